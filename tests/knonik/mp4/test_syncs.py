"""What a container calls a sync packet is only believed when a decoder can start there."""

import struct
from pathlib import Path

import av
import numpy as np
import pytest

from knonik.index.gop import ObjectIndex
from knonik.mp4.packets import CodecRecord, HeaderReader, Mp4Error, PacketTable, read_packets
from knonik.mp4.syncs import is_entry
from knonik.stores.base import LocalStore

HEIGHT, WIDTH = 64, 320


def _encode(path: Path, codec: str, options: dict[str, str], frames: int = 45) -> None:
    """A textured picture that moves sideways, so that intra refresh takes several frames."""
    blocks = np.random.default_rng(0).integers(0, 200, (HEIGHT // 8, WIDTH // 8 + 8, 3), np.uint8)
    wide = np.repeat(np.repeat(blocks, 8, axis=0), 8, axis=1)
    with av.open(str(path), "w", format="mp4") as output:
        stream = output.add_stream(codec, rate=10, options=options)
        stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, "yuv420p"
        stream.codec_context.thread_count = 1
        for i in range(frames):
            pixels = np.ascontiguousarray(wide[:, i : i + WIDTH])
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="yuv420p")
            frame.pts = i
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))


def _entries(table: PacketTable, store: LocalStore, key: str) -> list[int]:
    spans = zip(table.offset.tolist(), table.size.tolist(), strict=True)
    return [i for i, span in enumerate(spans) if is_entry(table.codec, store.read_range(key, *span))]


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("libx264", {"x264-params": "keyint=7:bframes=3:scenecut=0"}),
        ("libx264", {"x264-params": "keyint=6:min-keyint=1:bframes=2:b-adapt=0:open-gop=1"}),
        ("libx265", {"x265-params": "keyint=6:min-keyint=1:bframes=3:open-gop=1:log-level=0:aq-mode=0"}),
        ("libx265", {"x265-params": "keyint=6:open-gop=0:log-level=0:aq-mode=0"}),
        ("libsvtav1", {"svtav1-params": "lp=1:keyint=5", "preset": "12"}),
    ],
)
def test_true_sync_packets_are_recognised(tmp_path: Path, codec: str, options: dict[str, str]) -> None:
    _encode(tmp_path / "a.mp4", codec, options, frames=20)
    store = LocalStore(tmp_path)
    table = read_packets(store, "a.mp4")
    assert _entries(table, store, "a.mp4") == np.flatnonzero(table.sync).tolist()
    assert table.sync.sum() > 2
    read = HeaderReader(store).read("a.mp4", frames=20, joined=False)
    assert read.sync.tolist() == table.sync.tolist()


def test_intra_refresh_is_no_sync_packet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from knonik.video.decode import GopDecoder

    _encode(tmp_path / "a.mp4", "libx264", {"x264-params": "intra-refresh=1:keyint=20:bframes=0:scenecut=0"})
    store = LocalStore(tmp_path)
    claimed = read_packets(store, "a.mp4")
    assert np.flatnonzero(claimed.sync).tolist() == [0, 20, 40]
    assert _entries(claimed, store, "a.mp4") == [0]
    with pytest.raises(Mp4Error, match=r"a\.mp4: the packet at byte \d+ is marked as sync .* so frame 21 cannot"):
        ObjectIndex("a.mp4", claimed).fetch(store, 21)
    table = HeaderReader(store).read("a.mp4", frames=45, joined=False)
    assert "a.mp4: 2 of the 3 packets that it marks as sync are none" in caplog.text
    index = ObjectIndex("a.mp4", table)
    assert index.first_frames.tolist() == [0]
    with av.open(str(tmp_path / "a.mp4")) as container:
        expected = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    out = np.empty((HEIGHT, WIDTH, 3), np.uint8)
    decoder = GopDecoder()
    for frame in (0, 19, 20, 21, 39, 44):
        packets, pts = index.fetch(store, frame)
        decoder.decode(index.codec, packets, pts, [int(index.pts[frame])], [out])
        np.testing.assert_array_equal(out, expected[frame])


def test_messages_are_read_across_escapes_and_lengths() -> None:
    codec = CodecRecord(name="h264", extradata=b"\1\x64\0\x1f\xff", width=2, height=2, timescale=1)

    def nals(*units: bytes) -> bytes:
        return b"".join(struct.pack(">I", len(unit)) + unit for unit in units)

    text = bytes([5, 255, 3]) + b"\0\0\3\1" + bytes([9] * 255)  # 258 bytes, one more as escaped
    now, later = bytes([6, 1, 0xC4, 0x80]), bytes([6, 1, 0x14, 0x80])
    frame = bytes([0x41, 0x9A, 0, 0])
    assert is_entry(codec, nals(bytes([0x06]) + text + now, frame)) is True
    assert is_entry(codec, nals(bytes([0x06]) + text + later, frame)) is False
    assert is_entry(codec, nals(bytes([0x06]) + text + b"\x80", frame)) is False
    assert is_entry(codec, nals(bytes([0x06]) + text + now, b"\x65\x88")) is True
    assert is_entry(codec, nals(bytes([0x09, 0xF0]), bytes([0x06]) + text)) is None


def test_one_look_a_codec_record(tmp_path: Path) -> None:
    class Counting(LocalStore):
        reads = 0

        def read_range(self, key: str, offset: int, length: int, *, version: str | None = None) -> bytes:
            self.reads += 1
            return super().read_range(key, offset, length, version=version)

    for key in ("a.mp4", "b.mp4", "c.mp4"):
        _encode(tmp_path / key, "libx264", {"x264-params": "keyint=5:bframes=0"}, frames=20)
    store = Counting(tmp_path)
    reader = HeaderReader(store)
    counts = []
    for key in ("a.mp4", "b.mp4", "c.mp4"):
        before = store.reads
        reader.read(key, size=store.size(key), frames=20, joined=False)
        counts.append(store.reads - before)
    assert counts == [3, 1, 1]
