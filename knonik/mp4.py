"""Read where every video packet of an MP4 file lies, from its headers alone.

Only top-level box headers and the `moov` box are fetched, wherever `moov` stands; media bytes are never touched. Box
layouts: ISO/IEC 14496-12 (base format), 14496-15 (avcC, hvcC), the AV1-in-ISOBMFF binding (av1C), 14496-1 (esds).
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from knonik.store import Store

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


class Mp4Error(ValueError):
    """The file is not an MP4 this parser can index; the message names the file and the box."""


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


def read_packets(store: Store, key: str, size: int | None = None) -> PacketTable:
    """Packet table of the first video track of `key`.

    Args:
        size: object size in bytes if known; saves one request.

    Raises:
        Mp4Error: not an MP4, fragmented, no video track, unknown codec, or inconsistent tables.
    """
    try:
        total = store.size(key) if size is None else size
        table = _parse_moov(_fetch_moov(store, key, total), key)
        if len(table) and (table.offset.min() < 0 or (table.offset + table.size).max() > total):
            raise Mp4Error(f"{key}: packets reach beyond the {total} bytes of the file; truncated?")
        return table
    except Mp4Error:
        raise
    except (struct.error, IndexError, ValueError, ArithmeticError) as error:
        raise Mp4Error(f"{key}: damaged MP4 header ({error})") from error


def _fetch_moov(store: Store, key: str, total: int) -> bytes:
    position = 0
    while position + 8 <= total:
        head = store.read_range(key, position, min(16, total - position))
        length, kind = struct.unpack_from(">I4s", head)
        header = 8
        if length == 1:
            length, header = struct.unpack_from(">Q", head, 8)[0], 16
        elif length == 0:
            length = total - position  # the last box may run to the end of the file
        if position == 0 and kind not in (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide"):
            raise Mp4Error(f"{key}: starts with {head[:8]!r}, which is no MP4 box")
        if length < header or position + length > total:
            raise Mp4Error(
                f"{key}: box {kind!r} at byte {position} claims {length} bytes, the file has {total}; truncated?"
            )
        if kind == b"moov":
            return store.read_range(key, position + header, length - header)
        position += length
    raise Mp4Error(f"{key}: no moov box in {total} bytes; the recording was not finished")


class _Box(NamedTuple):
    kind: bytes
    body: bytes


def _boxes(data: bytes, start: int = 0) -> Iterator[_Box]:
    while start + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, start)
        header = 8
        if length == 1:
            length, header = struct.unpack_from(">Q", data, start + 8)[0], 16
        elif length == 0:
            length = len(data) - start
        if length < header or start + length > len(data):
            raise IndexError(f"box {kind!r} of {length} bytes overruns its parent")
        yield _Box(kind, data[start + header : start + length])
        start += length


def _child(data: bytes, *path: bytes) -> bytes | None:
    for kind in path:
        found = next((box.body for box in _boxes(data) if box.kind == kind), None)
        if found is None:
            return None
        data = found
    return data


def _need(data: bytes, key: str, *path: bytes) -> bytes:
    body = _child(data, *path)
    if body is None:
        raise Mp4Error(f"{key}: box {'/'.join(kind.decode('latin-1') for kind in path)} is missing")
    return body


def _parse_moov(moov: bytes, key: str) -> PacketTable:
    if _child(moov, b"mvex") is not None:
        raise Mp4Error(
            f"{key}: fragmented MP4 (mvex box) is not supported; remux it without fragments, packets can be copied"
        )
    tracks = [box.body for box in _boxes(moov) if box.kind == b"trak"]
    video = [track for track in tracks if (_child(track, b"mdia", b"hdlr") or b"")[8:12] == b"vide"]
    if not video:
        raise Mp4Error(f"{key}: none of its {len(tracks)} tracks is video")
    track = video[0]
    mdhd = _need(track, key, b"mdia", b"mdhd")
    timescale = int(struct.unpack_from(">I", mdhd, 20 if mdhd[0] == 1 else 12)[0])
    mvhd = _need(moov, key, b"mvhd")
    movie_scale = int(struct.unpack_from(">I", mvhd, 20 if mvhd[0] == 1 else 12)[0])
    stbl = _need(track, key, b"mdia", b"minf", b"stbl")
    codec = _codec(_need(stbl, key, b"stsd"), timescale, key)

    size = _sample_sizes(_need(stbl, key, b"stsz"))
    count = len(size)
    offset = _sample_offsets(stbl, size, key)
    duration = _runs(_need(stbl, key, b"stts"), count, key, "stts")
    media_time = np.cumsum(duration) - duration
    ctts = _child(stbl, b"ctts")
    # Version 0 is unsigned by the standard, yet writers put negative offsets there and readers take them as signed.
    delay = (
        _runs(ctts, count, key, "ctts").astype(np.int32).astype(np.int64)
        if ctts is not None
        else np.zeros(count, np.int64)
    )
    sync = np.ones(count, np.bool_)
    stss = _child(stbl, b"stss")
    if stss is not None:
        numbers = np.frombuffer(stss, ">u4", struct.unpack_from(">I", stss, 4)[0], 8).astype(np.int64)
        sync[:] = False
        sync[numbers - 1] = True
    if count and not sync[0]:
        raise Mp4Error(f"{key}: the first packet is not a sync packet, decoding cannot start")

    shift, start, end = _edit(track, timescale, movie_scale, key)
    composed = media_time + delay
    shown = (composed >= start) & (composed < end)
    # Negative composition offsets: decode times move down so that no packet is decoded after its presentation.
    lead = max(0, -int(delay.min())) if count else 0
    return PacketTable(
        codec=codec,
        offset=offset,
        size=size,
        pts=composed + shift,
        dts=media_time - lead + shift,
        sync=sync,
        shown=shown,
    )


def _codec(stsd: bytes, timescale: int, key: str) -> CodecRecord:
    entry = next(_boxes(stsd, 8), None)
    if entry is None or entry.kind not in CODECS:
        known = ", ".join(kind.decode() for kind in CODECS)
        raise Mp4Error(
            f"{key}: video format {entry.kind if entry else b''!r} is not supported; supported sample entries: {known}"
        )
    name, config_box = CODECS[entry.kind]
    width, height = struct.unpack_from(">HH", entry.body, 24)
    config = next((box.body for box in _boxes(entry.body, _SAMPLE_ENTRY_HEADER) if box.kind == config_box), None)
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
    table, width = _child(stbl, b"stco"), ">u4"
    if table is None:
        table, width = _need(stbl, key, b"co64"), ">u8"
    chunks = np.frombuffer(table, width, struct.unpack_from(">I", table, 4)[0], 8).astype(np.int64)
    stsc = _need(stbl, key, b"stsc")
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


def _edit(track: bytes, timescale: int, movie_scale: int, key: str) -> tuple[int, int, int]:
    """(ticks to add to media times, first and one-past-last media time shown) from the edit list."""
    whole = (0, -(1 << 62), 1 << 62)
    elst = _child(track, b"edts", b"elst")
    if elst is None:
        return whole
    wide = elst[0] == 1
    layout, step = (">QqI", 20) if wide else (">IiI", 12)
    entries = [struct.unpack_from(layout, elst, 8 + i * step) for i in range(struct.unpack_from(">I", elst, 4)[0])]
    empty = 0
    while entries and entries[0][1] == -1:  # an empty edit delays the track
        empty += round(entries.pop(0)[0] * timescale / movie_scale)
    if not entries:
        return whole
    if len(entries) > 1:
        raise Mp4Error(
            f"{key}: an edit list with {len(entries)} segments is not supported; remux the file, packets can be copied"
        )
    duration, start, rate = entries[0]
    if rate != 0x10000:
        raise Mp4Error(f"{key}: an edit list with rate {rate / 0x10000:g} is not supported, only 1")
    # Durations are rounded to the coarser movie clock: a frame is cut only if it starts clearly after the end.
    end = start + round(duration * timescale / movie_scale) if duration else 1 << 62
    return empty - start, start, end
