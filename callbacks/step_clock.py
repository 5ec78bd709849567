"""One clock for a run: how long each step took, and how much of it was waiting for the loader.

The clock stands exactly around the call it times (`listener.py`), costs a few clock reads a step and on a GPU a few
marks in its stream, and never waits for the device. Checkpoints, validation and compilation are left out of the step
they fall into.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from callbacks.device_time import DeviceTime, Span
from callbacks.listener import CompileWatch, Listener
from callbacks.peer_wait import PeerWait
from callbacks.step_hooks import StepCallback


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step on this rank; times in seconds of the host clock."""

    index: int
    wait_s: float
    """Inside the loader's `next`, all micro-batches of the step."""
    step_s: float
    """From the end of the step before, less checkpoints, validation and compilation."""
    samples: int
    flops: int
    """Model FLOPs of this rank, as the module declares them; 0 when it does not."""
    loss: torch.Tensor
    """Mean over the micro-batches, still on its device."""
    loss_weight: torch.Tensor | None = None
    """What the mean over ranks weighs this loss with, as the module gives it; None where all ranks count the same."""
    recompute_flops: int = 0
    """FLOPs of activations that are computed again in the backward, as the module declares them."""
    peer_wait_s: float = 0.0
    """From the end of this rank's own backward until all gradients were exchanged; 0 on one rank."""
    device_idle_s: float | None = None
    """Time the device had nothing to do while the host waited for the loader; None on a CPU."""
    compile_s: float = 0.0
    """Compilation, which `step_s` leaves out."""
    pause_s: float = 0.0
    """Checkpoints and validation, which `step_s` leaves out."""
    warm_up: bool = False
    """First step of a start, or one that compiled: its time says nothing about the others."""


def batch_length(batch: Any) -> int:
    """Samples in a batch: the leading size of its positions or else of its first tensor, or `len` of the batch."""
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0])
    if isinstance(batch, dict):
        if isinstance(batch.get("position"), torch.Tensor):  # one each, also where all tokens lie on one axis
            return batch_length(batch["position"])
        return next((batch_length(value) for value in batch.values() if isinstance(value, torch.Tensor)), len(batch))
    if isinstance(batch, list | tuple) and batch and isinstance(batch[0], torch.Tensor):
        return batch_length(batch[0])
    return len(batch)


class StepClock(StepCallback):
    """Times every optimizer step; put it first in the list of callbacks.

    Args:
        started_at: `time.perf_counter()` of the start of the program; the wait for the first batch counts from here.

    Attributes:
        steps: finished steps since the last `drain`, oldest first.
        first_batch_s: seconds from `started_at` until the first batch was there; None before. `Metrics` makes it the
            slowest rank's.
    """

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self.first_batch_s: float | None = None
        self.steps: list[Step] = []
        self._listener: Listener | None = None
        self._compiles: CompileWatch | None = None
        self._peers: PeerWait | None = None
        self._device_time = DeviceTime(torch.device("cpu"))
        self._spans: list[tuple[list[Span], list[Span]]] = []  # of each step: device idle, peer wait
        self._idle_spans: list[Span] = []
        self._warm_up = True
        self._cycle_started = 0.0
        self._wait_s = 0.0
        self._samples = 0
        self._flops = 0
        self._recompute_flops = 0
        self._losses: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self._step_before = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._listener is None:
            self._device_time = DeviceTime(trainer.strategy.root_device)
            self._listener = Listener(trainer.profiler, self._device_time)  # type: ignore[attr-defined]
            self._compiles = CompileWatch(self._listener)
            trainer.profiler = self._listener  # type: ignore[attr-defined]
        if trainer.world_size > 1:
            self._peers = PeerWait(self._device_time)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._cycle_started = time.perf_counter()
        self._step_before = trainer.global_step
        self._warm_up = True
        if self._compiles is not None:
            self._compiles.start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._compiles is not None:
            self._compiles.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._compiles is not None:
            self._compiles.stop()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        if self._peers is not None:
            self._peers.before_backward(loss)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._peers is not None:
            self._peers.after_backward()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self._listener is not None
        if self.first_batch_s is None:
            self.first_batch_s = time.perf_counter() - self.started_at
            # the first fetch is start-up, reported as `first_batch_s`; it is no wait of a step
            self._listener.fetch_s.clear()
            self._listener.fetch_spans.clear()
            self._listener.take_excluded()
            self._cycle_started = time.perf_counter()
        self._wait_s += sum(self._listener.fetch_s)
        self._listener.fetch_s.clear()
        self._idle_spans += self._listener.fetch_spans
        self._listener.fetch_spans.clear()
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
        self._recompute_flops += int(getattr(pl_module, "step_recompute_flops", 0))
        step = trainer.global_step
        if step == self._step_before:
            return  # a micro-batch of a step that is still accumulating
        now = time.perf_counter()
        # Lightning divides the returned loss by the number of micro-batches, so their sum is the step's mean
        loss = self._losses[0] if len(self._losses) == 1 else torch.stack(self._losses).sum()
        weight = torch.stack(self._weights).sum() if self._weights else None
        excluded = self._listener.take_excluded()
        peer_wait_s, peer_spans = self._peers.take() if self._peers is not None else (0.0, [])
        self.steps.append(
            Step(
                index=step,
                wait_s=self._wait_s,
                step_s=now - self._cycle_started - sum(excluded.values()),
                samples=self._samples,
                flops=self._flops,
                loss=loss if weight is None else loss / weight,
                loss_weight=weight,
                recompute_flops=self._recompute_flops,
                peer_wait_s=peer_wait_s,
                compile_s=excluded["compile"],
                pause_s=excluded["pause"],
                warm_up=self._warm_up or excluded["compile"] > 0,
            )
        )
        self._spans.append((self._idle_spans, peer_spans))
        self._cycle_started = now
        self._step_before = step
        self._warm_up = False
        self._wait_s, self._samples, self._flops, self._recompute_flops = 0.0, 0, 0, 0
        self._losses, self._weights, self._idle_spans = [], [], []

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
        """The steps finished since the last call; what the device's clock says of them is read here."""
        steps, self.steps = self.steps, []
        spans, self._spans = self._spans, []
        self._device_time.wait()
        return [self._with_device_time(*parts) for parts in zip(steps, spans, strict=True)]

    def _with_device_time(self, step: Step, spans: tuple[list[Span], list[Span]]) -> Step:
        idle, peers = (self._device_time.seconds(of) for of in spans)
        if idle is None and peers is None:
            return step
        # on a GPU the host runs ahead: only the device knows how long it waited for the others
        return replace(step, device_idle_s=idle, peer_wait_s=step.peer_wait_s if peers is None else peers)
