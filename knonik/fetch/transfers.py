"""Range reads in order of need by several threads, each as soon as the memory bound has room for its body."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from knonik.fetch.ranges import ByteRange, Piece


@dataclass(slots=True, eq=False)
class Entry:
    """A unit in memory, or on its way. It lives while the pool keeps it or a batch that is not done uses it."""

    piece: Piece
    transfer: "Transfer"
    body: memoryview | None = None
    users: int = 0
    kept: bool = True

    @property
    def lives(self) -> bool:
        """Whether anything needs it."""
        return self.kept or self.users > 0


@dataclass(slots=True, eq=False)
class Transfer:
    """A range read that is queued, under way or over, and the entries that its body is for.

    ready: set when it is over, whether it brought bodies, failed with `error` or was not made at all.
    """

    part: ByteRange
    entries: list[Entry] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)
    started: bool = False
    error: Exception | None = None


class Transfers:
    """Carries out transfers in the order they were queued.

    Args:
        turn: condition whose lock guards the transfers, the entries and the figures below. It is held while `queue` and
            `hold` are called, and when the callbacks are.
        read: bytes of a range.
        on_start: called when a transfer has left the queue.
        on_end: called when a transfer is over, with its entries' bodies set or its error.
        limit_bytes: bound of `num_bytes`.
        connections: threads.

    Attributes:
        num_bytes, most_bytes: bytes held by entries and by bodies being fetched, now and at most. While the body of a
            range is cut into pieces, both are in memory; one range at a time is.
    """

    def __init__(
        self,
        turn: threading.Condition,
        read: Callable[[str, int, int], bytes],
        *,
        on_start: Callable[[], None],
        on_end: Callable[[Transfer], None],
        limit_bytes: int,
        connections: int,
    ) -> None:
        self._turn, self._read, self._on_start, self._on_end = turn, read, on_start, on_end
        self._limit = limit_bytes
        self._queue: deque[Transfer] = deque()
        self._cutting = threading.Lock()
        self._closed = False
        self.num_bytes = self.most_bytes = 0
        # Daemons, so that an interpreter that ends with a source still open is not held up; `close` joins them.
        self._threads = [
            threading.Thread(target=self._work, name=f"knonik-fetch-{number}", daemon=True)
            for number in range(connections)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_queued(self) -> int:
        """Transfers not started."""
        return len(self._queue)

    @property
    def num_units_queued(self) -> int:
        """Units of the transfers not started."""
        return sum(len(transfer.entries) for transfer in self._queue)

    def queue(self, transfer: Transfer) -> None:
        """Carry it out after those queued before."""
        self._queue.append(transfer)
        self._turn.notify()

    def hold(self, count: int) -> None:
        """Count bytes as held, or as let go of if negative, which may make room for the next transfer."""
        self.num_bytes += count
        self.most_bytes = max(self.most_bytes, self.num_bytes)
        if count < 0:
            self._turn.notify()

    def close(self) -> None:
        """Give up what is queued, finish what is under way and join the threads. The lock must not be held."""
        with self._turn:
            self._closed = True
            queued, self._queue = self._queue, deque()
            self._turn.notify_all()
        for transfer in queued:
            transfer.ready.set()
        for thread in self._threads:
            thread.join()

    def _startable(self) -> bool:
        while self._queue:
            first = self._queue[0]
            if any(entry.lives for entry in first.entries):
                return self.num_bytes + first.part.cost <= self._limit
            self._queue.popleft().ready.set()  # its batch was given up, and it is not kept any more
        return False

    def _work(self) -> None:
        while True:
            with self._turn:
                while not (self._closed or self._startable()):
                    self._turn.wait()
                if self._closed:
                    return
                transfer = self._queue.popleft()
                transfer.started = True
                self.hold(transfer.part.cost)
                self._on_start()
                if self._queue:
                    self._turn.notify()
            self._carry_out(transfer)
            del transfer  # an idle thread holds no body

    def _carry_out(self, transfer: Transfer) -> None:
        part = transfer.part
        try:
            body = self._read(part.key, part.offset, part.length)
            if len(transfer.entries) == 1 and part.length == transfer.entries[0].piece.length:
                bodies = [memoryview(body)]
            else:
                bodies = self._cut(transfer, body)
            del body
        except Exception as error:
            transfer.error = error
        with self._turn:
            self.hold(-part.cost)
            if transfer.error is None:
                for entry, piece_body in zip(transfer.entries, bodies, strict=True):
                    if entry.lives:
                        entry.body = piece_body
                        self.hold(entry.piece.length)
            self._on_end(transfer)
            transfer.ready.set()

    def _cut(self, transfer: Transfer, body: bytes) -> list[memoryview]:
        # Copies, so that the body is freed at once and not with the last of its pieces; one at a time, for the bound.
        view, start = memoryview(body), transfer.part.offset
        with self._cutting:
            with self._turn:
                self.hold(transfer.part.cost)
            pieces = [entry.piece for entry in transfer.entries]
            bodies = [memoryview(bytes(view[piece.offset - start : piece.end - start])) for piece in pieces]
            with self._turn:
                self.hold(-transfer.part.cost)
        return bodies
