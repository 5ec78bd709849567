"""Whole runs of the Cosmos-3 policy on few demonstrations: the loss falls, a run continues, every rung trains alike."""

import gc
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks.run_record import RunRecord
from recipes.check import checked
from recipes.load import RecipeError
from recipes.run_folder import RunFolder
from recipes.train import train

SMOKE = "cosmos3_policy/smoke"
SMALL = (
    "data.decode_threads=1",
    "data.batch_size=2",
    "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1",
    "trainer.max_steps=4",
    "checkpoint.keep=-1",
    "validation=null",
)


@pytest.fixture(scope="module")
def run(world: Path) -> Callable[..., dict[str, Any]]:
    """Train in this process under a name; gives the summary, `folder` and `losses` in it."""

    def trained(name: str, *more: str, allow_drift: bool = False) -> dict[str, Any]:
        folder = world / name
        gc.collect()  # a run of this process that is over lets go of its folder
        given = (f"data.uri={world / 'data'}", f"data.cache.dir={world / 'cache'}", f"run.dir={folder}")
        summary, code = train(checked(SMOKE, [*given, *SMALL, *more], allow_drift=allow_drift), time.perf_counter())
        assert code == 0
        assert summary is not None
        return {**summary, "folder": folder, "losses": [row["loss"] for row in RunRecord(folder).rows()]}

    return trained


@pytest.fixture(scope="module")
def plain(run: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return run("plain")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    path, _ = RunFolder(folder).latest_checkpoint() or (Path(), 0)
    state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["state_dict"]
    return state


def test_the_loss_falls_and_the_summary_is_complete(run: Callable[..., dict[str, Any]]) -> None:
    found = run("whole", "trainer.max_steps=12", "optimizer.lr=3e-3", "schedule.cycle_steps=100")
    assert found["loss_last"] < 0.5 * found["loss_first"]
    assert (found["steps"], found["samples_seen"]) == (12, 24)
    assert found["tflops_per_device"] > 0
    state = weights(found["folder"])
    trained = {name.removeprefix("network.") for name in state if name.startswith("network.")}
    assert trained == {name.removeprefix("ema.") for name in state if name.startswith("ema.")}
    assert not {name for name in trained if name.startswith(("embed_tokens", "lm_head")) or ".to_q." in name}
    described = json.loads((found["folder"] / "processor.json").read_text())
    assert described["cameras"] == [f"observation.images.{name}" for name in ("wrist", "top", "side")]


def test_a_run_continues_where_it_stood(run: Callable[..., dict[str, Any]], plain: dict[str, Any]) -> None:
    first = run("continued", "trainer.max_steps=2", "schedule.cycle_steps=300")
    assert first["steps"] == 2
    found = run("continued", "schedule.cycle_steps=300")
    assert found["losses"] == plain["losses"]
    one, other = weights(plain["folder"]), weights(found["folder"])
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_continues_with_whole_steps_where_more_is_accumulated(
    run: Callable[..., dict[str, Any]], plain: dict[str, Any]
) -> None:
    """As on half as many ranks. Three micro-batches are behind it, which is no multiple of the two of a step."""
    run("halved", "trainer.max_steps=3")
    found = run("halved", "data.batch_size=1", "trainer.accumulate_grad_batches=2", allow_drift=True)
    assert [int(row["samples"]) for row in RunRecord(found["folder"]).rows()] == [2, 2, 2, 2]
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-5)


def test_stock_start_up_and_image_path_train_alike(
    run: Callable[..., dict[str, Any]], plain: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Rungs 0, 1 and 2: the start-up changes nothing; the jitter's few levels beside its reference change little."""
    with caplog.at_level(logging.INFO, "recipes.stock_start"):
        rungs = [run(f"rung{rung}", f"+ladder={rung}") for rung in range(3)]
    assert len([line for line in caplog.messages if "as objects" in line]) == 1
    assert rungs[1]["losses"] == rungs[0]["losses"]
    assert rungs[2]["losses"] == pytest.approx(rungs[0]["losses"], rel=1e-3)
    assert rungs[2]["losses"] == plain["losses"]
    assert all(rung["first_batch_s"] > 0 and rung["step_s_median"] > 0 for rung in rungs)


def test_recomputing_fewer_layers_trains_the_same(run: Callable[..., dict[str, Any]], plain: dict[str, Any]) -> None:
    found = run("fewer", "+ladder=5", "compile.scope=none")
    assert found["losses"] == plain["losses"]
    assert found["recomputed_blocks"] == {"layers": [0]}
    assert plain["recomputed_blocks"] == {"layers": [0, 1]}
    again = [[row["recompute_flops"] for row in RunRecord(of["folder"]).rows()] for of in (found, plain)]
    assert [2 * one for one in again[0]] == again[1]
    assert min(again[0]) > 0


@pytest.mark.kernels
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_rungs_train_alike(run: Callable[..., dict[str, Any]], plain: dict[str, Any]) -> None:
    for rung in (3, 4, 5):
        found = run(f"rung{rung}", f"+ladder={rung}")
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-4)
        assert found["compile_failures"] == {}
        assert found["compile_graphs"] > 0


def test_packs_by_tokens_hold_what_fits(run: Callable[..., dict[str, Any]], plain: dict[str, Any]) -> None:
    """A budget of one long sample and a half: a step takes two samples only where one of them has no caption."""
    found = run("packs", "data.pack_tokens=260", "data.batch_size=4", "trainer.max_steps=6")
    per_step = [int(row["samples"]) for row in RunRecord(found["folder"]).rows()]
    assert set(per_step) <= {1, 2, 3, 4}
    assert sum(per_step) == found["samples_seen"]
    assert min(per_step) == 1


def test_a_budget_below_the_longest_caption_is_told_before_training(run: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(RecipeError, match=r"data\.pack_tokens: 100 does not hold a sample of \d+ tokens, the prompt"):
        run("short", "data.pack_tokens=100")


def test_what_only_the_made_dataset_shows_is_told_before_training(tmp_path: Path) -> None:
    places = (f"data.uri={tmp_path / 'data'}", f"data.cache.dir={tmp_path / 'cache'}", f"run.dir={tmp_path / 'run'}")
    wrong = ("data.generate.layouts=2", "data.cameras=[observation.images.front]")
    recipe = checked(SMOKE, [*places, *SMALL, *wrong])
    with pytest.raises(RecipeError, match=r"data\.cameras: 'observation\.images\.front' is no camera of"):
        train(recipe, time.perf_counter())
    assert not (tmp_path / "run" / "steps.csv").exists()
