"""A deployed policy: loaded from a folder alone, upstream's observations and actions, chunks that join."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.gr00t_n17.checkpoint.export import export
from models.gr00t_n17.checkpoint.folder import CheckpointFolder
from models.gr00t_n17.checkpoint.weights import load_weights
from models.gr00t_n17.inputs.processor import Processor
from models.gr00t_n17.inputs.text import WordTokenizer
from models.gr00t_n17.network import GR00TN17
from models.gr00t_n17.policy import GR00TPolicy

TAG, BATCH, HORIZON = "new_embodiment", 2, 8
LANGUAGE = "annotation.human.action.task_description"


def words(folder: Path) -> WordTokenizer:
    return WordTokenizer.from_texts(["pick up the red block now"], backbone=CheckpointFolder(folder).config.backbone)


@pytest.fixture(scope="module")
def policy(tiny_checkpoint: Path) -> GR00TPolicy:
    return GR00TPolicy.from_pretrained(tiny_checkpoint, embodiment=TAG, tokenizer=words(tiny_checkpoint))


def observation(batch: int = BATCH) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "video": {name: rng.integers(0, 256, (batch, 1, 48, 64, 3), np.uint8) for name in ("front", "wrist")},
        "state": {
            "single_arm": rng.normal(size=(batch, 1, 5)).astype(np.float32),
            "gripper": rng.normal(size=(batch, 1, 1)).astype(np.float32),
        },
        "language": {LANGUAGE: [["Pick up the red block!"]] * batch},
    }


def noise(batch: int = BATCH) -> torch.Tensor:
    return torch.randn(batch, 10, 20, generator=torch.Generator().manual_seed(5))


def test_only_its_embodiment_is_held_and_the_answer_is_the_whole_networks(
    policy: GR00TPolicy, tiny_checkpoint: Path
) -> None:
    assert policy.policy.network.slots == (10,)
    actions, info = policy.get_action(observation(), {"noise": noise()})
    assert info == {}
    assert {name: (values.dtype, values.shape) for name, values in actions.items()} == {
        "single_arm": (np.float32, (BATCH, HORIZON, 5)),
        "gripper": (np.float32, (BATCH, HORIZON, 1)),
    }
    with torch.device("meta"):
        network = GR00TN17(CheckpointFolder(tiny_checkpoint).config)
    load_weights(network, tiny_checkpoint)
    processor = Processor.from_checkpoint(tiny_checkpoint, embodiment=TAG, tokenizer=words(tiny_checkpoint))
    whole = GR00TPolicy(network, processor)
    for name, values in whole.get_action(observation(), {"noise": noise()})[0].items():
        np.testing.assert_array_equal(values, actions[name])


def test_relative_actions_come_back_absolute(policy: GR00TPolicy) -> None:
    """Moving the arm's state moves its actions along; both states are clipped to the same one for the network."""
    far = observation()
    far["state"]["single_arm"] += 100.0
    farther = observation()
    farther["state"]["single_arm"] += 150.0
    a, b = (policy.get_action(seen, {"noise": noise()})[0] for seen in (far, farther))
    np.testing.assert_allclose(b["single_arm"] - a["single_arm"], 50.0, atol=1e-4)
    np.testing.assert_array_equal(a["gripper"], b["gripper"])


def test_flat_observations_get_flat_actions(policy: GR00TPolicy) -> None:
    nested = observation()
    flat = {f"{section}.{key}": value for section in ("video", "state") for key, value in nested[section].items()}
    flat[LANGUAGE] = ("Pick up the red block!",) * BATCH
    a, b = (policy.get_action(seen, {"noise": noise()})[0] for seen in (nested, flat))
    assert list(b) == [f"action.{name}" for name in a]
    for name, values in a.items():
        np.testing.assert_array_equal(values, b[f"action.{name}"])


def test_keys_and_steps_are_told(policy: GR00TPolicy) -> None:
    config = policy.get_modality_config()
    assert config["video"].modality_keys == ["front", "wrist"]
    assert config["action"].modality_keys == ["single_arm", "gripper"]
    assert config["action"].delta_indices == list(range(HORIZON))
    assert (config["language"].modality_keys, config["language"].delta_indices) == ([LANGUAGE], [0])
    assert policy.reset() == {}


def test_all_that_is_wrong_with_an_observation_is_told_at_once(policy: GR00TPolicy) -> None:
    wrong = observation()
    wrong["video"]["front"] = wrong["video"]["front"].astype(np.float32)
    wrong["video"]["wrist"] = np.repeat(wrong["video"]["wrist"], 2, axis=1)
    wrong["state"]["single_arm"] = wrong["state"]["single_arm"][..., :4]
    del wrong["state"]["gripper"]
    wrong["language"] = {LANGUAGE: ["Pick"]}
    with pytest.raises(ValueError, match="does not fit the policy") as caught:
        policy.get_action(wrong)
    for line in (
        "video.front is float32 [2, 1, 48, 64, 3]; it must be uint8",
        "video.wrist has 2 frames; the policy reads 1",
        "state.single_arm is float32 [2, 1, 4]; it must be float32 [B, 1, 5]",
        "state.gripper is missing",
        f"language '{LANGUAGE}' must be a list of B lists with one text each",
    ):
        assert line in str(caught.value)
    short = observation()
    short["language"] = {LANGUAGE: [["Pick"]]}
    with pytest.raises(ValueError, match="batch sizes differ"):
        policy.get_action(short)
    with pytest.raises(ValueError, match="nothing to act on"):
        policy.get_action(observation(0))
    broken = observation()
    broken["state"]["gripper"][1] = np.nan  # a sensor that is gone must not become a motion
    with pytest.raises(ValueError, match=r"state\.gripper holds values that are not finite"):
        policy.get_action(broken)


def test_options_that_do_not_fit_are_told(policy: GR00TPolicy) -> None:
    before = policy.get_action(observation(), {"noise": noise().numpy()})[0]  # an array is as good as a tensor
    np.testing.assert_array_equal(before["gripper"], policy.get_action(observation(), {"noise": noise()})[0]["gripper"])
    counts = {"rtc_overlap_steps": 4, "rtc_frozen_steps": 2}
    for options, message in (
        ({"noise": noise(1)}, r"noise has the shape \[1, 10, 20\]; it must be \[2, 10, 20\]"),
        ({"rtc_overlap": 4}, r"\['rtc_overlap'\] are unknown; allowed are action"),
        ({"action": {name: value[:1] for name, value in before.items()}, **counts}, "the observation has 2"),
    ):
        with pytest.raises(ValueError, match=message):
            policy.get_action(observation(), options)


def test_a_policy_that_goes_by_its_cameras_alone(tiny_checkpoint: Path, tmp_path: Path) -> None:
    blind = tmp_path / "blind"
    shutil.copytree(tiny_checkpoint, blind)
    file = json.loads((blind / "processor_config.json").read_text())
    config = file["processor_kwargs"]["modality_configs"][TAG]
    config["state"]["modality_keys"] = []
    config["action"]["action_configs"][0] = {"rep": "ABSOLUTE", "type": "NON_EEF", "format": "DEFAULT"}
    (blind / "processor_config.json").write_text(json.dumps(file))
    policy = GR00TPolicy.from_pretrained(blind, embodiment=TAG, tokenizer=words(blind))
    seen = {**observation(), "state": {}}
    before = policy.get_action(seen, {"noise": noise()})[0]
    options = {"action": before, "rtc_overlap_steps": 4, "rtc_frozen_steps": 4, "noise": noise()}
    after = policy.get_action(seen, options)[0]
    np.testing.assert_allclose(after["gripper"][:, :4], before["gripper"][:, 4:], atol=1e-6)


def test_a_chunk_goes_on_from_the_one_under_way(policy: GR00TPolicy) -> None:
    """Frozen steps are the last ones of the previous chunk, as they were in robot units; behind them it is let go."""
    seen = observation()
    steps = np.linspace(0.0, 0.7, HORIZON, dtype=np.float32)[None, :, None]
    previous = {name: values + steps for name, values in seen["state"].items()}
    previous["gripper"] = np.broadcast_to(steps, (BATCH, HORIZON, 1))
    options = {"action": previous, "rtc_overlap_steps": 4, "rtc_frozen_steps": 2, "noise": noise()}
    joined, _ = policy.get_action(seen, options)
    for name, values in joined.items():
        np.testing.assert_allclose(values[:, :2], previous[name][:, 4:6], atol=1e-5)
        assert not np.allclose(values[:, 2:4], previous[name][:, 6:8], atol=1e-5)
    # as the chunk would be with only the first 6 of its steps
    cut = {**options, "action_horizon": 6}
    for name, values in policy.get_action(seen, cut)[0].items():
        np.testing.assert_allclose(values[:, :2], previous[name][:, 2:4], atol=1e-5)
    for changes, message in (
        ({"rtc_frozen_steps": 5}, "rtc_frozen_steps=5, rtc_overlap_steps=4"),
        ({"rtc_overlap_steps": 9}, "at most the policy's 8 steps"),
        ({"action": None}, r"\['action'\] are missing"),
        ({"action": {"gripper": previous["gripper"], "single_arm": previous["gripper"]}}, "wrong: .'single_arm'"),
    ):
        with pytest.raises(ValueError, match=message):
            policy.get_action(seen, {**options, **changes})


def test_the_overlap_is_let_go_as_the_reference_does_it(policy: GR00TPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    network = policy.policy.network
    sample = type(network.action_head).sample

    def watched(self: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        asked.update(options)
        return sample(self, *arguments, **options)

    monkeypatch.setattr(type(network.action_head), "sample", watched)
    seen = observation()
    alone, _ = policy.get_action(seen, {"noise": noise()})
    options = {"action": alone, "rtc_overlap_steps": 6, "rtc_frozen_steps": 2, "rtc_ramp_rate": 3.0, "noise": noise()}
    policy.get_action(seen, options)
    inside = np.arange(1, 5) / 5
    ramp = (1 - np.exp(-3.0 * inside)) / (1 - np.exp(-3.0))
    np.testing.assert_allclose(asked["velocity_scale"][:, 0], [0, 0, *ramp, 1, 1, 1, 1], rtol=1e-6)
    start = asked["noise"]
    torch.testing.assert_close(start[:, 6:], noise()[:, 6:])
    assert (start[:, :6, 6:] == 0).all(), "elements behind the action's are padding, as in a chunk of the dataset"
    assert start[:, :6, :6].abs().max() <= 1
    policy.get_action(seen, {**options, "rtc_ramp_rate": None})
    steep = 1 - np.exp(-6.0 * inside[0])  # config.json says 6.0
    np.testing.assert_allclose(asked["velocity_scale"][2, 0], steep / (1 - np.exp(-6.0)), rtol=1e-6)


def test_an_exported_folder_acts_like_the_network_it_came_from(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with torch.device("meta"):
        network = GR00TN17(CheckpointFolder(tiny_checkpoint).config)
    load_weights(network, tiny_checkpoint)
    processor = Processor.from_checkpoint(tiny_checkpoint, embodiment=TAG, tokenizer=words(tiny_checkpoint))
    with torch.no_grad():
        network.action_head.model.proj_out_2.weight.mul_(1.3)
    export(network, processor, tmp_path / "out", dtype="float32", base=CheckpointFolder(tiny_checkpoint))
    expected, _ = GR00TPolicy(network, processor).get_action(observation(), {"noise": noise()})
    deployed = GR00TPolicy.from_pretrained(tmp_path / "out", embodiment=TAG)  # the tokenizer comes from the folder
    for name, values in deployed.get_action(observation(), {"noise": noise()})[0].items():
        np.testing.assert_array_equal(values, expected[name])


def test_bfloat16_is_what_a_mixed_precision_training_computes(policy: GR00TPolicy, tiny_checkpoint: Path) -> None:
    half = GR00TPolicy.from_pretrained(
        tiny_checkpoint, embodiment=TAG, dtype=torch.bfloat16, tokenizer=words(tiny_checkpoint)
    )
    dtypes = {parameter.dtype for parameter in half.policy.network.parameters()}
    assert dtypes == {torch.bfloat16, torch.float32}
    values, _ = half.get_action(observation(), {"noise": noise()})
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = policy.get_action(observation(), {"noise": noise()})
    for name in expected:
        np.testing.assert_array_equal(values[name], expected[name])
    with pytest.raises(ValueError, match="float16"):
        GR00TPolicy.from_pretrained(tiny_checkpoint, embodiment=TAG, dtype=torch.float16)


def test_a_folder_that_does_not_know_the_robot_says_so(
    tiny_checkpoint: Path, write_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="libero_sim"):
        GR00TPolicy.from_pretrained(tiny_checkpoint, embodiment="libero")
    bare = write_checkpoint(tmp_path, processor=False)
    with pytest.raises(ValueError, match=r"processor_config\.json"):
        GR00TPolicy.from_pretrained(bare, embodiment=TAG)
