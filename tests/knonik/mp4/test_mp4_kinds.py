"""Edit lists, fragments and header reads against libav's demuxer: what is presented, from how many bytes and reads."""

import struct
from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
import pytest

from knonik.index.gop import ObjectIndex
from knonik.mp4.packets import HeaderReader, Mp4Error, PacketTable, read_packets
from knonik.stores.base import LocalStore

B_FRAMES = "keyint=9:bframes=3:b-adapt=0:scenecut=0"
NO_B_FRAMES = "keyint=9:bframes=0:scenecut=0"
OPEN_GOP = "keyint=6:min-keyint=1:bframes=2:b-adapt=0:open-gop=1"
STEP = 1024  # ticks of a frame in the files made here; 100 on the movie's clock


class CountingStore(LocalStore):
    """Counts reads and bytes."""

    reads = 0
    read_bytes = 0

    def read_range(self, key: str, offset: int, length: int, *, version: str | None = None) -> bytes:
        self.reads += 1
        self.read_bytes += length
        return super().read_range(key, offset, length, version=version)


def _encode(path: Path, settings: str, flags: str = "", frames: int = 23, size: tuple[int, int] = (48, 64)) -> bytes:
    rng = np.random.default_rng(0)
    with av.open(str(path), "w", format="mp4", options={"movflags": flags} if flags else {}) as output:
        stream = output.add_stream("libx264", rate=10, options={"x264-params": settings, "threads": "1"})
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        for i in range(frames):
            pixels = np.full((*size, 3), 9 * i % 250, np.uint8) + rng.integers(0, 5, (*size, 3), np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="yuv420p")
            frame.pts = i
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return path.read_bytes()


def _presented(table: PacketTable) -> list[tuple[int, int, int]]:
    fields = (table.pts[table.shown], table.size[table.shown], table.offset[table.shown])
    return list(zip(*(values.tolist() for values in fields), strict=True))


def _presented_by_libav(path: Path) -> list[tuple[int, int, int]]:
    with av.open(str(path)) as container:
        packets = list(container.demux(container.streams.video[0]))
    return [(packet.pts, packet.size, packet.pos) for packet in packets if packet.size and not packet.is_discard]


def _check_pictures(folder: Path, key: str) -> None:
    """Every frame decoded from its GOP alone equals the container decode."""
    from knonik.video.decode import GopDecoder

    with av.open(str(folder / key)) as container:
        expected = [(frame.pts, frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    store = LocalStore(folder)
    index = ObjectIndex(key, read_packets(store, key))
    assert index.pts.tolist() == [pts for pts, _ in expected]
    out = np.empty_like(expected[0][1])
    decoder = GopDecoder()
    for number, (pts, picture) in enumerate(expected):
        begin, length = index.span(index.gop_number(number))
        packets, times = index.cut(number, store.read_range(key, begin, length), begin)
        decoder.decode(index.codec, packets, times, [pts], [out])
        np.testing.assert_array_equal(out, picture)


def _with_edits(body: bytes, edits: Sequence[tuple[int, int]]) -> bytes:
    """The file with another edit list: (duration on the movie's clock, start in ticks), -1 = nothing is shown."""

    def rebuilt(boxes: bytes) -> bytes:
        result = b""
        while boxes:
            size, kind = struct.unpack_from(">I4s", boxes)
            inner, boxes = boxes[8:size], boxes[size:]
            if kind in (b"moov", b"trak", b"edts"):
                inner = rebuilt(inner)
            elif kind == b"elst":
                inner = struct.pack(">II", 0, len(edits)) + b"".join(struct.pack(">IiI", *e, 0x10000) for e in edits)
            result += struct.pack(">I4s", len(inner) + 8, kind) + inner
        return result

    moov = body.rindex(b"moov") - 4
    assert moov > body.index(b"mdat")
    return body[:moov] + rebuilt(body[moov:])


EDITS = {
    "begins inside a GOP": [(1000, 5 * STEP + 100)],
    "begins at the second GOP": [(800, 11 * STEP)],
    "empty, then cut": [(300, -1), (500, 3 * STEP)],
    "two segments": [(500, 2 * STEP), (700, 13 * STEP)],
    "two segments off the grid": [(250, 2148), (433, 13612)],
    "the second one is earlier": [(300, -1), (500, 3 * STEP), (600, 2 * STEP)],
    "three segments": [(400, 12 * STEP), (300, 2 * STEP), (500, 15 * STEP)],
    "two empty ones in front": [(100, -1), (33, -1), (1500, 2 * STEP)],
}


@pytest.mark.parametrize("settings", [B_FRAMES, NO_B_FRAMES, OPEN_GOP])
def test_edit_lists_present_what_the_demuxer_does(tmp_path: Path, settings: str) -> None:
    for flags in ("", "negative_cts_offsets"):
        body = _encode(tmp_path / "a.mp4", settings, flags)
        for edits in EDITS.values():
            (tmp_path / "b.mp4").write_bytes(_with_edits(body, edits))
            expected = _presented_by_libav(tmp_path / "b.mp4")
            try:
                table = read_packets(LocalStore(tmp_path), "b.mp4")
            except Mp4Error as error:  # only where frames of two segments come out in the wrong order
                assert "segments of its edit list overlap" in str(error)  # noqa: PT017
                assert flags
                continue
            assert _presented(table) == expected, (flags, edits)


@pytest.mark.parametrize("case", EDITS)
def test_pictures_behind_edit_lists(tmp_path: Path, case: str) -> None:
    (tmp_path / "b.mp4").write_bytes(_with_edits(_encode(tmp_path / "a.mp4", B_FRAMES), EDITS[case]))
    _check_pictures(tmp_path, "b.mp4")


def test_random_edit_lists(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    body = _encode(tmp_path / "a.mp4", B_FRAMES)
    store, compared = LocalStore(tmp_path), 0
    for _ in range(40):
        edits = [(int(rng.integers(1, 1500)), int(rng.integers(0, 22 * STEP))) for _ in range(rng.integers(1, 4))]
        (tmp_path / "b.mp4").write_bytes(_with_edits(body, edits))
        try:
            table = read_packets(store, "b.mp4")
        except Mp4Error as error:
            assert "edit list" in str(error)  # noqa: PT017
            continue
        compared += 1
        assert _presented(table) == _presented_by_libav(tmp_path / "b.mp4"), edits
    assert compared > 25


def test_edit_lists_that_are_refused(tmp_path: Path) -> None:
    body = _encode(tmp_path / "a.mp4", B_FRAMES)
    for edits, message in (
        ([(500, 2 * STEP), (300, -1), (500, 11 * STEP)], "a segment from -1 ticks after another one"),
        ([(0, 2 * STEP)], "shows none of its 23 packets"),
        ([(500, 2 * STEP), (10, 18 * STEP + 10)], None),
    ):
        (tmp_path / "b.mp4").write_bytes(_with_edits(body, edits))
        if message is None:
            assert len(ObjectIndex("b.mp4", read_packets(LocalStore(tmp_path), "b.mp4"))) == 5
            continue
        with pytest.raises(Mp4Error, match=rf"b\.mp4: .*{message}"):
            read_packets(LocalStore(tmp_path), "b.mp4")


FRAGMENTS = (
    "frag_keyframe+empty_moov",
    "frag_keyframe",  # the first packets are listed in moov
    "frag_keyframe+delay_moov",  # with an edit list
    "frag_keyframe+empty_moov+default_base_moof",
    "frag_every_frame+empty_moov",
    "dash+delay_moov+global_sidx+frag_keyframe",
    "frag_keyframe+empty_moov+omit_tfhd_offset",
    "cmaf+negative_cts_offsets+frag_keyframe",
)


@pytest.mark.parametrize("flags", FRAGMENTS)
def test_fragmented_files(tmp_path: Path, flags: str) -> None:
    for settings in (B_FRAMES, NO_B_FRAMES, OPEN_GOP):
        body = _encode(tmp_path / "f.mp4", settings, flags)
        store = CountingStore(tmp_path)
        table = read_packets(store, "f.mp4")
        assert _presented(table) == _presented_by_libav(tmp_path / "f.mp4")
        with av.open(str(tmp_path / "f.mp4")) as container:
            packets = [packet for packet in container.demux(container.streams.video[0]) if packet.size]
        assert table.dts.tolist() == [packet.dts for packet in packets]
        assert table.sync.tolist() == [packet.is_keyframe for packet in packets]
        # One read a fragment, one more where it is longer than the one before, and those of moov and the ends.
        assert store.reads <= body.count(b"moof") + 6
        _check_pictures(tmp_path, "f.mp4")


def test_a_fragmented_file_that_is_cut_off(tmp_path: Path) -> None:
    body = _encode(tmp_path / "f.mp4", B_FRAMES, "frag_keyframe+empty_moov")
    (tmp_path / "f.mp4").write_bytes(body[: body.rindex(b"mdat") + 40])
    with pytest.raises(Mp4Error, match=r"f\.mp4: box b'mdat' claims .* truncated"):
        read_packets(LocalStore(tmp_path), "f.mp4")


def _moov_length(body: bytes) -> int:
    at = body.rindex(b"moov") - 4
    return int(struct.unpack_from(">I", body, at)[0])


@pytest.mark.parametrize("flags", ["", "faststart"])
@pytest.mark.parametrize("frames", [1, 40, 300])
def test_two_reads_bring_exactly_the_header(tmp_path: Path, flags: str, frames: int) -> None:
    body = _encode(tmp_path / "a.mp4", NO_B_FRAMES, flags, frames, (16, 16))
    store = CountingStore(tmp_path)
    assert len(read_packets(store, "a.mp4", size=len(body))) == frames
    assert store.reads <= 2
    assert store.read_bytes <= 64 + _moov_length(body)


def test_files_that_resemble_each_other_cost_one_read(tmp_path: Path) -> None:
    """What one file of a dataset shows is used for the next; a guess that fails costs two reads more and few bytes."""
    lengths = {"a.mp4": 40, "b.mp4": 40, "c.mp4": 35, "d.mp4": 44, "e.mp4": 400}
    bodies = {key: _encode(tmp_path / key, "keyint=2:scenecut=0:bframes=0", "", n) for key, n in lengths.items()}
    last = _encode(tmp_path / "first.mp4", "keyint=2:scenecut=0:bframes=0", "faststart", 40)
    store = CountingStore(tmp_path)
    reader = HeaderReader(store)
    for key, frames in lengths.items():
        store.reads = store.read_bytes = 0
        table = reader.read(key, size=len(bodies[key]), frames=frames, joined=False)
        assert table.offset.tolist() == read_packets(LocalStore(tmp_path), key).offset.tolist()
        # The first file costs one more, for its head, and another one that looks whether sync packets are any.
        assert store.reads == (3 if key == "a.mp4" else 1)
        extra = (64 if frames < 100 else 3 * frames) + (1024 if key == "a.mp4" else 0)
        assert store.read_bytes <= _moov_length(bodies[key]) + extra
    store.reads = store.read_bytes = 0
    assert len(reader.read("first.mp4", size=len(last), frames=40, joined=False)) == 40  # header in front after all
    assert store.reads <= 3
    assert store.read_bytes <= 2 * _moov_length(last) + 160
    store.reads = 0
    assert len(reader.read("b.mp4", size=len(bodies["b.mp4"]), frames=40, joined=False)) == 40  # and at the end again
    assert store.reads <= 3


def test_the_first_of_several_tracks(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with av.open(str(tmp_path / "two.mp4"), "w", format="mp4") as output:
        streams = []
        for size in ((48, 64), (32, 32)):
            stream = output.add_stream("libx264", rate=10, options={"x264-params": B_FRAMES, "threads": "1"})
            stream.height, stream.width = size
            stream.pix_fmt = "yuv420p"
            streams.append(stream)
        for i in range(30):
            for stream in streams:
                pixels = rng.integers(0, 255, (stream.height, stream.width, 3), np.uint8)
                frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="yuv420p")
                frame.pts = i
                output.mux(stream.encode(frame))
        for stream in streams:
            output.mux(stream.encode(None))
    table = read_packets(LocalStore(tmp_path), "two.mp4")
    assert _presented(table) == _presented_by_libav(tmp_path / "two.mp4")
    assert (table.codec.height, len(table)) == (48, 30)
    assert np.any(table.offset[1:] != (table.offset + table.size)[:-1]), "the tracks do not interleave"
    _check_pictures(tmp_path, "two.mp4")


def test_reads_of_large_and_odd_files(tmp_path: Path) -> None:
    body = _encode(tmp_path / "a.mp4", NO_B_FRAMES, "", 40, (16, 16))
    at = body.rindex(b"moov") - 4
    # Something large between media and header, as two recordings in one file would leave.
    odd = body[:at] + struct.pack(">I4s", 1 << 20, b"free") + bytes((1 << 20) - 8) + body[at:]
    (tmp_path / "odd.mp4").write_bytes(odd)
    store = CountingStore(tmp_path)
    assert len(read_packets(store, "odd.mp4", size=len(odd))) == 40
    assert store.reads <= 4
    assert store.read_bytes < 3000
    # Behind the header: it is read along with what is left of the file.
    (tmp_path / "more.mp4").write_bytes(body + struct.pack(">I4s", 3000, b"uuid") + bytes(2992))
    store.reads = 0
    reader = HeaderReader(store)
    for _ in range(2):
        assert len(reader.read("more.mp4", frames=40, joined=False)) == 40
    assert store.reads <= 2 + 1 + 2
