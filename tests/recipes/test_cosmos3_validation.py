"""The recipe's validation of the Cosmos-3 policy: which samples, with which weights, and what a resume may change."""

import dataclasses
import gc
import time
from pathlib import Path
from typing import Any

import pytest

from callbacks.run_record import RunRecord
from models.common.held_out import sample_keys
from recipes.check import checked
from recipes.families.cosmos3_policy import evaluate
from recipes.families.cosmos3_policy.validation import build_validation
from recipes.family import family
from recipes.load import load
from recipes.run_folder import RunFolder
from recipes.sources import open_all
from recipes.train import train
from recipes.trained import load_run

SMOKE = "cosmos3_policy/smoke"
SMALL = (
    "data.decode_threads=1",
    "data.batch_size=2",
    "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1",
    "trainer.max_steps=4",
    "validation.every_n_steps=3",
)


def given(world: Path, name: str, *more: str) -> list[str]:
    places = (f"data.uri={world / 'data'}", f"data.cache.dir={world / 'cache'}", f"run.dir={world / name}")
    return [*places, *SMALL, *more]


def trained(world: Path, name: str, *more: str, allow_drift: bool = False) -> dict[str, Any]:
    gc.collect()  # a run of this process that is over lets go of its folder
    summary, code = train(checked(SMOKE, given(world, name, *more), allow_drift=allow_drift), time.perf_counter())
    assert code == 0
    assert summary is not None
    return summary


@pytest.fixture(scope="module")
def run(world: Path) -> dict[str, Any]:
    return trained(world, "run")


def test_samples_are_the_same_for_any_number_of_ranks(world: Path) -> None:
    recipe = checked(SMOKE, given(world, "ranks", "validation.batches=5"))

    def samples(ranks: int, batch_size: int) -> tuple[list[int], list[int], int]:
        loss, open_loop, most = [], [], 0
        for rank in range(ranks):
            datasets = open_all(recipe)
            processor = family(recipe).build_processor(recipe, datasets)
            made = build_validation(recipe, datasets, processor, batch_size=batch_size, rank=rank, world_size=ranks)
            for batch in made.loss_batches:
                loss += sample_keys(batch).tolist()
                most = max(most, len(batch.text))
                assert "augmentations" not in batch.inputs
                assert min(batch.inputs["text_lengths"]) > 20  # no caption is dropped
            for batch in made.open_loop_batches:
                open_loop += batch.position.tolist()
                assert {image.shape[1] for image in batch.images.values()} == {1}  # the frame of now alone
            for dataset in datasets:
                dataset.close()
        return sorted(loss), sorted(open_loop), most

    one = samples(1, 4)
    assert len(set(one[0])) == 10
    assert one[2] == 4
    assert len(one[1]) > 1
    for ranks, batch_size in ((1, 3), (3, 2), (3, 8)):
        found = samples(ranks, batch_size)
        assert found[:2] == one[:2]
        assert found[2] <= batch_size


def test_training_does_not_notice_and_the_averages_are_measured(world: Path, run: dict[str, Any]) -> None:
    plain = trained(world, "plain", "validation=null")
    assert not [name for name in plain if name.startswith("val_")]
    assert plain["weights_digest"] == run["weights_digest"]
    losses = [[row["loss"] for row in RunRecord(world / name).rows()] for name in ("plain", "run")]
    assert losses[0] == losses[1]

    recipe = load(SMOKE, given(world, "run"))
    module = {}
    for averaged in (True, False):
        found = load_run(world / "run", averaged=averaged)
        datasets = open_all(recipe)
        options: dict[str, Any] = {"batch_size": 2, "rank": 0, "world_size": 1}
        made = build_validation(recipe, datasets, found.processor, **options)
        module[averaged] = made.measure(found.network, evaluate.build_vae(recipe))
        if averaged:  # `recipes eval` of the same episodes
            compared = evaluate.evaluate_run(found, uri=None, stride=None, limit=1)
            assert compared["action_mse"] == pytest.approx(run["val_action_mse"], rel=1e-5)
    for name, value in module[True].items():
        assert run[name.replace("/", "_")] == pytest.approx(value, rel=1e-5), name
    assert run["val_step"] == 4
    assert run["val_loss"] != pytest.approx(module[False]["val/loss"], rel=1e-6)


def test_a_resume_with_other_parts_of_the_optimizer_names_the_key(world: Path, run: dict[str, Any]) -> None:
    assert run["steps"] == 4
    more = ("trainer.max_steps=5", "optimizer.lr_multipliers.action_heads=3.0")
    changed = checked(SMOKE, given(world, "run", *more), allow_drift=True)  # values may change
    without = dataclasses.replace(changed, optimizer=dataclasses.replace(changed.optimizer, lr_multipliers={}))
    folder = RunFolder(world / "run")
    assert folder.fixed(changed) == []
    (line,) = folder.fixed(without)
    assert line.startswith("optimizer.lr_multipliers: was for ['action_heads'] when the run in")
    assert RunFolder(world / "new").fixed(without) == []
    assert trained(world, "run", *more, allow_drift=True)["steps"] == 5
    # where no recipe tells, as the folder's may have been changed
    longer = dataclasses.replace(without, trainer=dataclasses.replace(without.trainer, max_steps=6))
    gc.collect()
    with pytest.raises(ValueError, match=r"^optimizer\.lr_multipliers: the checkpoint's optimizer has groups for"):
        train(longer, time.perf_counter())
