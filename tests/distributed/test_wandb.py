"""Offline W&B: one run for four ranks, the same run when it continues, and the documented metrics in it, no others."""

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes.load import load
from recipes.stages import make_dataset

ROOT = Path(__file__).resolve().parents[2]
RANKS, STEPS = 4, 4
TIMEOUT_S = 900
ROWS = [line for line in (ROOT / "docs" / "metrics.md").read_text().splitlines() if line.startswith("| `")]
METRICS = {name for row in ROWS for name in re.findall(r"`(\w+/\w+)`", row.split(" | ")[0])}
GAUGES = {name for name in METRICS if name.startswith("loader/")}
GPU = {name for name in METRICS if name.startswith(("mem/gpu_", "time/device_idle_"))} | {"mem/peak_gib"}
# Of another stage's folder; and what is absent while ranks are even, as the table says.
ELSEWHERE = {"grounding/loss"}
WHEN_UNEVEN = {"time/data_wait_slowest_rank", "time/slowest_rank", "time/slowest_rank_extra_s"}
OF_WANDB = {"_step", "_timestamp", "_runtime", "_wandb", "trainer/global_step", "epoch"}

pytestmark = pytest.mark.distributed


def options(where: Path, *more: str) -> list[str]:
    return [
        "run.first=null", "evaluation=null", "data.generate.layouts=4", f"data.uri={where / 'data'}",
        f"data.cache.dir={where / 'cache'}", f"run.dir={where / 'run'}", "data.batch_size=null",
        "data.global_batch_size=8", "data.validation=0.25", "data.decode_threads=1", "schedule.warmup_steps=1",
        "validation={every_n_steps: 2, batches: 1, open_loop_episodes: 1}", "checkpoint.every_n_steps=2",
        "trainer.log_every_n_steps=1", "metrics.peak_tflops=1", "logger=wandb", *more,
    ]  # fmt: skip


def train(where: Path, *more: str, ranks: int) -> None:
    python = [sys.executable]
    if ranks > 1:
        python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    done = subprocess.run(
        [*python, "-m", "recipes", "train", "quickstart", *options(where, *more)],
        cwd=ROOT, env=environment | {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "WANDB_SILENT": "true"},
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


def records(file: Path) -> Iterator[Any]:
    """Records of an offline run: a log in blocks of 32 KiB, after a header of 7 bytes; each part has one of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, pending = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # the rest of a block too small for a header
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        pending += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(pending)
            pending = b""


def logged(file: Path) -> dict[str, list[Any]]:
    """Metric -> all values in the order written."""
    found: dict[str, list[Any]] = {}
    for record in records(file):
        for item in record.history.item:
            found.setdefault(item.key or "/".join(item.nested_key), []).append(json.loads(item.value_json))
    return found


def configuration(file: Path) -> dict[str, Any]:
    """The run's configuration after all updates."""
    values: dict[str, Any] = {}
    for record in records(file):
        for update in [*record.run.config.update, *record.config.update]:
            values[update.key or update.nested_key[0]] = json.loads(update.value_json)
    return values


def test_four_ranks_write_one_run_that_goes_on_with_the_documented_metrics(tmp_path: Path) -> None:
    make_dataset(load("quickstart", options(tmp_path)))
    folder = tmp_path / "run"
    train(tmp_path, f"trainer.max_steps={STEPS}", ranks=RANKS)
    (first,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    kept = json.loads((folder / "wandb.json").read_text())["id"]

    train(tmp_path, f"trainer.max_steps={STEPS + 2}", ranks=1)
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    (second,) = set(files) - {first}
    ids = [{record.run.run_id for record in records(file) if record.HasField("run")} for file in (first, second)]
    assert ids == [{kept}, {kept}]

    metrics, more = logged(first), logged(second)
    steps = [metrics["trainer/global_step"], more["trainer/global_step"]]
    assert set(steps[0]) >= set(range(STEPS))
    assert {STEPS, STEPS + 1} <= set(steps[1])
    assert min(steps[1]) == STEPS

    grouped = {name for name in metrics if name.startswith("val/action_")}
    assert set(metrics) - OF_WANDB - grouped <= METRICS
    assert set(more) - OF_WANDB - grouped <= METRICS
    assert set(metrics) >= METRICS - GAUGES - GPU - ELSEWHERE - WHEN_UNEVEN
    assert {"loader/ring_ready", "loader/read_bytes"} <= set(metrics)
    assert len(metrics["train/loss"]) == STEPS  # of rank 0 alone

    config = configuration(second)
    environment = json.loads((folder / "environment.json").read_text())
    assert config["environment"]["fingerprint"] == environment["fingerprint"]
    assert config["environment"]["packages"] == environment["packages"]
    assert config["environment"]["git"] == environment["git"]
    assert configuration(first)["environment"]["world_size"] == RANKS
    assert config["data"]["global_batch_size"] == 8
