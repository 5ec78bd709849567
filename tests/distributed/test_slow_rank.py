"""Of two ranks one is slowed on purpose: measured waits are the true ones, the rank is named, and so is the cause.

Every figure is compared with the time that the slowed part itself took in the same run, however busy the machine is.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from callbacks.data_wait import DataWait
from callbacks.host import Host
from callbacks.memory import Memory
from callbacks.metrics import Metrics
from callbacks.mfu import Mfu
from callbacks.rank_times import RankTimes
from callbacks.run_record import RunRecord
from callbacks.step_clock import StepClock
from callbacks.verdict import Verdict

STEPS, SLOW_RANK = 8, 1
LOADER_S, RANK_S = 0.2, 0.4  # beside them the noise of a busy machine is small
CASES = ("loader", "rank", "all_loaders")


class Slowed:
    """Sleeps when asked to and keeps how long it really slept."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.slept: list[float] = []

    def sleep(self) -> None:
        began = time.perf_counter()
        if self.seconds:
            time.sleep(self.seconds)
        self.slept.append(time.perf_counter() - began)


class Batches:
    def __init__(self, slowed: Slowed) -> None:
        self.slowed = slowed

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(STEPS + 2):
            self.slowed.sleep()
            yield torch.ones(4, 8)


class Line(LightningModule):
    def __init__(self, slowed: Slowed) -> None:
        super().__init__()
        self.slowed = slowed
        self.layer = torch.nn.Linear(8, 8)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        self.slowed.sleep()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(folder: Path, case: str, rank: int, ranks: int) -> dict[str, Any]:
    """Metrics, summary and what was really slept, of one rank."""
    slow = rank == SLOW_RANK or ranks == 1
    loader = Slowed(LOADER_S if case == "all_loaders" or (case == "loader" and slow) else 0.0)
    step = Slowed(RANK_S if case == "rank" and slow else 0.0)
    clock, record, waits, times = StepClock(time.perf_counter()), RunRecord(folder), DataWait(), RankTimes()
    device = torch.device("cpu")
    verdict = Verdict(times, Mfu(device, "32-true"), Host(), Memory(device))
    metrics = Metrics(clock, [waits, times, verdict], record, verdict)
    if rank == 0:
        record.resume_at(0)
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", max_steps=STEPS,
        callbacks=[clock, metrics], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, default_root_dir=folder, log_every_n_steps=1000,
    )  # fmt: skip
    trainer.fit(Line(step), train_dataloaders=Batches(loader))
    return {
        "metrics": metrics.latest,
        "summary": {**waits.summary(), **times.summary(), **verdict.summary()},
        # the first batch and the one fetched ahead of it are start-up
        "loader_s": sum(loader.slept[2 : STEPS + 1]) / STEPS,
        # in the second step DDP lays out its buckets: ranks meet in the forward, where no wait is told apart
        "alone_s": sum(loader.slept[3 : STEPS + 1]) / (STEPS - 1),
        "step_s": sum(step.slept[1:]) / (STEPS - 1),  # the first step is warm-up
    }


def test_a_slowed_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_time: Any) -> None:
    monkeypatch.setitem(globals(), "time", made_time)
    found = train(tmp_path, "loader", 0, 1)
    assert found["metrics"]["time/data_wait_s"] == pytest.approx(found["loader_s"])
    assert found["loader_s"] == pytest.approx((STEPS - 1) / STEPS * LOADER_S)
    assert found["summary"]["limited_by"] == "data"
    assert "for the loader" in found["summary"]["verdict"]
    assert "time/slowest_rank" not in found["metrics"]


@pytest.mark.distributed
def test_the_slow_one_of_two_ranks_is_named_with_what_slows_it(tmp_path: Path) -> None:
    launched = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            __file__, str(tmp_path),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert launched.returncode == 0, launched.stderr[-4000:]
    found = {case: [json.loads((tmp_path / f"{case}-{rank}.json").read_text()) for rank in range(2)] for case in CASES}

    metrics, summary = found["loader"][0]["metrics"], found["loader"][0]["summary"]
    assert metrics["time/data_wait_s"] == pytest.approx(found["loader"][SLOW_RANK]["loader_s"], rel=0.1)
    assert metrics["time/data_wait_slowest_rank"] == metrics["time/slowest_rank"] == SLOW_RANK
    assert metrics["time/slowest_rank_extra_s"] == pytest.approx(found["loader"][SLOW_RANK]["alone_s"], rel=0.1)
    assert summary["limited_by"] == "data"
    assert f"on rank {SLOW_RANK} alone" in summary["verdict"]

    metrics, summary = found["rank"][0]["metrics"], found["rank"][0]["summary"]
    assert metrics["time/slowest_rank"] == summary["slowest_rank"] == SLOW_RANK
    assert metrics["time/slowest_rank_extra_s"] == pytest.approx(found["rank"][SLOW_RANK]["step_s"], rel=0.1)
    assert metrics["time/data_wait_s"] < 0.1 * found["rank"][SLOW_RANK]["step_s"]
    assert summary["limited_by"] == "slow_rank"
    assert f"rank {SLOW_RANK}" in summary["verdict"]

    summary = found["all_loaders"][0]["summary"]
    assert summary["limited_by"] == "data"
    assert "alone" not in summary["verdict"]


def main(folder: Path) -> None:
    """One of two ranks under torchrun."""
    rank = int(os.environ["RANK"])
    for case in CASES:
        (folder / f"{case}-{rank}.json").write_text(json.dumps(train(folder, case, rank, 2)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
