"""What the stages of a pipeline spend their time on, measured where it happens."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Kind = Literal["busy", "starved", "blocked"]


class Stage:
    """Clock of one stage, shared by its threads.

    busy: working. starved: waiting for input. blocked: waiting for room at the output. The stage whose threads are
    neither starved nor blocked is the bottleneck. Times add up over threads, so they may exceed wall time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[Kind, float] = {"busy": 0.0, "starved": 0.0, "blocked": 0.0}
        self._items = 0

    @contextmanager
    def measure(self, kind: Kind, items: int = 0) -> Iterator[None]:
        """Add the time of the block, and `items` finished in it, also if it raises."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, time.perf_counter() - begin, items)

    def add(self, kind: Kind, seconds: float, items: int = 0) -> None:
        """Add time measured by the caller."""
        with self._lock:
            self._seconds[kind] += seconds
            self._items += items

    def snapshot(self) -> dict[str, float]:
        """`busy_s`, `starved_s`, `blocked_s` in seconds and `items`, all since the start."""
        with self._lock:
            return {**{f"{kind}_s": seconds for kind, seconds in self._seconds.items()}, "items": self._items}
