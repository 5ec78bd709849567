"""Parts of a remote object as a file: the byte ranges a reader will ask for, fetched together before it asks."""

import io
import os
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from knonik.stores.base import ObjectInfo, Store

MERGE_GAP_BYTES = 256 << 10  # latency times share of the link: 30 ms of 1 Gbit/s over 16 connections
RANGE_BYTES = 8 << 20  # longer ranges are cut, so that several connections share them


def merged_ranges(ranges: Sequence[tuple[int, int]], gap_bytes: int, limit_bytes: int) -> list[tuple[int, int]]:
    """Ranges (begin, end) that cover the given ones in rising order, none longer than `limit_bytes`.

    Two ranges become one when at most `gap_bytes` lie between them.
    """
    joined: list[list[int]] = []
    for begin, end in sorted(ranges):
        if joined and begin - joined[-1][1] <= gap_bytes:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    cut = []
    for begin, end in joined:
        pieces = max(1, -(-(end - begin) // limit_bytes))
        step = -(-(end - begin) // pieces)
        cut += [(place, min(place + step, end)) for place in range(begin, end, max(1, step))]
    return cut


class SparseFile(io.RawIOBase):
    """A seekable read-only file over one object of which some ranges are in memory; others are read when asked for."""

    def __init__(self, store: Store, key: str, info: ObjectInfo) -> None:
        self._store, self._key, self._info = store, key, info
        self._position = 0
        self._begins: list[int] = []
        self._bodies: list[bytes] = []

    def fetch(self, ranges: Sequence[tuple[int, int]], pool: ThreadPoolExecutor | None = None) -> None:
        """Bring ranges (begin, end) to memory, as few reads of bounded length, side by side in `pool`."""
        wanted = [
            part
            for part in merged_ranges(ranges, MERGE_GAP_BYTES, RANGE_BYTES)
            if part[1] > part[0] and self._held(part[0], part[1] - part[0]) is None
        ]
        bodies = [self._read(*part) for part in wanted] if pool is None else pool.map(lambda p: self._read(*p), wanted)
        for (begin, _), body in zip(wanted, bodies, strict=True):
            place = bisect_right(self._begins, begin)
            self._begins.insert(place, begin)
            self._bodies.insert(place, body)

    def _read(self, begin: int, end: int) -> bytes:
        return self._store.read_range(self._key, begin, end - begin, version=self._info.version or None)

    def _held(self, begin: int, length: int) -> memoryview | None:
        """Bytes from one range or from ranges that follow each other without a gap, None where some are not held."""
        place = bisect_right(self._begins, begin) - 1
        parts, position, end = [], begin, begin + length
        while position < end:
            if place < 0 or place >= len(self._begins):
                return None
            inside = position - self._begins[place]
            part = memoryview(self._bodies[place])[max(0, inside) : inside + end - position]
            if inside < 0 or not len(part):
                return None
            parts.append(part)
            position += len(part)
            place += 1
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._info.size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        length = max(0, min(len(buffer), self._info.size - self._position))
        if length:
            held = self._held(self._position, length)
            buffer[:length] = self._read(self._position, self._position + length) if held is None else held
            self._position += length
        return length
