"""Apply an edit list: which packets are decoded, which of them are shown, and when.

The outcome is that of libav's demuxer, which the stock loaders read through: every segment begins at the last sync
packet at or before its start, packets outside its span are decoded and dropped, segments follow each other, and the
first shown frame lies at 0 or behind the empty segments in front.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from knonik.mp4.boxes import Mp4Error
from knonik.mp4.tracks import CodecRecord, Edit, PacketTable, Samples


def without_edits(samples: Samples, codec: CodecRecord, delay: int = 0) -> PacketTable:
    """All packets, all shown, `delay` ticks later than on the track's clock."""
    return PacketTable(
        codec=codec,
        offset=samples.offset,
        size=samples.size,
        pts=samples.composed + delay,
        dts=samples.dts - lead(samples) + delay,
        sync=samples.sync,
        shown=np.ones(len(samples), np.bool_),
    )


def offset_of(edits: Sequence[Edit], key: str) -> int:
    """Ticks by which an edit list of one segment delays the track, for fragments, where nothing is cut.

    Raises:
        Mp4Error: it has several segments.
    """
    leading, segments = _split(edits, key)
    if len(segments) > 1:
        raise Mp4Error(
            f"{key}: a fragmented file whose edit list has {len(segments)} segments is not supported; remux it without "
            "fragments, packets can be copied"
        )
    return leading - (segments[0].start if segments else 0)


def with_edits(samples: Samples, edits: Sequence[Edit], codec: CodecRecord, key: str) -> PacketTable:
    """The packets of all segments, one segment after another.

    Raises:
        Mp4Error: the list is of a kind that container readers do not present sensibly.
    """
    leading, segments = _split(edits, key)
    if not segments or not len(samples):
        return without_edits(samples, codec, leading)
    clock = leading
    packets, pts, dts, sync, shown = [], [], [], [], []
    for segment in segments:
        members = _members(samples, segment)
        composed = samples.composed[members]
        inside = (composed >= segment.start) & (composed < segment.start + segment.duration)
        if inside.any():
            first = members[int(np.argmax(inside))]
            shift = clock - int(samples.dts[first])
            packets.append(members)
            pts.append(composed + shift)
            dts.append(samples.dts[members] + shift - lead(samples))
            # A sync packet that is not shown is of no use but as the begin of the segment.
            sync.append(samples.sync[members] & (inside | (members == members[0])))
            shown.append(inside)
        clock += segment.duration
    if not packets:
        raise Mp4Error(f"{key}: its edit list shows none of its {len(samples)} packets")
    late = max(0, _earliest(np.concatenate([times[seen] for times, seen in zip(pts, shown, strict=True)])) - leading)
    for before, after, seen, then in zip(pts, pts[1:], shown, shown[1:], strict=False):
        if before[seen].max() >= after[then].min():
            raise Mp4Error(f"{key}: segments of its edit list overlap in time; remux the file, packets can be copied")
    chosen = np.concatenate(packets)
    return PacketTable(
        codec=codec,
        offset=samples.offset[chosen],
        size=samples.size[chosen],
        pts=np.concatenate(pts) - late,
        dts=np.concatenate(dts) - late,
        sync=np.concatenate(sync),
        shown=np.concatenate(shown),
    )


def _earliest(pts: NDArray[np.int64]) -> int:
    """Time that is taken for the first shown frame's, of packets in decode order.

    The smallest, but a negative one only counts when nothing comes after it: so do container readers.
    """
    if pts.min() >= 0:
        return int(pts.min())
    earliest = -1
    for time in pts.tolist():
        earliest = time if earliest < 0 else min(earliest, time)
    return earliest


def _split(edits: Sequence[Edit], key: str) -> tuple[int, list[Edit]]:
    """Ticks of the empty segments in front, and the others."""
    segments = list(edits)
    leading = 0
    while segments and segments[0].start == -1:
        leading += segments.pop(0).duration
    if odd := [segment for segment in segments if segment.start < 0]:
        raise Mp4Error(
            f"{key}: an edit list with a segment from {odd[0].start} ticks after another one is not supported; remux "
            "the file, packets can be copied"
        )
    return leading, segments


def _members(samples: Samples, segment: Edit) -> NDArray[np.int64]:
    """Packets that are decoded for a segment."""
    start, end = segment.start, segment.start + segment.duration
    entries = np.flatnonzero(samples.sync & (samples.composed <= start) & (samples.dts <= start))
    begin = int(entries[-1]) if len(entries) else 0
    duration = np.diff(samples.dts, append=samples.dts[-1] + segment.duration)
    over = np.flatnonzero(samples.sync[begin:] & (samples.composed + duration >= end)[begin:]) + begin
    # Frames of the segment may be stored after the next sync packet (leading pictures), but not after the one behind.
    reordered = int(np.any(samples.composed != samples.dts))
    stop = int(over[reordered]) + 1 if len(over) > reordered else len(samples)
    return np.arange(begin, stop)


def lead(samples: Samples) -> int:
    """Negative composition offsets: decode times move down so that no packet is decoded after its presentation."""
    return max(0, -int((samples.composed - samples.dts).min())) if len(samples) else 0
