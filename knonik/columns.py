"""Low-dimensional columns as memory-mapped arrays: read once from Parquet, then shared by all processes of a machine.

Only the wanted columns are read, and no Python object is made per row. Arrays cover all rows of the dataset in
episode-table order.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from knonik.cache import new_array, one_builder
from knonik.episodes import EpisodeTable
from knonik.lerobot import MetadataError
from knonik.store import Store

logger = logging.getLogger(__name__)

_READERS = 8  # files read at once: enough to hide a store's latency, few enough to bound memory

Column = NDArray[np.float32] | NDArray[np.int64]


def load_columns(store: Store, episodes: EpisodeTable, names: Sequence[str], folder: Path) -> dict[str, Column]:
    """Read-only arrays [rows, D] of the named columns, built under `folder` where they are not there yet.

    Floats become float32, integers and booleans int64; a scalar column has D = 1 and nested lists are flattened.

    Args:
        episodes: table of the whole dataset, not of a subset: the arrays are shared.

    Raises:
        MetadataError: a column is missing, empty in places, of changing length or not numeric; a file has other rows
            than the metadata says.
    """
    columns = _open_all(folder, names, episodes.num_rows)
    if len(columns) < len(set(names)):
        with one_builder(folder, "columns"):
            there = _open_all(folder, names, episodes.num_rows)  # another process may have been faster
            missing = [name for name in dict.fromkeys(names) if name not in there]
            if missing:
                logger.info("reading columns %s of %d data files", ", ".join(missing), len(episodes.data_keys))
                _build(store, episodes, missing, folder)
        columns = _open_all(folder, names, episodes.num_rows)
    if vanished := [name for name in names if name not in columns]:
        raise OSError(f"column files of {vanished} vanished from {folder} right after they were written")
    return {name: columns[name] for name in names}


def _open_all(folder: Path, names: Sequence[str], num_rows: int) -> dict[str, Column]:
    opened = {name: _open(folder / _file_name(name), num_rows) for name in dict.fromkeys(names)}
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


def _build(store: Store, episodes: EpisodeTable, names: Sequence[str], folder: Path) -> None:
    by_file = np.argsort(episodes.data_object, kind="stable")
    ends = np.searchsorted(episodes.data_object[by_file], np.arange(len(episodes.data_keys)), side="right")
    starts = np.append(0, ends[:-1])
    targets: dict[str, NDArray[Any]] = {}

    def fill(number: int) -> None:
        key, members = episodes.data_keys[number], by_file[starts[number] : ends[number]]
        values = _read_file(store, key, names, optional="episode_index")
        rows = _member_rows(episodes, members, key, values)
        for name in names:
            part = values[name]
            if name not in targets:  # only in the first file, which is read alone
                shape = (episodes.num_rows, part.shape[1])
                targets[name] = stack.enter_context(new_array(folder / _file_name(name), part.dtype, shape))
            target = targets[name]
            if part.shape[1] != target.shape[1] or part.dtype != target.dtype:
                raise MetadataError(
                    f"{key}: column {name} is {part.dtype} [{part.shape[1]}], in {episodes.data_keys[0]} it is "
                    f"{target.dtype} [{target.shape[1]}]"
                )
            for position, source in zip(members, rows, strict=True):
                begin = episodes.first_row[position]
                target[begin : begin + episodes.length[position]] = part[source]

    # Files fill disjoint rows, so they are read side by side; the results stay in the mapped files and not in memory.
    with ExitStack() as stack:
        fill(0)
        pool = stack.enter_context(ThreadPoolExecutor(_READERS, thread_name_prefix="knonik-columns"))
        for _ in pool.map(fill, range(1, len(episodes.data_keys))):
            pass


def _member_rows(
    episodes: EpisodeTable, members: NDArray[np.int64], key: str, values: dict[str, NDArray[Any]]
) -> list[slice]:
    """Row ranges of the file's episodes, checked against the file's own row count and episode ids."""
    count = len(next(iter(values.values())))
    expected = int((episodes.data_row[members] + episodes.length[members]).max())
    if count != expected:
        ids = episodes.ids[members]
        raise MetadataError(
            f"{key}: has {count} rows, the metadata of episodes {ids.min()}..{ids.max()} says {expected}"
        )
    rows = [slice(int(episodes.data_row[i]), int(episodes.data_row[i] + episodes.length[i])) for i in members]
    stored = values.get("episode_index")
    if stored is not None:
        for position, source in zip(members, rows, strict=True):
            if np.any(stored[source] != episodes.ids[position]):
                found = np.unique(stored[source])[:4].tolist()
                raise MetadataError(
                    f"{key}: rows {source.start}..{source.stop - 1} should be episode {episodes.ids[position]}, "
                    f"their episode_index is {found}"
                )
    return rows


def _read_file(store: Store, key: str, names: Sequence[str], optional: str) -> dict[str, NDArray[Any]]:
    path = store.local_path(key)
    try:
        with pq.ParquetFile(path if path is not None else store.open(key)) as file:
            present = set(file.schema_arrow.names)
            absent = [name for name in names if name not in present]
            if absent:
                raise MetadataError(f"{key}: column {absent[0]} is missing; it has {', '.join(sorted(present))}")
            # One thread: builders of several ranks or data files share the machine.
            table = file.read(
                columns=[name for name in dict.fromkeys([*names, optional]) if name in present], use_threads=False
            )
    except (pa.ArrowException, OSError) as error:
        raise MetadataError(
            f"{key}: not a readable Parquet file ({error}); recording may have been cut off before its footer"
        ) from error
    return {name: _to_numpy(table.column(name), key, name) for name in table.column_names}


def _to_numpy(chunked: Any, key: str, name: str) -> NDArray[Any]:
    """[rows, D] array of a column of numbers or of (nested) lists of constant length."""
    parts = [_flatten(chunk, key, name) for chunk in chunked.chunks if len(chunk)]
    if not parts:
        raise MetadataError(f"{key}: column {name} has no rows")
    widths = {part.shape[1] for part in parts}
    if len(widths) > 1:
        raise MetadataError(f"{key}: column {name} has values of different lengths, {sorted(widths)}")
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _flatten(array: Any, key: str, name: str) -> NDArray[Any]:
    rows = len(array)
    while True:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        if array.null_count:
            raise MetadataError(f"{key}: column {name} has {array.null_count} empty values")
        kind = array.type
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            lengths = np.diff(array.offsets.to_numpy())
            if len(lengths) and lengths.min() != lengths.max():
                raise MetadataError(
                    f"{key}: column {name} has values of different lengths, {lengths.min()} to {lengths.max()}"
                )
            array = array.flatten()
        elif pa.types.is_fixed_size_list(kind):
            array = array.flatten()
        else:
            break
    if pa.types.is_boolean(kind):
        numbers = array.cast(pa.int8()).to_numpy(zero_copy_only=False).astype(np.int64)
    elif pa.types.is_integer(kind):
        numbers = array.to_numpy(zero_copy_only=False).astype(np.int64)
    elif pa.types.is_floating(kind):
        numbers = array.to_numpy(zero_copy_only=False).astype(np.float32)
    else:
        raise MetadataError(f"{key}: column {name} holds {kind}; only numbers, booleans and lists of them can be used")
    if not numbers.size:
        raise MetadataError(f"{key}: column {name} has values without elements")
    values: NDArray[Any] = numbers.reshape(rows, -1)
    return values
