"""The loader: an endless, resumable iterator of batches, decoded ahead by threads of this process.

Why threads and no side process: `benchmarks/loader_disturbance.py` (two 64x64 H.264 cameras, batch 32, a CPU step of
86 ms, one decode thread, two cores at load 1 to 2). Step and wait for the batch together took 1.29 times the step
without a loader with threads and 1.44 times with a spawned process; the bare step alone differed by less than its
noise. At load 3 to 5, three runs gave 1.33, 1.57, 1.74 for threads and 1.46, 1.84, 1.86 for the process.
"""

import hashlib
import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from knonik.batch import Batch
from knonik.dataset import Dataset
from knonik.gather import Gather
from knonik.pipeline import LoaderError, Pipeline
from knonik.plan import Offsets, Planner
from knonik.stages import Stage

__all__ = ["Loader", "LoaderError"]

Transform = Callable[[Batch], dict[str, torch.Tensor]]
_MAX_DEFAULT_THREADS = 8


class Loader:
    """Endless iterator of batches in an order that is a function of (seed, position) alone.

    The global batch is B = batch_size * world_size samples; batch b takes positions bB..(b+1)B-1 of the global order,
    rank r every world_size-th of them. Epochs follow each other without a gap, so a batch may hold the end of one
    and the beginning of the next. A batch handed out is the receiver's: the loader never writes into it again.

    Args:
        dataset: an opened dataset.
        batch_size: samples per rank.
        seed: chooses the order.
        windows: feature or camera key to step offsets from the anchor; default [0] each.
        edge: `repeat` repeats an episode's first or last row beyond its ends; `inside` takes only anchors whose future
            windows end inside the episode.
        cameras: camera keys; None = all.
        state, action: column keys; the windows of all action keys must be equal.
        rank, world_size: this process' share.
        transform: makes `Batch.inputs` of each batch; runs in the assembling thread.
        decode_threads: None = one less than the cores this rank may use, at least 1 and at most 8.
        ring_batches: batches being made or ready at any time; bounds memory.
        shuffle: False gives the stored order.
        pin_memory: put each batch into page-locked memory, for asynchronous copies to a GPU.

    Attributes:
        manual_acknowledge: False: a batch counts as consumed when it is handed out. True: when `acknowledge` is called
            with it, for a trainer that fetches ahead; `iter` then begins again at the first unacknowledged batch.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        seed: int = 0,
        windows: Mapping[str, Offsets] | None = None,
        edge: str = "repeat",
        cameras: Sequence[str] | None = None,
        state: Sequence[str] = ("observation.state",),
        action: Sequence[str] = ("action",),
        rank: int = 0,
        world_size: int = 1,
        transform: Transform | None = None,
        decode_threads: int | None = None,
        ring_batches: int = 3,
        shuffle: bool = True,
        pin_memory: bool = False,
    ) -> None:
        cameras = list(dataset.cameras if cameras is None else cameras)
        windows = dict(windows or {})
        used = (*cameras, *state, *action)
        if unknown := sorted(windows.keys() - set(used)):
            raise ValueError(f"windows names {unknown}, which are not loaded; loaded are {sorted(used)}")
        windows = {key: windows.get(key, [0]) for key in used}
        if len({tuple(windows[key]) for key in action}) > 1:
            raise ValueError(
                f"windows of the action keys {list(action)} differ; one action_is_pad serves all, give equal ones"
            )
        for name, value in (("decode_threads", decode_threads), ("ring_batches", ring_batches)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is not allowed; give 1 or more")
        self._planner = Planner(
            dataset,
            batch_size=batch_size,
            seed=seed,
            windows=windows,
            edge=edge,
            cameras=cameras,
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
        )
        self._dataset, self._seed = dataset, seed
        self._gather = Gather(dataset, windows=windows, state=state, action=action)
        self._shapes = {camera: (*dataset.image_shape(camera), 3) for camera in cameras}
        self._transform, self._pin_memory = transform, pin_memory
        # torchrun tells how many ranks share this machine; without it all of them may.
        self._threads = decode_threads or default_threads(int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
        self._ring_batches = ring_batches
        self._stages = {name: Stage() for name in ("decode", "assemble", "transform")}
        self._order = _order_digest(dataset, self._planner.horizon, shuffle)
        self._position = 0  # samples consumed over all epochs and ranks
        self._given: deque[Batch] = deque()  # handed out, not yet acknowledged
        self._again: deque[Batch] = deque()  # to be handed out once more after `iter`
        self._pipeline: Pipeline | None = None
        self._finalizer: weakref.finalize[[], Loader] | None = None
        self._closed = False
        self.manual_acknowledge = False

    def __iter__(self) -> "Loader":
        self._again.extendleft(reversed(self._given))
        self._given.clear()
        self._running()
        return self

    def __next__(self) -> Batch:
        batch = self._again.popleft() if self._again else self._running().take()
        if self.manual_acknowledge:
            self._given.append(batch)
        else:
            self._position = batch.begin + self._planner.global_batch
        return batch

    def acknowledge(self, batch: Batch) -> None:
        """Count a batch handed out, and those before it, as consumed. Copies of the batch on a device do as well."""
        if batch.begin not in [given.begin for given in self._given]:
            raise ValueError(f"the batch at position {batch.begin} is not one this loader is waiting for")
        while self._given[0].begin != batch.begin:
            self._given.popleft()
        self._given.popleft()
        self._position = batch.begin + self._planner.global_batch

    @property
    def num_anchors(self) -> int:
        """Samples of one epoch over all ranks."""
        return self._planner.num_anchors

    def state_dict(self) -> dict[str, str | int]:
        """Where to go on: plain values, the same on every rank, valid for any world size.

        `position` counts the samples consumed inside `epoch` over all ranks; `order` is a digest of what else the order
        depends on (episodes in use, edge policy, shuffle).
        """
        epoch, position = divmod(self._position, self.num_anchors)
        return {
            "fingerprint": self._dataset.fingerprint,
            "order": self._order,
            "seed": self._seed,
            "epoch": epoch,
            "position": position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; batches made ahead are dropped.

        Raises:
            ValueError: the state is of another dataset, seed or order.
        """
        own = self.state_dict()
        hints = {
            "fingerprint": "the dataset has changed since; resume with the same files",
            "seed": "give the same seed",
            "order": "give the same episodes, windows, edge and shuffle",
        }
        for key, hint in hints.items():
            if state.get(key) != own[key]:
                raise ValueError(f"saved {key} is {state.get(key)!r}, this loader has {own[key]!r}: {hint}")
        self._stop()
        self._position = int(state["epoch"]) * self.num_anchors + int(state["position"])

    def stages(self) -> dict[str, dict[str, float]]:
        """Seconds each stage was busy, starved and blocked, and its items (frames decoded, batches otherwise)."""
        return {name: stage.snapshot() for name, stage in self._stages.items()}

    def close(self) -> None:
        """Join all threads and let go of the columns; the dataset stays open."""
        self._stop()
        self._gather.close()
        self._closed = True

    def __enter__(self) -> "Loader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _running(self) -> Pipeline:
        if self._closed:
            raise LoaderError("the loader is closed; make a new one")
        if self._pipeline is None:
            make = _Inputs(self._transform)
            self._pipeline = Pipeline(
                self._dataset,
                self._planner,
                begin=self._position,
                shapes=self._shapes,
                finish=self._gather.batch,
                transform=make.pinned if self._pin_memory else make.inputs,
                decode_threads=self._threads,
                ring_batches=self._ring_batches,
                stages=self._stages,
            )
            # The threads hold the pipeline and never the loader, so a forgotten loader is collected and stops them; the
            # same call runs when the interpreter ends.
            self._finalizer = weakref.finalize(self, self._pipeline.close)
        return self._pipeline

    def _stop(self) -> None:
        self._given.clear()
        self._again.clear()
        if self._finalizer is not None:
            self._finalizer()
        self._pipeline = self._finalizer = None


class _Inputs:
    """The last step of a batch; holds no reference to the loader."""

    def __init__(self, transform: Transform | None) -> None:
        self._transform = transform

    def inputs(self, batch: Batch) -> Batch:
        return batch if self._transform is None else replace(batch, inputs=self._transform(batch))

    def pinned(self, batch: Batch) -> Batch:
        return self.inputs(batch).pin_memory()


def default_threads(local_ranks: int) -> int:
    """Decoding threads for one of `local_ranks` processes on this machine: its share of the cores less one, 1 to 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MAX_DEFAULT_THREADS, cores // local_ranks - 1))


def _order_digest(dataset: Dataset, horizon: int, shuffle: bool) -> str:
    digest = hashlib.sha256(dataset.episodes.ids.tobytes())
    digest.update(f"{horizon} {shuffle}".encode())
    return digest.hexdigest()[:16]
