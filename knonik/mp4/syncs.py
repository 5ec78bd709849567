"""Whether a decoder may really start at a packet: what a container calls a sync packet is looked into.

Encoders with intra refresh mark packets as sync that refer to frames before them, and some writers mark every intra
frame. Starting there gives frames that differ from the true ones, or none. The first bytes of a packet tell: an IDR or
a recovery point without further frames (H.264, ITU-T H.264 D.2.8), a random access picture (HEVC, ITU-T H.265 7.4.2.2),
a key frame (AV1 specification 5.9.2). Leading pictures of an open GOP are no obstacle, see `knonik.index.gop`.
"""

import logging
from dataclasses import replace

import numpy as np

from knonik.mp4.boxes import FileBytes
from knonik.mp4.tracks import CodecRecord, PacketTable

logger = logging.getLogger(__name__)

HEAD = 1024  # bytes of a packet that nearly always suffice; the longest text an encoder puts in front is about 700


def is_entry(codec: CodecRecord, packet: bytes | memoryview) -> bool | None:
    """Whether decoding may start at a packet, given whole or only its beginning; None if that does not tell."""
    data = memoryview(packet)
    try:
        if codec.name == "h264":
            return _h264(data, (codec.extradata[4] & 3) + 1)
        if codec.name == "hevc":
            return _hevc(data, (codec.extradata[21] & 3) + 1)
        if codec.name == "av1":
            return _av1(data)
    except IndexError:
        return None
    return True


def claims_hold(table: PacketTable, file: FileBytes) -> bool | None:
    """Whether a sync packet in the middle of the file is one, by one short read; None if only the first is claimed."""
    claimed = np.flatnonzero(table.sync)[1:]
    return _look(table, file, int(claimed[len(claimed) // 2])) if len(claimed) else None


def without_false_syncs(table: PacketTable, file: FileBytes) -> PacketTable:
    """The table with only those sync packets that are any, by one short read each; the file's first one is believed."""
    claimed = np.flatnonzero(table.sync)[1:]
    true = np.array([_look(table, file, number) for number in claimed.tolist()], np.bool_)
    if true.all():
        return table
    logger.warning(
        "%s: %d of the %d packets that it marks as sync are none, its GOPs are longer than they seem",
        file.key,
        int((~true).sum()),
        len(claimed) + 1,
    )
    sync = table.sync.copy()
    sync[claimed[~true]] = False
    return replace(table, sync=sync)


def _look(table: PacketTable, file: FileBytes, number: int) -> bool:
    begin, size = int(table.offset[number]), int(table.size[number])
    verdict = is_entry(table.codec, file.get(begin, begin + min(size, HEAD)))
    if verdict is None and size > HEAD:
        verdict = is_entry(table.codec, file.get(begin, begin + size))
    return bool(verdict)


def _h264(data: memoryview, width: int) -> bool | None:
    position, recovery = 0, False
    while position + width < len(data):
        length = int.from_bytes(data[position : position + width], "big")
        kind = data[position + width] & 0x1F
        if kind == 5:
            return True
        if 1 <= kind <= 4:
            return recovery
        if kind == 6:
            recovery = recovery or _recovers_at_once(bytes(data[position + width + 1 : position + width + length]))
        position += width + length
    return None


def _recovers_at_once(sei: bytes) -> bool:
    """Whether a supplemental message says that all frames from here on, in order of presentation, come out right."""
    sei = sei.replace(b"\0\0\3", b"\0\0")
    position = 0
    while position + 2 < len(sei):
        values = []
        for _ in range(2):  # type and length: bytes of 255 add up until a smaller one
            value = 0
            while sei[position] == 255:
                value, position = value + 255, position + 1
            values.append(value + sei[position])
            position += 1
        kind, length = values
        if kind == 6:
            return bool(sei[position] & 0x80)  # recovery_frame_cnt is 0
        position += length
    return False


def _hevc(data: memoryview, width: int) -> bool | None:
    position = 0
    while position + width < len(data):
        kind = data[position + width] >> 1 & 0x3F
        if kind < 32:
            return 16 <= kind <= 23
        position += width + int.from_bytes(data[position : position + width], "big")
    return None


def _av1(data: memoryview) -> bool | None:
    position = 0
    while position < len(data):
        header = data[position]
        kind = header >> 3 & 0xF
        position += 2 if header & 0x4 else 1
        length = len(data) - position
        if header & 0x2:
            length, shift = 0, 0
            while True:
                byte = data[position]
                position += 1
                length |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
        if kind in (3, 6):
            return data[position] & 0xE0 == 0  # no frame shown again, and of type key frame
        position += length
    return None
