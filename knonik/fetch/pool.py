"""Which units of compressed packets are kept in memory: hits, ranges to fetch and evictions, without any I/O.

Every decision depends on the order of the announced batches alone, never on how fast anything was fetched or decoded.
So the number of GETs of a run is known before it starts, and the same on every machine.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from knonik.fetch.ranges import ByteRange, Piece, Unit, alone, merged

HORIZON = 64  # batches whose needs are known when it is decided what to evict
_MAX_RANGE_BYTES = 4 << 20  # a longer body occupies a connection for so long that others finish sooner


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What happens for one batch.

    hits: in the pool already. ranges: to fetch. passed: not kept because the pool is smaller than the batch; whoever
    needs them reads them. elsewhere: found where reading costs no GET. evicted: leave the pool once no batch uses them.
    """

    number: int
    hits: tuple[Piece, ...]
    ranges: tuple[ByteRange, ...]
    passed: tuple[Piece, ...]
    elsewhere: tuple[Piece, ...]
    evicted: tuple[Unit, ...]


@dataclass(slots=True)
class _Kept:
    length: int
    last: int  # batch that used it last, by place in the order
    next: int | None = None  # next batch that is known to use it


@dataclass(frozen=True, slots=True)
class _Batch:
    number: int
    pieces: tuple[Piece, ...]


@dataclass(slots=True)
class _Recent:
    """Bytes by the batch that used them last, and from which batch on they make up no more than `limit`."""

    limit: int
    first: int = 0
    total: int = 0
    by_batch: dict[int, int] = field(default_factory=dict)

    def add(self, batch: int, length: int) -> None:
        if batch < self.first:
            return
        self.by_batch[batch] = self.by_batch.get(batch, 0) + length
        self.total += length
        while self.total > self.limit:
            self.total -= self.by_batch.pop(self.first, 0)
            self.first += 1

    def remove(self, batch: int, length: int) -> None:
        if batch >= self.first:
            self.total -= length
            self.by_batch[batch] -= length
            if not self.by_batch[batch]:
                del self.by_batch[batch]


class Pool:
    """The logical content of a pool of at most `limit_bytes`.

    A unit leaves when room is needed: first those without a known next use, the longest unused first, then by farthest
    next use. Units of the batches just fetched, up to half of the pool, go last: the decoder has yet to use them, so
    evicting them would make fetching ahead wait for it.

    Args:
        limit_bytes: bound of all kept units together, and of the bodies being fetched.
        merge_gap_bytes: two ranges of one object are fetched by one GET if no more than this lies between them.
        span: (offset, length) of a unit, for those that lie in a gap.
        horizon: batches beyond the one decided whose needs count as known.
    """

    def __init__(
        self,
        limit_bytes: int,
        *,
        merge_gap_bytes: int,
        span: Callable[[str, int], tuple[int, int]],
        horizon: int = HORIZON,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.horizon = horizon
        self.used_bytes = 0
        self._merge_gap, self._span = merge_gap_bytes, span
        self._max_range = min(_MAX_RANGE_BYTES, limit_bytes // 8)
        self._kept: dict[Unit, _Kept] = {}
        self._idle: OrderedDict[Unit, None] = OrderedDict()  # without a known use, the longest unused first
        self._farthest: list[
            tuple[int, Unit]
        ] = []  # heap of (-next use, unit); entries that no longer hold are skipped
        self._uses: dict[Unit, deque[int]] = {}  # known uses to come
        self._recent = _Recent(limit_bytes // 2)
        self._waiting: deque[_Batch] = deque()  # announced, not decided
        self._seen = 0  # batches whose needs are in `_uses`
        self._decided = 0

    @property
    def num_waiting(self) -> int:
        """Batches announced and not decided."""
        return len(self._waiting)

    def announce(self, number: int, pieces: Sequence[Piece]) -> None:
        """A batch to decide on later; batches come in order, their pieces in any."""
        found = {piece.unit: piece for piece in pieces}.values()
        self._waiting.append(_Batch(number, tuple(sorted(found, key=lambda piece: (piece.key, piece.offset)))))

    def decide(self, *, force: bool = False, elsewhere: Callable[[Piece], bool] | None = None) -> Decision | None:
        """What happens for the next batch.

        Args:
            force: decide even if eviction is needed and fewer than `horizon` batches beyond are announced.
            elsewhere: whether a piece that is not in the pool need not be fetched into it.

        Returns:
            None: no batch, or not enough batches announced to choose well.
        """
        if not self._waiting:
            return None
        batch, now = self._waiting[0], self._decided
        hits = [piece for piece in batch.pieces if piece.unit in self._kept]
        missing = [piece for piece in batch.pieces if piece.unit not in self._kept]
        left = {piece.unit for piece in missing if elsewhere(piece)} if elsewhere is not None else set()
        ranges, passed = self._ranges(
            [piece for piece in missing if piece.unit not in left], sum(piece.length for piece in hits)
        )
        short = self.used_bytes + sum(part.cost for part in ranges) - self.limit_bytes
        if short > 0 and len(self._waiting) <= self.horizon and not force:
            return None
        self._look_ahead(now)
        for piece in batch.pieces:
            self._used(piece.unit, now)
        for piece in hits:
            self._touch(piece.unit, now)
        evicted = tuple(self._evict(short, now)) if short > 0 else ()
        for part in ranges:
            for piece in part.pieces:
                self._admit(piece, now)
        ranges = [self._with_gaps(part, now, keep_all=not evicted) for part in ranges]
        self._waiting.popleft()
        self._decided += 1
        return Decision(
            number=batch.number,
            hits=tuple(hits),
            ranges=tuple(ranges),
            passed=tuple(passed),
            elsewhere=tuple(piece for piece in missing if piece.unit in left),
            evicted=evicted,
        )

    def forget(self, unit: Unit) -> None:
        """A unit that could not be fetched: the next batch that needs it tries again."""
        if unit in self._kept:
            self._drop(unit)
            self._idle.pop(unit, None)

    def _ranges(self, missing: list[Piece], taken: int) -> tuple[list[ByteRange], list[Piece]]:
        """Ranges that fit beside `taken` bytes, and the pieces that do not."""
        ranges = merged(missing, self._merge_gap, self._max_range)
        if taken + sum(part.cost for part in ranges) <= self.limit_bytes:
            return ranges, []
        fitting, passed = [], []
        for piece in missing:  # without gaps, as far as it goes
            if taken + piece.length <= self.limit_bytes:
                taken += piece.length
                fitting.append(piece)
            else:
                passed.append(piece)
        return [alone(piece) for piece in fitting], passed

    def _look_ahead(self, now: int) -> None:
        for place in range(self._seen, min(now + self.horizon, now + len(self._waiting) - 1) + 1):
            for piece in self._waiting[place - now].pieces:
                self._uses.setdefault(piece.unit, deque()).append(place)
                kept = self._kept.get(piece.unit)
                if kept is not None and kept.next is None:
                    del self._idle[piece.unit]
                    self._queue(piece.unit, kept)
            self._seen = place + 1

    def _used(self, unit: Unit, now: int) -> None:
        uses = self._uses[unit]
        uses.popleft()
        if not uses:
            del self._uses[unit]

    def _touch(self, unit: Unit, now: int) -> None:
        kept = self._kept[unit]
        self._recent.remove(kept.last, kept.length)
        self._idle.pop(unit, None)
        kept.last = now
        self._recent.add(now, kept.length)
        self._queue(unit, kept)

    def _admit(self, piece: Piece, now: int) -> None:
        kept = self._kept[piece.unit] = _Kept(piece.length, now)
        self.used_bytes += piece.length
        self._recent.add(now, piece.length)
        self._queue(piece.unit, kept)

    def _queue(self, unit: Unit, kept: _Kept) -> None:
        """Note the next use: where the unit stands among those to evict."""
        uses = self._uses.get(unit)
        kept.next = uses[0] if uses else None
        if kept.next is None:
            self._idle[unit] = None
        else:
            heapq.heappush(self._farthest, (-kept.next, unit))
            if len(self._farthest) > 2 * len(self._kept) + 1000:
                self._farthest = [(-each.next, unit) for unit, each in self._kept.items() if each.next is not None]
                heapq.heapify(self._farthest)

    def _evict(self, short: int, now: int) -> Iterator[Unit]:
        for unit in [*self._victims(short, min(self._recent.first, now))]:
            short -= self._drop(unit)
            yield unit
        if short > 0:  # the batch itself is larger than half of the pool
            for unit in [*self._victims(short, now)]:
                self._drop(unit)
                yield unit

    def _victims(self, short: int, before: int) -> Iterator[Unit]:
        """Units to evict among those last used before batch `before`, until `short` bytes are found."""
        idle = []
        for unit in self._idle:
            if short <= 0 or self._kept[unit].last >= before:
                break
            short -= self._kept[unit].length
            idle.append(unit)
        for unit in idle:
            del self._idle[unit]
            yield unit
        spared = []
        while short > 0 and self._farthest:
            entry = heapq.heappop(self._farthest)
            kept = self._kept.get(entry[1])
            if kept is None or kept.next != -entry[0]:
                continue
            if kept.last >= before:
                spared.append(entry)
                continue
            short -= kept.length
            kept.next = None  # further entries of it in the heap no longer hold
            yield entry[1]
        for entry in spared:
            heapq.heappush(self._farthest, entry)

    def _drop(self, unit: Unit) -> int:
        kept = self._kept.pop(unit)
        self._recent.remove(kept.last, kept.length)
        self.used_bytes -= kept.length
        return kept.length

    def _with_gaps(self, part: ByteRange, now: int, *, keep_all: bool) -> ByteRange:
        """The range with the whole units between its pieces, which come along anyway.

        They stay if that costs no other unit its place, or if they are needed soon.
        """
        gaps: list[Piece] = []
        spare = part.cost - sum(piece.length for piece in part.pieces)
        for before, after in pairwise(part.pieces):
            for group in range(before.group + 1, after.group):
                offset, length = self._span(part.key, group)
                gap = Piece(key=part.key, group=group, offset=offset, length=length)
                inside = length <= spare and part.offset <= offset and gap.end <= part.offset + part.length
                if inside and gap.unit not in self._kept and (keep_all or gap.unit in self._uses):
                    self._admit(gap, now)
                    spare -= length
                    gaps.append(gap)
        return replace(part, gaps=tuple(gaps))
