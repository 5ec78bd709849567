"""Tensors on local disk by key: bounded, shared by processes, and never wrong after one of them dies.

Every process appends to a pair of files of its own, values to one and then a fixed-size record of where they lie to the
other; all read all. A record is written after its value, so a process that is killed leaves bytes that no record names.
A machine that loses power may keep a record without its value: values are checked by CRC when a process first reads
them. Nothing is replaced: when the bound is reached what is kept stays, because a pass over a dataset comes back to
every sample equally often.
"""

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import shutil
import struct
import uuid
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

KEY_BYTES = 16
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# key, offset, bytes, rows, columns, dtype, mark, CRC of the value; then the CRC of all these
_RECORD = struct.Struct("<16sQQIIBBxxI")
_CHECK = struct.Struct("<I")
_SIZE = _RECORD.size + _CHECK.size


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A matrix [rows, columns] and one bit of the caller's."""

    values: Tensor
    mark: bool


@dataclass
class _Entry:
    data: Path
    offset: int
    size: int
    shape: tuple[int, int]
    dtype: torch.dtype
    mark: bool
    crc: int
    checked: bool


class FeatureCache:
    """Matrices by 16-byte keys in a folder on local disk.

    Args:
        folder: may hold several caches, whose sizes together are bounded; those of other keys that no process has open
            make room, least recently opened first.
        limit_bytes: bound of the folder. What would go beyond it is not kept.
        key: names all that the values depend on besides the sample: weights, settings, precision. Values stored under
            one key are never seen under another.

    Attributes:
        hits, misses: rows that `get` found and did not.
    """

    def __init__(self, folder: str | Path, limit_bytes: int, key: str) -> None:
        if limit_bytes < 1:
            raise ValueError(f"limit_bytes={limit_bytes}: a feature cache needs room (model.feature_cache)")
        self.root, self.limit_bytes = Path(folder), int(limit_bytes)
        self.hits = self.misses = 0
        self.root.mkdir(parents=True, exist_ok=True)
        self._folder = self.root / hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        with self._locked():
            self._folder.mkdir(exist_ok=True)
            # Held as long as the process lives: a folder somebody holds is never removed.
            self._in_use = (self._folder / "in_use").open("wb")
            fcntl.flock(self._in_use, fcntl.LOCK_SH)
            os.utime(self._folder)
        name = uuid.uuid4().hex
        self._data_path = self._folder / f"{name}.data"
        self._index_path = self._folder / f"{name}.index"
        self._data: BinaryIO | None = None
        self._index: BinaryIO | None = None
        self._entries: dict[bytes, _Entry] = {}
        self._read: dict[Path, int] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        self._full = False
        self._refresh()

    def __len__(self) -> int:
        """Entries this process knows of."""
        return len(self._entries)

    @property
    def full(self) -> bool:
        """Whether the bound was met: nothing more is kept."""
        return self._full

    def get(self, keys: Sequence[bytes]) -> list[Stored | None]:
        """What is kept under each key; the tensors lie in mapped memory, so copy what outlives the step."""
        if any(key not in self._entries for key in keys):
            self._refresh()
        found = [self._value(key) for key in keys]
        self.hits += sum(value is not None for value in found)
        self.misses += sum(value is None for value in found)
        return found

    def put(self, items: Sequence[tuple[bytes, Stored]]) -> None:
        """Keep matrices under their keys; one that has a value keeps it, one that no longer fits is left out."""
        if self._full:
            return
        with self._locked():
            self._refresh()
            new: dict[bytes, Stored] = {}
            for key, item in items:
                if key not in self._entries:
                    new.setdefault(key, item)
            room = self._room(sum(_bytes(item.values) + _SIZE for item in new.values()))
            for key, item in new.items():
                room -= _bytes(item.values) + _SIZE
                if room < 0:
                    self._stop(f"has reached its {self.limit_bytes} bytes (model.feature_cache)")
                    return
                try:
                    self._append(key, item)
                except OSError as error:  # a full disk; what no record names is never read
                    self._stop(f"cannot be written: {error}")
                    return

    def _stop(self, reason: str) -> None:
        self._full = True
        logger.warning(
            "the feature cache %s %s, with %d samples; the others are computed in every pass",
            self.root,
            reason,
            len(self._entries),
        )

    def close(self) -> None:
        """Let go of the files; what is kept stays for the next run."""
        for file in (self._data, self._index, self._in_use):
            if file is not None:
                file.close()
        self._data = self._index = None
        self._maps.clear()

    def _append(self, key: bytes, item: Stored) -> None:
        if self._data is None or self._index is None:
            # unbuffered: a record must not reach its file before its value
            self._data, self._index = self._data_path.open("ab", buffering=0), self._index_path.open("ab", buffering=0)
        values = item.values.detach().to("cpu").contiguous()
        content = memoryview(values.view(torch.uint8).numpy()).cast("B")
        offset = self._data.tell()
        _write(self._data, content)
        crc = zlib.crc32(content)
        rows, columns = values.shape
        dtype = _DTYPES.index(values.dtype)
        record = _RECORD.pack(key, offset, len(content), rows, columns, dtype, item.mark, crc)
        _write(self._index, memoryview(record + _CHECK.pack(zlib.crc32(record))))
        self._read[self._index_path] = self._index.tell()
        self._entries[key] = _Entry(
            self._data_path, offset, len(content), (rows, columns), values.dtype, item.mark, crc, checked=True
        )

    def _value(self, key: bytes) -> Stored | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        mapped = self._maps.get(entry.data)
        if mapped is None or len(mapped) < entry.offset + entry.size:
            with contextlib.suppress(OSError, ValueError), entry.data.open("rb") as file:
                # Copy on write: torch wants memory it may write to, and nothing here ever does.
                mapped = self._maps[entry.data] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if mapped is None or len(mapped) < entry.offset + entry.size:
            return self._lost(key, entry)
        if not entry.checked:
            if zlib.crc32(memoryview(mapped)[entry.offset : entry.offset + entry.size]) != entry.crc:
                return self._lost(key, entry)
            entry.checked = True
        count = entry.shape[0] * entry.shape[1]
        values = torch.frombuffer(mapped, dtype=entry.dtype, count=count, offset=entry.offset)
        return Stored(values=values.view(entry.shape), mark=entry.mark)

    def _lost(self, key: bytes, entry: _Entry) -> None:
        logger.warning("a value in %s is not what was written and is computed again", entry.data)
        del self._entries[key]

    def _refresh(self) -> None:
        """Read the records that were added since the last time."""
        for path in sorted(self._folder.glob("*.index")):
            done = self._read.get(path, 0)
            if path.stat().st_size - done < _SIZE:
                continue
            with path.open("rb") as file:
                file.seek(done)
                content = file.read()
            whole = len(content) // _SIZE * _SIZE  # the end may still be on its way, or never come
            self._read[path] = done + whole
            for start in range(0, whole, _SIZE):
                record = content[start : start + _RECORD.size]
                (check,) = _CHECK.unpack_from(content, start + _RECORD.size)
                if zlib.crc32(record) == check:
                    self._add(path.with_suffix(".data"), record)

    def _add(self, data: Path, record: bytes) -> None:
        key, offset, size, rows, columns, dtype, mark, crc = _RECORD.unpack(record)
        entry = _Entry(data, offset, size, (rows, columns), _DTYPES[dtype], bool(mark), crc, checked=False)
        self._entries.setdefault(key, entry)

    def _used(self) -> int:
        """Bytes of all files in the folder, those of other keys too."""
        return sum(path.stat().st_size for path in self.root.glob("*/*"))

    def _room(self, needed: int) -> int:
        """Bytes left below the bound, after caches of other keys that no process has open have made way."""
        room = self.limit_bytes - self._used()
        folders = [path for path in self.root.iterdir() if path.is_dir() and path != self._folder]
        for folder in sorted(folders, key=lambda path: path.stat().st_mtime):
            if room >= needed:
                break
            with (folder / "in_use").open("ab") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                logger.info("removing the feature cache %s of other weights or settings to make room", folder)
                shutil.rmtree(folder)
            room = self.limit_bytes - self._used()
        return room

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time opens, adds or removes."""
        with (self.root / "lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _bytes(values: Tensor) -> int:
    return values.numel() * values.element_size()


def _write(file: BinaryIO, content: memoryview) -> None:
    """All of it: a raw file may take less in one call."""
    while len(content):
        content = content[file.write(content) :]
