"""Extents of objects on a local disk, shared by all processes of a machine and by later runs, under one hard bound.

An extent is a fixed stretch of one version of an object, one file. `bytes` in the folder holds what all of them take.
A process that wants to add one first raises that number, under a lock and within the bound, and writes the file then:
so the bound holds at every moment, and a crash can only leave the number too high. Whoever opens the folder while
nobody else uses it counts again.
"""

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

logger = logging.getLogger(__name__)

EXTENT_BYTES = 4 << 20  # of an object, kept or not kept as one
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_TEMPORARY = ".part"


class DiskCache:
    """Bounded cache of object bytes in a folder.

    Names in the folder: `bytes` and `users`; per namespace a folder with `in-use`, per object and version one below it.
    Extents of other namespaces give way when no live process uses these, oldest namespace first. Extents of the own one
    stay: when every byte is read once an epoch in random order any part that stays is as good as another, and replacing
    would only cost requests.

    Args:
        folder: on a local file system with locks.
        limit_bytes: bound of all extents of all namespaces in the folder together; 0 keeps nothing.
        namespace: what is cached, for example a dataset's fingerprint.
        extent_bytes: length of an extent.

    Raises:
        ValueError: the limit is negative, or too small for one extent.
        OSError: the folder cannot be made, written or locked.
    """

    def __init__(self, folder: Path, limit_bytes: int, *, namespace: str, extent_bytes: int = EXTENT_BYTES) -> None:
        if extent_bytes <= 0:
            raise ValueError(f"extent_bytes is {extent_bytes}; it must be positive")
        if limit_bytes < 0 or 0 < limit_bytes < extent_bytes:
            raise ValueError(
                f"a disk cache of {limit_bytes} bytes holds not one extent of {extent_bytes}: "
                "give at least that many bytes, or 0 for no disk cache"
            )
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.extent_bytes = extent_bytes
        # Runs with other extents keep other files.
        self._home = folder / quote(f"{namespace}-{extent_bytes}", safe="")
        self._counts = dict.fromkeys(("disk_hits", "disk_misses", "disk_puts", "disk_refused", "disk_evicted_bytes"), 0)
        self._mutex = threading.Lock()
        self._versions: set[str] = set()  # object folders whose other versions have been removed
        self._warned = False
        self._marks: list[int] = []
        if limit_bytes:
            try:
                self._open()
            except BaseException:
                self.close()
                raise

    def read(self, key: str, version: str, size: int, offset: int, length: int) -> bytes | None:
        """`length` bytes of an object from `offset`; None unless every extent they touch is there."""
        if offset < 0 or length < 0 or offset + length > size:
            raise ValueError(f"{key}: bytes {offset}-{offset + length - 1} are not within its {size} bytes")
        parts = []
        home = self._object(key, version) if self.limit_bytes else None
        place, end = offset, offset + length
        while home is not None and place < end:
            number = place // self.extent_bytes
            stop = min(end, (number + 1) * self.extent_bytes)
            part = _pread(f"{home}/{number}", place - number * self.extent_bytes, stop - place)
            if part is None:
                break
            parts.append(part)
            place = stop
        with self._mutex:
            self._counts["disk_hits" if home and place >= end else "disk_misses"] += 1
        if home is None or place < end:
            return None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def missing(self, key: str, version: str, size: int) -> list[tuple[int, int]]:
        """(offset, length) of the extents of an object that are not there, in order."""
        there: set[str] = set()
        if self.limit_bytes:
            with suppress(FileNotFoundError, NotADirectoryError):
                there = set(os.listdir(self._object(key, version)))  # noqa: PTH208
        return [
            (offset, min(self.extent_bytes, size - offset))
            for offset in range(0, size, self.extent_bytes)
            if str(offset // self.extent_bytes) not in there
        ]

    def put(self, key: str, version: str, size: int, offset: int, body: bytes | memoryview) -> bool:
        """Keep one whole extent; False when there is no room for it.

        Raises:
            ValueError: `body` is not one whole extent of an object of `size` bytes.
        """
        wanted = min(self.extent_bytes, size - offset)
        if offset % self.extent_bytes or offset < 0 or len(body) != wanted:
            raise ValueError(
                f"{key}: {len(body)} bytes from {offset} are no extent of an object of {size} bytes; extents begin at "
                f"multiples of {self.extent_bytes}, and the one there has {max(0, wanted)} bytes"
            )
        stored = bool(self.limit_bytes) and self._put(
            self._object(key, version), str(offset // self.extent_bytes), body
        )
        with self._mutex:
            self._counts["disk_puts" if stored else "disk_refused"] += 1
        return stored

    def used_bytes(self) -> int:
        """Bytes of all extents in the folder, those being written included."""
        if not self.limit_bytes:
            return 0
        with self._locked() as ledger:
            return ledger.used

    def gauges(self) -> dict[str, float]:
        """disk_bytes, disk_limit_bytes; of this process disk_hits, disk_misses, disk_puts, _refused, _evicted_bytes."""
        bounds = {"disk_bytes": float(self.used_bytes()), "disk_limit_bytes": float(self.limit_bytes)}
        with self._mutex:
            return bounds | {name: float(count) for name, count in self._counts.items()}

    def close(self) -> None:
        """Stop counting as a user of the folder; what is in it stays for the next."""
        for descriptor in self._marks:
            os.close(descriptor)
        self._marks = []

    def _open(self) -> None:
        with self._locked() as ledger:
            self._home.mkdir(exist_ok=True)
            mark = os.open(self.folder / "users", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._marks.append(mark)
            if _try_lock(mark):  # nobody else is here, so everything unfinished is left over
                ledger.used = _recount(self.folder)
            fcntl.flock(mark, fcntl.LOCK_SH)
            own = os.open(self._home / "in-use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._marks.append(own)
            fcntl.flock(own, fcntl.LOCK_SH)
            os.utime(own)
            if ledger.used > self.limit_bytes:
                self._evict(ledger, ledger.used - self.limit_bytes)
            if ledger.used > self.limit_bytes:  # the bound was larger once: shrink what is ours as well
                ledger.used -= _remove(_extents(self._home), ledger.used - self.limit_bytes)
            if ledger.used > self.limit_bytes:
                logger.warning(
                    "%s holds %d bytes for other running processes, more than the %d allowed here: nothing is added",
                    self.folder,
                    ledger.used,
                    self.limit_bytes,
                )

    def _put(self, home: str, name: str, body: bytes | memoryview) -> bool:
        Path(home).mkdir(parents=True, exist_ok=True)
        if home not in self._versions:
            self._forget_other_versions(Path(home))
        target = Path(home, name)
        part: Path | None = None
        with self._locked() as ledger:
            if target.exists():
                return True
            if (over := ledger.used + len(body) - self.limit_bytes) > 0:
                self._evict(ledger, over)
            if ledger.used + len(body) > self.limit_bytes:
                return False
            ledger.used += len(body)
        try:
            descriptor, made = tempfile.mkstemp(suffix=_TEMPORARY, dir=home)
            part = Path(made)
            with os.fdopen(descriptor, "wb") as file:
                file.write(body)
                file.flush()
                os.fsync(descriptor)  # a name must never outlive a power cut that took the bytes
            with self._locked() as ledger:
                if target.exists():  # another process was faster with the same bytes
                    part.unlink()
                    ledger.used -= len(body)
                else:
                    part.replace(target)
            return True
        except OSError as error:
            if part is not None:
                part.unlink(missing_ok=True)
            with self._locked() as ledger:
                ledger.used -= len(body)
            if error.errno not in FULL:
                raise
            with self._mutex:
                warned, self._warned = self._warned, True
            if not warned:
                logger.warning("the disk of %s is full below the cache's bound; nothing more is added", self.folder)
            return False

    def _forget_other_versions(self, home: Path) -> None:
        """The object has changed since: its earlier bytes will never be asked for again."""
        with self._locked() as ledger:
            for other in home.parent.iterdir():
                if other != home:
                    ledger.used -= _remove(_extents(other), None)
        self._versions.add(str(home))

    def _evict(self, ledger: "_Ledger", needed: int) -> None:
        """Remove extents of namespaces that nobody uses until `needed` bytes are free, or none is left."""
        homes = [path for path in self.folder.iterdir() if path.is_dir() and path != self._home]
        for home in sorted(homes, key=lambda path: _age(path / "in-use")):
            if needed <= 0:
                return
            mark = os.open(home / "in-use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if _try_lock(mark):
                    freed = _remove(found := _extents(home), needed)
                    if freed == sum(size for _, size, _ in found):
                        shutil.rmtree(home, ignore_errors=True)  # or every later search would pass its empty folders
                    needed -= freed
                    ledger.used -= freed
                    with self._mutex:
                        self._counts["disk_evicted_bytes"] += freed
            finally:
                os.close(mark)

    def _object(self, key: str, version: str) -> str:
        # A file name has to be short and plain, a key is neither.
        name, tag = (hashlib.blake2b(text.encode(), digest_size=12).hexdigest() for text in (key, version))
        return f"{self._home}/{name}/{tag}"

    @contextmanager
    def _locked(self) -> Iterator["_Ledger"]:
        """The ledger, nobody else's meanwhile; written back at the end."""
        # Opened each time: a lock belongs to the open file, and threads and forked children must not share one.
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder / "bytes", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                raise OSError(
                    error.errno, f"{self.folder} is on a file system without locks; give a folder on a local disk"
                ) from error
            text = os.pread(descriptor, 32, 0)
            ledger = _Ledger(int(text) if text.strip().isdigit() else 0)
            before = ledger.used
            try:
                yield ledger
            finally:
                if ledger.used != before or not text:
                    os.pwrite(descriptor, f"{max(0, ledger.used):<31d}\n".encode(), 0)
        finally:
            os.close(descriptor)


class _Ledger:
    """Bytes of all extents in the folder."""

    def __init__(self, used: int) -> None:
        self.used = used


def _pread(path: str, offset: int, length: int) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        body = os.pread(descriptor, length, offset)
    finally:
        os.close(descriptor)
    return body if len(body) == length else None


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _extents(home: Path) -> list[tuple[float, int, str]]:
    """(time, bytes, path) of the finished extents below a folder."""
    found = []
    for folder, _, names in os.walk(home):
        for name in names:
            if name.isdigit():
                path = f"{folder}/{name}"
                with suppress(FileNotFoundError):
                    status = os.stat(path)  # noqa: PTH116
                    found.append((status.st_mtime, status.st_size, path))
    return found


def _remove(extents: list[tuple[float, int, str]], needed: int | None) -> int:
    """Delete extents, oldest first, until `needed` bytes are free (None: all); the bytes freed."""
    freed = 0
    for _, size, path in sorted(extents):
        if needed is not None and freed >= needed:
            break
        with suppress(FileNotFoundError):
            Path(path).unlink()
            freed += size
    return freed


def _recount(folder: Path) -> int:
    """Bytes of all extents; what dead writers left unfinished is deleted."""
    used = 0
    for home, _, names in os.walk(folder):
        for name in names:
            path = Path(home, name)
            if name.endswith(_TEMPORARY):
                path.unlink(missing_ok=True)
            elif name.isdigit():
                used += path.stat().st_size
    return used


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
