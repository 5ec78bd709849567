"""Low-dimensional columns as memory-mapped arrays: read once from Parquet, then shared by all processes of a machine.

Only the wanted columns are read, and no Python object is made per row. Values go to the array's file piece by piece, so
building takes the memory of a few pieces whatever the size of the dataset. Arrays cover all rows of the dataset in
episode-table order, and are kept apart by the versions of the data objects they were made from.
"""

import ctypes
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from knonik.cache import ArrayFile, new_array, one_builder, replacing
from knonik.columns.projection import open_projection
from knonik.columns.row_map import RowMap
from knonik.metadata.episodes import EpisodeTable
from knonik.metadata.files import MetadataError
from knonik.stores.base import ObjectInfo, Store

logger = logging.getLogger(__name__)

_REMOTE_BYTES = 512 << 20  # of data objects read at once from a store, at most: bounds memory, hides latency
_REMOTE_READERS = 32
_LARGE_BYTES = 16 << 20  # a data file after which it is worth giving memory back
_CONNECTIONS = 16
_RECORD = "objects.json"
_EMPTY = {"f": np.nan, "i": np.iinfo(np.int64).min}  # by kind of numbers: rows of a data file that cannot be read

Column = NDArray[np.float32] | NDArray[np.int64]


def load_columns(
    store: Store,
    episodes: EpisodeTable,
    names: Sequence[str],
    folder: Path,
    in_use: NDArray[np.int64] | None = None,
) -> dict[str, Column]:
    """Read-only arrays [rows, D] of the named columns, built under `folder` where they are not there yet.

    Floats become float32, integers and booleans int64; a scalar column has D = 1 and nested lists are flattened.

    Args:
        episodes: table of the whole dataset, not of a subset: the arrays are shared.
        in_use: ids of the episodes whose rows will be looked at, None = all. A data file that holds none of them may
            be damaged: it is named in a warning, and its rows are NaN, or the least integer.

    Raises:
        MetadataError: a column is missing, empty in places, of changing length or not numeric, or a file has other rows
            than the metadata says, where episodes in use are concerned.
        StoreError: a data object could not be read, or has changed since it was listed.
    """
    place = columns_folder(folder, episodes)
    columns = _open_all(place, names, episodes.num_rows)
    if len(columns) < len(set(names)):
        with one_builder(folder, "columns"):
            there = _open_all(place, names, episodes.num_rows)  # another process may have been faster
            missing = [name for name in dict.fromkeys(names) if name not in there]
            if missing:
                logger.info("reading columns %s of %d data files", ", ".join(missing), len(episodes.data_keys))
                _supersede(store, episodes, place)
                _build(store, episodes, missing, place, _keys(episodes, in_use))
        columns = _open_all(place, names, episodes.num_rows)
    if vanished := [name for name in names if name not in columns]:
        raise OSError(f"column files of {vanished} vanished from {place} right after they were written")
    needed = _keys(episodes, in_use)
    for name in names:
        for key, reason in _gaps(place, name).items():
            if key in needed:
                raise MetadataError(reason)
    return {name: columns[name] for name in names}


def _keys(episodes: EpisodeTable, ids: NDArray[np.int64] | None) -> set[str]:
    """Data objects of some episodes, None = all."""
    if ids is None or not len(ids):
        return set(episodes.data_keys if ids is None else ())
    return {episodes.data_keys[number] for number in np.unique(episodes.data_object[episodes.positions(ids)]).tolist()}


def _gaps(place: Path, name: str) -> dict[str, str]:
    """Data objects that a column was built without, and why. Other versions of them are looked for elsewhere."""
    path = place / f"{_file_name(name)}.gaps.json"
    return dict(json.loads(path.read_bytes())) if path.exists() else {}


def columns_folder(folder: Path, episodes: EpisodeTable) -> Path:
    """Where what is derived from the rows is kept: another folder for other versions of the data objects."""
    return folder / f"columns-{data_version(episodes)}"


def data_version(episodes: EpisodeTable) -> str:
    """Changes whenever the rows may have changed: a short text made of the versions of all data objects."""
    versions = json.dumps([[key, info.version] for key, info in _listed(episodes).items()])
    return hashlib.sha256(versions.encode()).hexdigest()[:16]


def _listed(episodes: EpisodeTable) -> dict[str, ObjectInfo]:
    infos = episodes.data_info or (ObjectInfo(size=-1, version=""),) * len(episodes.data_keys)
    return dict(zip(episodes.data_keys, infos, strict=True))


def _open_all(place: Path, names: Sequence[str], num_rows: int) -> dict[str, Column]:
    opened = {name: _open(place / _file_name(name), num_rows) for name in dict.fromkeys(names)}
    return {name: column for name, column in opened.items() if column is not None}


def _file_name(name: str) -> str:
    return f"{quote(name, safe='')}.npy"


def _open(path: Path, num_rows: int) -> Column | None:
    if not path.exists():
        return None
    try:
        array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        logger.warning("column cache %s is damaged (%s); it is built again", path, error)
        return None
    if array.ndim != 2 or len(array) != num_rows:
        logger.warning("column cache %s has shape %s, expected %d rows; it is built again", path, array.shape, num_rows)
        return None
    # A plain view: indexing the memmap class costs several times as much per call.
    column: Column = array.view(np.ndarray)
    return column


def _supersede(store: Store, episodes: EpisodeTable, place: Path) -> None:
    """Note what the arrays in `place` are made from; name what changed since an earlier build, and remove that build.

    The arrays of a copy of the dataset at another address are not touched.
    """
    record = place / _RECORD
    if record.exists():
        return
    versions = {key: info.version for key, info in _listed(episodes).items()}
    for other in place.parent.glob(f"columns-*/{_RECORD}"):
        try:
            earlier = json.loads(other.read_bytes())
            same, seen = earlier["uri"] == store.uri, dict(earlier["versions"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if same:
            changed = sorted(key for key in versions if seen.get(key) != versions[key])
            few = ", ".join(changed[:8]) + (f" and {len(changed) - 8} more" if len(changed) > 8 else "")
            logger.warning("data objects changed since their columns were read: %s; columns are built again", few)
            shutil.rmtree(other.parent, ignore_errors=True)  # who has them mapped keeps them
    with replacing(record) as temporary:
        temporary.write_text(json.dumps({"uri": store.uri, "versions": versions}))


def _build(store: Store, episodes: EpisodeTable, names: Sequence[str], place: Path, needed: Collection[str]) -> None:
    by_file = np.argsort(episodes.data_object, kind="stable")
    ends = np.searchsorted(episodes.data_object[by_file], np.arange(len(episodes.data_keys)), side="right")
    starts = np.append(0, ends[:-1])
    listed = _listed(episodes)
    targets: dict[str, tuple[ArrayFile, str]] = {}
    creating = threading.Lock()

    def fill(number: int) -> None:
        key, members = episodes.data_keys[number], by_file[starts[number] : ends[number]]
        rows = RowMap(episodes, members, key)
        info = listed[key] if listed[key].size >= 0 else ObjectInfo(size=store.size(key), version="")
        try:
            with open_projection(store, key, info, names, ("episode_index",), ranges) as projection:
                rows.check_count(projection.num_rows)
                begin = 0
                for values in projection.batches():
                    put(key, rows, begin, values)
                    begin += len(next(iter(values.values())))
        except MetadataError as error:
            raise MetadataError(f"{error} [{rows.describe()}]") from error
        if info.size >= _LARGE_BYTES:
            _give_back_memory()

    def put(key: str, rows: RowMap, begin: int, values: dict[str, NDArray[Any]]) -> None:
        if "episode_index" in values:
            rows.check_ids(begin, values["episode_index"][:, 0])
        for name in names:
            part = values[name]
            with creating:
                if name not in targets:  # the first file that is read settles type and width
                    shape = (episodes.num_rows, part.shape[1])
                    array = stack.enter_context(new_array(place / _file_name(name), part.dtype, shape))
                    targets[name] = array, key
                target, first_key = targets[name]
            if (part.dtype, part.shape[1]) != (target.dtype, target.shape[1]):
                raise MetadataError(
                    f"{key}: column {name} is {part.dtype} [{part.shape[1]}], in {first_key} it is "
                    f"{target.dtype} [{target.shape[1]}]"
                )
            for source, first_row in rows.pieces(begin, len(part)):
                target.write(first_row, part[source])

    failed: list[int] = []
    gaps: dict[int, MetadataError] = {}

    def guarded(number: int) -> None:
        if failed and number > min(failed):  # the error of the first bad file is raised, and nothing is kept
            return
        try:
            fill(number)
        except MetadataError as error:
            gaps[number] = error
            if episodes.data_keys[number] in needed:
                failed.append(number)
                raise
        except BaseException:
            failed.append(number)
            raise

    def leave_out() -> None:
        if len(gaps) == len(episodes.data_keys):  # nobody knows what such a column looks like
            raise gaps[min(gaps)]
        for number, error in sorted(gaps.items()):
            logger.warning("%s; its episodes cannot be used", error)
            for position in by_file[starts[number] : ends[number]].tolist():
                for target, _ in targets.values():
                    empty = np.full((int(episodes.length[position]), target.shape[1]), _EMPTY[target.dtype.kind])
                    target.write(int(episodes.first_row[position]), empty.astype(target.dtype))
        reasons = {episodes.data_keys[number]: str(error) for number, error in gaps.items()}
        for name in names:  # before the array itself is there
            path = place / f"{_file_name(name)}.gaps.json"
            path.unlink(missing_ok=True)
            if reasons:
                with replacing(path) as temporary:
                    temporary.write_text(json.dumps(reasons))

    # Files fill disjoint rows, so they are read side by side; the results stay in the files and not in memory. The
    # arrays outlive the threads that write to them, also when one of these fails.
    readers = min(_readers(store, listed), len(episodes.data_keys))
    with (
        ExitStack() as stack,
        ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="knonik-ranges") as ranges,
        ThreadPoolExecutor(readers, thread_name_prefix="knonik-columns") as pool,
    ):
        for _ in pool.map(guarded, range(len(episodes.data_keys))):
            pass
        leave_out()
    _give_back_memory()


def _give_back_memory() -> None:
    """Return freed memory to the system.

    A long footer is parsed to a million small pieces; glibc keeps them when they are freed, some 10 MB for every file.
    """
    pa.default_memory_pool().release_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have no such call, and no such need
    if trim is not None:
        trim(0)


def _readers(store: Store, listed: dict[str, ObjectInfo]) -> int:
    """Files to read at once: as many as compute locally; from a store as many as memory allows to hide its latency."""
    if store.is_local:
        return min(8, os.cpu_count() or 1)
    mean_bytes = max(1, sum(max(0, info.size) for info in listed.values()) // len(listed))
    return int(np.clip(_REMOTE_BYTES // mean_bytes, 2, _REMOTE_READERS))
