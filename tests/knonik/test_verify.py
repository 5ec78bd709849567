"""`verify` finds every frame equal to the stock rule's whatever a recorder may leave, and notices one that is not."""

import io
import json
import logging
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import knonik
from knonik.cli import make_parser
from knonik.commands import verify as command
from knonik.index.video_index import VideoIndex
from knonik.verify import Report, verify
from knonik.video.encode import encode_mp4

CAMERA = "observation.images.cam0"


def check(folder: Path, cache: Path, transport: str = "rgb24", **options: Any) -> Report:
    with knonik.open(folder, cache_dir=cache) as dataset:
        return verify(dataset, transport=transport, **options)


def assert_all_equal(folder: Path, cache: Path, frames: int, planes: bool = True) -> Report:
    """Both transports against the same reference: equal pictures, so equal digests."""
    report = check(folder, cache)
    assert (report.frames, report.num_mismatches, report.failed) == (frames, 0, {})
    converted = check(folder, cache, "yuv420p")
    assert (converted.frames, converted.num_mismatches, converted.failed) == (frames, 0, {})
    assert converted.digest == report.digest
    assert (converted.as_rgb24 == {}) == planes
    return report


@pytest.mark.parametrize("gop", [1, 2, 15, 250])
@pytest.mark.parametrize("codec", ["av1", "h264", "hevc"])
def test_codecs_and_gops(make_set: Any, tmp_path: Path, codec: str, gop: int) -> None:
    assert_all_equal(make_set([19, 8], cameras=1, codec=codec, gop=gop), tmp_path, 27)


@pytest.mark.parametrize(
    "options",
    [
        {"codec": "h264", "gop": 12, "bframes": 3},
        {"codec": "h264", "gop": 250, "bframes": 2, "version": "v2.1"},
        {"codec": "hevc", "gop": 12, "bframes": 3},
        {"codec": "h264", "gop": 2, "bframes": 1},
    ],
)
def test_b_frames(make_set: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    assert_all_equal(make_set([17, 9], cameras=1, **options), tmp_path, 26)


@pytest.mark.parametrize("codec", ["h264", "hevc"])
@pytest.mark.parametrize(
    ("pix_fmt", "size"),
    [("yuv420p", (34, 46)), ("yuv422p", (33, 46)), ("yuv444p", (33, 47)), ("yuv444p", (32, 47))],
)
def test_pixel_formats_and_odd_sizes(
    make_set: Any, tmp_path: Path, codec: str, pix_fmt: str, size: tuple[int, int]
) -> None:
    folder = make_set([7], cameras=1, codec=codec, pix_fmt=pix_fmt, size=size)
    assert_all_equal(folder, tmp_path, 7, planes=pix_fmt == "yuv420p")


@pytest.mark.parametrize("codec", ["av1", "h264", "hevc"])
@pytest.mark.parametrize(
    ("matrix", "full_range"), [(None, True), ("bt709", False), ("bt709", True), ("bt601", False), ("bt2020", False)]
)
def test_colour_tags(make_set: Any, tmp_path: Path, codec: str, matrix: str | None, full_range: bool) -> None:
    folder = make_set([5], cameras=1, codec=codec, matrix=matrix, full_range=full_range, version="v2.1")
    assert_all_equal(folder, tmp_path, 5)


def test_full_range_without_chroma_subsampling(make_set: Any, tmp_path: Path) -> None:
    folder = make_set([5], cameras=1, pix_fmt="yuv444p", full_range=True, matrix="bt709")
    assert_all_equal(folder, tmp_path, 5, planes=False)


def with_times(folder: Path, target: Path, times_s: list[float], timestamps: list[float]) -> Path:
    """A copy of a one-episode v2.1 set whose frames and rows have the given times."""
    shutil.copytree(folder, target)
    frames = np.random.default_rng(0).integers(0, 256, (len(times_s), 4, 6, 3), np.uint8).repeat(8, 1).repeat(8, 2)
    (video,) = (target / "videos").rglob("*.mp4")
    encode_mp4(video, frames, fps=10, codec="h264", gop=4, times_s=times_s)
    (data,) = (target / "data").rglob("*.parquet")
    table = pq.read_table(data)
    place = table.column_names.index("timestamp")
    pq.write_table(table.set_column(place, "timestamp", pa.array(timestamps, pa.float32())), data)
    return target


def test_variable_frame_rate(make_set: Any, tmp_path: Path) -> None:
    times = [0.0, 0.1, 0.25, 0.3, 0.31, 0.5, 0.9, 1.0]
    folder = with_times(make_set([8], cameras=1, version="v2.1"), tmp_path / "set", times, times)
    report = assert_all_equal(folder, tmp_path / "cache", 8)
    assert report.num_refused == 0


def test_rows_of_dropped_frames_are_refused_as_the_stock_loader_does(make_set: Any, tmp_path: Path) -> None:
    rows = [k / 10 for k in range(10)]
    kept = [t for k, t in enumerate(rows) if k not in (3, 7)]
    folder = with_times(make_set([10], cameras=1, version="v2.1"), tmp_path / "set", kept, rows)
    report = assert_all_equal(folder, tmp_path / "cache", 8)
    assert [(row.episode, row.frame) for row in report.refused] == [(0, 3), (0, 7)]
    assert "0.1" in report.refused[0].reason
    assert report.ok


@pytest.mark.parametrize(
    ("encoder", "pix_fmt", "options", "movflags"),
    [
        ("libx264", "yuv420p", {"bf": "3", "g": "6", "x264-params": "open-gop=1:b-pyramid=normal:scenecut=0"}, ""),
        ("libx265", "yuv420p", {"x265-params": "log-level=none:keyint=6:bframes=3:open-gop=1:scenecut=0"}, ""),
        ("libx264", "yuv420p", {"g": "4", "bf": "2"}, "frag_keyframe+delay_moov"),
        ("libx264", "yuv420p", {"g": "4", "bf": "2"}, "faststart"),
        ("libx264", "yuv420p10le", {"g": "4"}, ""),
        ("libsvtav1", "yuv420p10le", {"g": "4", "svtav1-params": "lp=1"}, ""),
        ("mpeg4", "yuv420p", {"g": "5", "bf": "2"}, ""),
    ],
)
def test_what_other_encoders_leave(
    make_set: Any, tmp_path: Path, encoder: str, pix_fmt: str, options: dict[str, str], movflags: str
) -> None:
    folder = shutil.copytree(make_set([20], cameras=1, version="v2.1"), tmp_path / "set")
    (video,) = (folder / "videos").rglob("*.mp4")
    frames = np.random.default_rng(0).integers(0, 256, (20, 8, 8, 3), np.uint8).repeat(8, 1).repeat(8, 2)
    with av.open(str(video), "w", options={"movflags": movflags} if movflags else {}) as container:
        stream = container.add_stream(encoder, rate=Fraction(10), options=options)
        stream.height, stream.width, stream.pix_fmt = 64, 64, pix_fmt
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    assert_all_equal(folder, tmp_path / "cache", 20, planes=pix_fmt == "yuv420p")


def test_depth_and_images_are_verified_too(make_set: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(make_set([6, 5], cameras=2, version="v2.1"), tmp_path / "set")
    info = json.loads((folder / "meta/info.json").read_text())
    info["features"][CAMERA]["info"] = {"video.is_depth_map": True}
    other = CAMERA.replace("cam0", "cam1")
    info["features"][other]["dtype"] = "image"
    (folder / "meta/info.json").write_text(json.dumps(info))
    random = np.random.default_rng(0)
    for episode, length in enumerate((6, 5)):
        name = f"episode_{episode:06d}"
        depth = random.integers(0, 4096, (length, 32, 48)).astype(np.uint16)
        encode_mp4(folder / f"videos/chunk-000/{CAMERA}/{name}.mp4", depth, fps=10, codec="hevc", pix_fmt="gray12le")
        (folder / f"videos/chunk-000/{other}/{name}.mp4").unlink()
        data = folder / f"data/chunk-000/{name}.parquet"
        bodies = []
        for _ in range(length):
            body = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (32, 48, 3), np.uint8)).save(body, "PNG")
            bodies.append({"bytes": body.getvalue(), "path": None})
        pq.write_table(pq.read_table(data).append_column(other, pa.array(bodies)), data, row_group_size=4)
    report = assert_all_equal(folder, tmp_path / "cache", 22, planes=False)
    assert report.cameras == (other, CAMERA)


def test_layouts_of_the_same_frames_have_one_digest(make_set: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"cameras": 2, "codec": "h264", "gop": 3}
    digests = {
        check(make_set([7, 5, 6], version=version, **options), tmp_path).digest for version in ("v3.0", "v2.1")
    } | {check(make_set([7, 5, 6], version="v3.0", episodes_per_file=2, **options), tmp_path).digest}
    assert len(digests) == 1
    assert check(make_set([7, 5, 7], version="v3.0", **options), tmp_path).digest not in digests


def test_drift_of_from_timestamp_is_told_apart(make_set: Any, tmp_path: Path) -> None:
    folder = make_set([6, 6, 6], cameras=1)
    copy = shutil.copytree(folder, tmp_path / "set")
    episodes = copy / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(episodes)
    name = f"videos/{CAMERA}/from_timestamp"
    drifted = [value + 0.01 * k for k, value in enumerate(table[name].to_pylist())]
    pq.write_table(table.set_column(table.column_names.index(name), name, pa.array(drifted)), episodes)
    report = check(copy, tmp_path / "cache")
    assert (report.frames, report.num_mismatches, report.num_beyond_stock) == (6, 0, 12)


def test_a_wrong_frame_is_found(make_set: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = VideoIndex.locate_many

    def swapped(self: VideoIndex, episodes: Any, camera: str, frames: Any) -> Any:
        keys, numbers = right(self, episodes, camera, frames)
        numbers = numbers.copy()
        numbers[[2, 3]] = numbers[[3, 2]]
        return keys, numbers

    monkeypatch.setattr(VideoIndex, "locate_many", swapped)
    report = check(make_set([6], cameras=1), tmp_path)
    assert [(row.frame, row.reason) for row in report.mismatches] == [(2, "other pixels"), (3, "other pixels")]
    assert not report.ok


def test_another_rule_than_the_stock_one_is_not_compared(make_set: Any, tmp_path: Path) -> None:
    with (
        knonik.open(make_set([6], cameras=1), cache_dir=tmp_path, match="index") as dataset,
        pytest.raises(ValueError, match="match='index'; the stock rule is match='time'"),
    ):
        verify(dataset)


def test_a_damaged_file_is_named_and_the_rest_is_verified(make_set: Any, tmp_path: Path) -> None:
    folder = make_set([6, 6], cameras=1, version="v2.1", codec="av1")
    copy = shutil.copytree(folder, tmp_path / "set")
    video = copy / "videos/chunk-000" / CAMERA / "episode_000001.mp4"
    body = bytearray(video.read_bytes())
    begin = body.index(b"mdat") + 4
    body[begin : begin + 400] = bytes(400)
    video.write_bytes(body)
    report = check(copy, tmp_path / "cache")
    assert report.frames == 6
    assert [key.split("/")[-1] for key in report.failed] == ["episode_000001.mp4"]
    assert not report.ok


@pytest.mark.parametrize("size", [0, 200, -40])
def test_a_file_that_was_cut_off_is_named_too(make_set: Any, tmp_path: Path, size: int) -> None:
    copy = shutil.copytree(make_set([6, 6], cameras=1, version="v2.1", codec="av1"), tmp_path / "set")
    video = copy / "videos/chunk-000" / CAMERA / "episode_000001.mp4"
    video.write_bytes(video.read_bytes()[:size])
    report = check(copy, tmp_path / "cache")
    assert report.frames == 6
    assert [key.split("/")[-1] for key in report.failed] == ["episode_000001.mp4"]


def test_real_datasets(shared_data: Path, tmp_path: Path) -> None:
    digests = [
        assert_all_equal_part(shared_data / name, tmp_path / "cache", episodes)
        for name, episodes in (("g1_inspire_v21", [6]), ("g1_inspire_v30", [6]))
    ]
    assert digests[0] == digests[1]
    report = check(shared_data / "gr1_picknplace_v20", tmp_path / "cache", episodes=[2])
    assert report.num_mismatches == 0
    assert [row.frame for row in report.refused] == [report.frames], "the last row lies past the video"


def test_clip_with_painted_frame_numbers(make_set: Any, shared_data: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(make_set([40], cameras=1, version="v2.1", fps=20), tmp_path / "set")
    (video,) = (folder / "videos").rglob("*.mp4")
    (clip,) = (shared_data / "labeled_frames_av1").rglob("*.mp4")
    video.write_bytes(clip.read_bytes())
    assert check(folder, tmp_path / "cache", "yuv420p").frames == 40


def assert_all_equal_part(folder: Path, cache: Path, episodes: list[int]) -> str:
    report = check(folder, cache, episodes=episodes)
    assert report.ok
    assert report.frames > 100
    return report.digest


def test_command(make_set: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_set([6], cameras=1, pix_fmt="yuv444p")
    arguments = ["verify", str(folder), "--cache-dir", str(tmp_path), "--transport", "yuv420p", "--workers", "1"]
    with caplog.at_level(logging.WARNING):
        result = command.run(make_parser().parse_args(arguments))
    assert json.loads(json.dumps(result))["frames"] == 6
    assert result["ok"] is True
    assert result["as_rgb24"].keys() == {CAMERA}
    said = command.text(result)
    assert "6 frames compared" in said
    assert result["digest"] in said
    with pytest.raises(ValueError, match="--workers=0"):
        command.run(make_parser().parse_args([*arguments[:-1], "0"]))
