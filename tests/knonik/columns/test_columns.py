"""Columns become arrays in episode order, whatever the Parquet layout, once for all processes."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from knonik.columns.arrays import columns_folder, load_columns
from knonik.columns.statistics import cached_statistics
from knonik.metadata.episodes import EpisodeTable
from knonik.metadata.lerobot import MetadataError, read_metadata
from knonik.stores.base import LocalStore, ObjectChanged, open_store

LENGTH = np.array([3, 2, 4])


def _table() -> EpisodeTable:
    """Episodes 4, 6, 9; the second file holds the first and the last, in the other order."""
    return EpisodeTable(
        ids=np.array([4, 6, 9]),
        length=LENGTH,
        first_row=np.array([0, 3, 5]),
        data_keys=("data/a.parquet", "data/b.parquet"),
        data_object=np.array([1, 0, 1]),
        data_row=np.array([4, 0, 0]),
        tasks=((),) * 3,
        cameras={},
    )


def _write(root: Path, **changes: Any) -> Path:
    (root / "data").mkdir(exist_ok=True)
    for name, ids in (("a", [6] * 2), ("b", [9] * 4 + [4] * 3)):
        value = np.array([100.0 * e for e in ids]) + np.arange(len(ids))
        pairs = np.stack([value, -value], 1)
        columns = {
            "fixed": pa.FixedSizeListArray.from_arrays(pa.array(pairs.reshape(-1).astype(np.float32)), 2),
            "list": pa.array(pairs.tolist()),
            "nested": pa.array(pairs.reshape(-1, 2, 1).tolist()),
            "scalar": pa.array(value),
            "half": pa.array(value.astype(np.float16)),
            "flag": pa.array([e == 9 for e in ids]),
            "small": pa.array(np.array(ids, np.int8)),
            "episode_index": pa.array(ids, pa.int64()),
            "text": pa.array(["x"] * len(ids)),
            "ragged": pa.array([[0.0] * (1 + i % 2) for i in range(len(ids))]),
            "holes": pa.array([None, *value[1:].tolist()]),
        }
        columns |= {key: column(ids) for key, column in changes.items()}
        table = pa.table({key: column for key, column in columns.items() if column is not None})
        pq.write_table(table, root / f"data/{name}.parquet", row_group_size=2)
    return root


EXPECTED = np.array([404, 405, 406, 600, 601, 900, 901, 902, 903], np.float32)


def test_layouts(tmp_path: Path) -> None:
    store = open_store(_write(tmp_path))
    names = ["fixed", "list", "nested", "scalar", "half", "flag", "small"]
    columns = load_columns(store, _table(), names, tmp_path / "cache")
    for name in ("fixed", "list", "nested"):
        np.testing.assert_array_equal(columns[name], np.stack([EXPECTED, -EXPECTED], 1))
    np.testing.assert_array_equal(columns["scalar"], EXPECTED[:, None])
    np.testing.assert_array_equal(columns["flag"][:, 0], [0] * 5 + [1] * 4)
    np.testing.assert_array_equal(columns["small"][:, 0], np.repeat([4, 6, 9], LENGTH))
    floats, ints = ("fixed", "list", "nested", "scalar", "half"), ("flag", "small")
    assert {columns[name].dtype for name in floats} == {np.dtype(np.float32)}
    assert {columns[name].dtype for name in ints} == {np.dtype(np.int64)}
    assert isinstance(columns["list"].base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        columns["list"][0] = 0


def test_built_once_and_again_when_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, cache = open_store(_write(tmp_path)), tmp_path / "cache"
    load_columns(store, _table(), ["list"], cache)
    for name in ("a", "b"):
        (tmp_path / f"data/{name}.parquet").rename(tmp_path / f"{name}.away")
    np.testing.assert_array_equal(load_columns(store, _table(), ["list"], cache)["list"][:, 0], EXPECTED)
    for name in ("a", "b"):
        (tmp_path / f"{name}.away").rename(tmp_path / f"data/{name}.parquet")
    place = columns_folder(cache, _table())
    file = place / "list.npy"
    file.write_bytes(file.read_bytes()[:-20])
    np.testing.assert_array_equal(load_columns(store, _table(), ["list"], cache)["list"][:, 0], EXPECTED)
    assert "damaged" in caplog.text
    assert sorted(path.name for path in place.iterdir()) == ["list.npy", "objects.json"]


def test_of_several_at_once_one_builds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    store = open_store(_write(tmp_path))
    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(load_columns, store, _table(), ["list", "flag"], tmp_path / "cache") for _ in range(12)]
        for job in jobs:
            np.testing.assert_array_equal(job.result()["list"][:, 0], EXPECTED)
    assert caplog.text.count("reading columns") == 1
    place = columns_folder(tmp_path / "cache", _table())
    assert sorted(path.name for path in place.iterdir()) == ["flag.npy", "list.npy", "objects.json"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", r"data/a\.parquet: column absent is missing"),
        ("text", "column text holds string"),
        ("ragged", "column ragged has values of different lengths"),
        ("holes", "column holes has 1 empty values"),
    ],
)
def test_unusable_columns_are_named(tmp_path: Path, name: str, message: str) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(MetadataError, match=message):
        load_columns(open_store(_write(tmp_path)), _table(), ["list", name], cache)
    assert not list(cache.rglob("*.npy*"))


def test_files_that_contradict_the_metadata_are_named(tmp_path: Path) -> None:
    store = open_store(_write(tmp_path, episode_index=lambda ids: pa.array([7] * len(ids))))
    with pytest.raises(MetadataError, match=r"data/a\.parquet: rows 0\.\.1 should be episode 6.*is \[7\]"):
        load_columns(store, _table(), ["list"], tmp_path / "cache")
    # Without ids in the file there is nothing to compare, and the rows are taken as listed.
    store = open_store(_write(tmp_path, episode_index=lambda ids: None))
    load_columns(store, _table(), ["list"], tmp_path / "cache")
    pq.write_table(pq.read_table(tmp_path / "data/b.parquet").slice(1), tmp_path / "data/b.parquet")
    with pytest.raises(MetadataError, match=r"data/b\.parquet: has 6 rows, the metadata of episodes 4\.\.9 says 7"):
        load_columns(store, _table(), ["fixed"], tmp_path / "cache")
    file = tmp_path / "data/a.parquet"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(MetadataError, match=r"data/a\.parquet: not a readable Parquet file"):
        load_columns(store, _table(), ["fixed"], tmp_path / "cache")


def test_changed_objects_are_named_and_their_columns_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, cache = open_store(_write(tmp_path)), tmp_path / "cache"

    def table() -> EpisodeTable:
        found = store.objects("data")
        return replace(_table(), data_info=tuple(found[key] for key in _table().data_keys))

    before = load_columns(store, table(), ["list", "flag"], cache)
    column_statistics = cached_statistics("list", before["list"], table(), cache)
    path = tmp_path / "data/b.parquet"
    old = path.stat()
    content = pq.read_table(path)
    content = content.set_column(content.column_names.index("list"), "list", pa.array([[1.0, 2.0]] * 7))
    pq.write_table(content, path, row_group_size=2)
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns + 1))
    after = load_columns(store, table(), ["list"], cache)["list"]
    assert after[:, 0].tolist() == [1, 1, 1, 600, 601, 1, 1, 1, 1]
    assert "data objects changed since their columns were read: data/b.parquet;" in caplog.text
    assert cached_statistics("list", after, table(), cache)["max"].tolist() != column_statistics["max"].tolist()
    np.testing.assert_array_equal(before["list"][:, 0], EXPECTED)  # who has the old ones mapped keeps them
    assert [path.parent.name for path in cache.rglob("list.npy")] == [columns_folder(cache, table()).name]
    # A table that was listed before the change asks for bytes that are gone.
    stale = replace(table(), data_info=tuple(replace(info, version="1-2") for info in table().data_info))
    with pytest.raises(ObjectChanged, match=r"data/a\.parquet"):
        load_columns(store, stale, ["list"], cache)


def test_a_broken_file_is_named_with_its_episodes(tmp_path: Path) -> None:
    store = open_store(_write(tmp_path))
    path = tmp_path / "data/b.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(MetadataError, match=r"data/b\.parquet: not a readable.*it holds 2 episodes of 4\.\.9"):
        load_columns(store, _table(), ["list"], tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.npy*"))


def test_a_broken_file_stands_only_in_the_way_of_its_episodes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = _write(tmp_path) / "data/a.parquet"
    body = path.read_bytes()
    path.write_bytes(body[:-100])
    store, table = open_store(tmp_path), _table()
    columns = load_columns(store, table, ["scalar", "small"], tmp_path / "cache", np.array([4, 9]))
    assert "data/a.parquet" in caplog.text
    assert "episode 6" in caplog.text
    kept = np.r_[0:3, 5:9]
    np.testing.assert_array_equal(columns["scalar"][kept, 0], EXPECTED[kept])
    assert np.isnan(columns["scalar"][3:5]).all()
    np.testing.assert_array_equal(columns["small"][3:5, 0], [np.iinfo(np.int64).min] * 2)
    for names in (["scalar"], ["small"], ["fixed"]):  # built already, and not
        with pytest.raises(MetadataError, match=r"data/a\.parquet: .*footer.*episode 6"):
            load_columns(store, table, names, tmp_path / "cache")
    path.write_bytes(body)
    mended = replace(table, data_info=tuple(store.objects("data").values()))
    np.testing.assert_array_equal(load_columns(store, mended, ["scalar"], tmp_path / "cache")["scalar"][:, 0], EXPECTED)


def test_a_page_that_makes_no_sense_is_an_error_of_its_file(tmp_path: Path) -> None:
    path = _write(tmp_path) / "data/a.parquet"
    with pq.ParquetFile(path) as file:
        chunk = file.metadata.row_group(0).column(file.schema_arrow.names.index("small"))
        at = chunk.data_page_offset
    body = bytearray(path.read_bytes())
    body[at : at + 24] = b"\xff" * 24
    path.write_bytes(body)
    with pytest.raises(MetadataError, match=r"data/a\.parquet: not a readable Parquet file"):
        load_columns(open_store(tmp_path), _table(), ["scalar", "small"], tmp_path / "cache")


def test_real_rows_are_the_parquet_rows(shared_data: Path, tmp_path: Path) -> None:
    for name in ("g1_inspire_v21", "g1_inspire_v30", "gr1_picknplace_v20"):
        store = open_store(shared_data / name)
        episodes = read_metadata(store).episodes
        columns = load_columns(store, episodes, ["action", "task_index"], tmp_path / name)
        paths = sorted((shared_data / name / "data").rglob("*.parquet"))
        rows = [row for path in paths for row in pq.read_table(path, columns=["action"]).column("action").to_pylist()]
        np.testing.assert_array_equal(columns["action"], np.array(rows, np.float32))
        assert columns["task_index"].shape == (len(rows), 1)


def test_a_store_without_paths_gives_the_same_in_one_read_a_file(tmp_path: Path) -> None:
    class Remote(LocalStore):
        is_local = False
        reads: ClassVar[list[str]] = []

        def local_path(self, key: str) -> Path | None:
            return None

        def size(self, key: str) -> int:
            raise AssertionError("sizes are known from the listing")

        def read_range(self, key: str, offset: int, length: int, *, version: str | None = None) -> bytes:
            self.reads.append(f"{key} {version}")
            return super().read_range(key, offset, length, version=version)

    store = Remote(_write(tmp_path))
    found = store.objects("data")
    table = replace(_table(), data_info=tuple(found[key] for key in _table().data_keys))
    names = ["fixed", "list", "nested", "scalar", "half", "flag", "small"]
    columns = load_columns(store, table, names, tmp_path / "remote")
    for name, values in load_columns(LocalStore(tmp_path), _table(), names, tmp_path / "local").items():
        np.testing.assert_array_equal(columns[name], values)
        assert columns[name].dtype == values.dtype
    assert sorted(store.reads) == [f"{key} {found[key].version}" for key in sorted(found)]
