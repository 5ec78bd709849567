"""Ready batches and the thread that takes them, which is the one a GPU waits for.

Taking a batch is made of little more than one queue operation. Two things are left to other threads, because each costs
more than the rest together, on caches that a step has just emptied: waking the planning thread, a system call, which
happens once for several batches where the ring has several to spare; and taking apart the batch that the consumer has
let go of, whose memory is given back by whoever makes the next one.
"""

import copy
import queue
import threading
import weakref
from collections import deque

from knonik.batches.batch import Batch

_SPARE = 4  # a planner that sleeps is woken when one slot in so many is free
_Lent = tuple[weakref.ref[Batch], Batch]  # what the consumer has, and the same tensors once more
_LENT = 2  # batches handed out of which something is kept, at most: a consumer holds one and asks for the next


class Handoff:
    """The ring of one consumer, one planner and one assembling thread; its slots are free, in the making or ready.

    Args:
        ring_batches: number of slots.
        turn: what the planner waits on.

    Attributes:
        planner_sleeps: set by the planner before it looks at `free` for the last time, so that none is overlooked.
    """

    def __init__(self, ring_batches: int, turn: threading.Condition) -> None:
        self.planner_sleeps = False
        self._turn, self._wake_at = turn, max(1, ring_batches // _SPARE)
        self._ready: queue.SimpleQueue[tuple[Batch, _Lent] | BaseException] = queue.SimpleQueue()
        self._free = deque([None] * ring_batches)
        self._lent: deque[_Lent] = deque()

    @property
    def free(self) -> int:
        """Slots for which no batch was begun."""
        return len(self._free)

    @property
    def ready(self) -> int:
        """Batches to be taken."""
        return self._ready.qsize()

    def begin(self) -> None:
        """Use a free slot; called by the planner alone. Batches that the consumer has dropped are taken apart here."""
        self._free.pop()
        while self._lent and (self._lent[0][0]() is None or len(self._lent) > _LENT):
            self._lent.popleft()

    def put(self, batch: Batch) -> None:
        """Hand over a finished batch."""
        # The consumer gets a second set of references to the same tensors: dropping them frees nothing yet.
        lent = copy.copy(batch)
        self._ready.put((lent, (weakref.ref(lent), batch)))

    def fail(self, error: BaseException) -> None:
        """All further `take` raise this, behind the batches that are ready."""
        self._ready.put(error)

    def take(self) -> Batch:
        """The next batch; waits for it. An error of a thread is raised here, in the place of the batch it hit."""
        item = self._ready.get()
        if isinstance(item, BaseException):
            self._ready.put(item)  # it stays failed
            raise item
        batch, lent = item
        self._lent.append(lent)
        self._free.append(None)
        # Left asleep it misses nothing: while slots are free and it sleeps, others are in the making or ready, and each
        # batch that gets ready wakes it too.
        if self.planner_sleeps and len(self._free) >= self._wake_at:
            with self._turn:
                self._turn.notify()
        return batch

    def close(self) -> None:
        """Let go of the batches handed out."""
        self._lent.clear()
