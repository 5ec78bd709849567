"""Compressed packets by plan: decoders ask for packets, the plan of the batches to come says what to fetch ahead."""

import logging
import shutil
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from knonik.dataset import Dataset
from knonik.fetch.disk import FULL, DiskCache
from knonik.fetch.pool import Pool
from knonik.fetch.pooled import MERGE_GAP_BYTES, PooledSource
from knonik.fetch.ranges import Piece, Unit
from knonik.order.plan import BatchPlan

__all__ = ["DirectSource", "PacketSource", "PooledSource", "Prediction", "Unit", "packet_source", "predict"]

logger = logging.getLogger(__name__)


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

    def ahead(self, frames: Sequence[tuple[str, int]]) -> None:
        """The calling thread will ask for the packets of these (key, frame) next, in any order; raises nothing."""
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


class _Ahead(threading.local):
    """Packets the thread has read and not asked for yet, by (key, frame)."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, int], tuple[list[memoryview], list[int]]] = {}


class DirectSource:
    """Reads packets when they are asked for: for local folders, where the page cache is the pool."""

    def __init__(self, dataset: Dataset) -> None:
        self._index, self._store = dataset.index, dataset.store
        self._lock = threading.Lock()
        self._reads = self._read_bytes = 0
        self._read_s = 0.0
        self._own = _Ahead()

    def announce(self, number: int, units: Sequence[Unit]) -> bool:
        """Nothing is read ahead."""
        return True

    def ahead(self, frames: Sequence[tuple[str, int]]) -> None:
        """Read them now: one after another costs a third of what it does between two decodings, in cold caches."""
        found = self._own.found
        found.clear()
        begun = time.perf_counter()
        for key, frame in frames:
            with suppress(Exception):  # `packets` meets the same, in the place it belongs to
                found[key, frame] = self._index.object(key).fetch(self._store, frame)
        self._count(found.values(), begun)

    def packets(self, key: str, frame: int) -> tuple[list[memoryview], list[int]]:
        """Those read ahead, else one range read."""
        if (found := self._own.found.pop((key, frame), None)) is not None:
            return found
        begun = time.perf_counter()
        read = self._index.object(key).fetch(self._store, frame)
        self._count([read], begun)
        return read

    def _count(self, reads: Collection[tuple[list[memoryview], list[int]]], begun: float) -> None:
        spent = time.perf_counter() - begun
        with self._lock:
            self._reads += len(reads)
            self._read_bytes += sum(sum(map(len, packets)) for packets, _ in reads)
            self._read_s += spent

    def done(self, number: int) -> None:
        """Nothing is kept."""

    def gauges(self) -> dict[str, float]:
        """Reads from the file system, cumulative; a local folder needs no GETs."""
        with self._lock:
            reads = {"reads": self._reads, "read_bytes": self._read_bytes, "waits_s": self._read_s}
        return {"gets": 0, "get_bytes": 0, **reads}

    def close(self) -> None:
        """Nothing is held open."""


def packet_source(
    dataset: Dataset,
    *,
    ram_bytes: int = 1 << 30,
    disk_bytes: int | None = None,
    cache_dir: Path | None = None,
    connections: int = 32,
    fill: bool = True,
    cameras: Sequence[str] | None = None,
) -> PacketSource:
    """The source that fits where the dataset lies: a local folder is read directly, all else through pool and disk.

    Args:
        ram_bytes: bound of the compressed packets in memory of this process; 0 = none is fetched ahead.
        disk_bytes: bound of the disk cache, shared by all processes of the machine and all datasets; None = half of
            the space that is free or the cache's already, of which only what the dataset needs is taken; 0 = no cache.
        cache_dir: folder of the disk cache; default `packets` in the cache folder the dataset was opened with.
        connections: range reads under way at a time.
        fill: bring the dataset to the disk cache in the background.
        cameras: those in use; None = all.

    Raises:
        ValueError: a bound is negative, or that of the disk too small; names the minimum.
    """
    if dataset.store.is_local:
        return DirectSource(dataset)
    disk = _disk_cache(dataset, cache_dir or dataset.folder.parent / "packets", disk_bytes)
    try:
        return PooledSource(
            dataset, ram_bytes=ram_bytes, disk=disk, connections=connections, fill=fill, cameras=cameras
        )
    except BaseException:
        if disk is not None:
            disk.close()
        raise


def _disk_cache(dataset: Dataset, folder: Path, limit_bytes: int | None) -> DiskCache | None:
    if limit_bytes == 0:
        return None
    if limit_bytes is not None:
        try:
            return DiskCache(folder, limit_bytes, namespace=dataset.fingerprint)
        except OSError as error:
            if error.errno not in FULL:
                raise
            # As for a disk that gets full later: the run goes on with more GETs.
            logger.warning("no disk cache in %s: its disk is full (%s)", folder, error)
            return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        # What the cache holds counts as free: otherwise each run would leave room for half of what the last one did.
        used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return DiskCache(folder, (free + used) // 2, namespace=dataset.fingerprint)
    except (OSError, ValueError) as error:
        logger.warning("no disk cache in %s: %s", folder, error)
        return None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Range reads that batches need, and their bytes, in a run without a disk cache and without failures.

    hits: units that were in the pool when they were needed, of `units` in all.
    """

    gets: int
    get_bytes: int
    hits: int
    units: int


def predict(
    dataset: Dataset,
    plans: Iterable[BatchPlan],
    *,
    ram_bytes: int,
    merge_gap_bytes: int = MERGE_GAP_BYTES,
    part: int = 0,
    count: int | None = None,
) -> Prediction:
    """What a `PooledSource` will ask the store for, by the very decisions it makes; reads no packets.

    Exact for a run that begins with the first plan and where every batch fits the pool, or none of it (`ram_bytes=0`).

    Args:
        plans: of the batches in order.
        ram_bytes, merge_gap_bytes: as for `PooledSource`.
        part: which part of the plans' source `dataset` is.
        count: batches to count; those after them only tell what will be needed. None = all.
    """
    index = dataset.index
    pool = Pool(ram_bytes, merge_gap_bytes=merge_gap_bytes, span=index.unit_span)
    last_frames: list[dict[Unit, int]] = []
    for number, plan in enumerate(plans):
        jobs = [job for job in plan.jobs if job.dataset == part and _is_video(dataset, job.source_camera)]
        last_frames.append({(job.key, job.group): max(job.numbers) for job in jobs})
        spans = [(job.key, job.group, *index.unit_span(job.key, job.group)) for job in jobs]
        pool.announce(number, [Piece(key=k, group=g, offset=o, length=n) for k, g, o, n in spans])
    gets = get_bytes = hits = units = 0
    while (decision := pool.decide(force=True)) is not None and (count is None or decision.number < count):
        # What does not fit the pool is read when needed, and only as far as the frame needs.
        reaches = [index.object(piece.key).reach(last_frames[decision.number][piece.unit]) for piece in decision.passed]
        gets += len(decision.ranges) + len(reaches)
        get_bytes += sum(each.length for each in decision.ranges) + sum(length for _, length in reaches)
        hits += len(decision.hits)
        units += len(last_frames[decision.number])
    return Prediction(gets=gets, get_bytes=get_bytes, hits=hits, units=units)


def _is_video(dataset: Dataset, camera: str) -> bool:
    return dataset.episodes.cameras[camera].kind != "image"
