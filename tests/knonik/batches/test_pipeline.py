"""The threads of a loader by themselves: how they end."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from knonik.batches.bad_samples import BadSamples
from knonik.batches.buffers import BufferPool
from knonik.batches.pipeline import LoaderError, Pipeline
from knonik.batches.stages import Stage
from knonik.order.plan import BatchPlan, GopJob
from knonik.video.frames import FrameSpec

CAMERA = "cam"


class Planner:
    """Batches of two samples, each with a job of its own."""

    reuse_batches = 1

    def plan(self, begin: int) -> BatchPlan:
        ids = np.arange(2, dtype=np.int64)
        jobs = [
            GopJob(dataset=0, camera=CAMERA, source_camera=CAMERA, key="k", group=n, numbers=[n], places=[n])
            for n in range(2)
        ]
        return BatchPlan(
            begin=begin, end=begin + 2, positions=begin + ids, datasets=0 * ids, episodes=ids, frames=ids,
            seen={CAMERA: ids[:, None]}, jobs=jobs,
        )  # fmt: skip


@dataclass
class Begun:
    """As much of a batch as the pipeline looks at."""

    begin: int


class Stuck:
    """Pictures that do not come before they are stopped."""

    def __init__(self) -> None:
        self.begun, self.stopped = threading.Event(), threading.Event()
        self.writing = 0
        self.writing_at_close: int | None = None
        self.gauges: Any = dict

    def expect(self, plan: BatchPlan) -> list[list[tuple[str, int]]]:
        return [[]]

    def announce(self, number: int, units: object) -> bool:
        return True

    def prepare(self, plan: BatchPlan, jobs: list[GopJob], flat: object) -> list[Callable[[], None]]:
        return [partial(self.write, plan, job, flat) for job in jobs]

    def write(self, plan: BatchPlan, job: GopJob, flat: object) -> None:
        self.writing += 1
        self.begun.set()
        self.stopped.wait()
        self.writing -= 1

    def waited_s(self) -> float:
        return 0.0

    def stop(self) -> None:
        self.stopped.set()

    def close(self) -> None:
        self.writing_at_close = self.writing


class Counted(Stuck):
    """Pictures that come; those of the first batch only when two threads make them at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.two = threading.Barrier(2, timeout=60)
        self.later: set[str] = set()

    def write(self, plan: BatchPlan, job: GopJob, flat: object) -> None:
        if plan.begin:
            self.later.add(threading.current_thread().name)
        else:
            self.two.wait()

    def done(self, number: int) -> None:
        pass


def test_one_thread_more_decodes_the_first_batch_and_no_other() -> None:
    pictures: Any = Counted()
    pipeline = Pipeline(
        Planner(),
        pictures,
        begin=0,
        capacity=2,
        specs={CAMERA: FrameSpec(shape=(1,), dtype=np.dtype(np.uint8))},
        buffers=BufferPool(keep=1),
        finish=lambda plan, images: Begun(plan.begin),  # type: ignore[arg-type, return-value]
        transform=lambda batch: batch,
        batch_bytes=2,
        bad_samples=BadSamples("raise", max_share=0, num_anchors=10),
        decode_threads=1,
        ring_batches=1,
        lookahead_batches=2,
        stages={name: Stage() for name in ("fetch", "decode", "assemble", "transform")},
    )
    pipeline.start()
    assert [pipeline.take().begin for _ in range(3)] == [0, 2, 4]
    pipeline.close()
    assert pictures.later == {"knonik-decode-0"}


def test_closing_lets_go_of_files_behind_the_last_thread_and_waits_for_no_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait = threading.Event.wait
    monkeypatch.setattr(threading.Event, "wait", lambda event, timeout=None: wait(event))
    pictures: Any = Stuck()
    pipeline = Pipeline(
        Planner(),
        pictures,
        begin=0,
        capacity=2,
        specs={CAMERA: FrameSpec(shape=(1,), dtype=np.dtype(np.uint8))},
        buffers=BufferPool(keep=1),
        finish=lambda plan, images: pytest.fail("no batch is whole"),
        transform=lambda batch: batch,
        batch_bytes=2,
        bad_samples=BadSamples("raise", max_share=0, num_anchors=10),
        decode_threads=1,
        ring_batches=2,
        lookahead_batches=2,
        stages={name: Stage() for name in ("fetch", "decode", "assemble", "transform")},
    )
    pipeline.start()
    pictures.begun.wait()
    closing = threading.Thread(target=pipeline.close, daemon=True)
    closing.start()
    closing.join(timeout=60)
    assert not closing.is_alive()
    # Closed while a thread still writes, a descriptor may by then be another file's.
    assert pictures.writing_at_close == 0
    with pytest.raises(LoaderError, match="closed"):
        pipeline.take()
