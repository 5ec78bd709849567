"""One clock for a run: how long each step took, and how much of it was waiting for the loader.

Lightning brackets every fetch with a profiler action, on whatever loader is used. Listening there puts the clock
exactly around the call it times, costs two clock reads, and never touches the device. Saving a checkpoint is bracketed
too, Lightning's validation has hooks and ours says when it runs: their time is left out of the step it falls into.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler

FETCH = "[_TrainingEpochLoop].train_dataloader_next"
EXCLUDED = "[Callback]ModelCheckpoint"


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step on this rank; times in seconds of the host clock."""

    index: int
    wait_s: float
    """Inside the loader's `next`, all micro-batches of the step."""
    step_s: float
    """From the end of the step before, less checkpoints and validation."""
    samples: int
    flops: int
    """Model FLOPs of this rank, as the module declares them; 0 when it does not."""
    loss: torch.Tensor
    """Mean over the micro-batches, still on its device."""
    loss_weight: torch.Tensor | None = None
    """What the mean over ranks weighs this loss with, as the module gives it; None where all ranks count the same."""


class _Listener(Profiler):
    """Passes every action on to the profiler in use and keeps the time of those the clock asks for."""

    def __init__(self, inner: Profiler) -> None:
        super().__init__()
        self.inner = inner
        self.fetch_s: list[float] = []
        self.excluded_s = 0.0
        self._fetch_started = 0.0
        self._excluded_started = 0.0
        self._excluded_depth = 0

    def exclude(self) -> None:
        """Leave the time until `include` out; pairs may be nested."""
        if not self._excluded_depth:
            self._excluded_started = time.perf_counter()
        self._excluded_depth += 1

    def include(self) -> None:
        """Count time again."""
        self._excluded_depth -= 1
        if not self._excluded_depth:
            self.excluded_s += time.perf_counter() - self._excluded_started

    def start(self, action_name: str) -> None:
        if action_name == FETCH:
            self._fetch_started = time.perf_counter()
        elif action_name.startswith(EXCLUDED):
            self.exclude()
        self.inner.start(action_name)

    def stop(self, action_name: str) -> None:
        self.inner.stop(action_name)
        if action_name == FETCH:
            self.fetch_s.append(time.perf_counter() - self._fetch_started)
        elif action_name.startswith(EXCLUDED):
            self.include()

    def summary(self) -> str:
        return self.inner.summary()

    def describe(self) -> None:
        self.inner.describe()

    def setup(self, stage: Any, local_rank: int | None = None, log_dir: str | None = None) -> None:
        self.inner.setup(stage, local_rank, log_dir)

    def teardown(self, stage: Any) -> None:
        self.inner.teardown(stage)


def batch_length(batch: Any) -> int:
    """Samples in a batch: the leading size of its first tensor, or `len` of the batch."""
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0])
    if isinstance(batch, dict):
        return next((batch_length(value) for value in batch.values() if isinstance(value, torch.Tensor)), len(batch))
    if isinstance(batch, list | tuple) and batch and isinstance(batch[0], torch.Tensor):
        return batch_length(batch[0])
    return len(batch)


class StepClock(Callback):
    """Times every optimizer step; put it first in the list of callbacks.

    Args:
        started_at: `time.perf_counter()` of the start of the program; the wait for the first batch counts from here.

    Attributes:
        steps: finished steps since the last `drain`, oldest first.
        first_batch_s: seconds from `started_at` until the first batch was there; None before.
    """

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self.first_batch_s: float | None = None
        self.steps: list[Step] = []
        self._listener: _Listener | None = None
        self._cycle_started = 0.0
        self._wait_s = 0.0
        self._samples = 0
        self._flops = 0
        self._losses: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self._step_before = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._listener is None:
            self._listener = _Listener(trainer.profiler)  # type: ignore[attr-defined]
            trainer.profiler = self._listener  # type: ignore[attr-defined]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._cycle_started = time.perf_counter()
        self._step_before = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self._listener is not None
        if self.first_batch_s is None:
            self.first_batch_s = time.perf_counter() - self.started_at
            # the first fetch is start-up, reported as `first_batch_s`; it is no wait of a step
            self._listener.fetch_s.clear()
            self._cycle_started = time.perf_counter()
        self._wait_s += sum(self._listener.fetch_s)
        self._listener.fetch_s.clear()
        self._samples += batch_length(batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._listener is not None
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        if isinstance(outputs, dict) and "loss_weight" in outputs:  # a sum, to be divided by the weight of the step
            loss = outputs["loss_sum"]
            self._weights.append(outputs["loss_weight"].detach())
        self._losses.append(loss.detach())
        self._flops += int(getattr(pl_module, "step_flops", 0))
        if trainer.global_step == self._step_before:
            return  # a micro-batch of a step that is still accumulating
        now = time.perf_counter()
        # Lightning divides the returned loss by the number of micro-batches, so their sum is the step's mean
        loss = self._losses[0] if len(self._losses) == 1 else torch.stack(self._losses).sum()
        weight = torch.stack(self._weights).sum() if self._weights else None
        self.steps.append(
            Step(
                index=trainer.global_step,
                wait_s=self._wait_s,
                step_s=now - self._cycle_started - self._listener.excluded_s,
                samples=self._samples,
                flops=self._flops,
                loss=loss if weight is None else loss / weight,
                loss_weight=weight,
            )
        )
        self._listener.excluded_s = 0.0
        self._cycle_started = now
        self._step_before = trainer.global_step
        self._wait_s, self._samples, self._flops = 0.0, 0, 0
        self._losses, self._weights = [], []

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._listener is not None:
            self._listener.exclude()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._listener is not None:
            self._listener.include()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside is left out of the step it falls into."""
        if self._listener is None:
            yield
            return
        self._listener.exclude()
        try:
            yield
        finally:
            self._listener.include()

    def drain(self) -> list[Step]:
        """The steps finished since the last call."""
        steps, self.steps = self.steps, []
        return steps
