"""Where the index of a dataset is kept, and which of several processes makes it."""

import fcntl
import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from knonik.index.file import DAMAGE, StoredIndex, decode_index

logger = logging.getLogger(__name__)


def index_path(folder: Path, uri: str, match: str) -> Path:
    """File of the index; copies of a dataset share a folder but not the versions of their objects."""
    return folder / f"index-{_digest(uri)}{'' if match == 'time' else f'-{match}'}.npz"


def latest_path(folder: Path, uri: str) -> Path:
    """File that names the folder in which the index of the dataset at this address was last kept."""
    return folder.parent / f"latest-{_digest(uri)}.txt"


def read_index(path: Path) -> StoredIndex | None:
    """The index in a file, None where there is no usable one."""
    if not path.exists():
        return None
    try:
        return decode_index(path.read_bytes())
    except DAMAGE as error:
        logger.warning("index cache %s is damaged or out of date (%s); it is built again", path, error)
        return None


def _digest(uri: str) -> str:
    return hashlib.sha256(uri.encode()).hexdigest()[:8]


@contextmanager
def one_reader(folder: Path) -> Iterator[bool]:
    """Whether this process is the one that reads all objects; it is until the block ends, however that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".index.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass  # a file system without locks: both read, which costs time and nothing else
        yield True
