"""The tensors of a torch.distributed.checkpoint folder by name, read one at a time, and nothing of it executed.

The folder's index, `.metadata`, is a pickle. It is opened here by a reader that knows the few plain classes such an
index consists of and refuses every other name, so a foreign folder cannot run code. The tensors themselves are loaded
with `weights_only`.
"""

import io
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

from models.common.stored import StoredTensor, word_of

INDEX_FILE = ".metadata"
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_CLASSES: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, kind.__name__): kind
        for kind in (
            metadata.Metadata,
            metadata.MetadataIndex,
            metadata.TensorStorageMetadata,
            metadata.BytesStorageMetadata,
            metadata.ChunkStorageMetadata,
            metadata.TensorProperties,
            metadata.StorageMeta,
            metadata._MEM_FORMAT_ENCODING,
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{("torch", name): value for name, value in _DTYPES.items()},
}
# The folder's own path may be noted in its index; which machine it was written on does not matter.
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}


class DcpTensors(Mapping[str, StoredTensor]):
    """The tensors of a folder; what else it holds is left alone.

    Args:
        folder: with `.metadata` and the files it names, whatever ranks have written them.

    Raises:
        FileNotFoundError: no such folder, or without its index, which is written last, or without a file it names.
        ValueError: the index is none, or names what no index needs; the parts of a tensor do not cover it, or twice; a
            file is shorter than it says.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        index = _read_index(self.path / INDEX_FILE)
        self._entries: dict[str, StoredTensor] = {}
        self._chunks: dict[str, list[tuple[Box, Any]]] = {}
        tensors = {k: v for k, v in index.state_dict_metadata.items() if isinstance(v, metadata.TensorStorageMetadata)}
        for name, entry in tensors.items():
            self._entries[name] = StoredTensor(
                name=name, file=self.path, shape=tuple(entry.size), dtype=word_of(entry.properties.dtype)
            )
            self._chunks[name] = []
        boxes = {
            (name, tuple(chunk.offsets)): (tuple(chunk.offsets), tuple(chunk.sizes))
            for name, entry in tensors.items()
            for chunk in entry.chunks
        }
        for place, info in (index.storage_data or {}).items():
            if place.fqn in self._chunks:
                offset = (0,) * len(tensors[place.fqn].size) if place.offset is None else tuple(place.offset)
                box = boxes.get((place.fqn, offset))
                if box is None:
                    raise ValueError(f"{self.path}: the index knows no part of {place.fqn} at {offset}")
                self._chunks[place.fqn].append((box, self._checked(info)))
        for name, chunks in self._chunks.items():
            if problem := uncovered([box for box, _ in chunks], self._entries[name].shape):
                raise ValueError(f"{self.path}: parts of {name} {problem}")
        self.files = sorted({self.path / info.relative_path for chunks in self._chunks.values() for _, info in chunks})
        self._dtypes = {name: entry.properties.dtype for name, entry in tensors.items()}
        self._check_files()

    def __getitem__(self, name: str) -> StoredTensor:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __enter__(self) -> "DcpTensors":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is held open."""

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """dtype of every floating tensor by name."""
        return {name: dtype for name, dtype in self._dtypes.items() if dtype.is_floating_point}

    def tensor(self, name: str) -> Tensor:
        """The whole tensor, put together from the parts that ranks have written.

        Raises:
            ValueError: parts are missing or not as the index says.
        """
        entry = self._entries[name]
        whole = None
        for (offset, size), info in self._chunks[name]:
            part = self._part(info)
            if tuple(part.shape) != size:
                raise ValueError(f"{self.path}: a part of {name} is {tuple(part.shape)}, not {size}")
            if size == entry.shape and part.dtype == self._dtypes[name]:
                return part
            whole = torch.empty(entry.shape, dtype=self._dtypes[name]) if whole is None else whole
            whole[tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))] = part
        return torch.empty(entry.shape, dtype=self._dtypes[name]) if whole is None else whole  # None: it has no values

    def _part(self, info: Any) -> Tensor:
        file = self.path / info.relative_path
        with file.open("rb") as handle:
            handle.seek(info.offset)
            content = handle.read(info.length)
        try:
            part = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:  # of several kinds: no archive, damaged, or more in it than a tensor
            raise ValueError(f"{file} holds no tensor at {info.offset}: {error}") from error
        if not isinstance(part, Tensor):
            raise ValueError(f"{file} holds {type(part).__name__} where a tensor should be")
        return part.detach()

    def _check_files(self) -> None:
        """Nothing may be loaded from a folder that is not whole: a copy that was cut short is told before that."""
        ends = dict.fromkeys(self.files, 0)
        for chunks in self._chunks.values():
            for _, info in chunks:
                file = self.path / info.relative_path
                ends[file] = max(ends[file], info.offset + info.length)
        if absent := [file.name for file in self.files if not file.is_file()]:
            raise FileNotFoundError(f"{self.path / INDEX_FILE} names files that are not there: {absent}")
        short = [
            f"{file.name}: {size} of {end} bytes" for file, end in ends.items() if (size := file.stat().st_size) < end
        ]
        if short:
            raise ValueError(f"{self.path}: files are cut short: {', '.join(short)}")

    def _checked(self, info: Any) -> Any:
        if Path(info.relative_path).name != info.relative_path:
            raise ValueError(f"{self.path / INDEX_FILE} names a file outside its folder: {info.relative_path}")
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{self.path}: stored as {', '.join(info.transform_descriptors)}, which is not read")
        return info


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First index and length in every dimension of a part."""


def uncovered(boxes: Sequence[Box], shape: tuple[int, ...]) -> str:
    """What keeps boxes from covering a shape, each value once; empty where nothing does."""
    if any(len(offset) != len(shape) or len(size) != len(shape) for offset, size in boxes) or any(
        not 0 <= start <= start + length <= whole
        for offset, size in boxes
        for start, length, whole in zip(offset, size, shape, strict=True)
    ):
        return f"lie outside its shape {shape}"
    active: list[Box] = []
    # Along the first dimension, in which ranks usually share a tensor: only those that reach this far are compared.
    for box in sorted(box for box in boxes if math.prod(box[1])):
        active = [other for other in active if not shape or other[0][0] + other[1][0] > box[0][0]]
        if any(_meet(box, other) for other in active):
            return f"overlap at {box[0]}"
        active.append(box)
    held, wanted = sum(math.prod(size) for _, size in boxes), math.prod(shape)
    return "" if held == wanted else f"hold {held} of {wanted} values; files are missing"


def _meet(one: Box, other: Box) -> bool:
    return all(a < b + m and b < a + n for a, n, b, m in zip(one[0], one[1], other[0], other[1], strict=True))


class _IndexReader(pickle.Unpickler):
    """Knows the names of `_CLASSES`, and paths, as text; no other name can enter."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return _as_text
        raise ValueError(f"it names {module}.{name}, which is no part of an index of tensors")


def _as_text(*parts: str) -> str:
    return "/".join(map(str, parts))


def _read_index(file: Path) -> metadata.Metadata:
    if not file.is_file():
        raise FileNotFoundError(f"{file.parent} is no whole checkpoint: it has no {file.name}, the index of its files")
    try:
        with file.open("rb") as handle:
            index = _IndexReader(handle).load()
    except Exception as error:
        raise ValueError(f"{file} is no index of a distributed checkpoint: {error}") from error
    if not isinstance(index, metadata.Metadata):
        raise ValueError(f"{file} holds {type(index).__name__}, no index of a distributed checkpoint")
    return index
