"""Brings a dataset to the disk cache in the background, so that a run on S3 soon needs no GETs any more."""

import fcntl
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from knonik.fetch.disk import DiskCache
from knonik.stores.base import ObjectChanged, ObjectInfo, Store, StoreUnavailable

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0  # how often a process that does not fill looks at what another one has brought, at most
_LOOK_SHARE = 0.05  # of the time may go into looking
_REPORT_S = 30.0
_MAX_FAILURES = 8  # in a row; then the store is left alone for a while
_PAUSE_S = 15.0
Extent = tuple[str, int]  # (object key, number of the extent inside it)


class Residency:
    """Which extents of the objects are on disk, as far as this process knows; answers without touching the disk.

    Other processes of the node add extents, so `look` is asked again as long as something is missing. An extent that is
    there stays: the cache evicts none of a dataset in use.
    """

    def __init__(self, disk: DiskCache, objects: Mapping[str, ObjectInfo]) -> None:
        self.disk, self.objects = disk, objects
        self._extent = disk.extent_bytes
        self._missing: dict[str, set[int]] = {}

    def look(self, key: str, *, again: bool = False) -> None:
        """Find out what is there of an object."""
        if again or key not in self._missing:
            info = self.objects[key]
            missing = self.disk.missing(key, info.version, info.size)
            numbers = {offset // self._extent for offset, _ in missing}
            if again:
                self._missing[key] = numbers
            else:  # another thread may have looked meanwhile, and extents may have arrived since
                self._missing.setdefault(key, numbers)

    def holds(self, key: str, offset: int, length: int) -> bool:
        """Whether all of a byte range is there; False for an object not looked at."""
        missing = self._missing.get(key)
        if missing is None:
            return False
        return not missing or missing.isdisjoint(self.extents(offset, length))

    def extents(self, offset: int, length: int) -> range:
        """Numbers of the extents that a byte range touches."""
        return range(offset // self._extent, (offset + length - 1) // self._extent + 1)

    def lacks(self, extent: Extent) -> bool:
        """Whether an extent of an object looked at is not there."""
        return extent[1] in self._missing[extent[0]]

    def missing(self, key: str) -> list[Extent]:
        """Extents not there of an object looked at."""
        return [(key, number) for number in sorted(self._missing[key])]

    def incomplete(self) -> list[str]:
        """Objects of which something is missing, or that were not looked at."""
        return [key for key in self.objects if self._missing.get(key, True)]

    def arrived(self, extent: Extent) -> None:
        """An extent was put on disk."""
        self._missing[extent[0]].discard(extent[1])

    def lost(self, key: str, offset: int, length: int) -> None:
        """A byte range that should be there is not: someone emptied the cache."""
        if key in self._missing:
            self._missing[key].update(self.extents(offset, length))

    def span(self, extent: Extent) -> tuple[int, int]:
        """(offset, length) of an extent."""
        offset = extent[1] * self._extent
        return offset, min(self._extent, self.objects[extent[0]].size - offset)

    def bytes_there(self) -> int:
        """Bytes on disk of the objects looked at."""
        found = 0
        for key, missing in list(self._missing.items()):
            found += self.objects[key].size - sum(self.span((key, number))[1] for number in list(missing))
        return found

    def complete(self) -> bool:
        """Whether every byte of every object is there."""
        return len(self._missing) == len(self.objects) and not any(self._missing.values())


class Fill:
    """Threads that read extents not on disk and put them there, needed ones first, until all is there or no room is.

    One process of a node fills a dataset at a time, the others look on and take over if it ends early. An extent that
    cannot be read, though the store answers, is left out and reported once: the samples in it are read, and their
    errors raised, where they are needed.

    Args:
        lock: file whose lock makes the holder the one that fills.
        threads: range reads under way at a time; only one while the caller holds `hold_back`.
        on_end: called once when nothing more will be put.
    """

    def __init__(
        self,
        store: Store,
        residency: Residency,
        *,
        lock: Path,
        threads: int,
        on_end: Callable[[], None],
    ) -> None:
        self._store, self._residency = store, residency
        self._disk, self._objects = residency.disk, residency.objects
        self._lock_path, self._on_end = lock, on_end
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._free = threading.Event()  # more than one thread may read
        self._free.set()
        self._wanted: dict[Extent, None] = {}  # in the order of need
        self._taken: set[Extent] = set()  # being read, or given up
        self._rest: Iterator[Extent] = iter(())
        self._full = self._winding_up = False
        self._failures = 0
        self._gets = self._get_bytes = self._in_flight = self._most_in_flight = 0
        self._total = sum(info.size for info in self._objects.values())
        self.active = True
        self._num_threads = threads
        self._leader = threading.Thread(target=self._lead, name="knonik-fill-0", daemon=True)
        self._leader.start()

    def want(self, key: str, offset: int, length: int) -> None:
        """A byte range will be needed: its extents come before those that nobody has asked for yet."""
        if self.active and not self._residency.holds(key, offset, length):
            with self._lock:
                for number in self._residency.extents(offset, length):
                    self._wanted.setdefault((key, number))

    def hold_back(self, yes: bool) -> None:
        """While True, requests for the batches at hand have the connections, and one thread goes on filling."""
        with self._lock:
            if yes and not self._winding_up:
                self._free.clear()
            else:
                self._free.set()

    def gauges(self) -> dict[str, float]:
        """Bytes of the dataset on disk and in all, and the fill's own GETs."""
        with self._lock:
            return {
                "fill_done_bytes": self._residency.bytes_there(),
                "fill_total_bytes": self._total,
                "fill_active": float(self.active),
                "fill_gets": self._gets,
                "fill_get_bytes": self._get_bytes,
                "fill_in_flight_bytes": self._in_flight,
                "fill_most_bytes": self._most_in_flight,
            }

    def close(self) -> None:
        """End the threads; reads under way are given up. Safe to call twice."""
        self._closing.set()
        self._wind_up()
        self._leader.join()

    def _lead(self) -> None:
        try:
            while not self._closing.is_set():
                with self._leadership() as leading:
                    begun = time.monotonic()
                    for key in self._residency.incomplete():
                        if self._closing.is_set():
                            return
                        self._residency.look(key, again=True)
                    spent = time.monotonic() - begun
                    if self._residency.complete():
                        return
                    if leading:
                        self._fill()
                        return
                self._closing.wait(max(_LOOK_AGAIN_S, spent / _LOOK_SHARE))
        except Exception:
            logger.exception("the background fill of the disk cache has ended; packets are read as they are needed")
        finally:
            self.active = False
            self._on_end()

    @contextmanager
    def _leadership(self) -> Iterator[bool]:
        with self._lock_path.open("w") as lock:
            leading = True
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                leading = False
            except OSError:  # no locks on this file system: processes then read some extents twice
                pass
            yield leading

    def _fill(self) -> None:
        there = self._residency.bytes_there()
        logger.info("filling the disk cache: %.2f of %.2f GB are there", there / 1e9, self._total / 1e9)
        self._rest = (extent for key in self._objects for extent in self._residency.missing(key))
        begun = time.monotonic()
        others = [
            threading.Thread(target=self._bring, args=(number,), name=f"knonik-fill-{number}", daemon=True)
            for number in range(1, self._num_threads)
        ]
        for thread in others:
            thread.start()
        try:
            self._bring(0, _Report(begun, there, self._total))
        finally:
            self._wind_up()
            for thread in others:
                thread.join()
        there = self._residency.bytes_there()
        logger.info(
            "the disk cache holds %.2f of %.2f GB of the dataset after %.0f s%s",
            there / 1e9,
            self._total / 1e9,
            time.monotonic() - begun,
            ": its bound is reached" if self._full else "",
        )

    def _wind_up(self) -> None:
        with self._lock:
            self._winding_up = True
            self._free.set()

    def _bring(self, number: int, report: "_Report | None" = None) -> None:
        while not self._closing.is_set() and not self._full:
            if number:
                self._free.wait()
            if (extent := self._next()) is None:
                return
            self._bring_one(extent)
            if report is not None:
                report.show(self._residency)

    def _bring_one(self, extent: Extent) -> None:
        key = extent[0]
        info = self._objects[key]
        offset, length = self._residency.span(extent)
        with self._lock:
            self._in_flight += length
            self._most_in_flight = max(self._most_in_flight, self._in_flight)
        try:
            body = self._store.read_until(self._closing, key, offset, length, version=info.version)
            with self._lock:
                self._failures = 0
                self._gets += 1
                self._get_bytes += length
            self._put(extent, body)
        except OSError as error:
            if not self._closing.is_set():
                self._failed(extent, error)
        finally:
            with self._lock:
                self._in_flight -= length

    def _put(self, extent: Extent, body: bytes) -> None:
        info = self._objects[extent[0]]
        try:
            if self._disk.put(extent[0], info.version, info.size, self._residency.span(extent)[0], body):
                self._residency.arrived(extent)
            else:
                self._full = True
        except OSError as error:  # the next extent would fare no better, and its GET would be in vain
            if not self._full:
                logger.warning("the disk cache in %s takes no more: %s", self._disk.folder, error)
            self._full = True

    def _failed(self, extent: Extent, error: OSError) -> None:
        later = isinstance(error, StoreUnavailable)
        logger.warning("%s the disk cache: %s", "not yet brought to" if later else "left out of", error)
        with self._lock:
            self._failures += 1
            pause = self._failures % _MAX_FAILURES == 0
            if later:  # nothing is known about the extent: it has its turn again
                self._taken.discard(extent)
                self._wanted[extent] = None
            if isinstance(error, ObjectChanged):  # none of its extents can be read any more
                self._taken.update(self._residency.missing(extent[0]))
        if pause:
            self._closing.wait(_PAUSE_S)

    def _next(self) -> Extent | None:
        with self._lock:
            while self._wanted:
                extent = next(iter(self._wanted))
                del self._wanted[extent]
                if self._take(extent):
                    return extent
            for extent in self._rest:
                if self._take(extent):
                    return extent
        return None

    def _take(self, extent: Extent) -> bool:
        if extent in self._taken or not self._residency.lacks(extent):
            return False
        self._taken.add(extent)
        return True


class _Report:
    """Says how far the fill is, and how long it will still take."""

    def __init__(self, begun: float, there: int, total: int) -> None:
        self._begun, self._there, self._total = begun, there, total
        self._shown = begun

    def show(self, residency: Residency) -> None:
        now = time.monotonic()
        if now - self._shown < _REPORT_S:
            return
        self._shown = now
        there = residency.bytes_there()
        rate = (there - self._there) / (now - self._begun)
        logger.info(
            "filling the disk cache: %.2f of %.2f GB, %.0f MB/s, %s left",
            there / 1e9,
            self._total / 1e9,
            rate / 1e6,
            f"{(self._total - there) / rate:.0f} s" if rate > 0 else "unknown time",
        )
