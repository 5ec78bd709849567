"""Read where every video packet of an MP4 file lies, from its headers alone.

The `moov` box is found in one to three reads, wherever it stands; media bytes are not touched but by a wrong guess.

Recorders leave `moov` at the end, joined files have it in front. Without other knowledge 64 bytes of the start tell
which, and where, and a second read brings exactly the box. Files of one dataset resemble each other, so after the first
one a single read of the right end, a little longer than the box should be, usually brings it at once. A wrong guess
costs one read more and what was read in vain, at most the guessed length.
"""

import struct
import threading
from collections.abc import Callable
from typing import NamedTuple

from knonik.mp4.boxes import FileBytes, Mp4Error, box_header
from knonik.mp4.edits import lead, offset_of, with_edits, without_edits
from knonik.mp4.fragments import read_fragments
from knonik.mp4.syncs import claims_hold, without_false_syncs
from knonik.mp4.tracks import CodecRecord, PacketTable, parse_track
from knonik.stores.base import Store

__all__ = ["CodecRecord", "HeaderReader", "Mp4Error", "PacketTable", "find_moov", "read_packets"]

_HEAD = 64  # bytes: ftyp with a few brands, free, and the header of mdat or moov
_BOX = 16  # bytes: the longest box header
_FIXED = 700  # bytes of a moov box that do not depend on the number of frames, at the least
_FIRST_KINDS = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"styp", b"sidx", b"uuid", b"pnot")
_TAIL = 64 << 10  # bytes behind the media that are read without asking what they are, at the least
_MOOV_PER_FRAME = 40  # bytes: a packet with its own duration, offset, chunk and composition time


class Moov(NamedTuple):
    """Where a moov box is: begin and end of the whole box in the file, and the bytes of its header."""

    begin: int
    end: int
    header: int

    def at_end(self, total: int) -> bool:
        """Whether nothing follows it."""
        return self.end == total


def find_moov(file: FileBytes, frames: int | None = None) -> Moov:
    """Place of the moov box, walking the top level of the file.

    Args:
        frames: frames expected in the file; bounds what may be read behind the media unseen.

    Raises:
        Mp4Error: no MP4, or cut off.
    """
    position, media = 0, False
    limit = max(_TAIL, _MOOV_PER_FRAME * (frames or 0))
    while position + 8 <= file.total:
        rest = file.total - position
        # Behind the media there is nearly always moov alone, so it is read together with its header.
        want = min(rest, _HEAD if not position else rest if media and rest <= limit else _BOX)
        near = position, position + min(rest, _BOX)
        head = file.get(*near) if file.held(*near) else file.get(position, position + want)
        try:
            kind, length, header = box_header(head, 0, rest)
        except IndexError as error:
            if not position and head[4:8] not in _FIRST_KINDS:
                raise Mp4Error(f"{file.key}: starts with {head[:8]!r}, which is no MP4 box") from error
            raise Mp4Error(f"{file.key}: {error}, at byte {position} of {file.total}; truncated?") from error
        if not position and kind not in _FIRST_KINDS:
            raise Mp4Error(f"{file.key}: starts with {head[:8]!r}, which is no MP4 box")
        if kind == b"moov":
            return Moov(position, position + length, header)
        media = media or kind == b"mdat"
        position += length
    raise Mp4Error(f"{file.key}: no moov box in {file.total} bytes; the recording was not finished")


def read_packets(store: Store, key: str, size: int | None = None) -> PacketTable:
    """Packet table of the first video track of `key`, without knowledge of other files: two reads, at most three.

    Args:
        size: object size in bytes if known; saves one request.

    Raises:
        Mp4Error: not an MP4, no video track, unknown codec, or inconsistent tables.
    """
    file = FileBytes(store, key, store.size(key) if size is None else size)
    return _parse(file, lambda: find_moov(file))


def _parse(file: FileBytes, find: Callable[[], Moov]) -> PacketTable:
    try:
        moov = find()
        track = parse_track(file.get(moov.begin, moov.end)[moov.header :], file.key)
        if track.defaults is not None:
            samples = read_fragments(file, moov.end, track)
            # Readers take the decode times of fragments as they are, and move the frames' times behind them.
            table = without_edits(samples, track.codec, offset_of(track.edits, file.key) + lead(samples))
        elif track.edits:
            table = with_edits(track.samples, track.edits, track.codec, file.key)
        else:
            table = without_edits(track.samples, track.codec)
        if len(table) and not table.sync[0]:
            raise Mp4Error(f"{file.key}: the first packet is not a sync packet, decoding cannot start")
        if len(table) and (table.offset.min() < 0 or (table.offset + table.size).max() > file.total):
            raise Mp4Error(f"{file.key}: packets reach beyond the {file.total} bytes of the file; truncated?")
        return table
    except Mp4Error:
        raise
    except (struct.error, IndexError, ValueError, ArithmeticError) as error:
        raise Mp4Error(f"{file.key}: damaged MP4 header ({error})") from error


class HeaderReader:
    """Reads the headers of the files of one dataset and learns from each where to look in the next.

    Sync packets of the first file of each codec record are checked by one more read; where they are none, those of all
    files with that record are. Guesses are kept apart for files of one episode and joined ones, which differ. Safe to
    use from many threads.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._per_frame: dict[tuple[bool, bool], float] = {}  # (joined, at end) -> most bytes a frame beyond _FIXED
        self._at_end: dict[bool, bool] = {}
        self._judging = threading.Lock()
        self._honest: dict[CodecRecord, bool] = {}  # whether sync packets of files with this record are what they say

    def read(
        self, key: str, *, size: int | None = None, version: str | None = None, frames: int, joined: bool
    ) -> PacketTable:
        """Packet table of the first video track, with true sync packets only.

        Args:
            size, version: of the object if known; a known size saves a request, a known version is insisted on.
            frames: frames it should hold.
            joined: whether it holds several episodes.

        Raises:
            Mp4Error: the file cannot be indexed.
        """
        total = self._store.size(key) if size is None else size
        file = FileBytes(self._store, key, total, version)
        with self._lock:
            at_end = self._at_end.get(joined)
            per_frame = self._per_frame.get((joined, bool(at_end)), 0.0)
        guess = 0
        if at_end is not None:
            # One part in 64 and 24 bytes more than the richest file so far: frame sizes do not change the length of
            # the tables, but the number of chunks and of different durations does a little.
            guess = min(total, _FIXED + round(per_frame * frames * (1 + 1 / 64)) + 24)
            file.get(total - guess, total) if at_end else file.get(0, min(total, guess + _HEAD))
        found = []

        def find() -> Moov:
            found.append((_moov_in_tail(file, guess) if at_end else None) or find_moov(file, frames))
            return found[0]

        table = _parse(file, find)
        (moov,) = found
        with self._lock:
            place = joined, moov.at_end(total)
            self._at_end[joined] = place[1]
            spent = (moov.end - moov.begin - _FIXED) / max(1, frames)
            self._per_frame[place] = max(self._per_frame.get(place, 0.0), spent)
        return table if self._believed(table, file) else without_false_syncs(table, file)

    def _believed(self, table: PacketTable, file: FileBytes) -> bool:
        """Whether encoders with this codec record mark sync packets rightly; the first such file is looked into."""
        verdict = self._honest.get(table.codec)
        if verdict is None:
            with self._judging:  # one file is enough
                verdict = self._honest.get(table.codec)
                if verdict is None and (verdict := claims_hold(table, file)) is not None:
                    self._honest[table.codec] = verdict
        return verdict is not False


def _moov_in_tail(file: FileBytes, length: int) -> Moov | None:
    """The moov box if it lies whole in the last `length` bytes: its own length must reach the end of the file."""
    tail = file.get(file.total - length, file.total)
    at = tail.find(b"moov", 4)
    while at >= 0:
        (claimed,) = struct.unpack_from(">I", tail, at - 4)
        if claimed == len(tail) - at + 4:
            return Moov(file.total - claimed, file.total, 8)
        at = tail.find(b"moov", at + 1)
    return None
