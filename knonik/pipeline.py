"""The threads of a loader: one that plans and assembles batches, and a pool that decodes their frames.

Plan and buffers of a batch are made first, its GOPs go to the decoding threads, and when the last of them is decoded
the batch is finished and queued. At most `ring_batches` batches exist between planning and being taken, which bounds
memory. Buffers are new for every batch and belong to whoever takes it: nothing is ever written into a batch that was
handed out.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from knonik.batch import Batch
from knonik.dataset import Dataset
from knonik.plan import BatchPlan, GopJob, Planner
from knonik.stages import Stage
from knonik.video import GopDecoder

_CHUNKS_PER_THREAD = 4  # enough to even out GOPs of unequal cost, few enough that queueing costs nothing


class LoaderError(RuntimeError):
    """A batch could not be made; the message names episode, camera, frame, file and cause."""


class _Work:
    """A batch in the making."""

    def __init__(self, plan: BatchPlan, images: dict[str, torch.Tensor], parts: int) -> None:
        self.plan = plan
        self.images = images
        self.done = threading.Event()
        self.error: BaseException | None = None
        self._lock = threading.Lock()
        self._parts = parts
        if not parts:
            self.done.set()

    def part_done(self, error: BaseException | None = None) -> None:
        with self._lock:
            self._parts -= 1
            self.error = self.error or error
            if not self._parts or error is not None:
                self.done.set()


class Pipeline:
    """Makes batches from a global position on, in order, until closed.

    Args:
        begin: global position of the first batch.
        finish: turns a plan and its images into a batch.
        transform: what to put into `Batch.inputs`, or None.
    """

    def __init__(
        self,
        dataset: Dataset,
        planner: Planner,
        *,
        begin: int,
        shapes: dict[str, tuple[int, int, int]],
        finish: Callable[[BatchPlan, dict[str, torch.Tensor]], Batch],
        transform: Callable[[Batch], Batch],
        decode_threads: int,
        ring_batches: int,
        stages: dict[str, Stage],
    ) -> None:
        self._dataset, self._planner, self._begin = dataset, planner, begin
        self._shapes, self._finish, self._transform = shapes, finish, transform
        self._stages = stages
        self._decoder = GopDecoder()
        self._jobs: queue.SimpleQueue[tuple[_Work, list[GopJob]] | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()
        self._slots = threading.Semaphore(ring_batches)
        self._closing = threading.Event()
        self._making: deque[_Work] = deque()
        self._parts = decode_threads * _CHUNKS_PER_THREAD
        # Daemons, so that an interpreter that ends with a loader still open is not held up; `close` joins them.
        self._decoders = [
            threading.Thread(target=self._decode, name=f"knonik-decode-{i}", daemon=True) for i in range(decode_threads)
        ]
        self._assembler = threading.Thread(target=self._assemble, name="knonik-assemble", daemon=True)
        for thread in (*self._decoders, self._assembler):
            thread.start()

    def take(self) -> Batch:
        """The next batch; waits for it. An error of a thread is raised here, in the place of the batch it hit."""
        item = self._ready.get()
        if isinstance(item, BaseException):
            self._ready.put(item)  # it stays failed
            raise item
        self._slots.release()
        return item

    def close(self) -> None:
        """Stop and join all threads. Safe to call twice; a `take` under way gets an error."""
        self._closing.set()
        self._slots.release()
        for _ in self._decoders:
            self._jobs.put(None)
        self._assembler.join()
        for thread in self._decoders:
            thread.join()
        self._ready.put(LoaderError("the loader was closed"))

    def _assemble(self) -> None:
        stage = self._stages["assemble"]
        try:
            while not self._closing.is_set():
                if self._slots.acquire(blocking=False):
                    with stage.measure("busy"):
                        self._start(self._planner.plan(self._begin))
                        self._begin += self._planner.global_batch
                elif self._making:
                    self._deliver(self._making.popleft())
                else:
                    with stage.measure("blocked"):
                        self._slots.acquire()
                    self._slots.release()
        except BaseException as error:
            self._ready.put(error)

    def _start(self, plan: BatchPlan) -> None:
        count = len(plan.positions)
        images = {
            camera: torch.empty((count, seen.shape[1], *self._shapes[camera]), dtype=torch.uint8)
            for camera, seen in plan.seen.items()
        }
        size = max(1, -(-len(plan.jobs) // self._parts))
        parts = [plan.jobs[i : i + size] for i in range(0, len(plan.jobs), size)]
        work = _Work(plan, images, len(parts))
        self._making.append(work)
        for part in parts:
            self._jobs.put((work, part))

    def _deliver(self, work: _Work) -> None:
        with self._stages["assemble"].measure("starved"):
            while not work.done.wait(timeout=1.0):
                if self._closing.is_set():
                    return
        if self._closing.is_set():
            return
        if work.error is not None:
            raise work.error
        with self._stages["assemble"].measure("busy", items=1):
            batch = self._finish(work.plan, work.images)
        with self._stages["transform"].measure("busy", items=1):
            batch = self._transform(batch)
        self._ready.put(batch)

    def _decode(self) -> None:
        stage = self._stages["decode"]
        while True:
            begin = time.perf_counter()
            item = self._jobs.get()
            taken = time.perf_counter()
            stage.add("starved", taken - begin)
            if item is None:
                break
            work, jobs = item
            error: BaseException | None = None
            flat = {camera: images.numpy().reshape(-1, *images.shape[2:]) for camera, images in work.images.items()}
            for job in jobs:
                if self._closing.is_set() or work.error is not None:
                    break
                try:
                    self._decode_gop(work.plan, job, flat[job.camera])
                except Exception as cause:
                    error = _located(work.plan, job, self._dataset.uri, cause)
                    break
            stage.add("busy", time.perf_counter() - taken, sum(len(job.places) for job in jobs))
            work.part_done(error)
        self._decoder.close()

    def _decode_gop(self, plan: BatchPlan, job: GopJob, flat: NDArray[np.uint8]) -> None:
        index = self._dataset.index
        if index.num_far_rows(job.camera):
            self._check_times(plan, job)
        frames = index.object(job.key)
        packets, pts = frames.fetch(self._dataset.store, max(job.numbers))
        wanted = frames.pts[job.numbers].tolist()
        self._decoder.decode(frames.codec, packets, pts, wanted, [flat[place] for place in job.places])

    def _check_times(self, plan: BatchPlan, job: GopJob) -> None:
        for place in job.places:
            episode, frame = _sample(plan, job.camera, place)
            if off_s := self._dataset.index.off_s(job.camera, episode, frame):
                raise ValueError(
                    f"the nearest video frame is {off_s:.6f} s off the row's timestamp (tolerance 0.0001 s)"
                )


def _sample(plan: BatchPlan, camera: str, place: int) -> tuple[int, int]:
    seen = plan.seen[camera]
    return int(plan.episodes[place // seen.shape[1]]), int(seen.reshape(-1)[place])


def _located(plan: BatchPlan, job: GopJob, uri: str, cause: Exception) -> LoaderError:
    where = ", ".join(
        f"episode {episode} frame {frame}"
        for episode, frame in dict.fromkeys(_sample(plan, job.camera, place) for place in job.places)
    )
    error = LoaderError(f"cannot read {where} of camera {job.camera} from {job.key} in {uri}: {cause}")
    error.__cause__ = cause
    return error
