"""Decoded pictures kept on local disk, so that later epochs of a small set cost no decode.

One sparse file per camera holds the picture of each row at its row number, beside a byte per row that says whether it
is there. All ranks of a node and all later runs share them. Pictures go through the page cache with plain reads and
writes: a full disk is an error that ends the keeping, where a store into a mapping would end the process.
"""

import fcntl
import hashlib
import logging
import os
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from knonik.cache import one_builder, replacing

logger = logging.getLogger(__name__)

_HELD = 1


class DecodedFrames:
    """Pictures of one camera by row number; safe for any number of threads and processes, which write equal bytes.

    Args:
        base: path without suffix; names everything the pictures depend on.
        rows: highest row number that can be kept, plus one.
        frame_bytes: size of one picture.
    """

    def __init__(self, base: Path, *, rows: int, frame_bytes: int) -> None:
        self._saved = base.with_name(f"{base.name}.saved")
        self._rows, self._frame_bytes = rows, frame_bytes
        self._file = os.open(base.with_name(f"{base.name}.frames"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with suppress(OSError):  # tells who makes room for other pictures that these are in use
            fcntl.flock(self._file, fcntl.LOCK_SH)
        self._state = _open_state(base, self._saved, rows)
        self._lock = threading.Lock()
        self._hits = self._written = 0
        self._full = False

    def has(self, rows: Sequence[int] | NDArray[np.int64]) -> bool:
        """Whether all these rows are there."""
        return bool((self._state[rows] == _HELD).all())

    def read(self, row: int, out: NDArray[Any]) -> bool:
        """Copy the picture of a row into the contiguous `out`; False if it is not there, or cannot be read."""
        if self._state[row] != _HELD:
            return False
        try:
            if os.preadv(self._file, [out.data], row * self._frame_bytes) != self._frame_bytes:
                return False
        except OSError:
            return False  # it is decoded once more
        with self._lock:
            self._hits += 1
        return True

    def write(self, row: int, picture: NDArray[Any]) -> None:
        """Keep the picture of a row, unless the disk is full or fails."""
        if self._full:
            return
        body, begin = np.ascontiguousarray(picture).data.cast("B"), row * self._frame_bytes
        try:
            done = 0
            while done < len(body):
                done += os.pwrite(self._file, body[done:], begin + done)
        except OSError as error:
            # Whatever it is: the pictures are there all the same, and no sample is bad for want of keeping it.
            self._full = True
            logger.warning("decoded pictures can no longer be kept (%s); further ones are decoded each time", error)
            return
        with self._lock:  # also orders the picture's bytes before the mark for other processes
            self._state[row] = _HELD
            self._written += 1

    def gauges(self) -> dict[str, float]:
        """`decoded_bytes` kept now by all users; `decoded_hits` and `decoded_written`, this process' counts."""
        kept = int(np.count_nonzero(self._state)) * self._frame_bytes
        return {"decoded_bytes": kept, "decoded_hits": self._hits, "decoded_written": self._written}

    def close(self) -> None:
        """Make what was kept last beyond a crash of the machine, and let go of the files."""
        if self._file < 0:
            return
        if self._written:
            # Marks are copied before the pictures are forced out, so a mark never stands for a picture that is not.
            state = self._state.copy()
            with suppress(OSError):
                os.fsync(self._file)
                with replacing(self._saved) as temporary:
                    temporary.write_bytes(state.tobytes())
        os.close(self._file)
        self._file = -1
        self._state = np.zeros(self._rows, np.uint8)


def open_decoded(
    folder: Path,
    cameras: Mapping[str, tuple[str, int]],
    *,
    rows: int,
    limit_bytes: int,
    needed_bytes: int,
) -> dict[str, DecodedFrames]:
    """The kept pictures of a dataset's cameras.

    Args:
        folder: where the dataset's decoded pictures are.
        cameras: camera key to what its pictures depend on beside the dataset (as text) and bytes of one picture.
        rows: highest row number in use, plus one.
        limit_bytes: bound for the folder. needed_bytes: what the rows in use will take at most; pictures of other
            settings that nobody uses make room for them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bases = {}
    for camera, (settings, size) in cameras.items():
        tag = hashlib.sha256(f"{camera}\0{settings}\0{rows}\0{size}".encode()).hexdigest()[:16]
        bases[camera] = folder / f"{quote(camera, safe='')}-{tag}"
    with one_builder(folder, "decoded"):  # one process makes the marks, the others map the same file
        _make_room(folder, {base.name for base in bases.values()}, limit_bytes - needed_bytes)
        return {
            camera: DecodedFrames(base, rows=rows, frame_bytes=cameras[camera][1]) for camera, base in bases.items()
        }


def _make_room(folder: Path, own: set[str], limit_bytes: int) -> None:
    """Delete pictures of other settings, least recently changed first, until they take no more than `limit_bytes`."""
    others = [path for path in folder.glob("*.frames") if path.stem not in own]
    used = {path: path.stat().st_blocks * 512 for path in others}
    for path in sorted(others, key=lambda path: path.stat().st_mtime):
        if sum(used.values()) <= limit_bytes:
            return
        with path.open("rb") as file, suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for rest in folder.glob(f"{path.stem}.*"):
                rest.unlink(missing_ok=True)
            logger.info("decoded pictures %s made room for others", path.stem)
            del used[path]
    if sum(used.values()) > limit_bytes:
        logger.warning("%s: other runs keep %d bytes of decoded pictures there", folder, sum(used.values()))


def _open_state(base: Path, saved: Path, rows: int) -> NDArray[np.uint8]:
    """The marks, mapped and shared. A new boot begins with those saved last: pictures kept later may be lost."""
    path = base.with_name(f"{base.name}.{_boot_id()}.state")
    if not path.exists() or path.stat().st_size != rows:
        marks = b""
        with suppress(OSError):
            marks = saved.read_bytes()
        with replacing(path) as temporary:
            temporary.write_bytes(marks if len(marks) == rows else bytes(rows))
        for old in base.parent.glob(f"{base.name}.*.state"):
            if old != path:
                old.unlink(missing_ok=True)
    state: Any = np.memmap(path, np.uint8, "r+", shape=(rows,))
    # A plain view: indexing the memmap class costs several times as much per call.
    marks_view: NDArray[np.uint8] = state.view(np.ndarray)
    return marks_view


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return uuid.uuid4().hex
