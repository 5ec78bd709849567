"""Packet decode equals container decode, for every codec and GOP shape a recorder may leave."""

import io
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from knonik.index.gop import ObjectIndex
from knonik.mp4.packets import read_packets
from knonik.stores.base import open_store
from knonik.video.decode import DecodeError, FrameTags, GopDecoder
from knonik.video.encode import Mp4Joiner, encode_mp4


def clip(frames: int, height: int, width: int, seed: int = 0) -> np.ndarray:
    """A moving pattern, so that every frame differs from every other."""
    y, x = np.mgrid[:height, :width]
    planes = [
        np.stack([x * 3 + i * 7 + seed, y * 5 + i * 3, x + y + i * 11 + seed], axis=-1) % 256 for i in range(frames)
    ]
    return np.stack(planes).astype(np.uint8)


def write_with(path: Path, frames: np.ndarray, encoder: str, pix_fmt: str, options: dict[str, str]) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream(encoder, rate=Fraction(20), options=options)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], pix_fmt
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))


def stock_frames(path: Path) -> list[np.ndarray]:
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def packet_frames(path: Path, order: list[int], decoder: GopDecoder) -> dict[int, np.ndarray]:
    store = open_store(path.parent)
    index = ObjectIndex(path.name, read_packets(store, path.name))
    found = {}
    for number in order:
        gop = index.gop(number).through(number)
        out = np.zeros((gop.codec.height, gop.codec.width, 3), np.uint8)
        decoder.decode(gop.codec, gop.read(store), gop.pts.tolist(), [gop.pts_of(number)], [out])
        found[number] = out
    return found


def assert_all_equal(path: Path, count: int) -> None:
    stock = stock_frames(path)
    assert len(stock) == count
    order = np.random.default_rng(0).permutation(count).tolist()
    for number, picture in packet_frames(path, order, GopDecoder()).items():
        np.testing.assert_array_equal(picture, stock[number], err_msg=f"frame {number}")


@pytest.mark.parametrize("codec", ["av1", "h264"])
@pytest.mark.parametrize("gop", [1, 2, 15])
def test_packet_decode_equals_container_decode(tmp_path: Path, codec: str, gop: int) -> None:
    path = tmp_path / "clip.mp4"
    encode_mp4(path, clip(19, 48, 64), fps=30, codec=codec, gop=gop)
    with av.open(str(path)) as container:
        keys = [packet.is_keyframe for packet in container.demux(video=0) if packet.size]
    assert keys == [i % gop == 0 for i in range(19)]
    assert_all_equal(path, 19)


@pytest.mark.parametrize(
    "options",
    [
        {"bf": "3", "g": "12", "x264-params": "b-pyramid=normal:scenecut=0"},
        {"bf": "2", "g": "250"},
    ],
)
def test_b_frames(tmp_path: Path, options: dict[str, str]) -> None:
    path = tmp_path / "clip.mp4"
    write_with(path, clip(30, 64, 64), "libx264", "yuv420p", options)
    with av.open(str(path)) as container:
        pts = [packet.pts for packet in container.demux(video=0) if packet.size]
    assert pts != sorted(pts), "the encoder made no B-frames, the test tests nothing"
    assert_all_equal(path, 30)


@pytest.mark.parametrize(("height", "width"), [(181, 322), (33, 65), (2, 2)])
def test_odd_sizes(tmp_path: Path, height: int, width: int) -> None:
    path = tmp_path / "clip.mp4"
    write_with(path, clip(5, height, width), "libx264", "yuv444p", {"g": "2"})
    assert_all_equal(path, 5)


def test_real_clips(shared_data: Path) -> None:
    av1 = next((shared_data / "g1_inspire_v21").rglob("episode_000004.mp4"))
    h264 = next((shared_data / "gr1_picknplace_v20").rglob("*.mp4"))
    for path, numbers in ((av1, [0, 1, 7, 60, 61]), (h264, [0, 3, 249, 250, 251])):
        stock = stock_frames(path)
        for number, picture in packet_frames(path, numbers, GopDecoder()).items():
            np.testing.assert_array_equal(picture, stock[number])


def test_joined_file_holds_the_parts(tmp_path: Path) -> None:
    parts = []
    for seed in range(3):
        part = io.BytesIO()
        encode_mp4(part, clip(7, 32, 32, seed), fps=10, codec="h264", gop=2)
        parts.append(part.getvalue())
    with Mp4Joiner(tmp_path / "all.mp4", fps=10) as joiner:
        spans = [joiner.add(part) for part in parts]
    assert spans == [(0.0, 0.7), (0.7, 1.4), (1.4, 2.1)]
    joined = stock_frames(tmp_path / "all.mp4")
    for i, part in enumerate(parts):
        (tmp_path / "one.mp4").write_bytes(part)
        np.testing.assert_array_equal(joined[7 * i : 7 * i + 7], stock_frames(tmp_path / "one.mp4"))
    assert_all_equal(tmp_path / "all.mp4", 21)
    index = ObjectIndex("all.mp4", read_packets(open_store(tmp_path), "all.mp4"))
    assert [index.gop(7 * i).frames.start for i in range(3)] == [0, 7, 14], "an episode does not begin on a key frame"
    assert (tmp_path / "all.mp4").read_bytes().find(b"moov") < 64, "a joined file has its header first"


def test_several_frames_at_once_and_repeats(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    encode_mp4(path, clip(15, 32, 48), fps=30, codec="h264", gop=15)
    store, stock = open_store(tmp_path), stock_frames(path)
    gop = ObjectIndex(path.name, read_packets(store, path.name)).gop(14)
    numbers = [9, 2, 9, 0, 14]
    out = [np.zeros((32, 48, 3), np.uint8) for _ in numbers]
    GopDecoder().decode(gop.codec, gop.read(store), gop.pts.tolist(), [gop.pts_of(n) for n in numbers], out)
    for number, picture in zip(numbers, out, strict=True):
        np.testing.assert_array_equal(picture, stock[number])


def test_decoding_stops_at_the_last_wanted_packet(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    encode_mp4(path, clip(15, 32, 48), fps=30, codec="h264", gop=15)
    store = open_store(tmp_path)
    gop = ObjectIndex(path.name, read_packets(store, path.name)).gop(3)
    packets: list[bytes | memoryview] = list(gop.read(store))
    packets[4:] = [b"garbage"] * (len(packets) - 4)
    out = np.zeros((32, 48, 3), np.uint8)
    GopDecoder().decode(gop.codec, packets, gop.pts.tolist(), [gop.pts_of(3)], [out])
    np.testing.assert_array_equal(out, stock_frames(path)[3])


def test_errors_name_what_is_wrong_and_leave_the_decoder_usable(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    encode_mp4(path, clip(8, 32, 48), fps=30, codec="av1", gop=2)
    store, decoder = open_store(tmp_path), GopDecoder()
    gop = ObjectIndex(path.name, read_packets(store, path.name)).gop(2)
    packets, pts, out = gop.read(store), gop.pts.tolist(), np.zeros((32, 48, 3), np.uint8)
    with pytest.raises(DecodeError, match="no packet has pts \\[7777777\\]"):
        decoder.decode(gop.codec, packets, pts, [7777777], [out])
    with pytest.raises(DecodeError, match="expected \\(16, 16, 3\\)"):
        decoder.decode(gop.codec, packets, pts, [gop.pts_of(2)], [out[:16, :16]])
    with pytest.raises(DecodeError):
        decoder.decode(gop.codec, [b"\x00" * 40] * len(pts), pts, [gop.pts_of(2)], [out])
    decoder.decode(gop.codec, packets, pts, [gop.pts_of(2)], [out])
    np.testing.assert_array_equal(out, stock_frames(path)[2])


def test_one_codec_context_serves_many_files_of_two_kinds(tmp_path: Path) -> None:
    decoder = GopDecoder(contexts_per_thread=1)
    for i, codec in enumerate(["av1", "h264", "av1", "h264"]):
        path = tmp_path / f"{i}.mp4"
        encode_mp4(path, clip(4, 32, 32, i), fps=30, codec=codec, gop=2)
        stock = stock_frames(path)
        for number, picture in packet_frames(path, [3, 0], decoder).items():
            np.testing.assert_array_equal(picture, stock[number])


@pytest.mark.parametrize("codec", ["av1", "h264", "hevc"])
def test_planes_are_those_of_the_stream_and_their_tags_are_told(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "clip.mp4"
    encode_mp4(path, clip(5, 34, 66), fps=30, codec=codec, gop=5, matrix="bt709", full_range=True)
    with av.open(str(path)) as container:
        frames = list(container.decode(video=0))
    store = open_store(tmp_path)
    gop = ObjectIndex(path.name, read_packets(store, path.name)).gop(4)
    out = [np.zeros(34 * 66 * 3 // 2, np.uint8) for _ in range(2)]
    wanted = [gop.pts_of(number) for number in (4, 1)]
    decoder = GopDecoder()
    tags = decoder.decode(gop.codec, gop.read(store), gop.pts.tolist(), wanted, out, "yuv420p")
    assert tags == FrameTags(pix_fmt=frames[0].format.name, matrix=1, range=2)
    for number, planes in zip((4, 1), out, strict=True):
        np.testing.assert_array_equal(planes, frames[number].to_ndarray().reshape(-1))
    other = {FrameTags(pix_fmt="yuv420p", matrix=2, range=1)}
    with pytest.raises(DecodeError, match="colour matrix 1 and range 2, unlike"):
        decoder.decode(gop.codec, gop.read(store), gop.pts.tolist(), wanted, out, "yuv420p", other)
    with pytest.raises(DecodeError, match=r"planes of 3366 bytes, expected \(3365,\)"):
        decoder.decode(gop.codec, gop.read(store), gop.pts.tolist(), wanted[:1], [out[0][:-1]], "yuv420p")
    with pytest.raises(ValueError, match="format='nv12'"):
        decoder.decode(gop.codec, gop.read(store), gop.pts.tolist(), wanted, out, "nv12")


def test_planes_of_another_layout_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    encode_mp4(path, clip(2, 32, 32), fps=30, codec="h264", pix_fmt="yuv444p")
    store = open_store(tmp_path)
    gop = ObjectIndex(path.name, read_packets(store, path.name)).gop(0)
    out = [np.zeros(32 * 32 * 3 // 2, np.uint8)]
    with pytest.raises(DecodeError, match="is yuv444p, which cannot be given as yuv420p"):
        GopDecoder().decode(gop.codec, gop.read(store), gop.pts.tolist(), [gop.pts_of(0)], out, "yuv420p")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codec": "vp8"}, "codec='vp8'"),
        ({"gop": 0}, "gop=0"),
        ({"frames": clip(2, 31, 32)}, "31x32"),
        ({"codec": "av1", "bframes": 2}, "bframes=2"),
        ({"codec": "av1", "pix_fmt": "yuv444p"}, "pix_fmt='yuv444p'"),
        ({"matrix": "rgb"}, "matrix='rgb'"),
        ({"times_s": [0.0, 0.0]}, "2 rising times"),
        ({"pix_fmt": "gray12le"}, "gray12le takes uint16"),
    ],
)
def test_encoder_refuses_what_it_cannot_do(change: dict[str, object], message: str) -> None:
    options = {"frames": clip(2, 32, 32), "fps": 30.0, "codec": "h264", **change}
    with pytest.raises(ValueError, match=message):
        encode_mp4(io.BytesIO(), options.pop("frames"), **options)  # type: ignore[arg-type]
