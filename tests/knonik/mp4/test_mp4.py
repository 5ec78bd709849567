"""The header parser against libav's own demuxer, on real and on generated files."""

import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from knonik.index.gop import ObjectIndex
from knonik.mp4.packets import Mp4Error, read_packets
from knonik.stores.base import LocalStore, Store, open_store


class CountingStore(LocalStore):
    """Adds up what is read."""

    reads = 0
    read_bytes = 0

    def read_range(self, key: str, offset: int, length: int, *, version: str | None = None) -> bytes:
        self.reads += 1
        self.read_bytes += length
        return super().read_range(key, offset, length)


def _check_against_demuxer(store: Store, key: str) -> int:
    table = read_packets(store, key)
    with av.open(str(store.local_path(key))) as container:
        stream = container.streams.video[0]
        packets = [packet for packet in container.demux(stream) if packet.size]
        assert table.codec.name == stream.codec_context.name.replace("libdav1d", "av1")
        assert table.codec.extradata == (stream.codec_context.extradata or b"")
        assert (table.codec.width, table.codec.height) == (stream.width, stream.height)
        assert table.codec.timescale == stream.time_base.denominator
    assert table.pts.tolist() == [packet.pts for packet in packets]
    assert table.dts.tolist() == [packet.dts for packet in packets]
    assert table.size.tolist() == [packet.size for packet in packets]
    assert table.sync.tolist() == [packet.is_keyframe for packet in packets]
    assert table.shown.tolist() == [not packet.is_discard for packet in packets]
    for offset, packet in zip(table.offset.tolist(), packets, strict=True):
        assert store.read_range(key, offset, packet.size) == bytes(packet)
    return len(packets)


def test_all_real_files(shared_data: Path) -> None:
    store = CountingStore(shared_data)
    keys = [key for key in store.list("") if key.endswith(".mp4")]
    assert sum(_check_against_demuxer(store, key) for key in keys) == 1848 + 1848 + 2096 + 40


def test_only_headers_are_read(shared_data: Path) -> None:
    store = CountingStore(shared_data / "g1_inspire_v21" / "videos")
    (key,) = [key for key in store.list("") if key.endswith("episode_000000.mp4")]
    read_packets(store, key)
    assert store.read_bytes < 8_000 < 2_000_000 < store.size(key)


def _encode(
    path: Path,
    codec: str,
    times: list[int] | range = range(23),
    container: dict[str, str] | None = None,
    **settings: Any,
) -> None:
    rng = np.random.default_rng(0)
    with av.open(str(path), "w", format="mp4", options=container or {}) as output:
        stream = output.add_stream(codec, rate=10, options=settings.pop("options", {}))
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for name, value in settings.items():
            setattr(stream.codec_context, name, value)
        for i in times:
            pixels = np.full((48, 64, 3), 10 * i, np.uint8) + rng.integers(0, 9, (48, 64, 3), np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="yuv420p")
            frame.pts = i
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))


B_FRAMES = {"options": {"x264-params": "keyint=9:bframes=3:b-adapt=0:scenecut=0"}}
CASES: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "h264 with B-frames": ("libx264", {}, B_FRAMES),
    "negative composition offsets": ("libx264", {"movflags": "negative_cts_offsets"}, B_FRAMES),
    "no edit list": ("libx264", {"use_editlist": "0"}, B_FRAMES),
    "moov first": ("libx264", {"movflags": "faststart"}, B_FRAMES),
    "open GOP": ("libx264", {}, {"options": {"x264-params": "keyint=6:min-keyint=1:bframes=2:b-adapt=0:open-gop=1"}}),
    "mpeg4": ("mpeg4", {}, {"gop_size": 5}),
    "mpeg4 with B-frames": ("mpeg4", {}, {"gop_size": 7, "max_b_frames": 2}),
    "one frame": ("libx264", {}, {"times": range(1)}),
    "late start": ("libx264", {}, {"times": range(4, 20), **B_FRAMES}),
    "dropped frames": ("libx264", {}, {"times": [0, 1, 2, 5, 6, 7, 8, 12, 13, 14, 20, 21], **B_FRAMES}),
    "hevc with open GOP": (
        "libx265",
        {},
        {"options": {"x265-params": "keyint=6:min-keyint=1:bframes=3:open-gop=1:log-level=0:aq-mode=0"}},
    ),
    "av1": ("libsvtav1", {}, {"options": {"svtav1-params": "lp=1:keyint=5", "preset": "12"}}),
}


@pytest.mark.parametrize("case", CASES)
def test_generated_files(tmp_path: Path, case: str) -> None:
    codec, container, settings = CASES[case]
    _encode(tmp_path / "a.mp4", codec, container=container, **settings)
    _check_against_demuxer(open_store(tmp_path), "a.mp4")


@pytest.mark.parametrize("case", CASES)
def test_packets_of_a_gop_give_the_frames_of_the_container(tmp_path: Path, case: str) -> None:
    from knonik.video.decode import GopDecoder

    codec, container, settings = CASES[case]
    _encode(tmp_path / "a.mp4", codec, container=container, **settings)
    with av.open(str(tmp_path / "a.mp4")) as source:
        expected = [(frame.pts, frame.to_ndarray(format="rgb24")) for frame in source.decode(video=0)]
    store = open_store(tmp_path)
    index = ObjectIndex("a.mp4", read_packets(store, "a.mp4"))
    assert index.pts.tolist() == [pts for pts, _ in expected]
    decoder = GopDecoder()
    for frame in np.random.default_rng(1).permutation(len(index)).tolist():
        gop = index.gop(frame).through(frame)
        assert gop.frames[-1] == frame
        out = np.empty((48, 64, 3), np.uint8)
        decoder.decode(gop.codec, gop.read(store), gop.pts.tolist(), [gop.pts_of(frame)], [out])
        np.testing.assert_array_equal(out, expected[frame][1])


def test_cut_tracks(tmp_path: Path) -> None:
    # An edit list that begins inside a GOP: frames before it are decoded but not shown, frames after its end neither.
    _encode(tmp_path / "a.mp4", "libx264", **B_FRAMES)
    body = (tmp_path / "a.mp4").read_bytes()
    at = body.index(b"elst") + 4
    version, count, duration, media_time, rate = struct.unpack_from(">IIIiI", body, at)
    assert (version, count, rate) == (0, 1, 0x10000)
    later = struct.pack(">IIIiI", 0, 1, duration - 300, media_time + 3 * 1024, rate)
    (tmp_path / "cut.mp4").write_bytes(body[:at] + later + body[at + 20 :])
    table = read_packets(open_store(tmp_path), "cut.mp4")
    with av.open(str(tmp_path / "cut.mp4")) as source:
        pts = [frame.pts for frame in source.decode(video=0)]
    assert ObjectIndex("cut.mp4", table).pts.tolist() == pts
    assert not table.shown.all()


def _with_co64(boxes: bytes) -> bytes:
    """Rebuild nested boxes with 64-bit chunk offsets in place of 32-bit ones, and a 64-bit size on moov."""
    result = b""
    while boxes:
        size, kind = struct.unpack_from(">I4s", boxes)
        body, boxes = boxes[8:size], boxes[size:]
        if kind in (b"moov", b"trak", b"mdia", b"minf", b"stbl"):
            body = _with_co64(body)
        elif kind == b"stco":
            offsets = struct.unpack_from(f">{len(body) // 4 - 2}I", body, 8)
            kind, body = b"co64", body[:8] + struct.pack(f">{len(offsets)}Q", *offsets)
        header = (
            struct.pack(">I4sQ", 1, kind, len(body) + 16)
            if kind == b"moov"
            else struct.pack(">I4s", len(body) + 8, kind)
        )
        result += header + body
    return result


def test_64_bit_sizes_and_offsets(tmp_path: Path) -> None:
    # Files over 4 GiB have them; moov stands last, so the packets stay where they are.
    _encode(tmp_path / "a.mp4", "libx264", **B_FRAMES)
    body = (tmp_path / "a.mp4").read_bytes()
    moov = body.index(b"moov") - 4
    assert moov > body.index(b"mdat")
    (tmp_path / "wide.mp4").write_bytes(body[:moov] + _with_co64(body[moov:]))
    _check_against_demuxer(open_store(tmp_path), "wide.mp4")


def test_refusals_name_the_file(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    _encode(tmp_path / "good.mp4", "libx264")
    body = (tmp_path / "good.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(body[:-100])
    with pytest.raises(Mp4Error, match=r"cut\.mp4: box b'moov'.*truncated"):
        read_packets(store, "cut.mp4")
    _encode(tmp_path / "first.mp4", "libx264", container={"movflags": "faststart"})
    for cut in (0, 100):  # with moov first, the media box is what is cut; a box that runs "to the end" hides it
        first = bytearray((tmp_path / "first.mp4").read_bytes()[: -cut or None])
        at = first.index(b"mdat") - 4
        first[at : at + 4] = bytes(4)
        (tmp_path / "first.mp4").write_bytes(bytes(first))
        if cut:
            with pytest.raises(Mp4Error, match=r"first\.mp4: packets reach beyond the"):
                read_packets(store, "first.mp4")
        else:
            assert len(read_packets(store, "first.mp4")) == 23
    (tmp_path / "nomoov.mp4").write_bytes(body[: body.index(b"moov") - 4])
    with pytest.raises(Mp4Error, match=r"nomoov\.mp4: no moov box"):
        read_packets(store, "nomoov.mp4")
    (tmp_path / "text.mp4").write_bytes(b"version https://example.invalid\n" * 4)
    with pytest.raises(Mp4Error, match=r"text\.mp4: starts with"):
        read_packets(store, "text.mp4")
    (tmp_path / "odd.mp4").write_bytes(body.replace(b"avc1\x00\x00\x00\x00", b"vvc1\x00\x00\x00\x00"))
    with pytest.raises(Mp4Error, match=r"odd\.mp4: video format b'vvc1' is not supported"):
        read_packets(store, "odd.mp4")
    (tmp_path / "sound.mp4").write_bytes(body.replace(b"vide", b"soun"))
    with pytest.raises(Mp4Error, match=r"none of its 1 tracks is video"):
        read_packets(store, "sound.mp4")
    for seed in range(60):  # random damage inside moov is an error of ours or a table, never anything else
        broken = bytearray(body)
        start = body.index(b"moov")
        for at in np.random.default_rng(seed).integers(start + 4, len(body), 6):
            broken[at] = seed
        (tmp_path / "broken.mp4").write_bytes(bytes(broken))
        with suppress(Mp4Error):
            read_packets(store, "broken.mp4")
