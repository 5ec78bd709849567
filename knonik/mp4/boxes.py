"""Bytes and boxes of an MP4 file: length, kind and body, nested. Layout: ISO/IEC 14496-12, clause 4.2."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from knonik.stores.base import Store


class Mp4Error(ValueError):
    """The file is not an MP4 this parser can index; the message names the file and the box."""


class Box(NamedTuple):
    """kind: four letters. body: what follows the header. begin: where the header starts in the bytes searched."""

    kind: bytes
    body: bytes
    begin: int


class BoxHeader(NamedTuple):
    """kind: four letters. length: bytes of the whole box. header: bytes before its body."""

    kind: bytes
    length: int
    header: int


def box_header(data: bytes, start: int, rest: int) -> BoxHeader:
    """The header at `start` of `data`, of a box that may be `rest` bytes long; needs 16 bytes where the box has them.

    Raises:
        IndexError: the length is impossible.
    """
    length, kind = struct.unpack_from(">I4s", data, start)
    header = 8
    if length == 1:
        length, header = struct.unpack_from(">Q", data, start + 8)[0], 16
    elif length == 0:
        length = rest  # the last box may run to the end
    if length < header or length > rest:
        raise IndexError(f"box {kind!r} claims {length} bytes where {rest} are left")
    return BoxHeader(kind, length, header)


def boxes(data: bytes, start: int = 0) -> Iterator[Box]:
    """The boxes that follow each other in `data` from `start` on."""
    while start + 8 <= len(data):
        kind, length, header = box_header(data, start, len(data) - start)
        yield Box(kind, data[start + header : start + length], start)
        start += length


def child(data: bytes, *path: bytes) -> bytes | None:
    """Body of the first box at a path of kinds, None where there is none."""
    for kind in path:
        found = next((box.body for box in boxes(data) if box.kind == kind), None)
        if found is None:
            return None
        data = found
    return data


def need(data: bytes, key: str, *path: bytes) -> bytes:
    """`child`, where its absence is an error of file `key`."""
    body = child(data, *path)
    if body is None:
        raise Mp4Error(f"{key}: box {'/'.join(kind.decode('latin-1') for kind in path)} is missing")
    return body


class FileBytes:
    """Bytes of one object, each read once.

    Args:
        version: if given, the object must still have it.
    """

    def __init__(self, store: Store, key: str, total: int, version: str | None = None) -> None:
        self.key, self.total = key, total
        self._store, self._version = store, version
        self._parts: list[tuple[int, bytes]] = []
        self.reads = 0

    def get(self, begin: int, end: int) -> bytes:
        """Bytes from `begin` up to `end`, from what is there and one read of what is missing between."""
        front, back = b"", b""
        for start, part in self._parts:
            if start <= begin and end <= start + len(part):
                return part[begin - start : end - start]
            if start <= begin < start + len(part):
                front = max(front, part[begin - start :], key=len)
            elif start < end <= start + len(part):
                back = max(back, part[: end - start], key=len)
        middle = self._read(begin + len(front), end - begin - len(front) - len(back))
        body = front + middle + back
        self._parts.append((begin, body))
        return body

    def held(self, begin: int, end: int) -> bool:
        """Whether these bytes need no read."""
        return any(start <= begin and end <= start + len(part) for start, part in self._parts)

    def forget(self, before: int) -> None:
        """Drop what ends at or before this byte."""
        self._parts = [(start, part) for start, part in self._parts if start + len(part) > before]

    def _read(self, begin: int, length: int) -> bytes:
        if length <= 0:
            return b""
        self.reads += 1
        if self._version:
            return self._store.read_range(self.key, begin, length, version=self._version)
        return self._store.read_range(self.key, begin, length)
