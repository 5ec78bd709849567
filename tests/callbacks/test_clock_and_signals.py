"""The clock and the stop on a signal inside a real Lightning loop."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from callbacks.metrics import Metrics
from callbacks.preemption import Preemption
from callbacks.run_record import RunRecord
from callbacks.step_clock import StepClock

SLOW_S = 0.03


class Slow:
    """Endless batches; those whose number is in `slow` arrive late."""

    def __init__(self, slow: set[int]) -> None:
        self.slow = slow

    def __iter__(self) -> Iterator[torch.Tensor]:
        number = 0
        while True:
            if number in self.slow:
                time.sleep(SLOW_S)
            yield torch.ones(4, 2)
            number += 1


class Line(LightningModule):
    step_flops = 10

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def run(callbacks: list[Callback], tmp_path: Path, **options: Any) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **options,
    )
    trainer.fit(Line(), train_dataloaders=Slow({4, 5}))
    return trainer


def test_waits_are_charged_to_steps_and_micro_batches_add_up(tmp_path: Path) -> None:
    clock = StepClock(time.perf_counter())
    run([clock], tmp_path, max_steps=4, accumulate_grad_batches=2)
    steps = clock.drain()
    assert [step.index for step in steps] == [1, 2, 3, 4]
    assert [step.samples for step in steps] == [8] * 4
    assert [step.flops for step in steps] == [20] * 4
    late = [step.wait_s >= SLOW_S for step in steps]
    # Lightning fetches one batch ahead, so batch 4 is waited for at the latest in the step that uses batch 3
    assert sum(step.wait_s for step in steps) >= 2 * SLOW_S
    assert 1 <= sum(late) <= 2
    assert all(step.wait_s <= step.step_s for step in steps)
    assert clock.first_batch_s is not None
    assert clock.drain() == []


def test_every_step_is_recorded_once(tmp_path: Path) -> None:
    clock, record = StepClock(time.perf_counter()), RunRecord(tmp_path)
    record.resume_at(0)
    run([clock, Metrics(clock, [], record)], tmp_path, max_steps=7, log_every_n_steps=3)
    assert [row["step"] for row in record.rows()] == list(range(1, 8))


class Kill(Callback):
    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_saves_once_and_stops_at_a_whole_step(tmp_path: Path) -> None:
    saved: list[int] = []
    preemption = Preemption(lambda trainer: saved.append(trainer.global_step))
    before = signal.getsignal(signal.SIGTERM)
    trainer = run([Kill(), preemption], tmp_path, max_steps=50, accumulate_grad_batches=2)
    assert saved == [3] or saved == [4]
    assert trainer.global_step == saved[0]
    assert preemption.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
