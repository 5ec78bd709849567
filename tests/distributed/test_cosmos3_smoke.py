"""The smoke recipe of the Cosmos-3 policy under torchrun: two ranks train what one process trains."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from callbacks.run_record import RunRecord
from recipes.load import load
from recipes.stages import make_dataset

ROOT = Path(__file__).resolve().parents[2]
SMOKE, STEPS = "cosmos3_policy/smoke", 5

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dataset and its index, which one process makes."""
    where = tmp_path_factory.mktemp("smoke")
    make_dataset(load(SMOKE, [f"data.uri={where / 'data'}", "data.generate.layouts=4"]))
    run(where, "one")
    return where


def run(where: Path, name: str, *more: str, ranks: int = 1) -> None:
    options = [
        f"data.uri={where / 'data'}",
        f"data.cache.dir={where / 'cache'}",
        f"run.dir={where / name}",
        "data.batch_size=null",
        "data.global_batch_size=4",
        "data.decode_threads=1",
        f"trainer.max_steps={STEPS}",
        "validation.every_n_steps=3",
        "trainer.log_every_n_steps=1",
        "trainer.accelerator=cpu",
    ]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launch, "-m", "recipes", "train", SMOKE, *options, *more],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def losses(folder: Path) -> list[float]:
    rows = RunRecord(folder).rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [row["loss"] for row in rows]


@pytest.mark.parametrize("more", [(), ("parallel.shard=2", "lookahead=stream")], ids=["ddp", "fsdp"])
def test_two_ranks_train_what_one_process_trains(world: Path, more: tuple[str, ...]) -> None:
    name = "sharded" if more else "two"
    run(world, name, *more, ranks=2)
    assert losses(world / name) == pytest.approx(losses(world / "one"), rel=1e-5)
    summary = json.loads((world / name / "summary.json").read_text())
    assert summary["samples_seen"] == STEPS * 4
    assert summary["loss_last"] < summary["loss_first"]
    one = json.loads((world / "one" / "summary.json").read_text())
    figures = [name for name in one if name.startswith("val_")]
    assert {"val_loss", "val_loss_vision", "val_action_mae", "val_step"} <= set(figures)
    for figure in figures:
        assert summary[figure] == pytest.approx(one[figure], rel=1e-4), figure
