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
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{what}.lock").open("w") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def new_array(path: Path, dtype: Any, shape: tuple[int, int]) -> Iterator[NDArray[Any]]:
    """A writable memory-mapped array [shape] that becomes the .npy file `path` when the block ends well."""
    with replacing(path) as temporary:
        array: Any = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
        yield array
        array.flush()
