"""The video track of a `moov` box: codec record, and place and times of every packet.

Box layouts: ISO/IEC 14496-12 (base format), 14496-15 (avcC, hvcC), the AV1-in-ISOBMFF binding (av1C), 14496-1 (esds).
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from knonik.mp4.boxes import Mp4Error, boxes, child, need

# Sample entry -> (FFmpeg codec name, box that carries the decoder configuration).
CODECS = {
    b"av01": ("av1", b"av1C"),
    b"avc1": ("h264", b"avcC"),
    b"avc3": ("h264", b"avcC"),
    b"hvc1": ("hevc", b"hvcC"),
    b"hev1": ("hevc", b"hvcC"),
    b"mp4v": ("mpeg4", b"esds"),
}
_SAMPLE_ENTRY_HEADER = 78  # bytes of a VisualSampleEntry before its child boxes
_MOST_PACKETS = 1 << 27  # 50 days at 30 fps; more is a damaged header


@dataclass(frozen=True, kw_only=True)
class CodecRecord:
    """What a decoder needs before its first packet.

    name: FFmpeg codec name (av1, h264, hevc, mpeg4). extradata: decoder configuration as FFmpeg's demuxer hands it out.
    width, height: pixels. timescale: ticks per second of all packet times.
    """

    name: str
    extradata: bytes
    width: int
    height: int
    timescale: int


@dataclass(frozen=True, kw_only=True)
class PacketTable:
    """Video packets of one file in decode order, all arrays [P].

    offset, size: bytes in the file. pts, dts: ticks of `codec.timescale`, shifted by the edit list as FFmpeg presents
    them. sync: a decoder may start here. shown: False for packets outside the edit list, which are decoded but not
    presented.
    """

    codec: CodecRecord
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    pts: NDArray[np.int64]
    dts: NDArray[np.int64]
    sync: NDArray[np.bool_]
    shown: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.offset)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Packets of a track on its own clock, before the edit list, in decode order, all arrays [P].

    offset, size: bytes in the file. dts, composed: ticks at which a packet is decoded and its frame shown. sync: the
    file says that a decoder may start here.
    """

    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    dts: NDArray[np.int64]
    composed: NDArray[np.int64]
    sync: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.offset)

    @staticmethod
    def join(parts: "Sequence[Samples]") -> "Samples":
        """One after another."""
        names = ("offset", "size", "dts", "composed", "sync")
        return Samples(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


class Edit(NamedTuple):
    """One segment of the presentation. start: ticks on the track's clock, -1 for an empty one. duration: ticks."""

    start: int
    duration: int


@dataclass(frozen=True, kw_only=True)
class Track:
    """The first video track of a moov box.

    number: the track's id. samples: those listed in moov itself. edits: the edit list, empty where there is none.
    end: ticks at which a fragment without own time goes on. defaults: (duration, size, flags) of a packet of a
    fragment, None where the file has no fragments.
    """

    codec: CodecRecord
    number: int
    samples: Samples
    edits: tuple[Edit, ...]
    end: int
    defaults: tuple[int, int, int] | None


def parse_track(moov: bytes, key: str) -> Track:
    """The first video track of a moov box, given without its header."""
    tracks = [box.body for box in boxes(moov) if box.kind == b"trak"]
    video = [track for track in tracks if (child(track, b"mdia", b"hdlr") or b"")[8:12] == b"vide"]
    if not video:
        raise Mp4Error(f"{key}: none of its {len(tracks)} tracks is video")
    track = video[0]
    mdhd = need(track, key, b"mdia", b"mdhd")
    timescale = int(struct.unpack_from(">I", mdhd, 20 if mdhd[0] == 1 else 12)[0])
    mvhd = need(moov, key, b"mvhd")
    movie_scale = int(struct.unpack_from(">I", mvhd, 20 if mvhd[0] == 1 else 12)[0])
    tkhd = need(track, key, b"tkhd")
    number = int(struct.unpack_from(">I", tkhd, 20 if tkhd[0] == 1 else 12)[0])
    stbl = need(track, key, b"mdia", b"minf", b"stbl")
    size = _sample_sizes(need(stbl, key, b"stsz"))
    count = len(size)
    duration = _runs(need(stbl, key, b"stts"), count, key, "stts")
    dts = np.cumsum(duration) - duration
    ctts = child(stbl, b"ctts")
    # Version 0 is unsigned by the standard, yet writers put negative offsets there and readers take them as signed.
    delay = _runs(ctts, count, key, "ctts").astype(np.int32) if ctts is not None else np.zeros(count, np.int32)
    return Track(
        codec=_codec(need(stbl, key, b"stsd"), timescale, key),
        number=number,
        samples=Samples(
            offset=_sample_offsets(stbl, size, key), size=size, dts=dts, composed=dts + delay, sync=_sync(stbl, count)
        ),
        edits=_edits(track, timescale, movie_scale, key),
        end=int(duration.sum()),
        defaults=_fragment_defaults(moov, number),
    )


def _sync(stbl: bytes, count: int) -> NDArray[np.bool_]:
    stss = child(stbl, b"stss")
    if stss is None:
        return np.ones(count, np.bool_)
    sync = np.zeros(count, np.bool_)
    numbers = np.frombuffer(stss, ">u4", struct.unpack_from(">I", stss, 4)[0], 8).astype(np.int64)
    sync[numbers - 1] = True
    for box in boxes(stbl):
        # Entry points of open GOPs, which some writers list here and not in stss.
        if box.kind == b"sbgp" and box.body[4:8] == b"rap ":
            begin = 12 if box.body[0] else 8
            (runs,) = struct.unpack_from(">I", box.body, begin)
            pairs = np.frombuffer(box.body, ">u4", 2 * runs, begin + 4).astype(np.int64).reshape(-1, 2)
            ends = np.minimum(np.cumsum(pairs[:, 0]), count)
            member = np.repeat(pairs[:, 1] > 0, np.diff(ends, prepend=0))
            sync[: len(member)] |= member
    return sync


def _fragment_defaults(moov: bytes, number: int) -> tuple[int, int, int] | None:
    mvex = child(moov, b"mvex")
    if mvex is None:
        return None
    for box in boxes(mvex):
        if box.kind == b"trex":
            track, _, duration, size, flags = struct.unpack_from(">5I", box.body, 4)
            if track == number:
                return duration, size, flags
    return 0, 0, 0


def _codec(stsd: bytes, timescale: int, key: str) -> CodecRecord:
    entry = next(boxes(stsd, 8), None)
    if entry is None or entry.kind not in CODECS:
        known = ", ".join(kind.decode() for kind in CODECS)
        raise Mp4Error(
            f"{key}: video format {entry.kind if entry else b''!r} is not supported; supported sample entries: {known}"
        )
    name, config_box = CODECS[entry.kind]
    width, height = struct.unpack_from(">HH", entry.body, 24)
    config = next((box.body for box in boxes(entry.body, _SAMPLE_ENTRY_HEADER) if box.kind == config_box), None)
    if config is None:
        raise Mp4Error(f"{key}: {entry.kind.decode()} without its {config_box.decode()} box")
    extradata = _decoder_specific_info(config) if config_box == b"esds" else config
    return CodecRecord(name=name, extradata=extradata, width=width, height=height, timescale=timescale)


def _decoder_specific_info(esds: bytes) -> bytes:
    """Body of descriptor 5 inside ES (3) and decoder config (4) descriptors."""
    position = 4
    while position < len(esds):
        tag, length, position = esds[position], 0, position + 1
        while True:
            byte = esds[position]
            position += 1
            length = length << 7 | byte & 0x7F
            if byte < 0x80:
                break
        if tag == 5:
            return esds[position : position + length]
        if tag == 3:
            flags = esds[position + 2]
            position += 3 + (2 if flags & 0x80 else 0) + (2 if flags & 0x20 else 0)
            position += 1 + esds[position] if flags & 0x40 else 0
        else:
            position += 13 if tag == 4 else length
    return b""


def _sample_sizes(stsz: bytes) -> NDArray[np.int64]:
    constant, count = struct.unpack_from(">II", stsz, 4)
    if constant and count > _MOST_PACKETS:
        raise IndexError(f"stsz claims {count} packets")
    if constant:
        return np.full(count, constant, np.int64)
    return np.frombuffer(stsz, ">u4", count, 12).astype(np.int64)


def _runs(box: bytes, count: int, key: str, name: str) -> NDArray[np.int64]:
    """Expand a run-length table of (samples, value) pairs to one value per sample."""
    pairs = np.frombuffer(box, ">u4", 2 * struct.unpack_from(">I", box, 4)[0], 8).astype(np.int64).reshape(-1, 2)
    # Surplus entries are cut before they are expanded: a damaged count must not take gigabytes.
    ends = np.minimum(np.cumsum(pairs[:, 0]), count)
    if count and (not len(ends) or ends[-1] < count):
        raise Mp4Error(f"{key}: {name} describes {int(ends[-1]) if len(ends) else 0} packets, stsz has {count}")
    return np.repeat(pairs[:, 1], np.diff(ends, prepend=0))


def _sample_offsets(stbl: bytes, size: NDArray[np.int64], key: str) -> NDArray[np.int64]:
    table, width = child(stbl, b"stco"), ">u4"
    if table is None:
        table, width = need(stbl, key, b"co64"), ">u8"
    chunks = np.frombuffer(table, width, struct.unpack_from(">I", table, 4)[0], 8).astype(np.int64)
    stsc = need(stbl, key, b"stsc")
    runs = np.frombuffer(stsc, ">u4", 3 * struct.unpack_from(">I", stsc, 4)[0], 8).astype(np.int64).reshape(-1, 3)
    if not len(size):
        return np.zeros(0, np.int64)
    # A run is valid from its first chunk (counted from 1) to the chunk before the next run.
    repeats = np.diff(np.append(runs[:, 0], len(chunks) + 1))
    per_chunk = np.repeat(runs[:, 1], repeats)
    if len(per_chunk) != len(chunks) or per_chunk.sum() != len(size):
        raise Mp4Error(
            f"{key}: stsc places {int(per_chunk.sum())} packets in {len(chunks)} chunks, stsz has {len(size)}"
        )
    ends = np.cumsum(size)
    before = ends - size
    first_of_chunk = np.cumsum(per_chunk) - per_chunk
    # Packets of a chunk lie back to back; a chunk without packets borrows any valid number and is never used.
    inside = before - np.repeat(before[np.minimum(first_of_chunk, len(size) - 1)], per_chunk)
    offsets: NDArray[np.int64] = np.repeat(chunks, per_chunk) + inside
    return offsets


def _edits(track: bytes, timescale: int, movie_scale: int, key: str) -> tuple[Edit, ...]:
    elst = child(track, b"edts", b"elst")
    if elst is None:
        return ()
    layout, step = (">Qqi", 20) if elst[0] == 1 else (">Iii", 12)
    edits = []
    for i in range(struct.unpack_from(">I", elst, 4)[0]):
        duration, start, rate = struct.unpack_from(layout, elst, 8 + i * step)
        if rate != 0x10000 and start != -1:
            raise Mp4Error(f"{key}: an edit list with rate {rate / 0x10000:g} is not supported, only 1")
        # Durations are counted on the coarser movie clock; halves are rounded up, as container readers do.
        edits.append(Edit(start, (2 * duration * timescale + movie_scale) // (2 * movie_scale)))
    return tuple(edits)
