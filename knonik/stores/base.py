"""Byte storage behind one small interface: a local folder or an S3 prefix, read by key and byte range.

Keys are relative POSIX paths below the root of the store ("data/chunk-000/file-000.parquet"). Every method may be
called from many threads. `knonik.stores.s3` holds the S3 side.
"""

import io
import os
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from knonik.cache import replacing

GAUGES = (
    "gets",
    "get_bytes",
    "retries",
    "hedges",
    "hedge_wins",
    "throttled",
    "resumed",
    "failed",
    "in_flight",
)


class StoreError(OSError):
    """A read from a store failed; the message names the object and, for range reads, the byte range."""


class StoreUnavailable(StoreError):
    """The store does not answer, or was closed: that says nothing about the object."""


class ObjectMissing(StoreError):
    """There is no such object."""


class ObjectChanged(StoreError):
    """The object is no longer the one that was listed; the message names it and both versions where known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectInfo:
    """What a listing tells of an object: bytes, and a version that changes whenever the bytes may have changed.

    version: the ETag on S3; modification time in ns and size for local files.
    """

    size: int
    version: str


class Counters:
    """The cumulative figures every store reports, counted from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(GAUGES, 0)

    def add(self, **amounts: int) -> None:
        """Add to some of `GAUGES`."""
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] += amount

    def values(self) -> dict[str, float]:
        """All of `GAUGES`, at one moment."""
        with self._lock:
            return {name: float(value) for name, value in self._values.items()}


class Store(ABC):
    """A set of named byte objects below one root."""

    uri: str
    is_local: bool

    @abstractmethod
    def read(self, key: str) -> bytes:
        """The whole object."""

    @abstractmethod
    def read_range(self, key: str, offset: int, length: int, *, version: str | None = None) -> bytes:
        """Exactly `length` bytes from byte `offset`; fewer is an error.

        Args:
            version: of the `ObjectInfo` that offset and length were derived from; None reads whatever is there.

        Raises:
            ObjectChanged: the object now has another version than the given one.
            ObjectMissing: it is not there.
            StoreError: too short, or not readable; names the object and the byte range.
        """

    @abstractmethod
    def objects(self, prefix: str) -> dict[str, ObjectInfo]:
        """Size and version of every object below the folder `prefix` ("" = all), sorted by key, from listings alone."""

    @abstractmethod
    def size(self, key: str) -> int:
        """Size of one object in bytes."""

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Whether the object is there."""

    @abstractmethod
    def write(self, key: str, body: bytes) -> None:
        """Put an object whole: readers see the old bytes or the new ones. Only used to publish an index."""

    @abstractmethod
    def local_path(self, key: str) -> Path | None:
        """Path of the object in the local file system, None where it has none."""

    @abstractmethod
    def gauges(self) -> dict[str, float]:
        """Cumulative figures since the store was made.

        gets, get_bytes: reads answered and their bytes, whatever they took. retries, hedges, resumed: further requests
        after a failure, beside a slow request, and for the rest of a body that broke off. hedge_wins: hedges that
        answered first. throttled: answers that asked for fewer requests. failed: reads given up. in_flight: now.
        """

    @abstractmethod
    def close(self) -> None:
        """Release connections. Reading afterwards is an error for S3 and harmless for local folders."""

    def read_until(
        self, stop: threading.Event, key: str, offset: int, length: int, *, version: str | None = None
    ) -> bytes:
        """As `read_range`, for who may want to leave: waits for a distant store end with `stop`.

        Raises:
            StoreUnavailable: given up because of `stop`; else as `read_range`.
        """
        return self.read_range(key, offset, length, version=version)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Key -> bytes of every object below the folder `prefix` ("" = all), sorted, from listings alone."""
        return {key: info.size for key, info in self.objects(prefix).items()}

    def list(self, prefix: str) -> list[str]:
        """Sorted keys below the folder `prefix`."""
        return sorted(self.objects(prefix))

    def open(self, key: str, info: ObjectInfo | None = None) -> io.BufferedReader:
        """The object as a seekable binary file; reads become range reads.

        Args:
            info: from a listing; saves asking for the size, and a change of the object under the reader is noticed.
        """
        return io.BufferedReader(_RangeFile(self, key, info), buffer_size=1 << 16)


def open_store(uri: str | os.PathLike[str]) -> Store:
    """Open `/path`, `file:///path` or `s3://bucket/prefix`.

    Raises:
        ValueError: unknown scheme, or an s3 address without a bucket.
    """
    text = os.fspath(uri)
    parts = urlsplit(text)
    if parts.scheme == "s3":
        if not parts.netloc:
            raise ValueError(f"S3 address {text!r} names no bucket; write s3://bucket/prefix")
        from knonik.stores.s3 import S3Store  # its libraries take 0.3 s to load

        # Not `parts.path`: '?' and '#' are plain characters of an S3 key.
        return S3Store(parts.netloc, text.partition("://")[2].partition("/")[2].strip("/"))
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise ValueError(f"file address {text!r} names a host; write file:///absolute/path")
        return LocalStore(Path(unquote(parts.path)))
    if "://" in text:
        raise ValueError(f"unknown scheme in {text!r}; allowed are /path, file:///path and s3://bucket/prefix")
    return LocalStore(Path(text))


def checked_key(key: str) -> str:
    """Refuse keys that could leave the root; a dataset's own templates are input from elsewhere."""
    path = PurePosixPath(key)
    if not key or path.is_absolute() or ".." in path.parts or "\\" in key or "\0" in key:
        raise ValueError(f"key {key!r} leaves the store; keys are relative paths without '..'")
    return str(path)


def check_range(key: str, offset: int, length: int) -> None:
    """Refuse a byte range that cannot be."""
    if offset < 0 or length < 0:
        raise ValueError(f"{key}: byte range starts at {offset} with length {length}; neither may be negative")


class LocalStore(Store):
    """A folder. Files are opened per read, so no descriptor outlives a call and none is inherited by a fork."""

    is_local = True

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()
        self.uri = str(self.root)
        self._counters = Counters()

    def read(self, key: str) -> bytes:
        try:
            body = self._path(key).read_bytes()
        except OSError as error:
            self._counters.add(failed=1)
            raise _kind(error)(f"cannot read {key} in {self.uri}: {error.strerror}") from error
        self._counters.add(gets=1, get_bytes=len(body))
        return body

    def read_range(self, key: str, offset: int, length: int, *, version: str | None = None) -> bytes:
        check_range(key, offset, length)
        try:
            descriptor = os.open(self._fast_path(key), os.O_RDONLY | os.O_CLOEXEC)
            try:
                if version is not None and (now := _version(os.fstat(descriptor))) != version:
                    raise ObjectChanged(f"{key} in {self.uri} has changed: version {now}, listed as {version}")
                body = os.pread(descriptor, length, offset)
                while len(body) < length and (more := os.pread(descriptor, length - len(body), offset + len(body))):
                    body += more
            finally:
                os.close(descriptor)
        except StoreError:
            self._counters.add(failed=1)
            raise
        except OSError as error:
            self._counters.add(failed=1)
            raise _kind(error)(f"cannot read {self._where(key, offset, length)}: {error.strerror}") from error
        if len(body) != length:
            self._counters.add(failed=1)
            raise StoreError(
                f"short read of {self._where(key, offset, length)}: got {len(body)} of {length} bytes, "
                "the file is truncated"
            )
        self._counters.add(gets=1, get_bytes=length)
        return body

    def objects(self, prefix: str) -> dict[str, ObjectInfo]:
        top = self.root if not prefix.strip("/") else self._path(prefix)
        found: dict[str, ObjectInfo] = {}
        for folder, _, names in os.walk(top, followlinks=True, onerror=self._not_listed):
            for name in names:
                path = Path(folder, name)
                status = path.stat()
                found[path.relative_to(self.root).as_posix()] = ObjectInfo(
                    size=status.st_size, version=_version(status)
                )
        return dict(sorted(found.items()))

    def _not_listed(self, error: OSError) -> None:
        # a folder that is not there is empty; one that may not be read would silently look so
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise StoreError(f"cannot list {error.filename}: {error.strerror}") from error

    def size(self, key: str) -> int:
        try:
            return self._path(key).stat().st_size
        except OSError as error:
            raise _kind(error)(f"no object {key} in {self.uri}: {error.strerror}") from error

    def exists(self, key: str) -> bool:
        return self._path(key).is_file()

    def write(self, key: str, body: bytes) -> None:
        path = self._path(key)
        try:
            with replacing(path) as temporary:
                temporary.write_bytes(body)
                temporary.chmod(0o644)  # temporary files are private, published ones are for everybody
        except OSError as error:
            raise StoreError(f"cannot write {key} in {self.uri}: {error.strerror}") from error

    def local_path(self, key: str) -> Path | None:
        return self._path(key)

    def gauges(self) -> dict[str, float]:
        return self._counters.values()

    def close(self) -> None:
        """Nothing is held open."""

    def _where(self, key: str, offset: int, length: int) -> str:
        return f"{key} bytes {offset}-{offset + length - 1} in {self.uri}"

    def _path(self, key: str) -> Path:
        return self.root / checked_key(key)

    def _fast_path(self, key: str) -> str:
        # Range reads of small frames are so short that making a Path would be most of their time.
        if not key or ".." in key or key[0] == "/" or "\\" in key or "\0" in key:
            return str(self._path(key))
        return f"{self.uri}/{key}"


def _version(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns}-{status.st_size}"


def _kind(error: OSError) -> type[StoreError]:
    return ObjectMissing if isinstance(error, FileNotFoundError | NotADirectoryError) else StoreError


class _RangeFile(io.RawIOBase):
    """Seekable read-only file over one object, for readers that want a file (Parquet)."""

    def __init__(self, store: Store, key: str, info: ObjectInfo | None) -> None:
        self._store, self._key = store, key
        self._size = store.size(key) if info is None else info.size
        self._version = None if info is None else info.version
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        length = max(0, min(len(buffer), self._size - self._position))
        buffer[:length] = self._store.read_range(self._key, self._position, length, version=self._version)
        self._position += length
        return length
