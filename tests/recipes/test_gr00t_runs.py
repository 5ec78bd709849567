"""Whole runs from a tiny checkpoint in the released layout: trained, measured, continued, exported, asked to act."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks.run_record import RunRecord
from recipes.check import checked
from recipes.evaluate import evaluate_folder, evaluate_run
from recipes.load import RecipeError
from recipes.run_folder import RunFolder
from recipes.train import train

SMALL = (
    "data.horizon=8",
    "data.global_batch_size=null",
    "data.batch_size=4",
    "data.decode_threads=1",
    "trainer.log_every_n_steps=1",
    "trainer.accelerator=cpu",
    "schedule.warmup_steps=1",
    "model.processor={tokenizer: words, shortest_image_edge: 64, min_pixels: 1024, state_dropout_prob: 0.2}",
)
CAMERAS = {"one": "observation.images.front", "two": "observation.images.wrist"}


@pytest.fixture
def run(checkpoint: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Train a recipe in this process; gives the summary, with the run's folder under `folder`."""

    def trained(recipe: str, name: str, *overrides: str) -> dict[str, Any]:
        folder = tmp_path / name
        cache = tmp_path_factory.getbasetemp() / "cache"
        fixed = (f"model.weights={checkpoint}", f"run.dir={folder}", f"data.cache.dir={cache}")
        summary, code = train(checked(recipe, [*fixed, *SMALL, *overrides]), time.perf_counter())
        assert code == 0
        assert summary is not None
        return {**summary, "folder": folder}

    return trained


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in RunRecord(folder).rows()]


@pytest.fixture(scope="module")
def other_dataset(write_dataset: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second robot: four values a step, in groups that the checkpoint does not know."""
    groups = {name: {"start": place, "end": place + 1} for place, name in enumerate(("x", "y", "z", "gripper"))}
    video = {"image": {"original_key": CAMERAS["one"]}, "wrist_image": {"original_key": CAMERAS["two"]}}
    where = tmp_path_factory.mktemp("other") / "set"
    return write_dataset(where, seed=5, width=4, modality={"state": groups, "action": groups, "video": video})


def mixture(first: Path, second: Path) -> str:
    names = ("x", "y", "z", "gripper")
    groups = {"state": list(names), "action": {name: {} for name in names}}
    return "data.mixture=" + json.dumps(
        [
            {"uri": str(first), "weight": 2, "embodiment": "new_embodiment", "cameras": CAMERAS},
            {
                "uri": str(second),
                "weight": 1,
                "embodiment": "libero_sim",
                "cameras": CAMERAS,
                "horizon": 6,
                "groups": groups,
            },
        ]
    )


def test_held_out_episodes_are_measured_while_the_checkpoint_trains(run: Any, arm_dataset: Path) -> None:
    held_out = ("data.validation_episodes=[1, 4]", "validation={every_n_steps: 2, batches: 2, open_loop_episodes: 2}")
    summary = run("gr00t_n17/finetune", "run", f"data.uri={arm_dataset}", "trainer.max_steps=4", *held_out)
    folder = summary["folder"]
    assert summary["val_step"] == 4
    assert {"val_loss", "val_action_mse", "val_action_mae_single_arm", "val_action_mae_gripper"} <= summary.keys()
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["episodes_held_out"] == [1, 4]
    # measuring draws nothing that training would draw otherwise
    bare = run("gr00t_n17/finetune", "bare", f"data.uri={arm_dataset}", "trainer.max_steps=4", held_out[0])
    assert losses(bare["folder"]) == losses(folder)
    assert bare["weights_digest"] == summary["weights_digest"]
    # the same comparison afterwards, through the calls of a policy server, in float32 instead of under autocast
    found = evaluate_run(folder)
    assert (found["episodes_compared"], found["step"]) == (2, 4)
    assert found["action_mse"] == pytest.approx(summary["val_action_mse"], rel=0.05)
    # the checkpoint's relative group is decoded to robot units by the run's own statistics
    processor = json.loads((folder / "processor.json").read_text())
    assert [group["rep"] for group in processor["modalities"]["action"]] == ["RELATIVE", "ABSOLUTE"]


def test_what_is_exported_acts_as_the_run_does(run: Any, arm_dataset: Path, tmp_path: Path) -> None:
    from models.gr00t_n17.policy import GR00TPolicy
    from recipes.export import export_run
    from recipes.trained import load_run

    held_out = "data.validation_episodes=[1, 4]"
    summary = run("gr00t_n17/finetune", "run", f"data.uri={arm_dataset}", "trainer.max_steps=3", held_out)
    export_run(summary["folder"], tmp_path / "out", dtype="float32")
    policy = GR00TPolicy.from_pretrained(tmp_path / "out", embodiment="new_embodiment")
    trained = load_run(summary["folder"])
    rng = torch.Generator().manual_seed(0)
    observation = {
        "video": {
            name: torch.randint(0, 256, (2, 1, 48, 64, 3), generator=rng, dtype=torch.uint8).numpy()
            for name in policy.get_modality_config()["video"].modality_keys
        },
        "state": {
            "single_arm": torch.rand(2, 1, 5, generator=rng).numpy(),
            "gripper": torch.rand(2, 1, 1, generator=rng).numpy(),
        },
        "language": {"annotation.human.action.task_description": [["Push block 1, slowly"], ["Push block 0"]]},
    }
    noise = torch.randn(2, 10, 20, generator=rng)
    acted, _ = policy.get_action(observation, {"noise": noise})
    wanted, _ = GR00TPolicy(trained.network, trained.processor).get_action(observation, {"noise": noise})
    assert {name: values.shape for name, values in acted.items()} == {"single_arm": (2, 8, 5), "gripper": (2, 8, 1)}
    for name, values in wanted.items():
        torch.testing.assert_close(torch.from_numpy(acted[name]), torch.from_numpy(values), rtol=0, atol=1e-5)
    found = evaluate_folder(tmp_path / "out", str(arm_dataset), stride=4, limit=2)
    assert (found["episodes_compared"], found["embodiment"]) == (2, "new_embodiment")
    assert found["predictions"] == 6 + 7  # every 4th of 22 and of 25 steps


def test_a_mixture_continues_at_the_next_sample_and_exports_both_robots(
    run: Any, arm_dataset: Path, other_dataset: Path, tmp_path: Path
) -> None:
    from recipes.export import export_run

    data = mixture(arm_dataset, other_dataset)
    lean = ("model.precision=lean", "checkpoint.every_n_steps=2", "checkpoint.keep=-1")
    whole = run("gr00t_n17/mixture", "whole", data, "trainer.max_steps=4", *lean)
    # as it would lie there after a kill: the schedule reaches to the last step, a shorter run would have another one
    folder = tmp_path / "continued"
    RunFolder(folder).checkpoints.mkdir(parents=True)
    source = RunFolder(whole["folder"])
    for name in ("recipe.json", "steps.csv"):
        (folder / name).write_bytes((whole["folder"] / name).read_bytes())
    RunFolder(folder).checkpoint_path(2).write_bytes(source.checkpoint_path(2).read_bytes())
    continued = run("gr00t_n17/mixture", "continued", data, "trainer.max_steps=4", *lean)
    assert losses(continued["folder"]) == losses(whole["folder"])
    assert continued["weights_digest"] == whole["weights_digest"]
    assert continued["fingerprint"] == whole["fingerprint"]
    reweighted = data.replace('"weight": 1', '"weight": 3')
    with pytest.raises(RecipeError, match=r"data\.mixture: was"):
        run("gr00t_n17/mixture", "continued", reweighted, "trainer.max_steps=6", *lean)

    export_run(whole["folder"], tmp_path / "out")
    statistics = json.loads((tmp_path / "out" / "statistics.json").read_text())
    assert list(statistics["libero_sim"]["action"]) == ["x", "y", "z", "gripper"]
    assert str(arm_dataset) not in (tmp_path / "out" / "README.md").read_text()  # where data lay is not told
    found = evaluate_folder(tmp_path / "out", str(other_dataset), embodiment="libero_sim", limit=1)
    assert {"action_mse_x", "action_mse_gripper"} <= found.keys()
    assert torch.tensor(statistics["new_embodiment"]["relative_action"]["single_arm"]["min"]).shape == (8, 5)


def test_steps_in_seconds_are_the_same_during_training_and_after_it(
    run: Any, arm_dataset: Path, other_dataset: Path
) -> None:
    data = mixture(arm_dataset, other_dataset)
    measured = ("data.validation=0.34", "validation={every_n_steps: 2, batches: 0, open_loop_episodes: 9}")
    # datasets of 10 rows a second: a chunk of 8 steps is 16 rows
    summary = run("gr00t_n17/mixture", "run", data, "trainer.max_steps=2", "precision=32-true", "data.fps=5", *measured)
    found = evaluate_run(summary["folder"])["parts"][0]
    assert found["action_mse_single_arm"] == pytest.approx(summary["val_action_mse_single_arm"], rel=1e-3)


def test_adapters_alone_are_kept_and_merged_for_export(run: Any, arm_dataset: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from models.common.stored import StoredTensors
    from recipes.export import export_run

    summary = run("gr00t_n17/lora", "lora", f"data.uri={arm_dataset}", "trainer.max_steps=2", "optimizer.lr=1e-2")
    path, _ = RunFolder(summary["folder"]).latest_checkpoint() or (None, 0)
    assert path is not None
    kept = torch.load(path, weights_only=True)["state_dict"]
    assert any("lora" in name for name in kept)
    assert not any("action_head.model." in name and name.endswith("base_layer.weight") for name in kept)
    export_run(summary["folder"], tmp_path / "out")
    with StoredTensors(tmp_path / "out") as stored:
        assert not any("lora" in name for name in stored)
        assert "action_head.model.transformer_blocks.0.attn1.to_q.weight" in stored
