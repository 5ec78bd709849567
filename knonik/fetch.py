"""Compressed packets by plan: decoders ask for packets, the plan of the batches to come says what to fetch ahead."""

import threading
import time
from collections.abc import Sequence
from typing import Protocol

from knonik.dataset import Dataset

Unit = tuple[str, int]  # (object key, number of a GOP inside it): what is fetched and kept as one


class PacketSource(Protocol):
    """Packets of the frames that planned batches need.

    One thread announces batches in order, decoding threads take their packets, and `done` is called when a batch has
    been decoded. Threads should take the packets of earlier batches first.
    """

    def announce(self, number: int, units: Sequence[Unit]) -> bool:
        """Batch `number`, higher than any before, will need `units`; they are fetched as early as the bounds allow.

        Returns:
            False: nothing more can be looked ahead now, the batch was not noted; try again after some `done`. The first
            batch that is not done is always taken.

        Raises:
            ValueError: `number` does not rise.
        """
        ...

    def packets(self, key: str, frame: int) -> tuple[list[memoryview], list[int]]:
        """Packets from the sync packet to the last one needed to present `frame`, and their pts; waits for them.

        Raises:
            StoreError: they cannot be had; names the object, the byte range and the cause.
        """
        ...

    def done(self, number: int) -> None:
        """Batch `number` is decoded, or given up."""
        ...

    def gauges(self) -> dict[str, float]:
        """Bounds, their use and counters since the start; names end in their unit where it is not a count."""
        ...

    def close(self) -> None:
        """End all threads; waiting calls of `packets` get an error. Safe to call twice."""
        ...


class DirectSource:
    """Reads packets when they are asked for: for local folders, where the page cache is the pool."""

    def __init__(self, dataset: Dataset) -> None:
        self._index, self._store = dataset.index, dataset.store
        self._lock = threading.Lock()
        self._reads = self._read_bytes = 0
        self._read_s = 0.0

    def announce(self, number: int, units: Sequence[Unit]) -> bool:
        """Nothing is read ahead."""
        return True

    def packets(self, key: str, frame: int) -> tuple[list[memoryview], list[int]]:
        """One range read."""
        begun = time.perf_counter()
        packets, pts = self._index.object(key).fetch(self._store, frame)
        spent = time.perf_counter() - begun
        with self._lock:
            self._reads += 1
            self._read_bytes += sum(map(len, packets))
            self._read_s += spent
        return packets, pts

    def done(self, number: int) -> None:
        """Nothing is kept."""

    def gauges(self) -> dict[str, float]:
        """Reads from the file system, cumulative; a local folder needs no GETs."""
        with self._lock:
            return {
                "gets": 0,
                "get_bytes": 0,
                "reads": self._reads,
                "read_bytes": self._read_bytes,
                "waits_s": self._read_s,
            }

    def close(self) -> None:
        """Nothing is held open."""


def packet_source(
    dataset: Dataset,
    *,
    ram_bytes: int = 1 << 30,
    disk_bytes: int | None = None,
    connections: int = 32,
    fill: bool = True,
) -> PacketSource:
    """The source that fits where the dataset lies.

    Args:
        ram_bytes: bound of the compressed packets in memory; 0 = nothing is fetched ahead.
        disk_bytes: bound of the disk cache; None = what the dataset needs, at most half of the free space; 0 = none.
        connections: range reads under way at a time.
        fill: bring the dataset to the disk cache in the background.
    """
    return DirectSource(dataset)
