"""A written dataset has LeRobot's layout, and both versions hold the same rows and frames."""

import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pyarrow.parquet as pq
import pytest

import knonik
from knonik.write.lerobot import EpisodeData, write_lerobot

LENGTHS = (7, 4, 9, 1, 6)


def small(length: int, side: int = 16, key: str = "cam", dim: int = 2) -> EpisodeData:
    rng = np.random.default_rng(length)
    return EpisodeData(
        columns={"action": rng.normal(size=(length, dim)).astype(np.float32)},
        frames={key: rng.integers(0, 255, (length, side, side, 3), np.uint8)},
        task="t",
    )


def test_both_versions_give_equal_rows_and_frames(make_set, tmp_path: Path) -> None:
    old = knonik.open(make_set(LENGTHS, version="v2.1"), cache_dir=tmp_path)
    new = knonik.open(make_set(LENGTHS, version="v3.0"), cache_dir=tmp_path)
    assert (old.version, new.version) == ("v2.1", "v3.0")
    assert len(old) == len(new) == sum(LENGTHS)
    assert old.tasks == new.tasks == {0: "do thing 0 ✓", 1: "do thing 1 ✓", 2: "do thing 2 ✓"}
    for key in ("observation.state", "action", "timestamp", "frame_index", "episode_index", "index", "task_index"):
        np.testing.assert_array_equal(old.column(key), new.column(key), err_msg=key)
    for episode, length in enumerate(LENGTHS):
        for camera in old.cameras:
            for frame in range(length):
                where = {"episode": episode, "camera": camera, "frame": frame}
                np.testing.assert_array_equal(old.frame(**where), new.frame(**where), err_msg=str(where))


@pytest.mark.parametrize("codec", ["av1", "h264"])
@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_frames_come_back_in_their_place(tmp_path: Path, version: str, codec: str) -> None:
    y, x = np.mgrid[:32, :32]
    source = []
    for episode, length in enumerate((5, 1, 4)):
        wave = [128 + 100 * np.sin((x + 5 * i + 11 * episode) / 9) * np.cos(y / 7) for i in range(length)]
        frames = np.repeat(np.stack(wave)[..., None], 3, axis=-1).astype(np.uint8)
        columns = {"action": np.arange(length, dtype=np.float32)}
        source.append(EpisodeData(columns=columns, frames={"cam": frames}, task="t"))
    root = write_lerobot(
        tmp_path / "set", source, fps=12.5, robot_type="none", version=version, codec=codec, episodes_per_file=2
    )
    dataset = knonik.open(root, cache_dir=tmp_path / "cache")
    assert dataset.fps == 12.5
    pictures = {
        (e, i): dataset.frame(episode=e, camera="cam", frame=i)
        for e, data in enumerate(source)
        for i in range(data.length)
    }
    for place, picture in pictures.items():
        errors = {(e, i): np.abs(picture.astype(int) - source[e].frames["cam"][i]).mean() for e, i in pictures}
        assert min(errors, key=errors.get) == place
        assert errors[place] < 6


def test_v30_layout(make_set) -> None:
    root = make_set(LENGTHS, version="v3.0")
    info = json.loads((root / "meta/info.json").read_text())
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"], info["fps"]) == (5, sum(LENGTHS), 3, 10)
    assert info["splits"] == {"train": "0:5"}
    assert info["features"]["observation.state"]["shape"] == [3]
    assert info["features"]["observation.images.cam1"]["shape"] == [32, 48, 3]
    rows = pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    files = {row["data/file_index"] for row in rows}
    assert files == {0, 1}
    for row in rows:
        for kind in ("data", "videos/observation.images.cam0", "videos/observation.images.cam1"):
            assert row[f"{kind}/file_index"] == row["episode_index"] // 3
        assert row["dataset_to_index"] - row["dataset_from_index"] == row["length"] == LENGTHS[row["episode_index"]]
        seconds = (
            row["videos/observation.images.cam0/to_timestamp"] - row["videos/observation.images.cam0/from_timestamp"]
        )
        assert seconds == pytest.approx(row["length"] / 10)
        assert row["stats/action/max"][0] == 1000 * row["episode_index"] + row["length"] - 1
    for number, lengths in enumerate((LENGTHS[:3], LENGTHS[3:])):
        data = pq.ParquetFile(root / f"data/chunk-000/file-{number:03d}.parquet")
        assert [data.metadata.row_group(i).num_rows for i in range(data.num_row_groups)] == list(lengths)
        with av.open(str(root / f"videos/observation.images.cam1/chunk-000/file-{number:03d}.mp4")) as video:
            assert sum(packet.size > 0 for packet in video.demux(video=0)) == sum(lengths)
    tasks = pq.read_table(root / "meta/tasks.parquet")
    assert tasks.column_names == ["task_index", "task"]
    assert json.loads(tasks.schema.metadata[b"pandas"])["index_columns"] == ["task"]


def test_v21_layout(make_set) -> None:
    root = make_set(LENGTHS, version="v2.1")
    info = json.loads((root / "meta/info.json").read_text())
    assert (info["total_videos"], info["total_chunks"]) == (10, 1)
    assert len(list(root.glob("data/chunk-000/episode_00000?.parquet"))) == 5
    assert len(list(root.glob("videos/chunk-000/observation.images.cam?/episode_00000?.mp4"))) == 10
    lines = [json.loads(line) for line in (root / "meta/episodes.jsonl").read_text().splitlines()]
    assert [line["length"] for line in lines] == list(LENGTHS)
    stats = [json.loads(line) for line in (root / "meta/episodes_stats.jsonl").read_text().splitlines()]
    assert stats[2]["stats"]["observation.state"]["max"] == [2.0, 8.0, 4.0]
    assert not (root / "meta/stats.json").exists()


def test_statistics(make_set, tmp_path: Path) -> None:
    root = make_set(LENGTHS, version="v3.0")
    stats = json.loads((root / "meta/stats.json").read_text())
    actions = np.asarray(knonik.open(root, cache_dir=tmp_path).column("action"), np.float64)
    found = stats["action"]
    np.testing.assert_allclose(found["mean"], actions.mean(0))
    np.testing.assert_allclose(found["std"], actions.std(0))
    np.testing.assert_allclose([found["min"], found["max"]], [actions.min(0), actions.max(0)])
    for name, quantile in (("q01", 0.01), ("q10", 0.1), ("q50", 0.5), ("q90", 0.9), ("q99", 0.99)):
        np.testing.assert_allclose(found[name], np.quantile(actions, quantile, axis=0))
    assert found["count"] == [sum(LENGTHS)]
    image = stats["observation.images.cam0"]
    assert np.shape(image["mean"]) == (3, 1, 1)
    assert 0.0 <= np.min(image["min"]) <= np.min(image["q01"]) <= np.max(image["mean"]) <= np.max(image["max"]) <= 1.0


def test_image_statistics_are_those_of_the_pixels(tmp_path: Path) -> None:
    data = small(5)
    root = write_lerobot(tmp_path / "set", [data], fps=5, robot_type="none", codec="h264")
    found = json.loads((root / "meta/stats.json").read_text())["cam"]
    pixels = data.frames["cam"].reshape(-1, 3) / 255
    np.testing.assert_allclose(np.ravel(found["mean"]), pixels.mean(0))
    np.testing.assert_allclose(np.ravel(found["std"]), pixels.std(0))
    np.testing.assert_allclose(np.ravel(found["q50"]), np.quantile(pixels, 0.5, axis=0), atol=1 / 255)
    assert found["count"] == [5]


def test_a_generator_is_streamed(tmp_path: Path) -> None:
    held: list[weakref.ref[np.ndarray]] = []
    alive: list[int] = []

    def source() -> Iterator[EpisodeData]:
        for _ in range(12):
            data = small(3)
            held.append(weakref.ref(data.frames["cam"]))
            yield data
            del data
            gc.collect()
            alive.append(sum(ref() is not None for ref in held))

    write_lerobot(tmp_path / "set", source(), fps=5, robot_type="none", codec="h264", workers=1, episodes_per_file=12)
    assert len(held) == 12
    assert max(alive) <= 4, "frames of episodes already encoded are kept"


def test_nothing_is_left_when_it_fails(tmp_path: Path) -> None:
    def source() -> Iterator[EpisodeData]:
        yield small(3)
        raise RuntimeError("robot fell over")

    with pytest.raises(RuntimeError, match="fell over"):
        write_lerobot(tmp_path / "set", source(), fps=5, robot_type="none", codec="h264")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("episodes", "options", "message"),
    [
        ([], {}, "at least one episode"),
        ([small(3), small(4, side=32)], {}, "episode 1: cam is uint8 \\[32, 32, 3\\]"),
        ([small(3), small(4, key="other")], {}, "episode 1 has frames \\['other'\\]"),
        ([small(3), small(4, dim=3)], {}, "episode 1: action"),
        ([small(3)], {"version": "v1.0"}, "version='v1.0'"),
        ([small(3)], {"episodes_per_file": 0}, "episodes_per_file=0"),
        ([small(3, side=15)], {}, "even sides"),
    ],
)
def test_refusals(tmp_path: Path, episodes: list[EpisodeData], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_lerobot(tmp_path / "set", episodes, **{"fps": 5, "robot_type": "x", "codec": "h264", **options})


def test_an_existing_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    with pytest.raises(FileExistsError):
        write_lerobot(tmp_path / "set", [small(2)], fps=5, robot_type="none")
