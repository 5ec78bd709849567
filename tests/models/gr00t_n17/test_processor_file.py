"""Processors out of a checkpoint's side files and back into them; a recipe's settings over the checkpoint's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.gr00t_n17.checkpoint.folder import CheckpointFolder
from models.gr00t_n17.inputs.processor import DatasetParts, Processor
from models.gr00t_n17.inputs.text import WordTokenizer

FILES = ("processor_config.json", "statistics.json", "embodiment_id.json")


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Path) -> CheckpointFolder:
    return CheckpointFolder(tiny_checkpoint)


@pytest.fixture(scope="module")
def tokenizer(folder: CheckpointFolder) -> WordTokenizer:
    return WordTokenizer.from_texts(["push it"], backbone=folder.config.backbone)


def numbers(dim: int, steps: int | None = None) -> dict[str, np.ndarray]:
    shape = (dim,) if steps is None else (steps, dim)
    found = {"min": -1.0, "max": 1.0, "mean": 0.0, "std": 0.5, "q01": -0.9, "q99": 0.9}
    return {name: np.full(shape, value) for name, value in found.items()}


def for_dataset(
    folder: CheckpointFolder | None, tokenizer: WordTokenizer, *, config: Any, horizon: int | None = None, **said: Any
) -> Processor:
    """A dataset of six joints whose modality.json names the groups that the checkpoint's new_embodiment has."""
    slices = {"single_arm": {"start": 0, "end": 5}, "gripper": {"start": 5, "end": 6}}
    groups = said.pop("groups", None)
    return Processor.for_dataset(
        config,
        said,
        DatasetParts(
            cameras=["observation.images.wrist", "observation.images.front"],
            state=["observation.state"],
            action=["action"],
            statistics={"observation.state": numbers(6), "action": numbers(6)},
            modality={"state": slices, "action": slices},
            groups=groups,
            relative=lambda modalities: {g.name: numbers(g.dim, modalities.horizon) for g in modalities.relative},
        ),
        horizon=horizon,
        embodiment="new_embodiment",
        checkpoint=folder,
        tokenizer=tokenizer,
    )


def written(processor: Processor, folder: CheckpointFolder, to: Path) -> Path:
    to.mkdir()
    (to / "config.json").write_text((folder.path / "config.json").read_text())
    base = [folder.processor_file, folder.statistics, folder.stored_embodiment_ids]
    made = [processor.to_file(base[0]), processor.statistics_file(base[1]), processor.embodiment_file(base[2])]
    for name, values in zip(FILES, made, strict=True):
        (to / name).write_text(json.dumps(values))
    return to


def test_a_checkpoint_alone_makes_a_processor(folder: CheckpointFolder, tokenizer: WordTokenizer) -> None:
    found = Processor.from_checkpoint(folder, embodiment="new_embodiment", tokenizer=tokenizer)
    assert (found.cameras, found.state_keys) == (["front", "wrist"], ["single_arm", "gripper"])
    assert (found.embodiment_id, found.horizon, found.active_slots) == (10, 8, (10,))
    assert found.processor_config.color_jitter == (0.3, 0.4, 0.5, 0.08)
    actions = torch.rand(2, 10, 20) * 2 - 1
    state = {"single_arm": torch.randn(2, 1, 5), "gripper": torch.randn(2, 1, 1)}
    decoded = found.decode_actions(actions, state)
    low, high = (
        np.array(folder.statistics["new_embodiment"]["relative_action"]["single_arm"][n]) for n in ("min", "max")
    )
    expected = (actions[:, :8, :5].numpy() + 1) / 2 * (high - low) + low + state["single_arm"].numpy()
    np.testing.assert_allclose(decoded["single_arm"], expected, rtol=1e-6)


def test_files_come_back_as_they_were(folder: CheckpointFolder, tokenizer: WordTokenizer, tmp_path: Path) -> None:
    found = Processor.from_checkpoint(folder, embodiment="libero_sim", tokenizer=tokenizer)
    base = folder.processor_file
    assert base is not None
    file = found.to_file(base)
    for key, value in base["processor_kwargs"].items():
        if key != "modality_configs":
            assert file["processor_kwargs"][key] == value, key
    for tag, config in base["processor_kwargs"]["modality_configs"].items():
        for section, said in config.items():
            assert file["processor_kwargs"]["modality_configs"][tag][section].items() >= said.items()
    assert found.statistics_file(folder.statistics) == folder.statistics
    assert found.embodiment_file(folder.stored_embodiment_ids) == folder.embodiment_ids
    again = Processor.from_checkpoint(written(found, folder, tmp_path / "out"), embodiment="libero_sim")
    assert again.to_dict() == found.to_dict()  # with the tokenizer of the run that wrote it


def test_sections_that_are_not_read_and_further_texts_stay(folder: CheckpointFolder, tokenizer: WordTokenizer) -> None:
    base = json.loads(json.dumps(folder.processor_file))
    config = base["processor_kwargs"]["modality_configs"]["new_embodiment"]
    config["mask"] = {"delta_indices": [0], "modality_keys": ["front"]}
    config["language"]["modality_keys"].append("annotation.paraphrase")
    trained = for_dataset(folder, tokenizer, config=folder.config)
    written = trained.to_file(base)["processor_kwargs"]["modality_configs"]["new_embodiment"]
    assert written["mask"] == config["mask"]
    assert written["language"] == config["language"]
    assert len(written["action"]["modality_keys"]) == 2


def test_a_trained_run_is_deployed_from_its_files(
    folder: CheckpointFolder, tokenizer: WordTokenizer, tmp_path: Path
) -> None:
    trained = for_dataset(folder, tokenizer, config=folder.config, horizon=5, use_percentiles=False, crop_fraction=0.9)
    deployed = Processor.from_checkpoint(written(trained, folder, tmp_path / "out"), embodiment="new_embodiment")
    assert deployed.processor_config == trained.processor_config
    assert deployed.to_dict() == trained.by_group().to_dict()
    actions, state = torch.rand(3, 10, 20), torch.randn(3, 1, 6)
    columns = {"single_arm": state[..., :5], "gripper": state[..., 5:]}
    expected = trained.decode_actions(actions, {"observation.state": state})
    for group, values in deployed.decode_actions(actions, columns).items():
        np.testing.assert_array_equal(values, expected[group])
    targets = trained.action_groups({"action": torch.arange(12.0).view(1, 2, 6)})
    assert targets["gripper"].tolist() == [[[5.0], [11.0]]]


def test_the_recipes_settings_win_over_the_checkpoints(folder: CheckpointFolder, tokenizer: WordTokenizer) -> None:
    plain = for_dataset(folder, tokenizer, config=folder.config)
    assert plain.cameras == ["observation.images.front", "observation.images.wrist"]  # in the checkpoint's order
    assert (plain.horizon, plain.processor_config.state_dropout_prob) == (8, 0.2)
    assert [group.name for group in plain.modalities.relative] == ["single_arm"]
    said = for_dataset(folder, tokenizer, config=folder.config, color_jitter=None, state_dropout_prob=0.0)
    assert said.processor_config.color_jitter is None  # null clears what the checkpoint has
    assert said.processor_config.state_dropout_prob == 0.0
    groups = {"action": {"gripper": {}, "single_arm": {"rep": "DELTA"}}}
    own = for_dataset(folder, tokenizer, config=folder.config, horizon=3, groups=groups)
    assert [group.name for group in own.modalities.action] == ["gripper", "single_arm"]
    assert not own.modalities.relative


def test_a_setting_that_would_be_ignored_is_an_error(folder: CheckpointFolder, tokenizer: WordTokenizer) -> None:
    with pytest.raises(ValueError, match=r"image_target_size=\(224, 224\) would be ignored beside shortest_image_edge"):
        for_dataset(folder, tokenizer, config=folder.config, image_target_size=(224, 224))
    with pytest.raises(ValueError, match=r"image_crop_size=.* would be ignored beside crop_fraction=0.95"):
        for_dataset(folder, tokenizer, config=folder.config, image_crop_size=(200, 200))
    squashed = for_dataset(
        folder,
        tokenizer,
        config=folder.config,
        image_target_size=(224, 224),
        image_crop_size=(200, 200),
        shortest_image_edge=None,
        crop_fraction=None,
    )
    assert squashed.image_settings.recipe == "B"


def test_groups_bring_the_settings_they_need(folder: CheckpointFolder, tokenizer: WordTokenizer) -> None:
    groups = {"sin_cos": ["single_arm"], "action": {"single_arm": {"rep": "RELATIVE"}}}
    found = for_dataset(None, tokenizer, config=folder.config, horizon=4, groups=groups)
    assert found.processor_config.apply_sincos_state_encoding
    assert found.state_action.state_dim == 2 * 5 + 1
    assert found.state_action.relative == {"single_arm"}


def test_unknown_embodiments_and_bare_folders_are_told(
    folder: CheckpointFolder, tokenizer: WordTokenizer, write_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="'new_embodimen' is not known; the nearest is 'new_embodiment'"):
        Processor.from_checkpoint(folder, embodiment="new_embodimen", tokenizer=tokenizer)
    with pytest.raises(ValueError, match="no modality config for embodiment 'unitree_g1_sonic'; it has"):
        Processor.from_checkpoint(folder, embodiment="unitree_g1_sonic", tokenizer=tokenizer)
    bare = write_checkpoint(tmp_path / "bare", processor=False)
    with pytest.raises(ValueError, match=r"has no processor_config.json"):
        Processor.from_checkpoint(bare, embodiment="new_embodiment", tokenizer=tokenizer)
    assert for_dataset(CheckpointFolder(bare), tokenizer, config=folder.config, horizon=4).horizon == 4
