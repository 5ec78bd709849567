"""Metadata of all three LeRobot versions, with the oddities real datasets show."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from knonik.metadata.episodes import DepthSpec
from knonik.metadata.lerobot import Metadata, MetadataError, read_metadata
from knonik.stores.base import open_store

CAM = "observation.images.top"


def _read(root: Path) -> Metadata:
    return read_metadata(open_store(root))


def _touch(path: Path, body: bytes = b"") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)


def _info(version: str, **changes: Any) -> dict[str, Any]:
    features = {CAM: {"dtype": "video", "shape": [3, 48, 64]}, "action": {"dtype": "float32", "shape": [2]}}
    return {"codebase_version": version, "fps": 10.0, "features": features, "chunks_size": 2, "unknown": 1} | changes


def _v2(root: Path, version: str = "v2.1", **changes: Any) -> Path:
    """Episodes 5, 2, 9 of 3, 4, 5 rows; files are empty, only their names matter here."""
    data = changes.setdefault("data_path", "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet")
    video = changes.setdefault(
        "video_path", "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    )
    _touch(root / "meta/info.json", json.dumps(_info(version, **changes)).encode())
    rows = [{"episode_index": e, "tasks": [f"do {e}"], "length": n, "extra": 0} for e, n in ((5, 3), (2, 4), (9, 5))]
    _touch(root / "meta/episodes.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    _touch(
        root / "meta/tasks.jsonl",
        '{"task_index": 7, "task": "سيب\u2028 it"}\n\n{"task_index": 0, "task": ""}\n'.encode(),
    )
    for row in rows:
        names = {"episode_index": row["episode_index"], "episode_chunk": row["episode_index"] // 2, "video_key": CAM}
        _touch(root / data.format(**names))
        _touch(root / video.format(**names))
    return root


def _v3(root: Path, **changes: Any) -> Path:
    """Episodes 0..3; two data files, camera files split elsewhere, two episode files."""
    changes.setdefault("data_path", "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet")
    changes.setdefault("video_path", "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4")
    _touch(root / "meta/info.json", json.dumps(_info("v3.0", **changes)).encode())
    table = pa.table(
        {
            "episode_index": [0, 1, 2, 3],
            "tasks": [["a"], ["b", "c"], ["a"], []],
            "length": [3, 4, 5, 2],
            "data/chunk_index": [0, 0, 0, 0],
            "data/file_index": [0, 0, 1, 1],
            "dataset_from_index": [0, 3, 7, 12],
            f"videos/{CAM}/chunk_index": [0, 0, 0, 1],
            f"videos/{CAM}/file_index": [0, 1, 1, 0],
            f"videos/{CAM}/from_timestamp": [0.0, 0.0, 0.4, 0.0],
            "stats/action/mean": [[0.0]] * 4,
        }
    )
    (root / "meta/episodes/chunk-000").mkdir(parents=True)
    pq.write_table(table.slice(2), root / "meta/episodes/chunk-000/file-000.parquet")
    pq.write_table(table.slice(0, 2), root / "meta/episodes/chunk-000/file-001.parquet")
    pq.write_table(pa.table({"task_index": [2, 0], "task": ["two", "zero"]}), root / "meta/tasks.parquet")
    for name in ("data/chunk-000/file-000.parquet", "data/chunk-000/file-001.parquet"):
        _touch(root / name)
    for name in ("chunk-000/file-000.mp4", "chunk-000/file-001.mp4", "chunk-001/file-000.mp4"):
        _touch(root / "videos" / CAM / name)
    return root


@pytest.mark.parametrize("version", ["v2.0", "v2.1"])
def test_v2(tmp_path: Path, version: str) -> None:
    metadata = _read(_v2(tmp_path, version))
    assert (metadata.version, metadata.fps) == (version, 10.0)
    assert metadata.tasks == {7: "سيب\u2028 it", 0: ""}
    episodes = metadata.episodes
    assert episodes.ids.tolist() == [2, 5, 9]
    assert episodes.length.tolist() == [4, 3, 5]
    assert episodes.first_row.tolist() == [0, 4, 7]
    assert [episodes.data_keys[i] for i in episodes.data_object] == [
        "data/chunk-001/episode_000002.parquet",
        "data/chunk-002/episode_000005.parquet",
        "data/chunk-004/episode_000009.parquet",
    ]
    camera = episodes.cameras[CAM]
    assert camera.keys[camera.object[1]] == f"videos/chunk-002/{CAM}/episode_000005.mp4"
    assert episodes.tasks == (("do 2",), ("do 5",), ("do 9",))


def test_v3_uses_the_offsets_of_each_camera(tmp_path: Path) -> None:
    episodes = _read(_v3(tmp_path)).episodes
    assert episodes.ids.tolist() == [0, 1, 2, 3]
    assert episodes.data_object.tolist() == [0, 0, 1, 1]
    assert episodes.data_row.tolist() == [0, 3, 0, 5]
    camera = episodes.cameras[CAM]
    assert [camera.keys[i].removeprefix(f"videos/{CAM}/") for i in camera.object] == [
        "chunk-000/file-000.mp4",
        "chunk-000/file-001.mp4",
        "chunk-000/file-001.mp4",
        "chunk-001/file-000.mp4",
    ]
    assert camera.start_s.tolist() == [0.0, 0.0, 0.4, 0.0]
    assert episodes.tasks == (("a",), ("b", "c"), ("a",), ())


def test_v3_with_v2_templates(tmp_path: Path) -> None:
    metadata = _read(
        _v3(
            tmp_path,
            data_path="data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
            video_path="videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        )
    )
    assert metadata.episodes.data_row.tolist() == [0, 3, 0, 5]
    assert metadata.episodes.cameras[CAM].start_s.tolist() == [0.0, 0.0, 0.4, 0.0]


def test_folder_video_against_template_videos(tmp_path: Path) -> None:
    (_v3(tmp_path) / "videos").rename(tmp_path / "video")
    assert _read(tmp_path).episodes.cameras[CAM].keys[0].startswith("video/")


def test_declared_camera_without_files_is_no_camera(tmp_path: Path) -> None:
    shutil.rmtree(_v2(tmp_path) / "videos")
    metadata = _read(tmp_path)
    assert metadata.episodes.cameras == {}
    assert CAM in metadata.features


@pytest.mark.parametrize("key", ["info", "video_info"])
@pytest.mark.parametrize("mark", ["is_depth_map", "video.is_depth_map"])
def test_depth_is_a_kind_of_its_own(tmp_path: Path, key: str, mark: str) -> None:
    details: dict[str, Any] = {mark: True, "video.depth_max": 4, "video.use_log": False, "video.g": 2}
    features = {
        CAM: {"dtype": "video", "shape": [48, 64, 1], key: details},
        "other": {"dtype": "video", "video_info": None},
    }
    cameras = _read(_v2(tmp_path, features=features)).episodes.cameras
    assert list(cameras) == [CAM]
    assert cameras[CAM].kind == "depth"
    assert cameras[CAM].depth == DepthSpec(min_m=0.01, max_m=4.0, shift_m=3.5, log=False)


def test_depth_scale_defaults_and_nonsense(tmp_path: Path) -> None:
    def feature(**details: Any) -> dict[str, Any]:
        return {CAM: {"dtype": "video", "info": {"is_depth_map": True, **details}}}

    spec = _read(_v2(tmp_path / "plain", features=feature())).episodes.cameras[CAM].depth
    assert spec == DepthSpec(min_m=0.01, max_m=10.0, shift_m=3.5, log=True)
    cases = [
        ({"video.depth_max": 0.01}, "depth from 0.01 to 0.01 m"),
        ({"video.shift": -1}, "depth_min \\+ shift must be positive"),
        ({"video.depth_min": "near"}, "video.depth_min is 'near'"),
        ({"video.use_log": 1}, "video.use_log is 1"),
    ]
    for number, (details, message) in enumerate(cases):
        with pytest.raises(MetadataError, match=rf"feature {CAM}.*{message}"):
            _read(_v2(tmp_path / str(number), features=feature(**details)))


def test_image_features_are_cameras_inside_the_data_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    features = {
        "observation.image": {"dtype": "image", "shape": [48, 64, 3]},
        "observation.depth": {"dtype": "image", "info": {"is_depth_map": True}},
    }
    episodes = _read(_v3(tmp_path, features=features)).episodes
    assert list(episodes.cameras) == ["observation.image"]
    camera = episodes.cameras["observation.image"]
    assert (camera.kind, camera.depth) == ("image", None)
    assert [camera.keys[i] for i in camera.object] == [episodes.data_keys[i] for i in episodes.data_object]
    assert "camera observation.depth holds depth maps as images" in caplog.text
    assert episodes.subset([1]).cameras["observation.image"].kind == "image"


def test_real_sets(shared_data: Path) -> None:
    v21, v30 = (_read(shared_data / name) for name in ("g1_inspire_v21", "g1_inspire_v30"))
    assert v21.episodes.length.tolist() == v30.episodes.length.tolist() == [278, 221, 277, 267, 280, 260, 265]
    assert v21.tasks == v30.tasks == {0: "Pick up the yellow bottle on the table."}
    assert list(v30.episodes.cameras) == ["observation.images.cam_high"]
    gr1 = _read(shared_data / "gr1_picknplace_v20")
    assert list(gr1.episodes.cameras) == ["observation.images.ego_view"]
    assert gr1.episodes.num_rows == 2096
    assert gr1.episodes.data_keys[1] == "data/chunk-000/episode_000001.parquet"


def test_ids_are_never_positions(tmp_path: Path) -> None:
    episodes = _read(_v2(tmp_path)).episodes
    assert episodes.positions([9, 2]).tolist() == [2, 0]
    assert episodes.position(5) == 1
    subset = episodes.subset([9, 2])
    assert subset.ids.tolist() == [2, 9]
    assert subset.first_row.tolist() == [0, 7]
    assert subset.cameras[CAM].keys[subset.cameras[CAM].object[1]].endswith("episode_000009.mp4")
    with pytest.raises(KeyError, match="episode ids 5 are not in use"):
        subset.position(5)
    with pytest.raises(KeyError, match="episode ids 1, 3 "):
        episodes.subset([1, 2, 3])


def test_fingerprint_changes_with_metadata_and_sizes(tmp_path: Path) -> None:
    seen = {_read(_v2(tmp_path)).fingerprint}
    assert _read(tmp_path).fingerprint in seen
    _touch(tmp_path / "README.md", b"does not count")
    assert _read(tmp_path).fingerprint in seen
    _touch(tmp_path / f"videos/chunk-001/{CAM}/episode_000002.mp4", b"longer")
    seen.add(_read(tmp_path).fingerprint)
    _touch(tmp_path / "meta/stats.json", b"{}")
    seen.add(_read(tmp_path).fingerprint)
    assert len(seen) == 3


def test_errors_name_file_and_key(tmp_path: Path) -> None:
    def broken(name: str, key: str, body: bytes | None, make: Any = _v2) -> Path:
        root = make(tmp_path / name)
        if body is None:
            (root / key).unlink()
        else:
            _touch(root / key, body)
        return root

    info = _info("v2.1")
    cases = [
        (broken("a", "meta/episodes.jsonl", None), r"meta/episodes\.jsonl is missing"),
        (broken("b", "meta/episodes.jsonl", b'{"episode_index": 1}\n'), r"meta/episodes\.jsonl: key length is missing"),
        (broken("c", "meta/episodes.jsonl", b"{oops\n"), r"meta/episodes\.jsonl line 1: not valid JSON"),
        (broken("d", "meta/tasks.jsonl", None), r"meta/tasks\.parquet and meta/tasks\.jsonl"),
        (broken("e", "meta/info.json", json.dumps(info | {"fps": 0}).encode()), r"meta/info\.json: fps is 0"),
        (broken("f", "meta/info.json", json.dumps(_info("v1.6")).encode()), r"codebase_version is 'v1\.6'"),
        (broken("g", "data/chunk-001/episode_000002.parquet", None), r"no data_path template.*episode_000002\.parquet"),
        (broken("h", f"videos/chunk-004/{CAM}/episode_000009.mp4", None), rf"camera {CAM}.*episode_000009\.mp4"),
        (broken("i", "meta/tasks.parquet", b"PAR1", make=_v3), r"meta/tasks\.parquet: not a readable Parquet"),
        (broken("j", "meta/episodes/chunk-000/file-001.parquet", b"", make=_v3), r"file-001\.parquet: not a readable"),
    ]
    for root, message in cases:
        with pytest.raises(MetadataError, match=message):
            _read(root)
    twice = b'{"episode_index": 2, "length": 4}\n' * 2
    with pytest.raises(MetadataError, match="episode_index 2 stands there twice"):
        _read(broken("k", "meta/episodes.jsonl", twice))
    with pytest.raises(MetadataError, match="task_index 0 has two texts"):
        _read(broken("l", "meta/tasks.jsonl", b'{"task_index":0,"task":"a"}\n{"task_index":0,"task":"b"}\n'))
    with pytest.raises(MetadataError, match=r"meta/tasks\.jsonl: a row has an empty task_index or task"):
        _read(broken("m", "meta/tasks.jsonl", b'{"task_index": 0, "task": null}\n'))
    with pytest.raises(FileNotFoundError, match=r"looked for meta/info\.json"):
        _read(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"features": {"action": "float32"}}, "feature action is 'float32'"),
        ({"features": {"action": {"shape": [2]}}}, "an object with a dtype was expected"),
        ({"chunks_size": "many"}, "chunks_size is 'many'; it must be a positive whole number"),
        ({"chunks_size": -1}, "chunks_size is -1"),
    ],
)
def test_malformed_declarations_name_the_key(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(MetadataError, match=expected):
        _read(_v2(tmp_path, **changes))
