"""Byte storage behind one small interface: a local folder or an S3 prefix, read by key and byte range.

Keys are relative POSIX paths below the root of the store ("data/chunk-000/file-000.parquet"). Every method may be
called from many threads.
"""

import io
import os
import threading
from abc import ABC, abstractmethod
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit


class StoreError(OSError):
    """A read from a store failed; the message names the object and, for range reads, the byte range."""


class Store(ABC):
    """A set of named byte objects below one root."""

    uri: str

    @abstractmethod
    def read(self, key: str) -> bytes:
        """The whole object."""

    @abstractmethod
    def read_range(self, key: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from byte `offset`; fewer is an error."""

    @abstractmethod
    def sizes(self, prefix: str) -> dict[str, int]:
        """Key -> bytes of every object below the folder `prefix` ("" = all), sorted, from listings alone."""

    @abstractmethod
    def size(self, key: str) -> int:
        """Size of one object in bytes."""

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Whether the object is there."""

    @abstractmethod
    def local_path(self, key: str) -> Path | None:
        """Path of the object in the local file system, None where it has none."""

    @abstractmethod
    def close(self) -> None:
        """Release connections. Reading afterwards is an error for S3 and harmless for local folders."""

    def list(self, prefix: str) -> list[str]:
        """Sorted keys below the folder `prefix`."""
        return sorted(self.sizes(prefix))

    def open(self, key: str) -> io.BufferedReader:
        """The object as a seekable binary file; reads become range reads."""
        return io.BufferedReader(_RangeFile(self, key), buffer_size=1 << 16)


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
        return S3Store(parts.netloc, parts.path.strip("/"))
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise ValueError(f"file address {text!r} names a host; write file:///absolute/path")
        return LocalStore(Path(unquote(parts.path)))
    if "://" in text:
        raise ValueError(f"unknown scheme in {text!r}; allowed are /path, file:///path and s3://bucket/prefix")
    return LocalStore(Path(text))


def _checked(key: str) -> str:
    """Refuse keys that could leave the root; a dataset's own templates are input from elsewhere."""
    path = PurePosixPath(key)
    if not key or path.is_absolute() or ".." in path.parts or "\\" in key or "\0" in key:
        raise ValueError(f"key {key!r} leaves the store; keys are relative paths without '..'")
    return str(path)


def _check_range(key: str, offset: int, length: int) -> None:
    if offset < 0 or length < 0:
        raise ValueError(f"{key}: byte range starts at {offset} with length {length}; neither may be negative")


class LocalStore(Store):
    """A folder. Files are opened per read, so no descriptor outlives a call and none is inherited by a fork."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()
        self.uri = str(self.root)

    def read(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except OSError as error:
            raise StoreError(f"cannot read {key} in {self.uri}: {error.strerror}") from error

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        _check_range(key, offset, length)
        where = f"{key} bytes {offset}-{offset + length - 1} in {self.uri}"
        try:
            descriptor = os.open(self._fast_path(key), os.O_RDONLY | os.O_CLOEXEC)
            try:
                body = os.pread(descriptor, length, offset)
                while len(body) < length and (more := os.pread(descriptor, length - len(body), offset + len(body))):
                    body += more
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StoreError(f"cannot read {where}: {error.strerror}") from error
        if len(body) != length:
            raise StoreError(f"short read of {where}: got {len(body)} of {length} bytes, the file is truncated")
        return body

    def sizes(self, prefix: str) -> dict[str, int]:
        top = self.root if not prefix.strip("/") else self._path(prefix)
        found: dict[str, int] = {}
        for folder, _, names in os.walk(top, followlinks=True, onerror=self._not_listed):
            for name in names:
                path = Path(folder, name)
                found[path.relative_to(self.root).as_posix()] = path.stat().st_size
        return dict(sorted(found.items()))

    def _not_listed(self, error: OSError) -> None:
        # a folder that is not there is empty; one that may not be read would silently look so
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise StoreError(f"cannot list {error.filename}: {error.strerror}") from error

    def size(self, key: str) -> int:
        try:
            return self._path(key).stat().st_size
        except OSError as error:
            raise StoreError(f"no object {key} in {self.uri}: {error.strerror}") from error

    def exists(self, key: str) -> bool:
        return self._path(key).is_file()

    def local_path(self, key: str) -> Path | None:
        return self._path(key)

    def close(self) -> None:
        """Nothing is held open."""

    def _path(self, key: str) -> Path:
        return self.root / _checked(key)

    def _fast_path(self, key: str) -> str:
        # Range reads of small frames are so short that making a Path would be most of their time.
        if not key or ".." in key or key[0] == "/" or "\\" in key or "\0" in key:
            return str(self._path(key))
        return f"{self.uri}/{key}"


class S3Store(Store):
    """A prefix in an S3 bucket, through boto3 in its standard retry mode; AWS_ENDPOINT_URL names another endpoint."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self._lock = threading.Lock()
        self._client: Any = None
        self._closed = False

    def read(self, key: str) -> bytes:
        return self._get(key, None, f"{key} in {self.uri}")

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        _check_range(key, offset, length)
        if length == 0:
            return b""  # a Range header cannot express an empty range
        last = offset + length - 1
        where = f"{key} bytes {offset}-{last} in {self.uri}"
        body = self._get(key, f"bytes={offset}-{last}", where)
        if len(body) != length:
            raise StoreError(f"short read of {where}: got {len(body)} of {length} bytes")
        return body

    def sizes(self, prefix: str) -> dict[str, int]:
        folder = "/".join(part for part in (self.prefix, prefix.strip("/")) if part)
        start = f"{folder}/" if folder else ""
        root = len(self.prefix) + 1 if self.prefix else 0
        found: dict[str, int] = {}
        pages = self._connect().get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=start)
        try:
            for page in pages:
                found.update({entry["Key"][root:]: int(entry["Size"]) for entry in page.get("Contents", ())})
        except self._failures() as error:
            raise StoreError(f"cannot list {start or '/'} of bucket {self.bucket}: {error}") from error
        return dict(sorted((key, size) for key, size in found.items() if not key.endswith("/")))

    def size(self, key: str) -> int:
        try:
            return int(self._connect().head_object(Bucket=self.bucket, Key=self._name(key))["ContentLength"])
        except self._failures() as error:
            raise StoreError(f"no object {key} in {self.uri}: {error}") from error

    def exists(self, key: str) -> bool:
        try:
            self._connect().head_object(Bucket=self.bucket, Key=self._name(key))
        except self._failures() as error:
            # Only "not found" is an answer; a refused or failed request must not pass for an absent object.
            status = getattr(error, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode")
            if status == 404:
                return False
            raise StoreError(f"cannot look up {key} in {self.uri}: {error}") from error
        return True

    def local_path(self, key: str) -> Path | None:
        return None

    def close(self) -> None:
        with self._lock:
            client, self._client, self._closed = self._client, None, True
        if client is not None:
            client.close()

    def _get(self, key: str, byte_range: str | None, where: str) -> bytes:
        extra = {"Range": byte_range} if byte_range else {}
        try:
            answer = self._connect().get_object(Bucket=self.bucket, Key=self._name(key), **extra)
            with answer["Body"] as stream:
                return bytes(stream.read())
        except self._failures() as error:
            raise StoreError(f"cannot read {where}: {error}") from error

    def _name(self, key: str) -> str:
        return f"{self.prefix}/{_checked(key)}" if self.prefix else _checked(key)

    def _connect(self) -> Any:
        # Clients are thread safe, making one is not; a session of our own avoids boto3's shared default session.
        with self._lock:
            if self._closed:
                raise StoreError(f"{self.uri} is closed")
            if self._client is None:
                import boto3
                from botocore.config import Config

                config = Config(retries={"mode": "standard", "total_max_attempts": 5}, max_pool_connections=64)
                self._client = boto3.session.Session().client("s3", config=config)
            return self._client

    @staticmethod
    def _failures() -> tuple[type[Exception], ...]:
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        return BotoCoreError, ClientError, HTTPError


class _RangeFile(io.RawIOBase):
    """Seekable read-only file over one object, for readers that want a file (Parquet)."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key
        self._size, self._position = store.size(key), 0

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
        buffer[:length] = self._store.read_range(self._key, self._position, length)
        self._position += length
        return length
