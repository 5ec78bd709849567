"""Some columns of one Parquet object as a stream of arrays: only their bytes are read, only a batch is in memory."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from knonik.metadata.files import MetadataError
from knonik.stores.base import ObjectInfo, Store, StoreError
from knonik.stores.sparse_file import SparseFile

TAIL_BYTES = 128 << 10  # first read of a remote object: the footer of most, and the whole of a small one
_BATCH_ROWS = 1 << 15
_BUFFER_BYTES = 1 << 20  # local files are read in such steps, so the size of a row group does not matter
_MAGIC = b"PAR1"
_PADDING_BYTES = 128  # some old writers state a chunk's length a little too short, and readers ask for more


class Projection:
    """The named columns of one object, opened by `open_projection`; `num_rows` is what the footer says."""

    def __init__(self, file: Any, key: str, names: Sequence[str], leaves: dict[str, list[str]]) -> None:
        self._file, self._key, self._names = file, key, tuple(names)
        self._leaves = [leaf for name in names for leaf in leaves[name]]
        self.num_rows: int = file.metadata.num_rows

    def batches(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Rows in file order, some ten thousand at a time: name -> [n, D], float32 or int64."""
        # One thread: builders of several ranks or data files share the machine.
        for batch in self._file.iter_batches(_BATCH_ROWS, columns=self._leaves, use_threads=False):
            yield {name: to_numpy(batch.column(name), self._key, name) for name in self._names}


@contextmanager
def open_projection(
    store: Store,
    key: str,
    info: ObjectInfo,
    names: Sequence[str],
    optional: Sequence[str] = (),
    pool: ThreadPoolExecutor | None = None,
) -> Iterator[Projection]:
    """Open one object for its columns `names`, and those of `optional` that it has.

    A remote object costs one read for its footer, a second one where the footer is long, and then one for each stretch
    of wanted column chunks.

    Args:
        info: its size, and the version the reads insist on where one is known.
        pool: fetches the stretches of a remote object side by side.

    Raises:
        MetadataError: no Parquet file, or a column is missing; names the object.
        StoreError: it could not be read, or has changed.
    """
    tail_bytes = min(info.size, 8 if store.local_path(key) is not None else TAIL_BYTES)
    source = SparseFile(store, key, info)
    source.fetch([(info.size - tail_bytes, info.size)])
    source.seek(-min(8, tail_bytes), 2)
    end = source.read(8) or b""
    footer_bytes = int.from_bytes(end[:4], "little") + 8
    if info.size < 12 or end[4:] != _MAGIC or footer_bytes > info.size - 4:
        raise MetadataError(
            f"{key}: not a readable Parquet file (its {info.size} bytes do not end in a footer); "
            "recording may have been cut off before its footer"
        )
    path = store.local_path(key)
    try:
        if path is not None:
            file = pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        else:
            if footer_bytes > tail_bytes:
                source.fetch([(info.size - footer_bytes, info.size - tail_bytes)])
            file = pq.ParquetFile(source, pre_buffer=False)
        with file:
            present = set(file.schema_arrow.names)
            if absent := [name for name in names if name not in present]:
                raise MetadataError(f"{key}: column {absent[0]} is missing; it has {', '.join(sorted(present))}")
            wanted = list(dict.fromkeys([*names, *(name for name in optional if name in present)]))
            numbers = _leaf_numbers(file.schema_arrow)
            if path is None:
                source.fetch(_chunks(file.metadata, {i for name in wanted for i in numbers[name]}), pool)
            # Not by `file.schema`: that refers to the footer which refers to it, so neither would be freed in time.
            first = file.metadata.row_group(0) if file.metadata.num_row_groups else None
            paths = {name: [first.column(i).path_in_schema for i in numbers[name]] if first else [] for name in wanted}
            yield Projection(file, key, wanted, paths)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, StoreError) or getattr(error, "errno", None) is not None:
            raise  # reading failed; pages that make no sense are OSErrors without a number
        raise MetadataError(f"{key}: not a readable Parquet file ({error})") from error


def _leaf_numbers(schema: Any) -> dict[str, list[int]]:
    """Column name -> numbers of its leaf columns in the file, which are counted in schema order."""
    numbers, count = {}, 0
    for field in schema:
        leaves = _num_leaves(field.type)
        numbers[field.name] = list(range(count, count + leaves))
        count += leaves
    return numbers


def _num_leaves(kind: Any) -> int:
    if isinstance(kind, pa.ExtensionType):
        return _num_leaves(kind.storage_type)
    if pa.types.is_dictionary(kind) or not kind.num_fields:
        return 1
    return sum(_num_leaves(kind.field(i).type) for i in range(kind.num_fields))


def _chunks(metadata: Any, leaves: set[int]) -> list[tuple[int, int]]:
    """Byte ranges (begin, end) of the given leaf columns in all row groups."""
    ranges = []
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for leaf in sorted(leaves):
            chunk = row_group.column(leaf)
            begin = chunk.data_page_offset
            if chunk.dictionary_page_offset:  # some writers put 0 there for "none"
                begin = min(begin, chunk.dictionary_page_offset)
            ranges.append((begin, begin + chunk.total_compressed_size + _PADDING_BYTES))
    last = max((end for _, end in ranges), default=0)
    return [(begin, min(end, last - _PADDING_BYTES)) for begin, end in ranges]


def to_numpy(array: Any, key: str, name: str) -> NDArray[Any]:
    """[rows, D] array of a column of numbers or of (nested) lists of constant length: float32 or int64.

    Raises:
        MetadataError: empty values, lists of different lengths, or no numbers; names the object and the column.
    """
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
        numbers = array.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    elif pa.types.is_floating(kind):
        numbers = array.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    else:
        raise MetadataError(f"{key}: column {name} holds {kind}; only numbers, booleans and lists of them can be used")
    if not numbers.size:
        raise MetadataError(f"{key}: column {name} has values without elements")
    values: NDArray[Any] = numbers.reshape(rows, -1)
    return values
