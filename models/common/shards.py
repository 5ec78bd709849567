"""Tensors into sharded safetensors with an index, a folder at a time and never half of one."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.common.weight_files import STEM

SHARD_BYTES = 5e9
"""Size of one file; the usual one on the hub."""


@contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """A temporary sibling to fill, which becomes `folder` when the block ends well and is removed otherwise.

    Raises:
        FileExistsError: there is something under that name that is no empty folder.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not empty; name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".writing"))
    try:
        yield temporary
        for file in temporary.rglob("*"):
            # temporary files are private, published ones are for everybody
            file.chmod(0o755 if file.is_dir() else 0o644)
        temporary.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save_checkpoint_weights(
    tensors: Iterable[tuple[str, Tensor]],
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: float = SHARD_BYTES,
    stem: str = STEM,
) -> None:
    """Write tensors as they come into `STEM-XXXXX-of-YYYYY.safetensors` with an index; none is visible before all are.

    No more than one shard is held in memory, and of that only what is not already mapped in the asked dtype.

    Args:
        tensors: (name, tensor) pairs, each taken when the one before has found its shard.
        folder: made when it does not exist; older files of these names are replaced, and removed if no longer named.
        dtype: of the stored tensors; None keeps each tensor's own.
        shard_bytes: size of a file, exceeded only by a tensor that is larger by itself.
        stem: how the files' names begin.

    Raises:
        ValueError: a name comes twice, or none comes.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".weights.") as scratch:
        parts: list[list[str]] = []
        seen: set[str] = set()
        total, shard, size = 0, dict[str, Tensor](), 0

        def write() -> None:
            file = Path(scratch, f"{len(parts)}")
            save_file(shard, str(file), metadata={"format": "pt"})
            with file.open("rb+") as handle:
                os.fsync(handle.fileno())
            parts.append(list(shard))
            shard.clear()

        for name, tensor in tensors:
            if name in seen:
                raise ValueError(f"{name} comes twice")
            seen.add(name)
            value = tensor.detach().to("cpu", dtype).contiguous()
            if shard and size + value.nbytes > shard_bytes:
                write()
                size = 0
            # tensors that share memory are stored one by one: the format refuses them
            shared = any(value.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in shard.values())
            shard[name] = value.clone() if shared else value
            size += value.nbytes
            total += value.nbytes
        if not seen:
            raise ValueError("there is no tensor to write")
        write()
        names = [f"{stem}-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
        weight_map = {name: file for file, members in zip(names, parts, strict=True) for name in members}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        index_file = f"{stem}.safetensors.index.json"
        Path(scratch, index_file).write_text(json.dumps(index, indent=2) + "\n")
        stale = {file.name for file in folder.glob(f"{stem}*.safetensors")} - set(names)
        for i, name in enumerate(names):
            Path(scratch, f"{i}").replace(folder / name)
        Path(scratch, index_file).replace(folder / index_file)
        for name in stale:
            (folder / name).unlink()
