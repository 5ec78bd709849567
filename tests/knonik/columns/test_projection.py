"""What a projection asks of a store: the footer and the wanted column chunks, in few reads, of one version."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from knonik.columns.projection import TAIL_BYTES, open_projection
from knonik.metadata.files import MetadataError
from knonik.stores.base import LocalStore, ObjectChanged, ObjectInfo
from knonik.stores.sparse_file import SparseFile, merged_ranges

ROWS, WIDTH = 20_000, 7


class RemoteStore(LocalStore):
    """A folder that is read like a bucket: no paths, and every range is recorded."""

    is_local = False

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.ranges: list[tuple[int, int]] = []

    def local_path(self, key: str) -> Path | None:
        return None

    def read_range(self, key: str, offset: int, length: int, *, version: str | None = None) -> bytes:
        self.ranges.append((offset, length))
        return super().read_range(key, offset, length, version=version)


def _write(root: Path, row_group_size: int, wide: int = 16) -> dict[str, np.ndarray[Any, Any]]:
    """Two wanted columns with `wide` others between and around them, incompressible as real ones are."""
    rng = np.random.default_rng(3)

    def vectors() -> tuple[np.ndarray[Any, Any], Any]:
        values = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
        return values, pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), WIDTH)

    columns, wanted = {}, {}
    for i in range(wide):
        columns[f"other.{i}"] = vectors()[1]
        if i == wide // 2:
            # Names that are prefixes of each other must not bring each other along.
            wanted["action"], columns["action"] = vectors()
            columns["action.text"] = pa.array(["x"] * ROWS)
    wanted["index"] = np.arange(ROWS)[:, None]
    columns["index"] = pa.array(np.arange(ROWS))
    pq.write_table(pa.table(columns), root / "rows.parquet", row_group_size=row_group_size)
    return wanted


def _read(store: LocalStore, info: ObjectInfo, names: list[str]) -> dict[str, np.ndarray[Any, Any]]:
    with ThreadPoolExecutor(4) as pool, open_projection(store, "rows.parquet", info, names, pool=pool) as projection:
        parts = list(projection.batches())
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


@pytest.mark.parametrize("row_group_size", [ROWS, 500])
def test_remote_and_local_rows_are_the_same(tmp_path: Path, row_group_size: int) -> None:
    wanted = _write(tmp_path, row_group_size)
    for store in (RemoteStore(tmp_path), LocalStore(tmp_path)):
        info = store.objects("")["rows.parquet"]
        found = _read(store, info, ["index", "action"])
        for name, values in wanted.items():
            np.testing.assert_array_equal(found[name], values)


def test_few_reads_of_little_more_than_what_is_wanted(tmp_path: Path) -> None:
    _write(tmp_path, ROWS)
    store = RemoteStore(tmp_path)
    info = store.objects("")["rows.parquet"]
    _read(store, info, ["action", "index"])
    wanted_bytes = ROWS * (WIDTH * 4 + 8)
    assert len(store.ranges) == 2  # the footer, with which the last column comes, and the stretch of the other
    assert sum(length for _, length in store.ranges) < 1.5 * wanted_bytes + TAIL_BYTES + info.size // 50
    assert sum(length for _, length in store.ranges) < info.size // 5


def test_a_long_footer_costs_one_more_read(tmp_path: Path) -> None:
    _write(tmp_path, 100)
    store = RemoteStore(tmp_path)
    info = store.objects("")["rows.parquet"]
    with open_projection(store, "rows.parquet", info, ["index"]) as projection:
        footer = [(offset, length) for offset, length in store.ranges if offset + length == info.size]
        assert footer == [(info.size - TAIL_BYTES, TAIL_BYTES)]
        assert store.ranges[1][0] + store.ranges[1][1] == info.size - TAIL_BYTES
        opened = len(store.ranges)
        assert sum(len(part["index"]) for part in projection.batches()) == ROWS
        assert len(store.ranges) == opened  # everything was fetched before the reading began


def test_a_small_object_is_one_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"index": np.arange(50)}), tmp_path / "rows.parquet")
    store = RemoteStore(tmp_path)
    info = store.objects("")["rows.parquet"]
    assert _read(store, info, ["index"])["index"][:, 0].tolist() == list(range(50))
    assert store.ranges == [(0, info.size)]


def test_a_changed_object_is_noticed(tmp_path: Path) -> None:
    pq.write_table(pa.table({"index": np.arange(50)}), tmp_path / "rows.parquet")
    for store in (RemoteStore(tmp_path), LocalStore(tmp_path)):
        info = ObjectInfo(size=store.size("rows.parquet"), version="another")
        with pytest.raises(ObjectChanged, match=r"rows\.parquet"):
            _read(store, info, ["index"])


@pytest.mark.parametrize("body", [b"", b"PAR1", b"PAR1" + b"\0" * 64, b"x" * 32 + b"\xff\xff\0\0PAR1"])
def test_what_is_no_parquet_is_named(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "rows.parquet").write_bytes(body)
    for store in (RemoteStore(tmp_path), LocalStore(tmp_path)):
        with pytest.raises(MetadataError, match=r"rows\.parquet: not a readable Parquet file"):
            _read(store, ObjectInfo(size=len(body), version=""), ["index"])


def test_merged_ranges_cover_with_bounded_length() -> None:
    assert merged_ranges([(50, 60), (0, 10), (15, 20)], gap_bytes=5, limit_bytes=100) == [(0, 20), (50, 60)]
    assert merged_ranges([(0, 10), (2, 4)], gap_bytes=0, limit_bytes=100) == [(0, 10)]
    assert merged_ranges([], gap_bytes=5, limit_bytes=100) == []
    cut = merged_ranges([(3, 103)], gap_bytes=0, limit_bytes=30)
    assert [begin for begin, _ in cut] + [103] == [3] + [end for _, end in cut]
    assert max(end - begin for begin, end in cut) <= 30


def test_sparse_file_reads_across_ranges_and_outside(tmp_path: Path) -> None:
    body = np.random.default_rng(0).bytes(4_000)
    (tmp_path / "a").write_bytes(body)
    store = RemoteStore(tmp_path)
    file = SparseFile(store, "a", ObjectInfo(size=len(body), version=""))
    file._bodies, file._begins = [body[100:200], body[200:260], body[300:400]], [100, 200, 300]
    cases = [(100, 160), (150, 100), (320, 10), (90, 20), (250, 60), (3_990, 50)]
    for begin, length in cases:
        file.seek(begin)
        assert file.read(length) == body[begin : begin + length]
    assert store.ranges == [(90, 20), (250, 60), (3_990, 10)]
