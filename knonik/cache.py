"""Where derived files are kept, and how they are put there so that no reader ever sees half of one."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def cache_root(cache_dir: str | os.PathLike[str] | None) -> Path:
    """The given folder, else $KNONIK_CACHE, else `knonik` in the user's cache folder."""
    if cache_dir is not None:
        return Path(cache_dir)
    if own := os.environ.get("KNONIK_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "knonik"


class CacheFolderError(OSError):
    """The folder for derived files cannot be written to; the message names it and what sets it."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary sibling to write to, which becomes `path` when the block ends well and is deleted otherwise.

    Processes that make the same file write the same bytes, so whoever comes last replaces equal by equal.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def one_builder(folder: Path, what: str) -> Iterator[None]:
    """Hold the right to build `what` in a folder: the ranks of a node build once, the others find the result.

    The lock belongs to the open file: it ends with the process, however that ends. Where a file system has no locks the
    builders do the same work side by side, which costs time and nothing else.

    Raises:
        CacheFolderError: nothing can be kept there.
    """
    path = folder / f".{what}.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as error:
        raise CacheFolderError(
            f"nothing can be kept in {folder} ({error.strerror}); give a cache folder that can be written to: "
            "cache_dir, $KNONIK_CACHE, or data.cache.dir of a recipe"
        ) from error
    with lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class ArrayFile:
    """A two-dimensional .npy file that is written in pieces, by any number of threads, without being mapped.

    Pages of a writable mapping would count as the writer's memory until the system gets round to writing them back.
    """

    def __init__(self, path: Path, dtype: Any, shape: tuple[int, int]) -> None:
        self.dtype, self.shape = np.dtype(dtype), shape
        self._path = path
        with path.open("wb") as file:
            description = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, description)
            self._header_bytes = file.tell()
            self._row_bytes = self.dtype.itemsize * shape[1]
            file.truncate(self._header_bytes + self._row_bytes * shape[0])
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def write(self, first_row: int, values: NDArray[Any]) -> None:
        """Put rows [n, D] of the array's own type at `first_row`."""
        body = np.ascontiguousarray(values).data.cast("B")
        place = self._header_bytes + first_row * self._row_bytes
        try:
            while body:
                written = os.pwrite(self._descriptor, body, place)
                body, place = body[written:], place + written
        except OSError as error:
            needed = self._row_bytes * self.shape[0]
            raise OSError(
                error.errno, f"cannot write {self._path}, which needs {needed} bytes in all: {error.strerror}"
            ) from error

    def close(self) -> None:
        """Give the file back to the system."""
        os.close(self._descriptor)


@contextmanager
def new_array(path: Path, dtype: Any, shape: tuple[int, int]) -> Iterator[ArrayFile]:
    """An array [shape] to fill, which becomes the .npy file `path` when the block ends well."""
    with replacing(path) as temporary:
        array = ArrayFile(temporary, dtype, shape)
        try:
            yield array
        finally:
            array.close()
