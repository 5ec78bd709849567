"""The clock and the stop on a signal inside a real Lightning loop."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from callbacks.metrics import Metrics
from callbacks.preemption import Preemption
from callbacks.run_record import RunRecord
from callbacks.step_clock import StepClock
from callbacks.window import Window

SLOW_S = 0.03


@pytest.fixture(autouse=True)
def time(made_time: Any) -> Any:
    return made_time


class Slow:
    """Endless batches; those whose number is in `slow` arrive late."""

    def __init__(self, time: Any, slow: set[int]) -> None:
        self.time = time
        self.slow = slow

    def __iter__(self) -> Iterator[torch.Tensor]:
        number = 0
        while True:
            if number in self.slow:
                self.time.sleep(SLOW_S)
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


def run(callbacks: list[Callback], tmp_path: Path, time: Any, **options: Any) -> Trainer:
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
    trainer.fit(Line(), train_dataloaders=Slow(time, {4, 5}))
    return trainer


def test_waits_are_charged_to_steps_and_micro_batches_add_up(tmp_path: Path, time: Any) -> None:
    clock = StepClock(time.perf_counter())
    run([clock], tmp_path, time, max_steps=4, accumulate_grad_batches=2)
    steps = clock.drain()
    assert [step.index for step in steps] == [1, 2, 3, 4]
    assert [step.samples for step in steps] == [8] * 4
    assert [step.flops for step in steps] == [20] * 4
    late = [step.wait_s for step in steps if step.wait_s]
    # Lightning fetches one batch ahead, so batch 4 is waited for at the latest in the step that uses batch 3
    assert sum(late) == pytest.approx(2 * SLOW_S)
    assert 1 <= len(late) <= 2
    assert [step.step_s for step in steps] == pytest.approx([step.wait_s for step in steps])
    assert clock.first_batch_s == 0.0
    assert clock.drain() == []


def test_every_step_is_recorded_once(tmp_path: Path, time: Any) -> None:
    clock, record = StepClock(time.perf_counter()), RunRecord(tmp_path)
    record.resume_at(0)
    run([clock, Metrics(clock, [], record)], tmp_path, time, max_steps=7, log_every_n_steps=3)
    assert [row["step"] for row in record.rows()] == list(range(1, 8))


class Save(Callback):
    """Writes a checkpoint at one step, between two logging intervals, and looks at what is on disk then."""

    def __init__(self, record: RunRecord, step: int) -> None:
        self.record = record
        self.step = step
        self.on_disk: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.record.folder / "at.ckpt")
            self.on_disk = [int(row["step"]) for row in self.record.rows()]


class Count:
    """Meter that remembers which steps each of its windows held."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def measure(self, window: Window) -> dict[str, float]:
        self.seen.append(window.index)
        return {}


def test_the_steps_of_a_checkpoint_are_on_disk_before_it(tmp_path: Path, time: Any) -> None:
    clock, record, meter = StepClock(time.perf_counter()), RunRecord(tmp_path), Count()
    record.resume_at(0)
    saver = Save(record, step=5)
    run([clock, Metrics(clock, [meter], record), saver], tmp_path, time, max_steps=7, log_every_n_steps=3)
    assert saver.on_disk == [1, 2, 3, 4, 5]
    assert meter.seen == [[1, 2, 3], [4, 5, 6], [7]]
    assert [row["step"] for row in record.rows()] == list(range(1, 8))


def test_checkpoints_and_validation_are_left_out_of_the_step(tmp_path: Path, time: Any) -> None:
    clock = StepClock(time.perf_counter())
    clock.setup(Trainer(logger=False, accelerator="cpu"), Line(), "fit")
    listener = clock._listener
    assert listener is not None
    listener.start("[Callback]ModelCheckpoint{}.on_train_batch_end")
    time.sleep(SLOW_S)
    listener.start("[Callback]ModelCheckpoint{}.on_save_checkpoint")  # nested: counted once, and the time before kept
    listener.stop("[Callback]ModelCheckpoint{}.on_save_checkpoint")
    listener.stop("[Callback]ModelCheckpoint{}.on_train_batch_end")
    assert listener.excluded_s == pytest.approx(SLOW_S)
    clock.on_validation_start(None, None)  # type: ignore[arg-type]
    time.sleep(SLOW_S)
    clock.on_validation_end(None, None)  # type: ignore[arg-type]
    assert listener.excluded_s == pytest.approx(2 * SLOW_S)


class Kill(Callback):
    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        if trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_saves_once_and_stops_at_a_whole_step(tmp_path: Path, time: Any) -> None:
    saved: list[int] = []
    preemption = Preemption(lambda trainer: saved.append(trainer.global_step))
    before = signal.getsignal(signal.SIGTERM)
    trainer = run([Kill(), preemption], tmp_path, time, max_steps=50, accumulate_grad_batches=2)
    assert saved == [3] or saved == [4]
    assert trainer.global_step == saved[0]
    assert preemption.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_one_interrupt_asks_and_the_second_stops_at_once() -> None:
    preemption = Preemption(lambda trainer: None)
    preemption._handle(signal.SIGTERM, None)
    preemption._handle(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        preemption._handle(signal.SIGINT, None)
