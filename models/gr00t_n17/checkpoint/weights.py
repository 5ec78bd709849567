"""Weights by name in safetensors files: released checkpoints in, the same layout out. Nothing is ever unpickled."""

import hashlib
import json
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

logger = logging.getLogger(__name__)

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
_IGNORED_SUFFIX = "lm_head.weight"  # tied to the token embedding; the head is never run


def load_weights(network: nn.Module, source: str | Path, prefix: str = "") -> None:
    """Copy the weights of `source` into `network`, file by file, cast to each parameter's dtype.

    Args:
        network: parameters on a real device (not meta).
        source: a safetensors file, a folder with model.safetensors or model.safetensors.index.json, or a hub id.
        prefix: only names that begin with it are read and required, e.g. "backbone.".

    Raises:
        ValueError: one error that lists every missing, unexpected and misshapen name; the network may then be partly
            overwritten.
        FileNotFoundError: nothing to read at `source`.
    """
    targets = {name: tensor for name, tensor in network.state_dict().items() if name.startswith(prefix)}
    if not targets:
        raise ValueError(f"prefix={prefix!r} fits no name of the network; names begin with {_heads(network)}")
    on_meta = [name for name, tensor in targets.items() if tensor.is_meta]
    if on_meta:
        raise ValueError(f"{len(on_meta)} tensors are on the meta device (first: {on_meta[0]}); call to_empty before")
    files = weight_files(source)
    seen: set[str] = set()
    unexpected: list[str] = []
    misshapen: list[str] = []
    with torch.no_grad():
        for file in files:
            with safe_open(file, framework="pt", device="cpu") as stored:
                for name in stored.keys():  # noqa: SIM118 - safe_open is no mapping
                    if not name.startswith(prefix) or name.endswith(_IGNORED_SUFFIX):
                        continue
                    if name not in targets:
                        unexpected.append(name)
                        continue
                    seen.add(name)
                    shape = tuple(stored.get_slice(name).get_shape())
                    if shape != tuple(targets[name].shape):
                        misshapen.append(f"{name}: stored {shape}, network {tuple(targets[name].shape)}")
                        continue
                    targets[name].copy_(stored.get_tensor(name))
    problems = _report("missing", sorted(set(targets) - seen))
    problems += _report("unexpected", sorted(unexpected)) + _report("misshapen", misshapen)
    if problems:
        raise ValueError(
            f"weights of {source} do not fit the network (prefix {prefix!r}); sizes and names come from the model's "
            "config, which must be the checkpoint's own config.json\n" + "\n".join(problems)
        )
    logger.info("loaded %d tensors from %d file(s) of %s", len(seen), len(files), source)


def save_weights(network: nn.Module, path: str | Path, prefix: str = "") -> None:
    """Write the network's tensors whose names begin with `prefix` to one safetensors file, atomically."""
    path = Path(path)
    tensors = {
        name: tensor.detach().to("cpu").contiguous()
        for name, tensor in network.state_dict().items()
        if name.startswith(prefix)
    }
    if not tensors:
        raise ValueError(f"prefix={prefix!r} fits no name of the network; names begin with {_heads(network)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # A sibling folder: the rename stays inside one file system, so readers see the old file or the whole new one.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        temporary = Path(folder) / path.name
        save_file(_unshared(tensors), str(temporary), metadata={"format": "pt"})
        temporary.replace(path)


def weight_files(source: str | Path) -> list[Path]:
    """The safetensors files of a file, a folder or a hub id, in the order they are read."""
    path = local_weights(source)
    if path.is_file():
        return [path]
    if (path / INDEX_FILE).is_file():
        names = sorted(set(json.loads((path / INDEX_FILE).read_text())["weight_map"].values()))
        absent = [name for name in names if not (path / name).is_file()]
        if absent:
            raise FileNotFoundError(f"{path / INDEX_FILE} names files that are not there: {absent}")
        return [path / name for name in names]
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    raise FileNotFoundError(f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}")


def weights_digest(parameters: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over (name, dtype, shape, bytes) of the tensors in the order of their names.

    Pass the trained ones, e.g. `{n: p for n, p in network.named_parameters() if p.requires_grad}`.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(dict(parameters).items()):
        value = tensor.detach().to("cpu").contiguous()
        digest.update(f"{name}\0{str(value.dtype).removeprefix('torch.')}\0{list(value.shape)}\0".encode())
        for chunk in _bytes(value):
            digest.update(chunk)
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Iterator[memoryview]:
    flat = tensor.reshape(-1).view(torch.uint8)
    for part in flat.split(1 << 28):
        yield memoryview(part.numpy())


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share memory (tied weights) are copied: the format stores each name on its own."""
    seen: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        out[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return out


def local_weights(source: str | Path) -> Path:
    """The file or folder of a checkpoint on this machine; one named by its hub id is fetched, or found in the cache."""
    if Path(source).exists():
        return Path(source)
    source = str(source)
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise FileNotFoundError(f"{source}: no such file or folder, and not the form OWNER/NAME of a hub id")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:
        raise FileNotFoundError(
            f"weights {source!r}: no such file or folder, and as a hub id it could not be fetched ({error}). Offline, "
            "name a folder that holds the checkpoint's files"
        ) from error


def _heads(network: nn.Module) -> list[str]:
    return sorted({name.split(".")[0] + "." for name in network.state_dict()})


def _report(kind: str, names: list[str]) -> list[str]:
    shown = [f"  {name}" for name in names[:50]]
    if len(names) > 50:
        shown.append(f"  ... and {len(names) - 50} more")
    return [f"{kind} ({len(names)}):", *shown] if names else []
