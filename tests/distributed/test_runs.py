"""Whole runs of the command line: one process, two under torchrun, stopped, killed, continued. Equal to the last bit
where the arithmetic is the same, to 1e-5 where the sums are split over ranks."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks.run_record import RunRecord
from recipes.load import load
from recipes.run_folder import RunFolder
from recipes.stages import make_dataset

ROOT = Path(__file__).resolve().parents[2]
STEPS, EVERY = 24, 6
LR = 1e-4
TIMEOUT_S = 900
METRICS = (ROOT / "docs" / "metrics.md").read_text()
DOCUMENTED = {"epoch", "step", *re.findall(r"`(\w+/\w+)`", METRICS)}

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small dataset of the tabletop world and its index."""
    where = tmp_path_factory.mktemp("runs")
    make_dataset(load("quickstart", options(where, "none")))
    return where


def options(where: Path, name: str, *more: str) -> list[str]:
    return [
        "run.first=null",
        "evaluation=null",
        "data.generate.layouts=4",
        f"data.uri={where / 'data'}",
        f"data.cache.dir={where / 'cache'}",
        f"run.dir={where / name}",
        "data.batch_size=null",
        "data.global_batch_size=8",
        f"trainer.max_steps={STEPS}",
        "schedule.warmup_steps=4",
        f"optimizer.lr={LR}",
        f"checkpoint.every_n_steps={EVERY}",
        "checkpoint.keep=-1",
        "trainer.log_every_n_steps=1",
        "data.decode_threads=1",
        *more,
    ]


def command(where: Path, name: str, *more: str, ranks: int = 1) -> list[str]:
    python = [sys.executable]
    if ranks > 1:
        python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*python, "-m", "recipes", "train", "quickstart", *options(where, name, *more)]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}


def run(where: Path, name: str, *more: str, ranks: int = 1) -> str:
    done = subprocess.run(
        command(where, name, *more, ranks=ranks), cwd=ROOT, env=environment(), capture_output=True, text=True,
        timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr + done.stdout


def run_until(where: Path, name: str, step: int, number: int, ranks: int = 1) -> int:
    """Start a run, send it a signal once `step` is recorded, and give its exit code."""
    process = subprocess.Popen(
        command(where, name, ranks=ranks), cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        record, end = RunRecord(where / name), time.monotonic() + TIMEOUT_S
        while len(record.rows()) < step:
            assert process.poll() is None, "the run ended before it could be stopped"
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(number)
        return process.wait(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()


def losses(folder: Path) -> list[float]:
    rows = RunRecord(folder).rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [row["loss"] for row in rows]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    path, step = RunFolder(folder).latest_checkpoint() or (None, 0)
    assert step == STEPS
    return torch.load(path, weights_only=True)["state_dict"]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def assert_close(one: Path, other: Path) -> None:
    assert losses(other) == pytest.approx(losses(one), rel=1e-5, abs=1e-6)
    reference = weights(one)
    for name, value in weights(other).items():
        # A constant added to all keys of an attention changes nothing, so the gradient of a key bias is zero but for
        # rounding, and Adam makes steps of up to one learning rate out of the rounding. All else agrees to 1e-5.
        walks = name.endswith(("to_k.bias", "qkv.bias"))
        torch.testing.assert_close(value, reference[name], rtol=1e-5, atol=STEPS * LR if walks else 1e-5)


@pytest.fixture(scope="module")
def uninterrupted(world: Path) -> Path:
    run(world, "whole")
    return world / "whole"


def test_the_loss_falls_and_the_summary_is_complete(uninterrupted: Path) -> None:
    figures = summary(uninterrupted)
    assert figures["loss_last"] < figures["loss_first"]
    assert figures["steps"] == STEPS
    assert figures["samples_seen"] == STEPS * 8
    assert figures["mfu"] is None
    assert figures["mfu_reason"]
    for name in ("samples_per_s", "first_batch_s", "data_wait_frac", "data_wait_p99_s", "data_wait_max_s",
                 "data_waits_over_1s", "step_s_median", "tflops_per_device", "peak_rss_gb", "fingerprint"):  # fmt: skip
        assert figures[name] is not None, name
    assert figures["tflops_per_device"] > 0
    assert len(figures["weights_digest"]) == 64


def test_two_ranks_see_what_one_process_sees_and_write_one_wandb_run(world: Path, uninterrupted: Path) -> None:
    run(world, "ranks", "logger=wandb", ranks=2)
    assert_close(uninterrupted, world / "ranks")
    runs = list((world / "ranks" / "wandb").glob("offline-run-*"))
    assert len(runs) == 1
    assert len(list(runs[0].glob("*.wandb"))) == 1
    header = next((world / "ranks" / "metrics").rglob("metrics.csv")).read_text().splitlines()[0].split(",")
    assert set(header) <= DOCUMENTED
    assert {"train/loss", "time/data_wait_s", "throughput/samples_per_s", "data/samples_seen"} <= set(header)


def test_a_stopped_run_continues_at_the_next_sample(world: Path, uninterrupted: Path) -> None:
    assert run_until(world, "stopped", EVERY + 2, signal.SIGTERM) == 128 + signal.SIGTERM
    stopped_at = (RunFolder(world / "stopped").latest_checkpoint() or (None, 0))[1]
    assert EVERY + 2 <= stopped_at < STEPS
    assert "continuing from step" in run(world, "stopped")
    assert losses(world / "stopped") == losses(uninterrupted)
    assert summary(world / "stopped")["weights_digest"] == summary(uninterrupted)["weights_digest"]
    assert summary(world / "stopped")["samples_seen"] == STEPS * 8


def test_ranks_that_are_stopped_save_the_same_step_and_leave(world: Path, uninterrupted: Path) -> None:
    assert run_until(world, "stopped-ranks", EVERY + 2, signal.SIGTERM, ranks=2) != 0
    assert EVERY + 2 <= (RunFolder(world / "stopped-ranks").latest_checkpoint() or (None, 0))[1] < STEPS
    run(world, "stopped-ranks")
    assert_close(uninterrupted, world / "stopped-ranks")


@pytest.mark.parametrize(("ranks", "equal"), [(1, "bitwise"), (2, "close")], ids=["on one rank", "on two ranks"])
def test_a_killed_run_continues_from_its_last_checkpoint(
    killed: Callable[[str], Path], uninterrupted: Path, ranks: int, equal: str
) -> None:
    folder = killed(equal)
    run(folder.parent, folder.name, ranks=ranks)
    if equal == "bitwise":
        assert losses(folder) == losses(uninterrupted)
        assert summary(folder)["weights_digest"] == summary(uninterrupted)["weights_digest"]
    else:
        assert_close(uninterrupted, folder)


@pytest.fixture(scope="module")
def killed(world: Path) -> Callable[[str], Path]:
    """Copies of the folder of a run that was killed between two checkpoints."""
    assert run_until(world, "killed", EVERY + 2, signal.SIGKILL) == -signal.SIGKILL
    assert (RunFolder(world / "killed").latest_checkpoint() or (None, 0))[1] >= EVERY

    def copy(name: str) -> Path:
        where = world / f"killed-{name}"
        shutil.copytree(world / "killed", where)
        return where

    return copy


def test_a_finished_run_is_reused(world: Path, uninterrupted: Path) -> None:
    assert "is complete" in run(world, "whole")


def test_ranks_do_not_start_before_their_data_exists(world: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        command(world, "early", f"data.uri={tmp_path / 'none'}"),
        cwd=ROOT, env={**environment(), "WORLD_SIZE": "2", "RANK": "0"}, capture_output=True, text=True,
        timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 2
    assert "start once without torchrun first" in done.stderr
