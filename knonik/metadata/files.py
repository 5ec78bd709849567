"""Files below `meta/`: fetched side by side, parsed strictly, and every complaint names the file and the key."""

import io
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from knonik.stores.base import Store

_READERS = 16  # metadata files are small: what their reading waits for is the latency of a store
_IN_FLIGHT_BYTES = 256 << 20  # of big sets, whose per-episode statistics make hundreds of megabytes


class MetadataError(ValueError):
    """The dataset's metadata is missing, damaged or contradicts its files."""


def read_in_order(store: Store, sizes: Mapping[str, int]) -> Iterator[tuple[str, bytes]]:
    """(key, bytes) of the given objects in the order given; a bounded number of bytes is on its way at a time."""
    pending: deque[tuple[str, Future[bytes]]] = deque()
    in_flight = 0
    with ThreadPoolExecutor(min(_READERS, max(1, len(sizes))), thread_name_prefix="knonik-meta") as pool:
        try:
            for key, size in sizes.items():
                while pending and in_flight + size > _IN_FLIGHT_BYTES:
                    ready, body = pending.popleft()
                    yield ready, body.result()
                    in_flight -= sizes[ready]
                pending.append((key, pool.submit(store.read, key)))
                in_flight += size
            while pending:
                ready, body = pending.popleft()
                yield ready, body.result()
        finally:
            pool.shutdown(cancel_futures=True)


def entry(mapping: Mapping[str, Any], key: str, source: str) -> Any:
    """A required entry of a JSON object."""
    if key not in mapping:
        raise MetadataError(f"{source}: key {key} is missing; it has {', '.join(sorted(mapping))}")
    return mapping[key]


def json_object(body: bytes, source: str) -> dict[str, Any]:
    """A JSON file that must hold one object."""
    try:
        value = json.loads(body)
    except ValueError as error:
        raise MetadataError(f"{source}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise MetadataError(f"{source}: holds {type(value).__name__}, an object was expected")
    return value


def json_lines(files: Mapping[str, bytes], source: str) -> list[dict[str, Any]]:
    """A file of one JSON object per line; empty lines do not count."""
    if source not in files:
        raise MetadataError(f"{source} is missing")
    # Not splitlines(): texts may hold characters such as U+2028, which it would take for line ends.
    lines = files[source].split(b"\n")
    return [json_object(line, f"{source} line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def parquet_table(body: bytes, source: str, leave_out: Sequence[str] = ()) -> Any:
    """A Parquet file as an Arrow table without the columns that begin with one of `leave_out`."""
    try:
        with pq.ParquetFile(io.BytesIO(body)) as file:
            names = [name for name in file.schema_arrow.names if not name.startswith(tuple(leave_out))]
            return file.read(columns=names, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise MetadataError(f"{source}: not a readable Parquet file ({error})") from error
