"""The tensors of a torch.distributed.checkpoint folder by name, read one at a time, and nothing of it executed.

The folder's index, `.metadata`, is a pickle. It is opened here by a reader that knows the few plain classes such an
index consists of and refuses every other name, so a foreign folder cannot run code. The tensors themselves are loaded
with `weights_only`.
"""

import io
import pickle
from collections.abc import Iterator, Mapping
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
        ValueError: the index is none, or names what no index needs; a file is shorter than it says.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        index = _read_index(self.path / INDEX_FILE)
        self._entries: dict[str, StoredTensor] = {}
        self._chunks: dict[str, list[tuple[Any, Any]]] = {}
        tensors = {k: v for k, v in index.state_dict_metadata.items() if isinstance(v, metadata.TensorStorageMetadata)}
        for name, entry in tensors.items():
            self._entries[name] = StoredTensor(
                name=name, file=self.path, shape=tuple(entry.size), dtype=word_of(entry.properties.dtype)
            )
            self._chunks[name] = []
        for place, info in (index.storage_data or {}).items():
            if place.fqn in self._chunks:
                self._chunks[place.fqn].append((place.offset, self._checked(info)))
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
        if len(self._chunks[name]) == 1:
            alone = self._part(self._chunks[name][0][1])
            if tuple(alone.shape) == entry.shape and alone.dtype == self._dtypes[name]:
                return alone
        whole = torch.empty(entry.shape, dtype=self._dtypes[name])
        filled = 0
        for offset, info in self._chunks[name]:
            part = self._part(info)
            target = whole
            if offset is not None:
                if len(offset) != whole.dim() or any(
                    o + n > size for o, n, size in zip(offset, part.shape, whole.shape, strict=False)
                ):
                    raise ValueError(f"{self.path}: a part of {name} lies outside its shape {entry.shape}")
                for dim, (start, length) in enumerate(zip(offset, part.shape, strict=True)):
                    target = target.narrow(dim, start, length)
            if target.shape != part.shape:
                raise ValueError(f"{self.path}: a part of {name} is {tuple(part.shape)}, not {tuple(target.shape)}")
            target.copy_(part)
            filled += part.numel()
        if filled != whole.numel():
            raise ValueError(f"{self.path}: {name} has {filled} of {whole.numel()} values; files are missing")
        return whole

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
        raise FileNotFoundError(f"{file.parent} is no whole checkpoint: it has no {file.name}")
    try:
        with file.open("rb") as handle:
            index = _IndexReader(handle).load()
    except Exception as error:
        raise ValueError(f"{file} is no index of a distributed checkpoint: {error}") from error
    if not isinstance(index, metadata.Metadata):
        raise ValueError(f"{file} holds {type(index).__name__}, no index of a distributed checkpoint")
    return index
