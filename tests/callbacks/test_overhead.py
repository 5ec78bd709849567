"""Measuring never waits for the device: what it must know of it is read once per logging interval."""

import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils._python_dispatch import TorchDispatchMode

from callbacks import step_clock
from callbacks.data_wait import DataWait
from callbacks.device_time import DeviceTime
from callbacks.gauges import Gauges
from callbacks.host import Host
from callbacks.memory import Memory
from callbacks.metrics import Metrics
from callbacks.mfu import Mfu
from callbacks.preemption import Preemption
from callbacks.progress import Progress
from callbacks.rank_times import RankTimes
from callbacks.run_record import RunRecord
from callbacks.step_clock import StepClock
from callbacks.throughput import Throughput
from callbacks.verdict import Verdict

STEPS, EVERY, MICRO_BATCHES = 12, 4, 2
CPU = torch.device("cpu")


class Reads(TorchDispatchMode):
    """Keeps the stack of every operation that turns a tensor into a Python value, which waits on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks: list[set[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in {"_local_scalar_dense", "nonzero", "equal", "is_nonzero"}:
            self.stacks.append({frame.name for frame in traceback.extract_stack()})
        return func(*args, **(kwargs or {}))


class Mark:
    """Stands for `torch.cuda.Event`; a wait for it is counted with the step it happens after."""

    made = 0
    waits: ClassVar[list[int]] = []
    trainer: Trainer

    def __init__(self, enable_timing: bool) -> None:
        Mark.made += 1

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        Mark.waits.append(Mark.trainer.global_step)

    def elapsed_time(self, end: "Mark") -> float:
        return 1.0


class Line(LightningModule):
    step_flops, step_recompute_flops = 10, 5

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Ones:
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(4, 2)


class Peers(Callback):
    """Lets the clock take the wait for other ranks, as it does where there are some."""

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock._peers = step_clock.PeerWait(self.clock._device_time)


def test_nothing_is_read_from_the_device_between_two_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    for name in ("synchronize", "current_stream", "mem_get_info", "memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *device, name=name: waits.append(name))
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    # the marks of a GPU, on a machine without one
    monkeypatch.setattr(step_clock, "DeviceTime", lambda device: DeviceTime(torch.device("cuda", 0)))
    monkeypatch.setattr(Mark, "waits", [])
    monkeypatch.setattr(Mark, "made", 0)
    clock, record = StepClock(time.perf_counter()), RunRecord(tmp_path)
    record.resume_at(0)
    ranks, mfu, host, memory = RankTimes(), Mfu(CPU, "bf16-mixed", 1.0), Host(), Memory(CPU)
    verdict = Verdict(ranks, mfu, host, memory)
    meters = [DataWait(), Throughput(100), ranks, mfu, memory, host, Gauges(dict), verdict]
    metrics = Metrics(clock, meters, record, verdict, Progress(every_s=0.0))
    Mark.trainer = trainer = Trainer(
        accelerator="cpu", max_steps=STEPS, accumulate_grad_batches=MICRO_BATCHES, log_every_n_steps=EVERY,
        callbacks=[clock, Peers(clock), metrics, Preemption(lambda trainer: None)],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    with Reads() as reads:
        trainer.fit(Line(), train_dataloaders=Ones())
    assert waits == []
    assert Mark.waits == [4, 8, 12]
    with Reads() as control:
        float(torch.ones(1))
    assert len(control.stacks) == 1, "a read is seen"
    assert [stack for stack in reads.stacks if "flush" not in stack] == []
    # two marks a fetch and two a backward, used again after each row
    assert Mark.made <= 4 * MICRO_BATCHES * (EVERY + 1)
    idle = [row["device_idle_s"] for row in record.rows()]
    assert idle[1:] == pytest.approx([0.001 * MICRO_BATCHES] * (STEPS - 1))
    assert metrics.latest["time/device_idle_s"] == pytest.approx(0.001 * MICRO_BATCHES)
    assert metrics.latest["perf/hfu"] == pytest.approx(1.5 * metrics.latest["perf/mfu"])
