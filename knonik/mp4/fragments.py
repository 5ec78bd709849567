"""Packets of fragmented MP4 files: `moof` boxes spread over the file, each with the packets of the `mdat` behind it.

Layouts: ISO/IEC 14496-12, clause 8.8. The boxes form a chain that only their headers reveal, so a file with N fragments
costs about N + 2 reads, one after another (a joined file 1 to 3). No media bytes are read but those that a `moof`
shorter than the one before lets slip in.
"""

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from knonik.mp4.boxes import FileBytes, Mp4Error, box_header, boxes, child
from knonik.mp4.tracks import Samples, Track

_BOX = 16  # bytes: the longest box header
_MOST_PACKETS = 1 << 22  # in one run; more is a damaged header
_NOT_SYNC = 0x01010000  # sample_is_non_sync_sample, or sample_depends_on says that it does


class _Defaults(NamedTuple):
    duration: int
    size: int
    flags: int


def read_fragments(file: FileBytes, begin: int, track: Track) -> Samples:
    """All packets of a track: those of moov, then those of the fragments from byte `begin` on.

    Raises:
        Mp4Error: cut off inside a fragment, or damaged.
    """
    assert track.defaults is not None
    parts = [track.samples]
    position, usual, clock = begin, _BOX, track.end
    while position + 8 <= file.total:
        rest = file.total - position
        near = position, position + min(rest, _BOX)
        # Fragments resemble each other: one read of the last one's length brings the next with its mdat header.
        head = file.get(*near) if file.held(*near) else file.get(position, position + min(rest, usual))
        try:
            kind, length, header = box_header(head, 0, rest)
        except IndexError as error:
            raise Mp4Error(f"{file.key}: {error}, at byte {position} of {file.total}; truncated?") from error
        if kind == b"moof":
            behind = min(file.total, position + length + _BOX)
            body = file.get(position, behind)[header:length]
            usual = length + 2 * _BOX
            part = _moof(body, position, track, clock, file.key)
            parts.append(part.samples)
            clock = part.end
        position += length
        file.forget(position)
    return Samples.join(parts)


class _Part(NamedTuple):
    samples: Samples
    end: int  # ticks


def _moof(moof: bytes, begin: int, track: Track, clock: int, key: str) -> _Part:
    """Packets of the track in one moof box that starts at byte `begin`."""
    runs: list[Samples] = []
    data_end = begin
    for box in boxes(moof):
        if box.kind != b"traf":
            continue
        tfhd = child(box.body, b"tfhd")
        if tfhd is None:
            raise Mp4Error(f"{key}: box moof/traf/tfhd is missing at byte {begin}")
        number, base, defaults = _track_header(tfhd, track.defaults or (0, 0, 0), begin, data_end)
        tfdt = child(box.body, b"tfdt")
        if number == track.number and tfdt is not None:
            (clock,) = struct.unpack_from(">Q" if tfdt[0] == 1 else ">I", tfdt, 4)
        data_end = base
        for run in boxes(box.body):
            if run.kind != b"trun":
                continue
            samples, duration, data_end = _run(run.body, base, data_end, clock, defaults)
            if number == track.number:
                runs.append(samples)
                clock += duration
    return _Part(Samples.join(runs) if runs else _nothing(), clock)


def _track_header(tfhd: bytes, trex: tuple[int, int, int], begin: int, data_end: int) -> tuple[int, int, _Defaults]:
    """Track id, byte from which data offsets count, and defaults of the packets."""
    flags, number = struct.unpack_from(">II", tfhd)
    flags &= 0xFFFFFF
    # Counted from the moof box by default in newer files, from the end of the track before in older ones.
    base = begin if flags & 0x20000 else data_end
    position = 8
    if flags & 0x1:
        (base,) = struct.unpack_from(">Q", tfhd, position)
        position += 8
    position += 4 if flags & 0x2 else 0
    values = list(trex)
    for i, bit in enumerate((0x8, 0x10, 0x20)):
        if flags & bit:
            (values[i],) = struct.unpack_from(">I", tfhd, position)
            position += 4
    return number, base, _Defaults(*values)


def _run(trun: bytes, base: int, data_end: int, clock: int, defaults: _Defaults) -> tuple[Samples, int, int]:
    """Packets of one run, their duration in ticks, and the byte behind the last."""
    flags, count = struct.unpack_from(">II", trun)
    if count > _MOST_PACKETS:
        raise IndexError(f"trun claims {count} packets")
    position, begin = 8, data_end
    if flags & 0x1:
        begin = base + struct.unpack_from(">i", trun, position)[0]
        position += 4
    first_flags = None
    if flags & 0x4:
        (first_flags,) = struct.unpack_from(">I", trun, position)
        position += 4
    given = [bit for bit in (0x100, 0x200, 0x400, 0x800) if flags & bit]
    fields = np.frombuffer(trun, ">u4", count * len(given), position).astype(np.int64).reshape(count, len(given))
    column = {bit: fields[:, i] for i, bit in enumerate(given)}

    def values(bit: int, default: int) -> NDArray[np.int64]:
        return column.get(bit, np.full(count, default, np.int64))

    duration, size, marks = (
        values(0x100, defaults.duration),
        values(0x200, defaults.size),
        values(0x400, defaults.flags),
    )
    if first_flags is not None and count:
        marks = marks.copy()
        marks[0] = first_flags
    dts = clock + np.cumsum(duration) - duration
    delay = values(0x800, 0).astype(np.int32).astype(np.int64)  # signed in practice, whatever the version says
    end = begin + int(size.sum())
    samples = Samples(
        offset=begin + np.cumsum(size) - size, size=size, dts=dts, composed=dts + delay, sync=(marks & _NOT_SYNC) == 0
    )
    return samples, int(duration.sum()), end


def _nothing() -> Samples:
    none = np.zeros(0, np.int64)
    return Samples(offset=none, size=none, dts=none, composed=none, sync=none.astype(np.bool_))
