"""Training checkpoints as a folder: every rank writes its shards, any number of ranks reads them back.

    step-00001000.ckpt/
        .metadata, __*.distcp   sharded tensors, and all of the state dict (torch.distributed.checkpoint)
        meta.pt                 everything else, and under which keys the sharded tensors stood
        files.json              bytes of every file: the folder is whole when all are there

A folder gets its name when all of it is on disk, and loses the name before anything in it is deleted.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

METADATA, PLAIN, FILES = ".metadata", "meta.pt", "files.json"
WRITING, DELETING = ".writing", ".deleting"
PLACES = "sharded_tensors"
STATE_DICT, OPTIMIZERS = "state_dict", "optimizer_states"

Place = tuple[str | int, ...]
"""Keys that lead to a value in a nested checkpoint."""


def separate(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Copies on the CPU of what goes into shards, by name, and the rest of a checkpoint with their places in it.

    Shards hold the state dict and every DTensor beside it. Nothing returned is changed by further training.
    """
    places = {
        place: leaf
        for place, leaf in _leaves(checkpoint, ())
        if isinstance(leaf, DTensor) or (isinstance(leaf, Tensor) and place[0] == STATE_DICT)
    }
    tensors = {_name(place): _copy(leaf) for place, leaf in places.items()}
    rest = _without(checkpoint, places.keys(), ())
    rest[PLACES] = [list(place) for place in places]
    return tensors, rest


def write(folder: Path, tensors: dict[str, Tensor], rest: dict[str, Any], group: Any = None) -> None:
    """Write what `separate` gave, on every rank at once; the first rank names the folder when all have written.

    Args:
        folder: where it goes; what lay there is replaced.
        group: process group with a CPU backend; its first rank is the first of all.

    Raises:
        Exception: a rank could not write; nothing has been named then.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    temporary = folder.parent / f"{WRITING}-{folder.name}"
    # one file for each rank and its own sync: what is renamed below is on disk
    writer = FileSystemWriter(temporary, single_file_per_rank=True, sync_files=True, thread_count=1)
    dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=not dist.is_initialized())
    if not first:
        return
    with (temporary / PLAIN).open("wb") as file:
        torch.save(rest, file)
        _to_disk(file)
    sizes = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
    with (temporary / FILES).open("w") as file:
        json.dump(sizes, file)
        _to_disk(file)
    if folder.exists():
        discard(folder)
    temporary.rename(folder)
    _sync_folder(folder.parent)


def clear(parent: Path) -> None:
    """Delete what killed runs left half written or half deleted; before `write`, by one process."""
    for kind in (WRITING, DELETING):
        for left in parent.glob(f"{kind}-*"):
            shutil.rmtree(left, ignore_errors=True)


def discard(path: Path) -> None:
    """Delete a checkpoint, file or folder; a kill half way leaves no half of one under its name."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    doomed = path.with_name(f"{DELETING}-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def read(folder: Path) -> dict[str, Any]:
    """A checkpoint as one process would have saved it: whole tensors on the CPU, optimizer states by position.

    PyTorch unpickles the folder's index; read no folder from a stranger.
    """
    checkpoint, places = _plain(folder)
    entries = _entries(folder)
    tensors = {name: torch.empty(entries[name].size, dtype=entries[name].properties.dtype) for name in places}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as asked for
        dcp.load(dict(tensors), storage_reader=FileSystemReader(folder), no_dist=True)
    for name, place in places.items():
        _put(checkpoint, place, tensors[name])
    return by_position(checkpoint)


def read_shards(folder: Path, parameters: Mapping[str, Tensor], group: Any = None) -> dict[str, Any]:
    """The same with this rank's shards only, for whatever sharding the parameters have; called on every rank.

    Args:
        parameters: by name. A tensor that stands under a parameter's name and has its shape is sharded like it; others
            are read whole.
    """
    checkpoint, places = _plain(folder)
    entries = _entries(folder)
    tensors: dict[str, Tensor] = {}
    for name, place in places.items():
        size, dtype = entries[name].size, entries[name].properties.dtype
        like = _parameter(place, size, parameters)
        tensors[name] = torch.empty(size, dtype=dtype) if like is None else torch.empty_like(like, dtype=dtype)
    dcp.load(dict(tensors), storage_reader=FileSystemReader(folder), process_group=group)
    for name, place in places.items():
        _put(checkpoint, place, tensors[name])
    return by_position(checkpoint)


def shard(checkpoint: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """A checkpoint of whole tensors cut for this rank: each is sharded like the parameter it belongs to."""

    def cut(place: Place, leaf: Any) -> Any:
        like = _parameter(place, leaf.shape, parameters) if isinstance(leaf, Tensor) else None
        return leaf if like is None else distribute(leaf, like)

    result: dict[str, Any] = _mapped(checkpoint, cut, ())
    return result


def distribute(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has, sharded like `like`; no communication."""
    if not isinstance(like, DTensor):
        return whole
    from torch.distributed.tensor import distribute_tensor

    moved = whole.to(like.device)
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)


def by_name(state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """An optimizer's state dict with parameter names for positions; `names` in the order of its groups."""
    return _renamed(state, lambda key: names[key] if isinstance(key, int) else key)


def by_position(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint whose optimizer states are keyed by position in the groups, as PyTorch's own are."""
    states = checkpoint.get(OPTIMIZERS)
    if not states:
        return checkpoint
    numbered = []
    for state in states:
        order = {name: index for index, name in enumerate(n for g in state["param_groups"] for n in g["params"])}
        numbered.append(_renamed(state, order.__getitem__))
    return {**checkpoint, OPTIMIZERS: numbered}


def _renamed(state: Mapping[str, Any], rename: Callable[[Any], Any]) -> dict[str, Any]:
    return {
        **state,
        "state": {rename(key): values for key, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [rename(key) for key in group["params"]]} for group in state["param_groups"]
        ],
    }


def _parameter(place: Place, size: Any, parameters: Mapping[str, Tensor]) -> Tensor | None:
    """The parameter whose name leads to a tensor, if that has its shape; None for what is no part of a parameter."""
    for key in place:
        found = parameters.get(str(key))
        if found is None and isinstance(key, str) and "." in key:
            ends = [value for name, value in parameters.items() if name.endswith(f".{key}")]
            found = ends[0] if len(ends) == 1 else None
        if found is not None and found.shape == torch.Size(size):
            return found.detach()
    return None


def _plain(folder: Path) -> tuple[dict[str, Any], dict[str, Place]]:
    checkpoint = torch.load(folder / PLAIN, map_location="cpu", weights_only=True)
    places = [tuple(place) for place in checkpoint.pop(PLACES)]
    return checkpoint, {_name(place): place for place in places}


def _entries(folder: Path) -> dict[str, TensorStorageMetadata]:
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: entry for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}


def _name(place: Place) -> str:
    return ".".join(map(str, place))


def _copy(tensor: Tensor) -> Tensor:
    copy = tensor.detach()
    return copy.clone() if copy.device.type == "cpu" else copy.cpu()


def _leaves(value: Any, place: Place) -> Iterator[tuple[Place, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*place, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, (*place, index))
    else:
        yield place, value


def _mapped(value: Any, change: Callable[[Place, Any], Any], place: Place) -> Any:
    if isinstance(value, Mapping):
        return {key: _mapped(item, change, (*place, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, change, (*place, index)) for index, item in enumerate(value)]
    return change(place, value)


def _without(value: Any, places: Any, place: Place) -> Any:
    """The same nest of plain dicts and lists without the leaves at `places`, to which only keys of dicts may lead."""
    if isinstance(value, Mapping):
        return {
            key: _without(item, places, (*place, key)) for key, item in value.items() if (*place, key) not in places
        }
    if isinstance(value, list):
        return [_without(item, places, (*place, index)) for index, item in enumerate(value)]
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _put(checkpoint: dict[str, Any], place: Place, value: Any) -> None:
    inner: Any = checkpoint
    for key in place[:-1]:
        inner = inner.setdefault(key, {}) if isinstance(inner, dict) else inner[key]
    inner[place[-1]] = value


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
