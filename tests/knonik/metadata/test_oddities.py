"""What real datasets got wrong or strange, and public bug reports about other loaders, each on a small set."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import knonik
from knonik.columns import statistics
from knonik.columns.statistics import column_statistics
from knonik.metadata import files as meta_files
from knonik.metadata.files import read_in_order
from knonik.metadata.lerobot import read_metadata
from knonik.stores.base import LocalStore, open_store

CAM = "observation.images.cam{}"


def _rows_only(root: Path, lengths: Sequence[int], tasks: dict[int, str], **columns: Any) -> Path:
    """A v3.0 set without cameras; episode e has the e-th task of the table, in the order of the given dict."""
    for place in ("meta/episodes/chunk-000", "data/chunk-000"):
        (root / place).mkdir(parents=True)
    ids, starts = np.arange(len(lengths)), np.cumsum([0, *lengths])
    values = list(tasks)
    episode = np.repeat(ids, lengths)
    rows = {
        "timestamp": np.concatenate([np.arange(n) / 30 for n in lengths]).astype(np.float32),
        "episode_index": episode,
        "task_index": np.array([values[e % len(values)] for e in episode]),
        **columns,
    }
    pq.write_table(pa.table(rows), root / "data/chunk-000/file-000.parquet")
    listed = {
        "episode_index": ids,
        "tasks": [[tasks[values[e % len(values)]]] for e in ids],
        "length": lengths,
        "data/chunk_index": ids * 0,
        "data/file_index": ids * 0,
        "dataset_from_index": starts[:-1],
    }
    pq.write_table(pa.table(listed), root / "meta/episodes/chunk-000/file-000.parquet")
    pq.write_table(pa.table({"task_index": values, "task": list(tasks.values())}), root / "meta/tasks.parquet")
    features = {name: {"dtype": "float32", "shape": [1]} for name in rows}
    info = {"codebase_version": "v3.0", "fps": 30.0, "features": features, "total_videos": 3, "data_path": None}
    (root / "meta/info.json").write_text(json.dumps(info))
    return root


def test_texts_go_by_value_in_any_order_and_script(tmp_path: Path) -> None:
    tasks = {7: "ضع الكوب هنا", 0: "", 2: "拿起杯子 \u2028 ✓"}
    with knonik.open(_rows_only(tmp_path / "set", [2, 1, 3], tasks), cache_dir=tmp_path / "cache") as ds:
        assert ds.texts(np.array([0, 1, 2]), np.array([1, 0, 2])) == list(tasks.values())
        assert ds.episodes.tasks == tuple((text,) for text in tasks.values())


def test_a_task_that_is_not_listed_is_named(tmp_path: Path) -> None:
    root = _rows_only(tmp_path / "set", [2], {3: "a"})
    pq.write_table(pa.table({"task_index": [0], "task": ["a"]}), root / "meta/tasks.parquet")
    with knonik.open(root, cache_dir=tmp_path / "cache") as ds, pytest.raises(KeyError, match="task_index 3 stands"):
        ds.texts(np.array([0]), np.array([0]))


def test_large_and_wide_sets(tmp_path: Path) -> None:
    tasks = {index: f"task {index}" for index in range(56_362)}
    rows = 117_520
    one_row = np.arange(1030, dtype=np.float32)
    wide = pa.FixedSizeListArray.from_arrays(pa.array(np.tile(one_row, 20)), 1030)
    root = _rows_only(tmp_path / "long", [rows], tasks, **{"caption": ["text"] * rows})
    with knonik.open(root, cache_dir=tmp_path / "cache") as ds:
        assert (len(ds), len(ds.tasks), ds.fps) == (rows, 56_362, 30.0)
        assert ds.column("timestamp")[-1, 0] == np.float32((rows - 1) / 30)
    with knonik.open(_rows_only(tmp_path / "wide", [20], {0: "a"}, state=wide), cache_dir=tmp_path / "cache") as ds:
        np.testing.assert_array_equal(ds.column("state")[19], one_row)


def test_listed_statistics_are_not_trusted(tmp_path: Path) -> None:
    root = _rows_only(tmp_path / "set", [3, 3], {0: "a", 5: "b"})
    (root / "meta/stats.json").write_text(json.dumps({"task_index": {"max": [0.0], "mean": [0.0]}}))
    with knonik.open(root, cache_dir=tmp_path / "cache") as ds:
        assert ds.statistics("task_index")["max"].tolist() == [5.0]
        assert ds.statistics("task_index")["mean"].tolist() == [2.5]


def test_subsets_mean_ids_in_every_question(tmp_path: Path) -> None:
    lengths = [4, 2, 5, 3, 6, 2]
    value = np.arange(sum(lengths), dtype=np.float32)
    root = _rows_only(tmp_path / "set", lengths, {9: "a", 4: "b", 6: "c"}, action=value)
    with (
        knonik.open(root, cache_dir=tmp_path / "cache") as full,
        knonik.open(root, cache_dir=tmp_path / "cache", episodes=[5, 2, 3]) as some,
    ):
        assert some.episodes.ids.tolist() == [2, 3, 5]
        assert len(some) == 10
        ids, frames = np.array([5, 2, 2, 3]), np.array([1, 4, 0, 2])
        for ds in (full, some):
            steps, is_pad = ds.window(ids, frames, range(-1, 2))
            actions = ds.column("action")[ds.rows(ids, steps)][..., 0]
            assert actions.tolist() == [[20, 21, 21], [9, 10, 10], [6, 6, 7], [12, 13, 13]]
            assert is_pad.sum(axis=1).tolist() == [1, 1, 1, 1]
            assert ds.texts(ids, frames) == ["c", "c", "c", "a"]
        assert some.statistics("action")["min"].tolist() == [6.0]
        with pytest.raises(KeyError, match="episode ids 0"):
            some.rows(np.array([0]), np.array([0]))


def test_cameras_split_otherwise_than_the_data(make_set: Callable[..., Path], tmp_path: Path) -> None:
    lengths = (3, 4, 2, 5, 3)
    root = tmp_path / "set"
    shutil.copytree(make_set(lengths, episodes_per_file=3), root)
    other = make_set(lengths, episodes_per_file=2)
    name = CAM.format(1)
    shutil.rmtree(root / "videos" / name)
    shutil.copytree(other / "videos" / name, root / "videos" / name)
    path = "meta/episodes/chunk-000/file-000.parquet"
    table, moved = pq.read_table(root / path), pq.read_table(other / path)
    for column in (column for column in moved.column_names if column.startswith(f"videos/{name}/")):
        table = table.set_column(table.column_names.index(column), column, moved[column])
    pq.write_table(table, root / path)
    with (
        knonik.open(root, cache_dir=tmp_path / "cache") as ds,
        knonik.open(make_set(lengths, version="v2.1"), cache_dir=tmp_path / "cache") as single,
    ):
        keys = [{ds.locate(e, CAM.format(camera), 0)[0] for e in range(5)} for camera in range(2)]
        assert [len(found) for found in keys] == [2, 3]
        for episode, camera, frame in ((4, 0, 2), (4, 1, 2), (2, 1, 0), (3, 0, 4)):
            where: dict[str, Any] = {"episode": episode, "camera": CAM.format(camera), "frame": frame}
            np.testing.assert_array_equal(ds.frame(**where), single.frame(**where))


@pytest.mark.parametrize("shift_s", [0.0, 0.004])
def test_a_constant_shift_is_reported_and_the_end_of_an_episode_is_none(
    make_set: Callable[..., Path], tmp_path: Path, shift_s: float
) -> None:
    root = tmp_path / "set"
    shutil.copytree(make_set((3, 4, 2, 5, 3), episodes_per_file=3), root)
    for path in (root / "data").rglob("*.parquet"):
        table = pq.read_table(path)
        times = pa.array(table["timestamp"].to_numpy() + np.float32(shift_s))
        pq.write_table(table.set_column(table.column_names.index("timestamp"), "timestamp", times), path)
    with knonik.open(root, cache_dir=tmp_path / "cache") as ds:
        ds.index.wait()
        assert ds.index.num_far_rows(CAM.format(0)) == (len(ds) if shift_s else 0)
        if shift_s:
            assert ds.index.off_s(CAM.format(0), 1, 2) == pytest.approx(shift_s, abs=1e-5)
            with pytest.raises(ValueError, match=r"episode 1, .* is 0\.004\d* s away from the row's timestamp"):
                ds.frame(episode=1, camera=CAM.format(0), frame=2)


def test_what_the_library_publishes_is_no_part_of_the_dataset(tmp_path: Path) -> None:
    root = _rows_only(tmp_path / "set", [2], {0: "a"})
    before = read_metadata(open_store(root))
    for place in (".knonik", "data/.knonik"):
        (root / place).mkdir()
        (root / place / "index.npz").write_bytes(b"x")
    after = read_metadata(open_store(root))
    assert after.fingerprint == before.fingerprint
    assert list(after.objects) == ["data/chunk-000/file-000.parquet"]
    assert after.sizes == {key: info.size for key, info in after.objects.items()}
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    assert read_metadata(open_store(copy)).fingerprint == before.fingerprint


def test_metadata_is_read_in_order_within_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_files, "_IN_FLIGHT_BYTES", 250)
    bodies = {f"meta/{i:02d}": bytes([i]) * 100 for i in range(9)} | {"meta/09": b"x" * 900}
    (tmp_path / "meta").mkdir()
    for key, body in bodies.items():
        (tmp_path / key).write_bytes(body)
    taken: list[str] = []
    asked: list[int] = []

    class Watched(LocalStore):
        def read(self, key: str) -> bytes:
            asked.append(int(key[-2:]) - len(taken))
            return super().read(key)

    for key, body in read_in_order(Watched(tmp_path), {key: len(body) for key, body in bodies.items()}):
        assert body == bodies[key]
        taken.append(key)
    assert taken == list(bodies)
    assert max(asked) <= 2  # never further ahead than the bound allows


def test_a_missing_row_offset_follows_from_the_lengths(tmp_path: Path) -> None:
    root = _rows_only(tmp_path / "set", [2, 3], {0: "a"}, action=np.arange(5, dtype=np.float32))
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["dataset_from_index"]), path)
    with knonik.open(root, cache_dir=tmp_path / "cache") as ds:
        assert ds.column("action")[ds.rows(np.array([1]), np.array([0])), 0].tolist() == [2.0]


def test_statistics_do_not_depend_on_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(1).standard_normal((9, 5)).astype(np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 5)
    root = _rows_only(tmp_path / "set", [4, 2, 3], {0: "a"}, action=column)
    with knonik.open(root, cache_dir=tmp_path / "cache", episodes=[0, 2]) as ds:
        whole = column_statistics(ds.column("action"), ds.episodes)
        monkeypatch.setattr(statistics, "_BLOCK_BYTES", 4 * 7 * 2)
        parts = column_statistics(ds.column("action"), ds.episodes)
    used = values[[0, 1, 2, 3, 6, 7, 8]].astype(np.float64)
    for name, expected in (("mean", used.mean(0)), ("std", used.std(0)), ("max", used.max(0))):
        np.testing.assert_allclose(whole[name], expected, rtol=1e-12)
        np.testing.assert_allclose(parts[name], expected, rtol=1e-12)
    np.testing.assert_array_equal(whole["q01"], parts["q01"])
