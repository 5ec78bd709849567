"""Readers give the pictures of a row whatever the camera is stored as, and never a wrong one in silence."""

import io
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import knonik
from knonik.metadata.episodes import DepthSpec
from knonik.video import frames
from knonik.video.colour import Planes
from knonik.video.decode import DecodeError, FrameTags, read_container, swscale_rgb
from knonik.video.depth import codes, millimetres
from knonik.video.encode import encode_mp4
from knonik.video.frames import FrameReader, StoredPackets, frame_reader
from knonik.video.images import ImageError

CAMERA = "observation.images.cam0"


def read(reader: FrameReader, key: str, numbers: list[int]) -> np.ndarray:
    out = np.zeros((len(numbers), *reader.spec.shape), reader.spec.dtype)
    reader.read(key, numbers, list(out))
    return out


def copied(source: Path, target: Path) -> Path:
    for path in source.rglob("*"):
        if path.is_file():
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            (target / path.relative_to(source)).write_bytes(path.read_bytes())
    return target


def change_feature(folder: Path, change: dict[str, Any]) -> None:
    info = json.loads((folder / "meta/info.json").read_text())
    info["features"][CAMERA] |= change
    (folder / "meta/info.json").write_text(json.dumps(info))


def as_images(folder: Path, encode: Any, column_type: str) -> list[np.ndarray]:
    """Move the video of a v2.1 set into its Parquet files; returns the pictures of all rows."""
    pictures: list[np.ndarray] = []
    for path in sorted((folder / "data").rglob("*.parquet")):
        video = folder / "videos/chunk-000" / CAMERA / f"{path.stem}.mp4"
        with video.open("rb") as file:
            own = [picture for _, picture in read_container(file)]
        video.unlink()
        bodies = [encode(picture) for picture in own]
        values: Any = [{"bytes": body, "path": None} for body in bodies] if column_type == "struct" else bodies
        kind: Any = pa.struct({"bytes": pa.binary(), "path": pa.string()}) if column_type == "struct" else pa.binary()
        table = pq.read_table(path).append_column(CAMERA, pa.array(values, kind))
        pq.write_table(table, path, row_group_size=4)
        pictures += own
    change_feature(folder, {"dtype": "image"})
    return pictures


def encoded(picture: np.ndarray, kind: str = "PNG", mode: str = "RGB", **options: Any) -> bytes:
    body = io.BytesIO()
    Image.fromarray(picture).convert(mode).save(body, kind, **options)
    return body.getvalue()


def test_planes_convert_to_the_rgb_frames(make_set: Any, tmp_path: Path) -> None:
    with knonik.open(make_set([7], cameras=1, gop=3), cache_dir=tmp_path) as dataset:
        key, _ = dataset.locate(0, CAMERA, 0)
        rgb = frame_reader(dataset, CAMERA, packets=StoredPackets(dataset))
        planes = frame_reader(dataset, CAMERA, packets=StoredPackets(dataset), transport="yuv420p")
        assert rgb.colour is None
        assert planes.colour is not None
        assert planes.spec.shape == (32 * 48 * 3 // 2,)
        for numbers in ([0, 1, 2], [5, 3, 5], [6]):
            data = torch.from_numpy(read(planes, key, numbers))[None]
            batch = Planes(data=data, height=32, width=48, spec=planes.colour)
            np.testing.assert_array_equal(batch.rgb()[0].numpy(), read(rgb, key, numbers))


@pytest.mark.parametrize(
    ("size", "pix_fmt", "reason"),
    [
        ((33, 48), "yuv422p", "odd number of rows"),
        ((32, 48), "yuv444p", "yuv444p with colour matrix 2"),
        ((32, 48), "yuv422p", "yuv422p with colour matrix 2"),
    ],
)
def test_what_is_not_reproduced_comes_as_rgb_and_says_so(
    make_set: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, size: tuple[int, int], pix_fmt: str, reason: str
) -> None:
    folder = make_set([3], cameras=1, size=size, pix_fmt=pix_fmt)
    with knonik.open(folder, cache_dir=tmp_path) as dataset, caplog.at_level(logging.WARNING):
        reader = frame_reader(dataset, CAMERA, packets=StoredPackets(dataset), transport="yuv420p")
        assert reader.colour is None
        assert reader.spec.shape == (*size, 3)
        assert reason in caplog.text
        np.testing.assert_array_equal(read(reader, *_one(dataset))[0], dataset.frame(episode=0, camera=CAMERA, frame=1))


def _one(dataset: knonik.Dataset) -> tuple[str, list[int]]:
    key, number = dataset.locate(0, CAMERA, 1)
    return key, [number]


def test_a_file_tagged_otherwise_is_an_error_under_planes(make_set: Any, tmp_path: Path) -> None:
    folder = copied(make_set([3, 3], cameras=1, version="v2.1"), tmp_path / "set")
    video = folder / "videos/chunk-000" / CAMERA / "episode_000001.mp4"
    encode_mp4(video, np.full((3, 32, 48, 3), 90, np.uint8), fps=10, codec="h264", matrix="bt709")
    with knonik.open(folder, cache_dir=tmp_path / "cache") as dataset:
        reader = frame_reader(dataset, CAMERA, packets=StoredPackets(dataset), transport="yuv420p")
        read(reader, dataset.locate(0, CAMERA, 0)[0], [0])
        with pytest.raises(DecodeError, match=r"episode_000001.*colour matrix 1 and range 1.*transport='rgb24'"):
            read(reader, dataset.locate(1, CAMERA, 0)[0], [0])


def test_another_swscale_is_noticed(
    make_set: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processors run other code in libswscale, which may round in another way."""

    def rounding_up(planes: np.ndarray, height: int, width: int, tags: FrameTags) -> np.ndarray:
        rgb = swscale_rgb(planes, height, width, tags)
        rgb[7, 9] += 1
        return rgb

    monkeypatch.setattr(frames, "swscale_rgb", rounding_up)
    frames._as_swscale.cache_clear()
    try:
        with knonik.open(make_set([3], cameras=1), cache_dir=tmp_path) as dataset, caplog.at_level(logging.WARNING):
            reader = frame_reader(dataset, CAMERA, packets=StoredPackets(dataset), transport="yuv420p")
    finally:
        frames._as_swscale.cache_clear()
    assert reader.colour is None
    assert "libswscale of this machine" in caplog.text


def test_decoded_pictures_of_one_rule_are_not_given_under_another(make_set: Any, tmp_path: Path) -> None:
    folder = copied(make_set([8], cameras=1, version="v2.1", gop=4), tmp_path / "set")
    (data,) = (folder / "data").rglob("*.parquet")
    table = pq.read_table(data)  # times a step late, as in NVIDIA's GR1 sample
    late = pa.array([(k + 1) / 10 for k in range(7)] + [0.7], pa.float32())
    pq.write_table(table.set_column(table.column_names.index("timestamp"), "timestamp", late), data)
    shown = {}
    for match in ("time", "index"):
        with (
            knonik.open(folder, cache_dir=tmp_path / "cache", match=match) as dataset,
            knonik.Loader(dataset, batch_size=8, shuffle=False, decoded_bytes=1 << 20) as loader,
        ):
            shown[match] = next(iter(loader)).images[CAMERA][:, 0].numpy()
            for frame in range(8):
                wanted = dataset.frame(episode=0, camera=CAMERA, frame=frame)
                np.testing.assert_array_equal(shown[match][frame], wanted)
    np.testing.assert_array_equal(shown["time"][:7], shown["index"][1:])


def test_unknown_transport_and_camera(make_set: Any, tmp_path: Path) -> None:
    with knonik.open(make_set([3], cameras=1), cache_dir=tmp_path) as dataset:
        with pytest.raises(ValueError, match="transport='nv12'"):
            frame_reader(dataset, CAMERA, packets=StoredPackets(dataset), transport="nv12")
        with pytest.raises(KeyError, match="camera 'wrist' is unknown"):
            frame_reader(dataset, "wrist", packets=StoredPackets(dataset))


@pytest.mark.parametrize("column_type", ["struct", "binary"])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_images_in_parquet(make_set: Any, tmp_path: Path, column_type: str, kind: str) -> None:
    folder = copied(make_set([9, 6], cameras=1, version="v2.1"), tmp_path / "set")
    pictures = as_images(folder, lambda picture: encoded(picture, kind, quality=95), column_type)
    if kind == "JPEG":
        pictures = [np.asarray(Image.open(io.BytesIO(encoded(p, kind, quality=95)))) for p in pictures]
    with knonik.open(folder, cache_dir=tmp_path / "cache") as dataset:
        assert dataset.cameras == [CAMERA]
        assert dataset.image_shape(CAMERA) == (32, 48)
        reader = frame_reader(dataset, CAMERA, packets=StoredPackets(dataset))
        for row, (episode, frame) in enumerate([(0, f) for f in range(9)] + [(1, f) for f in range(6)]):
            key, number = dataset.locate(episode, CAMERA, frame)
            np.testing.assert_array_equal(read(reader, key, [number])[0], pictures[row])
            np.testing.assert_array_equal(dataset.frame(episode=episode, camera=CAMERA, frame=frame), pictures[row])


def test_each_row_group_of_images_is_fetched_once(make_set: Any, tmp_path: Path) -> None:
    folder = copied(make_set([9], cameras=1, version="v2.1"), tmp_path / "set")
    as_images(folder, encoded, "struct")
    for _ in range(2):  # a later run finds what the first has packed
        with knonik.open(folder, cache_dir=tmp_path / "cache", background=False) as dataset:
            reader = frame_reader(dataset, CAMERA, packets=StoredPackets(dataset))
            key, first = dataset.locate(0, CAMERA, 0)
            read(reader, key, [first + frame for frame in range(9)])
            before = dataset.store.gauges()["gets"]
            read(reader, key, [first + frame for frame in reversed(range(9))])
            assert dataset.store.gauges()["gets"] == before
    assert len(list((tmp_path / "cache").rglob("*.images"))) == 3  # 9 rows in groups of 4


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "no image bytes in row 2"),
        (b"no image", "8 bytes are no image"),
        (encoded(np.zeros((32, 48, 3), np.uint8), mode="L"), "mode L; only RGB"),
        (encoded(np.zeros((8, 8, 3), np.uint8)), r"\(8, 8, 3\), expected \(32, 48, 3\)"),
    ],
)
def test_bad_images_name_file_and_row(make_set: Any, tmp_path: Path, body: bytes, message: str) -> None:
    folder = copied(make_set([4], cameras=1, version="v2.1"), tmp_path / "set")
    count = iter(range(4))
    as_images(folder, lambda picture: body if next(count) == 2 else encoded(picture), "struct")
    with knonik.open(folder, cache_dir=tmp_path / "cache") as dataset:
        reader = frame_reader(dataset, CAMERA, packets=StoredPackets(dataset))
        key, first = dataset.locate(0, CAMERA, 0)
        read(reader, key, [first, first + 1, first + 3])
        with pytest.raises(ImageError, match=rf"episode_000000.parquet, row 2: .*{message}"):
            read(reader, key, [first + 2])


@pytest.mark.parametrize("size", [(32, 48), (33, 47)])
def test_depth_video_comes_in_millimetres(make_set: Any, tmp_path: Path, size: tuple[int, int]) -> None:
    folder = copied(make_set([6], cameras=1, version="v2.1"), tmp_path / "set")
    depth = np.random.default_rng(0).integers(0, 4096, (6, *size)).astype(np.uint16)
    video = folder / "videos/chunk-000" / CAMERA / "episode_000000.mp4"
    encode_mp4(video, depth, fps=10, codec="hevc", pix_fmt="gray12le")
    info = {"is_depth_map": True, "video.depth_min": 0.2, "video.depth_max": 4.0, "video.use_log": False}
    change_feature(folder, {"info": info})
    with knonik.open(folder, cache_dir=tmp_path / "cache") as dataset:
        assert (dataset.cameras, dataset.depth_cameras) == ([], [CAMERA])
        for frame in (0, 5, 3):
            picture = dataset.frame(episode=0, camera=CAMERA, frame=frame)
            assert picture.dtype == np.uint16
            assert picture.shape == (*size, 1)
            wanted = np.rint((0.2 + depth[frame] / 4095 * 3.8) * 1000)
            assert np.abs(picture[..., 0] - wanted).max() <= 1
            table = millimetres(DepthSpec(min_m=0.2, max_m=4.0, log=False))
            np.testing.assert_array_equal(picture[..., 0], table[depth[frame]])


def test_a_colour_video_is_no_depth_map(make_set: Any, tmp_path: Path) -> None:
    folder = copied(make_set([3], cameras=1, version="v2.1"), tmp_path / "set")
    change_feature(folder, {"info": {"is_depth_map": True}})
    with (
        knonik.open(folder, cache_dir=tmp_path / "cache") as dataset,
        pytest.raises(RuntimeError, match="is yuv420p, which cannot be given as gray12le"),
    ):
        dataset.frame(episode=0, camera=CAMERA, frame=0)


@pytest.mark.parametrize("spec", [DepthSpec(), DepthSpec(min_m=0.0, max_m=4.0, shift_m=0.1), DepthSpec(log=False)])
def test_depth_scale_runs_from_end_to_end_and_back(spec: DepthSpec) -> None:
    table = millimetres(spec)
    assert table[0] == round(spec.min_m * 1000)
    assert table[-1] == round(spec.max_m * 1000)
    assert np.all(np.diff(table.astype(int)) >= 0)
    step_mm = np.diff(table.astype(int)).max()
    depth = np.arange(table[0], table[-1] + 1, dtype=np.uint16)
    assert np.abs(table[codes(depth, spec)].astype(int) - depth).max() <= step_mm
