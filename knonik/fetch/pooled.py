"""Packets of a dataset on S3: fetched ahead by plan, kept in a bounded pool, brought to the local disk meanwhile."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence

from knonik.dataset import Dataset
from knonik.fetch.disk import DiskCache
from knonik.fetch.fill import Fill, Residency
from knonik.fetch.pool import Decision, Pool
from knonik.fetch.ranges import Piece, Unit
from knonik.fetch.transfers import Entry, Transfer, Transfers
from knonik.stores.base import StoreError, StoreUnavailable

logger = logging.getLogger(__name__)

MERGE_GAP_BYTES = 128 << 10  # what each of 32 connections to a 1 Gbit/s link could carry in a latency of 30 ms
_MOST_AHEAD = 512  # batches
_AHEAD_OF_FILL = 8  # batches; what is needed later arrives with the fill, in larger ranges
_FILL_CONNECTIONS = 8
_PATIENCE_S = 30.0
_OF_STORE = ("retries", "hedges", "throttled", "resumed", "failed", "in_flight")
_COUNTED = (
    "done_gets",
    "done_get_bytes",
    "pool_hits",
    "pool_misses",
    "disk_hits",
    "forced_decisions",
    "waits",
    "out_of_turn",
)


class PooledSource:
    """Range reads by several connections, ahead of the decoder, into a pool of compressed packets.

    Args:
        dataset: an opened dataset.
        ram_bytes: bound of the pool and of all bodies being fetched, passed by one range at most; 0 = no pool: packets
            are read when asked for. A batch larger than the bound works: what does not fit is read when asked for.
        disk: cache on local disk that is read before the store, or None. It is closed with the source.
        connections: range reads under way at a time.
        merge_gap_bytes: two ranges of an object in one batch become one if no more than this lies between them.
        fill: bring the objects to `disk` in the background.
        cameras: those whose objects are to be filled in; None = all.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        ram_bytes: int,
        disk: DiskCache | None = None,
        connections: int = 32,
        merge_gap_bytes: int = MERGE_GAP_BYTES,
        fill: bool = True,
        cameras: Sequence[str] | None = None,
    ) -> None:
        if ram_bytes < 0:
            raise ValueError(f"ram_bytes={ram_bytes} is not allowed; give 0 (no pool) or more")
        if connections < 1:
            raise ValueError(f"connections={connections} is not allowed; give 1 or more")
        self._dataset, self._index, self._store, self._disk = dataset, dataset.index, dataset.store, disk
        self._connections, self._ram_bytes = connections, ram_bytes
        tables = dataset.episodes.cameras
        self._videos = frozenset(key for table in tables.values() if table.kind != "image" for key in table.keys)
        self._lock = threading.Lock()
        self._turn = threading.Condition(self._lock)
        self._closed = False
        self._stop = threading.Event()  # reads need not go on
        self._last = -1  # batch
        self._batches: dict[int, list[Entry]] = {}  # not done: what they use
        self._live: dict[Unit, list[Entry]] = {}  # oldest first
        self._undecided: Counter[Unit] = Counter()
        self._aside: dict[int, list[Unit]] = {}  # of batches not done: units that are not for the pool
        self._asked: dict[int, tuple[int, int]] = {}  # for batches not done: GETs and their bytes
        self._read_aside: Counter[Unit] = Counter()
        self._all_there = False  # on disk: nothing to fetch ahead
        self._counts: Counter[str] = Counter()
        self._waits_s = 0.0
        self._residency: Residency | None = None
        self._fill: Fill | None = None
        limit, fill_threads = ram_bytes, 0
        if disk is not None:
            objects = {key: dataset.objects[key] for key in _objects(dataset, cameras)}
            self._residency = Residency(disk, objects)
            if fill:  # its bodies are memory too: their share is taken from the pool
                fill_threads = max(1, min(_FILL_CONNECTIONS, connections // 2, ram_bytes // 4 // disk.extent_bytes))
                limit = max(0, ram_bytes - fill_threads * disk.extent_bytes)
        self._pool = Pool(limit, merge_gap_bytes=merge_gap_bytes, span=self._index.unit_span)
        self._transfers = Transfers(
            self._turn,
            self._read,
            on_start=self._pump,
            on_end=self._ended,
            limit_bytes=limit,
            connections=connections if limit else 0,
        )
        if self._residency is not None and fill:
            lock = self._residency.disk.folder / f"fill-{dataset.fingerprint[:16]}.lock"
            self._fill = Fill(self._store, self._residency, lock=lock, threads=fill_threads, on_end=self._filled)

    def announce(self, number: int, units: Sequence[Unit]) -> bool:
        """See `PacketSource`. Units of objects that are no video are not fetched here."""
        with self._lock:
            self._check_open()
            if number <= self._last:
                raise ValueError(f"batch {number} was announced after batch {self._last}; numbers must rise")
            if self._all_there:
                self._last = number
                return True
            if self._batches and (self._pool.num_waiting > self._pool.horizon or len(self._batches) >= _MOST_AHEAD):
                return False
        pieces = self._pieces(units)
        if self._residency is not None:
            for key in {piece.key for piece in pieces}:
                self._residency.look(key)
        if self._fill is not None:
            for piece in pieces:
                self._fill.want(piece.key, piece.offset, piece.length)
        with self._lock:
            self._last = number
            self._batches[number] = []
            self._undecided.update(piece.unit for piece in pieces)
            self._pool.announce(number, pieces)
            self._pump()
        return True

    def packets(self, key: str, frame: int) -> tuple[list[memoryview], list[int]]:
        """See `PacketSource`. A unit that nobody announced is read by a request of its own."""
        frames = self._index.object(key)
        with self._lock:
            self._check_open()
            entry = self._entry((key, frames.gop_number(frame)))
        if entry is not None and (body := self._body(entry)) is not None:
            return frames.cut(frame, body, entry.piece.offset)
        offset, length = frames.reach(frame)
        return frames.cut(frame, self._read(key, offset, length, ahead=False), offset)

    def ahead(self, frames: Sequence[tuple[str, int]]) -> None:
        """See `PacketSource`; packets are fetched by `announce`, and waiting here would keep others from decoding."""

    def done(self, number: int) -> None:
        """See `PacketSource`."""
        with self._lock:
            gets, get_bytes = self._asked.pop(number, (0, 0))
            self._counts.update(done_gets=gets, done_get_bytes=get_bytes)
            for entry in self._batches.pop(number, ()):
                entry.users -= 1
                self._release(entry)
            _count_down(self._read_aside, self._aside.pop(number, ()))
            self._pump()

    def gauges(self) -> dict[str, float]:
        """See `PacketSource`.

        gets, get_bytes: range reads of this source and its fill, and their bytes. done_gets, done_get_bytes: those for
        batches that are done, as `predict` foretells them.
        """
        fill = self._fill.gauges() if self._fill is not None else {}
        disk = self._disk.gauges() if self._disk is not None else {"disk_bytes": 0.0, "disk_limit_bytes": 0.0}
        store = {name: value for name, value in self._store.gauges().items() if name in _OF_STORE}
        with self._lock:
            counts = self._counts
            return {
                **store,
                **disk,
                **fill,
                **{name: counts[name] for name in _COUNTED},
                "pool_bytes": self._transfers.num_bytes + fill.get("fill_in_flight_bytes", 0),
                "pool_most_bytes": self._transfers.most_bytes + fill.get("fill_most_bytes", 0),
                "pool_limit_bytes": self._ram_bytes,
                "units_wanted": self._transfers.num_units_queued + self._undecided.total(),
                "lookahead_batches": len(self._batches),
                "gets": counts["gets"] + fill.get("fill_gets", 0),
                "get_bytes": counts["get_bytes"] + fill.get("fill_get_bytes", 0),
                "waits_s": self._waits_s,
            }

    def close(self) -> None:
        """See `PacketSource`. Reads under way are given up."""
        with self._lock:
            self._closed = True
        self._stop.set()
        if self._fill is not None:
            self._fill.close()
        self._transfers.close()
        if self._disk is not None:
            self._disk.close()
        with self._lock:
            self._live.clear()
            self._batches.clear()
            self._transfers.num_bytes = 0

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable(f"the packets of {self._dataset.uri} are no longer read: their source was closed")

    def _pieces(self, units: Sequence[Unit]) -> list[Piece]:
        pieces = []
        for key, group in dict.fromkeys(units):
            if key not in self._videos:
                continue
            try:
                offset, length = self._index.unit_span(key, group)
            except (OSError, ValueError, LookupError):
                continue  # `packets` meets the same error, in the place of the samples it belongs to
            pieces.append(Piece(key=key, group=group, offset=offset, length=length))
        return pieces

    # Under `_lock` from here on, as far as the next comment.

    def _pump(self) -> None:
        """Decide on batches until the connections have enough to do."""
        while not self._closed and self._transfers.num_queued < self._connections:
            filling = self._fill is not None and self._fill.active
            if filling and len(self._batches) - self._pool.num_waiting >= _AHEAD_OF_FILL:
                break
            if not self._decide(force=False):
                break
        if self._fill is not None and self._fill.active:
            self._fill.hold_back(self._transfers.num_queued > 0 or self._next_lacks_packets())

    def _next_lacks_packets(self) -> bool:
        """Whether the batch to decode next still waits for a range read."""
        used = next(iter(self._batches.values()), [])
        return any(entry.body is None and entry.transfer.error is None for entry in used)

    def _decide(self, *, force: bool) -> bool:
        decision = self._pool.decide(force=force, elsewhere=self._on_disk if self._residency is not None else None)
        if decision is None:
            return False
        self._apply(decision)
        return True

    def _apply(self, decision: Decision) -> None:
        for unit in decision.evicted:
            entry = self._live[unit][-1]
            entry.kept = False
            self._release(entry)
        used: list[Entry] = [self._live[piece.unit][-1] for piece in decision.hits]
        for part in decision.ranges:
            transfer = Transfer(part)
            transfer.entries += [Entry(piece, transfer) for piece in (*part.pieces, *part.gaps)]
            for entry in transfer.entries:
                self._live.setdefault(entry.piece.unit, []).append(entry)
            used += transfer.entries[: len(part.pieces)]
            self._transfers.queue(transfer)
        aside = [piece.unit for piece in (*decision.passed, *decision.elsewhere)]
        _count_down(self._undecided, [*(entry.piece.unit for entry in used), *aside])
        if decision.number in self._batches:
            for entry in used:
                entry.users += 1
            self._batches[decision.number] = used
            self._asked[decision.number] = len(decision.ranges), sum(part.length for part in decision.ranges)
            if aside:
                self._aside[decision.number] = aside
                self._read_aside.update(aside)
        self._counts["pool_hits"] += len(decision.hits)
        self._counts["pool_misses"] += len(used) - len(decision.hits) + len(decision.passed)

    def _entry(self, unit: Unit) -> Entry | None:
        """The entry to take a unit from; None if it is to be read by whoever needs it."""
        while True:
            if live := self._live.get(unit):
                # One that is there, else one on its way, else one that failed and says why.
                best = min(live, key=lambda entry: (entry.body is None, entry.transfer.error is not None))
                # A range of a later batch may wait for the room of the very batch that this unit did not fit into.
                if best.body is not None or best.transfer.started or unit not in self._read_aside:
                    return best
            if unit in self._read_aside or unit not in self._undecided:
                return None
            if not self._decide(force=False):
                self._counts["forced_decisions"] += 1
                self._decide(force=True)

    def _release(self, entry: Entry) -> None:
        """Let go of an entry that nothing needs any more."""
        if entry.lives:
            return
        live = self._live[entry.piece.unit]
        live.remove(entry)
        if not live:
            del self._live[entry.piece.unit]
        if entry.body is not None:
            self._transfers.hold(-entry.piece.length)

    def _ended(self, transfer: Transfer) -> None:
        if transfer.error is not None:
            for entry in transfer.entries:
                if entry.kept:
                    self._pool.forget(entry.piece.unit)  # the next batch that needs it tries again
                    entry.kept = False
                    self._release(entry)
        self._pump()

    # Not under `_lock`.

    def _body(self, entry: Entry) -> memoryview | None:
        """The bytes of an entry; None if the caller must read them."""
        transfer = entry.transfer
        if not transfer.ready.is_set():
            begun = time.perf_counter()
            while not transfer.ready.wait(_PATIENCE_S) and transfer.started:
                pass
            with self._lock:
                self._waits_s += time.perf_counter() - begun
                self._counts["waits"] += 1
                self._counts["out_of_turn"] += not transfer.ready.is_set()
        if entry.body is not None:
            return entry.body
        if transfer.error is not None and len(transfer.entries) == 1:
            kind = type(transfer.error) if isinstance(transfer.error, StoreError) else StoreError
            raise kind(str(transfer.error)) from transfer.error
        # Pieces of one range are then tried alone, so that what is wrong with one does not hit the others. A range that
        # has had no room for long is not waited for either: its batch was taken out of turn.
        with self._lock:
            self._check_open()
        return None

    def _on_disk(self, piece: Piece) -> bool:
        return self._residency is not None and self._residency.holds(piece.key, piece.offset, piece.length)

    def _read(self, key: str, offset: int, length: int, *, ahead: bool = True) -> bytes:
        info = self._dataset.objects[key]
        if self._disk is not None and self._residency is not None and self._residency.holds(key, offset, length):
            body = self._disk.read(key, info.version, info.size, offset, length)
            if body is not None:
                with self._lock:
                    self._counts["disk_hits"] += 1
                return body
            self._residency.lost(key, offset, length)
            self._all_there = False
        body = self._store.read_until(self._stop, key, offset, length, version=info.version)
        with self._lock:
            self._counts.update(gets=1, get_bytes=length)
            if not ahead:
                self._counts.update(done_gets=1, done_get_bytes=length)
        return body

    def _filled(self) -> None:
        with self._lock:
            self._all_there = self._residency is not None and self._residency.complete()
            self._pump()


def _objects(dataset: Dataset, cameras: Sequence[str] | None) -> list[str]:
    """Video objects of the episodes in use."""
    keys: dict[str, None] = {}
    for name, table in dataset.episodes.cameras.items():
        if table.kind != "image" and (cameras is None or name in cameras):
            keys |= dict.fromkeys(table.keys[number] for number in sorted(set(table.object.tolist())))
    return list(keys)


def _count_down(counter: Counter[Unit], units: Sequence[Unit]) -> None:
    for unit in units:
        counter[unit] -= 1
        if not counter[unit]:
            del counter[unit]
