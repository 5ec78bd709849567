"""Byte ranges of objects: the units of packets that are fetched and kept, and how near ones share a GET."""

from collections.abc import Sequence
from dataclasses import dataclass

Unit = tuple[str, int]  # (object key, number of a GOP inside it)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A unit and the bytes of its object that it consists of."""

    key: str
    group: int
    offset: int
    length: int

    @property
    def unit(self) -> Unit:
        """What it is kept under."""
        return self.key, self.group

    @property
    def end(self) -> int:
        """First byte behind it."""
        return self.offset + self.length


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteRange:
    """One GET, the pieces it is made for, and those in the gaps between them that are kept as well."""

    key: str
    offset: int
    length: int
    pieces: tuple[Piece, ...]
    gaps: tuple[Piece, ...] = ()

    @property
    def cost(self) -> int:
        """Bytes of memory it may take: the body, or its pieces where they overlap (leading pictures of open GOPs)."""
        return max(self.length, sum(piece.length for piece in self.pieces))


def merged(pieces: Sequence[Piece], gap_bytes: int, max_bytes: int) -> list[ByteRange]:
    """Pieces as few ranges: near ones of one object together, none longer than `max_bytes` unless a piece is."""
    ranges: list[ByteRange] = []
    group: list[Piece] = []
    end = 0
    for piece in sorted(pieces, key=lambda piece: (piece.key, piece.offset, piece.group)):
        if group and (
            piece.key != group[0].key
            or piece.offset - end > gap_bytes
            or max(end, piece.end) - group[0].offset > max_bytes
        ):
            ranges.append(_together(group, end))
            group = []
        end = max(end, piece.end) if group else piece.end
        group.append(piece)
    return [*ranges, _together(group, end)] if group else ranges


def _together(pieces: list[Piece], end: int) -> ByteRange:
    first = pieces[0]
    return ByteRange(key=first.key, offset=first.offset, length=end - first.offset, pieces=tuple(pieces))


def alone(piece: Piece) -> ByteRange:
    """The range of one piece."""
    return ByteRange(key=piece.key, offset=piece.offset, length=piece.length, pieces=(piece,))
