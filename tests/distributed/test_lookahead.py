"""A run that works a micro-batch ahead, killed and continued: every loss and weight of the plain run, and a data
position that counts what was trained, not what was drawn or made ahead."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks.run_record import RunRecord
from recipes.load import load
from recipes.run_folder import RunFolder
from recipes.stages import make_dataset

ROOT = Path(__file__).resolve().parents[2]
STEPS, EVERY, BATCH, TIMEOUT_S = 12, 3, 8, 900

pytestmark = pytest.mark.distributed


def options(where: Path, name: str, *more: str) -> list[str]:
    return [
        "run.first=null",
        "evaluation=null",
        "model.config.tune_llm=false",
        "model.config.tune_visual=false",
        "data.generate.layouts=4",
        f"data.uri={where / 'data'}",
        f"data.cache.dir={where / 'cache'}",
        f"run.dir={where / name}",
        "data.batch_size=null",
        f"data.global_batch_size={BATCH}",
        f"trainer.max_steps={STEPS}",
        "trainer.accumulate_grad_batches=2",
        "schedule.warmup_steps=2",
        f"checkpoint.every_n_steps={EVERY}",
        "checkpoint.keep=-1",
        "trainer.log_every_n_steps=1",
        "data.decode_threads=1",
        *more,
    ]


def command(where: Path, name: str, *more: str) -> list[str]:
    return [sys.executable, "-m", "recipes", "train", "quickstart", *options(where, name, *more)]


def run(where: Path, name: str, *more: str) -> str:
    done = subprocess.run(
        command(where, name, *more), cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


def run_until_killed(where: Path, name: str, step: int, *more: str) -> None:
    process = subprocess.Popen(
        command(where, name, *more), cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        record, end = RunRecord(where / name), time.monotonic() + TIMEOUT_S
        while len(record.rows()) < step:
            assert process.poll() is None, "the run ended before it could be stopped"
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in RunRecord(folder).rows()]


def checkpoint(folder: Path, step: int) -> dict[str, Any]:
    stored: dict[str, Any] = torch.load(RunFolder(folder).checkpoint_path(step), weights_only=True)
    return stored


def test_killed_and_continued_it_is_the_plain_run(tmp_path: Path) -> None:
    make_dataset(load("quickstart", options(tmp_path, "none")))
    assert "lookahead" not in run(tmp_path, "plain")
    ahead = ("lookahead=stream", "ema.kind=power")
    run_until_killed(tmp_path, "killed", EVERY + 1, *ahead)
    assert "lookahead: off" not in run(tmp_path, "killed", *ahead)
    assert losses(tmp_path / "killed") == losses(tmp_path / "plain")
    for step in (EVERY, STEPS):
        plain, killed = (checkpoint(tmp_path / name, step) for name in ("plain", "killed"))
        (key,) = [key for key, value in plain.items() if isinstance(value, dict) and "position" in value]
        assert killed[key] == plain[key]
        if step == EVERY:  # also after the continued run, which must not save half a step under this name
            assert (killed[key]["epoch"], killed[key]["position"]) == (0, step * 2 * BATCH)
        state = {name: value for name, value in killed["state_dict"].items() if not name.startswith("ema.")}
        assert state.keys() == plain["state_dict"].keys()
        assert all(torch.equal(value, plain["state_dict"][name]) for name, value in state.items())
        assert len(killed["state_dict"]) > len(state)
