"""The threads of a loader: one plans ahead, a pool decodes, one puts batches together in order.

The planning thread looks as far ahead as the packet source has room for, so bytes are on their way long before their
batch is due. A batch whose turn has come gets buffers and its GOPs go to the decoding threads; when the last of them is
decoded the batch is finished and queued. At most `ring_batches` batches exist between getting buffers and being taken,
which bounds memory. Buffers belong to whoever takes the batch and are used again only when nobody refers to them.

What a consumer waits for: a decoding thread leaves the interpreter lock for nearly all of its time, and taking a ready
batch is one queue operation (`handoff.py`), so the wait is that of a lock others hold for microseconds.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from knonik.batches.bad_samples import BadSamples
from knonik.batches.batch import Batch
from knonik.batches.buffers import BufferPool
from knonik.batches.handoff import Handoff
from knonik.batches.pictures import Pictures, sample
from knonik.batches.stages import Stage
from knonik.order.plan import BatchPlan, GopJob
from knonik.stores.base import StoreUnavailable
from knonik.video.frames import FrameSpec

_CHUNKS_PER_THREAD = 4  # enough to even out GOPs of unequal cost, few enough that queueing costs nothing

_FIRST_CHUNKS = 4  # times as many for the first batch
_JOBS_AT_ONCE = 8  # GOPs read, decoded and converted together by a thread; of the longest ones that is some MB


class LoaderError(RuntimeError):
    """A batch could not be made; the message names episode, camera, frame, file and cause."""


class Plans(Protocol):
    """What the pipeline needs of a planner."""

    @property
    def reuse_batches(self) -> int:
        """Batches over which the samples of one GOP are spread."""

    def plan(self, begin: int) -> BatchPlan:
        """This rank's share of the batch at a global position."""


class _Work:
    """A batch in the making."""

    def __init__(
        self, number: int, plan: BatchPlan, images: dict[str, torch.Tensor], parts: list[list[GopJob]]
    ) -> None:
        self.number = number
        self.plan = plan
        self.images = images
        self.flat: dict[str, NDArray[Any]] = {
            camera: image.numpy().reshape(-1, *image.shape[2:]) for camera, image in images.items()
        }
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.bad: dict[int, Exception] = {}  # place in the batch -> why that sample cannot be made
        self.parts = deque(parts)  # not begun
        self._lock = threading.Lock()
        self._unfinished = len(parts)
        if not parts:
            self.done.set()

    def part_done(self, error: BaseException | None = None) -> None:
        with self._lock:
            self._unfinished -= 1
            self.error = self.error or error
            if not self._unfinished or error is not None:
                self.done.set()


class Pipeline:
    """Makes batches from a global position on, in order, from `start` until `close`.

    Args:
        planner: says what each batch holds.
        pictures: writes the pictures of a batch; closed with the pipeline.
        begin: global position of the first batch.
        specs: batch camera to shape and element type of one picture.
        black: batch camera to the picture where a sample's dataset has no such camera; those not named have zeros.
        buffers: where the batches' memory comes from.
        finish: turns a plan and its images [B, T, *shape] into a batch.
        transform: last step of a batch.
        capacity: samples a batch may have; memory is taken for as many, so that batches of any size share it.
        batch_bytes: pictures of a batch of as many.
        bad_samples: what to do about samples that cannot be made.
        lookahead_batches: batches planned and announced beyond those in the ring, at most.
    """

    def __init__(
        self,
        planner: Plans,
        pictures: Pictures,
        *,
        begin: int,
        capacity: int,
        specs: Mapping[str, FrameSpec],
        buffers: BufferPool,
        finish: Callable[[BatchPlan, dict[str, torch.Tensor]], Batch],
        transform: Callable[[Batch], Batch],
        batch_bytes: int,
        bad_samples: BadSamples,
        decode_threads: int,
        ring_batches: int,
        lookahead_batches: int,
        stages: Mapping[str, Stage],
        black: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        self._planner, self._pictures, self._begin, self._capacity = planner, pictures, begin, capacity
        self._specs, self._buffers, self._finish, self._transform = specs, buffers, finish, transform
        self._bad_samples, self._stages, self._black = bad_samples, stages, black or {}
        self._chunks = decode_threads * _CHUNKS_PER_THREAD
        self._most_ahead = lookahead_batches
        self._ring, self._batch_bytes = ring_batches, batch_bytes
        # Shared with the planning thread, under `_turn`.
        self._turn = threading.Condition()
        self._refused = False  # the source had no room when asked last, and no batch was done since
        self._delivered = False
        self._closing = threading.Event()
        # The planning thread's own.
        self._planned: deque[tuple[BatchPlan, list[list[tuple[str, int]]]]] = deque()
        self._announced: deque[tuple[int, BatchPlan]] = deque()
        self._number = 0
        self._failure: Exception | None = None
        self._jobs: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()  # a batch as often as it has parts
        self._making: queue.SimpleQueue[_Work | BaseException | None] = queue.SimpleQueue()
        self._waits_for: _Work | None = None  # what the assembling thread waits for
        self._handoff = Handoff(ring_batches, self._turn)
        self.take = self._handoff.take
        # Daemons, so that an interpreter that ends with a loader still open is not held up; `close` joins them.
        self._decoders = [
            threading.Thread(target=self._decode, name=f"knonik-decode-{i}", daemon=True) for i in range(decode_threads)
        ]
        self._planning = threading.Thread(target=self._plan, name="knonik-plan", daemon=True)
        self._assembler = threading.Thread(target=self._assemble, name="knonik-assemble", daemon=True)
        self._threads = (self._planning, *self._decoders, self._assembler)

    def start(self) -> None:
        """Begin to make batches."""
        for thread in self._threads:
            thread.start()

    def gauges(self) -> dict[str, float]:
        """Batches ready, being made and looked ahead at, bytes of the ring; gauges of buffers and pictures."""
        ready, taken = self._handoff.ready, self._ring - self._handoff.free
        return {
            "ring_batches": self._ring,
            "ring_ready": ready,
            "ring_making": max(0, taken - ready),
            "ring_bytes": taken * self._batch_bytes,
            "ring_limit_bytes": self._ring * self._batch_bytes,
            "lookahead_batches": len(self._announced) + len(self._planned),
            **self._buffers.gauges(),
            **self._pictures.gauges(),
        }

    def close(self) -> None:
        """Stop and join all threads. Safe to call twice; a `take` under way gets an error."""
        if threading.current_thread() in self._threads:
            # A garbage collection may run in a thread of ours, even inside one of its locks: it cannot join itself.
            self._closing.set()  # at once: what the loader lets go of next must not be missed by another batch
            threading.Thread(target=self.close, name="knonik-close", daemon=True).start()
            return
        self._closing.set()
        with self._turn:
            self._turn.notify()
        self._pictures.stop()  # ends the waits for packets
        for _ in self._decoders:
            self._jobs.put(None)
        self._making.put(None)
        if (work := self._waits_for) is not None:
            work.done.set()
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join()
        self._pictures.close()  # now: a thread at work may be using any of its files
        self._handoff.close()
        self._buffers.close()
        self._handoff.fail(LoaderError("the loader was closed"))

    def _plan(self) -> None:
        try:
            while not self._closing.is_set():
                if not (self._start_next() or self._look_ahead()):
                    with self._turn:
                        self._handoff.planner_sleeps = True
                        if self._idle():
                            self._turn.wait()
                        self._handoff.planner_sleeps = False
                if self._failure is not None and not self._announced:
                    raise self._failure  # behind the batches that are well
        except BaseException as error:
            self._making.put(error)

    def _idle(self) -> bool:
        startable = self._handoff.free > 0 and self._announced
        return not startable and not self._may_look_ahead() and not self._closing.is_set()

    def _may_look_ahead(self) -> bool:
        # Until the first batch is out the processor is for making it, and the link for its bytes.
        most = self._most_ahead if self._delivered else min(self._most_ahead, self._ring)
        return not self._refused and self._failure is None and len(self._announced) < most

    def _start_next(self) -> bool:
        """Give the next batch buffers and hand out its jobs, if the ring has a slot for it."""
        if not self._announced or self._handoff.free < 1:
            return False
        with self._stages["assemble"].measure("busy"):
            self._handoff.begin()
            number, plan = self._announced.popleft()
            images = {camera: self._memory(camera, seen.shape) for camera, seen in plan.seen.items()}
            # Of the first batch one thread more decodes, and the last part is waited for with nothing else to do.
            chunks = self._chunks if self._delivered else _FIRST_CHUNKS * self._chunks
            size = max(1, -(-len(plan.jobs) // chunks))
            parts = [plan.jobs[i : i + size] for i in range(0, len(plan.jobs), size)]
            work = _Work(number, plan, images, parts)
            self._making.put(work)
            for _ in parts:
                self._jobs.put(work)
        return True

    def _memory(self, camera: str, shape: tuple[int, ...]) -> torch.Tensor:
        """For pictures [B, T] of a camera."""
        size, steps = shape
        whole = self._buffers.take((self._capacity, steps, *self._specs[camera].shape), self._specs[camera].dtype)
        return whole if size == self._capacity else whole[:size]

    def _look_ahead(self) -> bool:
        """Plan or announce one more batch; False if there is no room."""
        if not self._may_look_ahead():
            return False
        try:
            self._plan_next()
        except Exception as error:
            self._failure = error
        return True

    def _plan_next(self) -> None:
        # A GOP is decoded for all batches that share it, so these must be planned before the first of them starts.
        while len(self._planned) < max(1, self._planner.reuse_batches):
            with self._stages["assemble"].measure("busy"):
                plan = self._planner.plan(self._begin)
                self._planned.append((plan, self._pictures.expect(plan)))
                self._begin = plan.end
        plan, units = self._planned[0]
        with self._turn:
            self._refused = True  # `done` of a batch from here on asks again
        if not self._pictures.announce(self._number, units):
            return
        with self._turn:
            self._refused = False
        self._planned.popleft()
        self._announced.append((self._number, plan))
        self._number += 1

    def _assemble(self) -> None:
        try:
            while True:
                with self._stages["assemble"].measure("starved"):
                    work = self._making.get()
                if work is None or self._closing.is_set():
                    return
                if isinstance(work, BaseException):
                    raise work
                # Noted before `_closing` is looked at, and `close` looks after setting it: one of them sees the other.
                self._waits_for = work
                if not self._closing.is_set():
                    if not self._delivered:
                        self._help(work)
                    with self._stages["assemble"].measure("starved"):
                        work.done.wait()
                self._waits_for = None
                if self._closing.is_set():
                    return
                self._deliver(work)
                del work  # while this thread waits, the batch's memory is its receiver's alone
        except BaseException as error:
            self._handoff.fail(error)

    def _deliver(self, work: _Work) -> None:
        if work.error is not None:
            raise work.error
        self._pictures.done(work.number)
        with self._turn:
            self._refused, self._delivered = False, True
            self._turn.notify()
        with self._stages["assemble"].measure("busy", items=1):
            for camera, places in work.plan.blank.items():
                work.flat[camera][places] = self._black.get(camera, 0)
            plan, images = work.plan, work.images
            if work.bad:
                plan = self._bad_samples.settled(plan, work.flat, work.bad)
                images = {camera: image[: len(plan.positions)] for camera, image in images.items()}
            batch = self._finish(plan, images)
        with self._stages["transform"].measure("busy", items=1):
            batch = self._transform(batch)
        self._handoff.put(batch)

    def _decode(self) -> None:
        while True:
            begin = time.perf_counter()
            work = self._jobs.get()
            self._stages["decode"].add("starved", time.perf_counter() - begin)
            if work is None or self._closing.is_set():
                return
            self._decode_part(work)
            del work  # as above

    def _help(self, work: _Work) -> None:
        """Decode in this thread too: the first batch is what the consumer has been waiting for since the start."""
        while not self._closing.is_set() and self._decode_part(work):
            pass

    def _decode_part(self, work: _Work) -> bool:
        """Decode one part of a batch; False if all were begun."""
        try:
            jobs = work.parts.popleft()
        except IndexError:
            return False
        begin = time.perf_counter()
        error: BaseException | None = None
        for place in range(0, len(jobs), _JOBS_AT_ONCE):
            if (error := self._write(work, jobs[place : place + _JOBS_AT_ONCE])) is not None:
                break
        waited = self._pictures.waited_s()
        items = sum(len(job.places) for job in jobs)
        self._stages["decode"].add("busy", time.perf_counter() - begin - waited, items)
        self._stages["fetch"].add("busy", waited, items)
        work.part_done(error)
        return True

    def _write(self, work: _Work, jobs: list[GopJob]) -> Exception | None:
        """Write the pictures of some jobs; the error to raise, if any."""
        if self._closing.is_set() or work.error is not None:
            return None
        left: list[tuple[GopJob, Any]] = [*zip(jobs, self._pictures.prepare(work.plan, jobs, work.flat), strict=True)]
        while left:
            rests = []
            for job, start in left:
                if self._closing.is_set() or work.error is not None:
                    return None
                try:
                    if (rest := start()) is not None:
                        rests.append((job, rest))
                except Exception as cause:
                    if (error := self._failed(work, job, cause)) is not None:
                        return error
            left = rests
        return None

    def _failed(self, work: _Work, job: GopJob, cause: Exception) -> Exception | None:
        """The error to raise; None where bad samples are left out, which are then noted."""
        # A store that does not answer makes no sample bad; asking it for each one would take for ever.
        if not self._bad_samples.skip or isinstance(cause, StoreUnavailable):
            return self._located(work.plan, job, cause)
        for number, place in zip(job.numbers, job.places, strict=True):
            alone = replace(job, numbers=[number], places=[place])
            try:
                self._pictures.write_alone(work.plan, alone, work.flat[job.camera])
            except StoreUnavailable as error:
                return self._located(work.plan, alone, error)
            except Exception as error:
                index = place // work.plan.seen[job.camera].shape[1]
                work.bad.setdefault(index, self._located(work.plan, alone, error))
        return None

    def _located(self, plan: BatchPlan, job: GopJob, cause: Exception) -> LoaderError:
        where = ", ".join(
            f"episode {episode} frame {frame}"
            for episode, frame in dict.fromkeys(sample(plan, job.camera, place) for place in job.places)
        )
        uri = self._pictures.uri(job.dataset)
        error = LoaderError(f"cannot read {where} of camera {job.source_camera} from {job.key} in {uri}: {cause}")
        error.__cause__ = cause
        return error
