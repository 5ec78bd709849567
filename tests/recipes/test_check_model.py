"""Problems of embodiments, groups, precision, adapters, validation and mixtures; and what a checkpoint overrules."""

import json
import shutil
from pathlib import Path

import pytest

from recipes.check import check, checked
from recipes.load import RecipeError


def overrides(data: Path, checkpoint: Path | None, tmp_path: Path, *more: str) -> list[str]:
    weights = ["model.size=tiny"] if checkpoint is None else [f"model.weights={checkpoint}"]
    return [
        f"data.uri={data}",
        *weights,
        f"run.dir={tmp_path / 'run'}",
        f"data.cache.dir={tmp_path / 'cache'}",
        "data.horizon=8",
        *more,
    ]


def report(name: str, values: list[str]) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        checked(name, values)
    return caught.value.problems


def test_a_checkpoint_and_a_dataset_that_fit_pass(arm_dataset: Path, checkpoint: Path, tmp_path: Path) -> None:
    assert checked("gr00t_n17/finetune", overrides(arm_dataset, checkpoint, tmp_path)).model.precision == "stock"
    lean = ("model.precision=lean", "data.validation=0.4", "validation={every_n_steps: 5, open_loop_episodes: 1}")
    assert checked("gr00t_n17/finetune", overrides(arm_dataset, checkpoint, tmp_path, *lean)).validation is not None


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "model.embodiment=libero_smi",
            "model.embodiment: embodiment 'libero_smi' is not known; the nearest is 'libero",
        ),
        ("model.embodiment_id=32", "model.embodiment_id: 32 is not a slot; allowed: 0 to 31"),
        ("model.embodiment=libero_sim", "model.modality: the checkpoint's modality config has the action groups"),
        ("model.config={select_layer: 1}", "model.config.select_layer: 1 is not the checkpoint's"),
        (
            "model.config={diffusion_model_cfg: {num_layers: 6}}",
            "model.config.diffusion_model_cfg.num_layers: 6 is not the checkpoint's 4",
        ),
        (
            "model.config={use_percentiles: false}",
            "model.config.use_percentiles: has no effect; give model.processor.use",
        ),
        (
            "model.processor.image_target_size=[224, 224]",
            "image_target_size: has no effect with shortest_image_edge=256, which is the checkpoint's; give",
        ),
        (
            "model.processor={crop_fraction: 0.9, image_crop_size: [230, 230]}",
            "image_crop_size: has no effect with crop_fraction=0.9; give model.processor.crop_fraction=null",
        ),
        ("model.precision=lena", "model.precision: 'lena' is not one of 'stock', 'lean', 'bf16'"),
        ("model.lora={rank: 4}", "model.lora.targets: required, but the recipe gives no value"),
        ("model.lora={targets: [llm, vit]}", "model.lora.targets[1]: 'vit' is not one of 'llm', 'vision', 'dit'"),
        ("model.lora={targets: [], rank: 0}", "model.lora.rank: 0 is not positive"),
        ("model.feature_cache=lots", "model.feature_cache: 'lots' is not a size"),
        ("validation={every_n_steps: 5}", "validation: no episode is held out; give data.validation=0.05 or"),
        ("data.validation_episodes=[9]", "data.validation_episodes: "),
        ("data.validation_episodes=[0, 1, 2, 3, 4, 5]", "they are all episodes of"),
        ("data.missing_cameras=black", "data.missing_cameras: has no effect without data.mixture"),
        ("data.modality=/nowhere.json", "data.modality: /nowhere.json is no file"),
        ("data.modality={state: {arm: {start: 0, end: 9}}}", "data.modality: modality.json: state.arm is 0..9"),
        (
            "model.modality={state: [single_amr]}",
            "model.modality.state: 'single_amr' is no group of the dataset's (did you",
        ),
        (
            "model.modality={action: {gripper: {rep: RELATIVE, state_key: griper}}}",
            "model.modality.action.gripper.state_key: 'griper' is no state group (did you mean 'gripper'?)",
        ),
        (
            "model.modality={action: {gripper: {state_key: gripper}}}",
            "model.modality.action.gripper.state_key: has no effect with rep=ABSOLUTE; give rep=RELATIVE",
        ),
        (
            "model.modality={action: {gripper: {rep: RELATIV}}}",
            "model.modality.action.gripper.rep: 'RELATIV' is not one of 'ABSOLUTE', 'RELATIVE', 'DELTA'",
        ),
        ("data.mixture=[{uri: /a}]", "data.uri: give it or data.mixture; the recipe gives both"),
    ],
)
def test_each_problem_names_its_key(
    arm_dataset: Path, checkpoint: Path, tmp_path: Path, override: str, expected: str
) -> None:
    assert expected in "\n".join(report("gr00t_n17/finetune", overrides(arm_dataset, checkpoint, tmp_path, override)))


def test_precision_modes_need_their_autocast(arm_dataset: Path, tmp_path: Path) -> None:
    values = overrides(arm_dataset, None, tmp_path, "model.precision=lean")
    assert report("gr00t_n17/finetune", values) == [
        "model.precision: lean computes under bfloat16 autocast; give precision=bf16-mixed, or stock"
    ]


def test_a_feature_cache_needs_a_frozen_backbone(arm_dataset: Path, tmp_path: Path) -> None:
    still = "model.processor={color_jitter: null, crop_fraction: null}"
    more = ("model.feature_cache=1GB", still, "model.config={tune_visual: true}", "model.lora={targets: [vision]}")
    lines = report("gr00t_n17/finetune", overrides(arm_dataset, None, tmp_path, *more))
    assert any("model.feature_cache: the backbone changes with model.config.tune_visual=True" in line for line in lines)
    assert any("model.feature_cache: the backbone changes with adapters on llm or vision" in line for line in lines)
    assert any("model.config.tune_visual: has no effect, adapters on vision freeze" in line for line in lines)
    kept = ("model.feature_cache=1GB", "model.config={tune_llm: false, tune_visual: false}")
    (line,) = report("gr00t_n17/finetune", overrides(arm_dataset, None, tmp_path, *kept))
    assert "every pass sees other images (image recipe A" in line
    steady = overrides(arm_dataset, None, tmp_path, *kept, "model.processor.random_crop=false")
    assert checked("gr00t_n17/finetune", steady).model.feature_cache == "1GB"


def test_whole_columns_are_groups_where_no_file_names_any(write_dataset, tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "set", episodes=2)
    relative = "model.modality={action: {action: {rep: RELATIVE, state_key: state}}}"
    checked("gr00t_n17/finetune", overrides(data, None, tmp_path, relative))
    wrong = report("gr00t_n17/finetune", overrides(data, None, tmp_path, "model.modality={action: {gripper: {}}}"))
    assert wrong == ["model.modality.action: 'gripper' is no group of the dataset's (allowed: action)"]


def test_one_slot_for_all_does_not_overrule_the_robots_of_a_mixture(arm_dataset: Path, checkpoint: Path) -> None:
    parts = [{"uri": str(arm_dataset), "embodiment": "new_embodiment"}, {"uri": str(arm_dataset), "embodiment_id": 1}]
    given = ["model.embodiment_id=0", f"data.mixture={json.dumps(parts)}", f"model.weights={checkpoint}"]
    lines = report("gr00t_n17/mixture", given)
    overruled = [line for line in lines if "would be overruled by model.embodiment_id = 0" in line]
    assert [line.split(":")[0] for line in overruled] == ["data.mixture[0].embodiment"]


def test_the_parts_of_a_mixture_are_looked_at_one_by_one(arm_dataset: Path, checkpoint: Path, tmp_path: Path) -> None:
    shared = [
        f"model.weights={checkpoint}",
        f"run.dir={tmp_path / 'run'}",
        f"data.cache.dir={tmp_path}",
        "data.horizon=8",
    ]
    parts = [
        {
            "uri": str(arm_dataset),
            "weight": 2,
            "embodiment": "new_embodimant",
            "cameras": {"one": "observation.images.x"},
        },
        {"uri": str(tmp_path / "none"), "horizon": 9, "cameras": {"two": "observation.images.front"}},
        {"uri": str(arm_dataset), "weight": -1, "action": ["actoin"], "episodes": []},
    ]
    lines = report("gr00t_n17/mixture", [*shared, f"data.mixture={json.dumps(parts)}", "data.cameras=[a]"])
    keys = sorted(line.split(":")[0] for line in lines)
    assert keys == [
        "data.cameras",
        "data.mixture[0].cameras",
        "data.mixture[0].cameras",
        "data.mixture[0].embodiment",
        "data.mixture[1].cameras",
        "data.mixture[1].horizon",
        "data.mixture[1].uri",
        "data.mixture[1].weight",
        "data.mixture[2].action",
        "data.mixture[2].episodes",
        "data.mixture[2].weight",
    ]
    good = f"data.mixture=[{{uri: {arm_dataset}}}, {{uri: {arm_dataset}, embodiment: libero_sim, groups: {{}}}}]"
    assert len(checked("gr00t_n17/mixture", [*shared, good]).data.mixture or ()) == 2
    (line,) = report("gr00t_n17/mixture", [*shared, "data.mixture=[{weight: 1}]"])
    assert line == "data.mixture[0].uri: required, but the recipe gives no value"


def test_a_checkpoint_whose_files_are_damaged_is_named(arm_dataset: Path, checkpoint: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    (copy / "embodiment_id.json").write_text('{"new_embodiment": "ten"}')
    lines = report("gr00t_n17/finetune", overrides(arm_dataset, copy, tmp_path))
    assert any("embodiment_id.json" in line for line in lines)


def test_a_checkpoint_that_lies_elsewhere_is_looked_at_when_it_came(
    arm_dataset: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recipes import checkpoint_source
    from recipes.build import with_local_weights

    wrong = overrides(arm_dataset, checkpoint, tmp_path, "model.weights=owner/name", "model.config={max_state_dim: 8}")
    recipe = checked("gr00t_n17/finetune", wrong)
    assert check(recipe, world_size=1) == []
    monkeypatch.setattr(checkpoint_source, "local_checkpoint", lambda source, cache_dir=None: checkpoint)
    with pytest.raises(RecipeError, match="max_state_dim: 8 is not the checkpoint's"):
        with_local_weights(recipe)


def test_weights_that_are_none_are_told_before_anything_starts(
    arm_dataset: Path, checkpoint: Path, tmp_path: Path
) -> None:
    empty = overrides(arm_dataset, None, tmp_path, f"model.weights={arm_dataset}")
    assert any("has neither model.safetensors nor" in line for line in report("gr00t_n17/finetune", empty))
    text = overrides(arm_dataset, checkpoint / "config.json", tmp_path)
    assert any("config.json is no safetensors file" in line for line in report("gr00t_n17/finetune", text))
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    next(iter(sorted(copy.glob("*.safetensors")))).unlink()
    lines = report("gr00t_n17/finetune", overrides(arm_dataset, copy, tmp_path))
    assert any("names files that are not there: ['model-00001-of-00003.safetensors']" in line for line in lines)


def test_settings_that_another_one_takes_the_meaning_from(arm_dataset: Path, checkpoint: Path, tmp_path: Path) -> None:
    relative = ("model.modality={action: {single_arm: {rep: RELATIVE}}}", "model.processor.use_relative_action=false")
    assert report("gr00t_n17/finetune", overrides(arm_dataset, checkpoint, tmp_path, *relative)) == [
        "model.modality.action: has no effect with model.processor.use_relative_action=false; leave one out"
    ]
    tiny = overrides(arm_dataset, checkpoint, tmp_path, "model.size=tiny")
    assert report("gr00t_n17/finetune", tiny) == [
        "model.size: tiny has no effect beside the checkpoint's config.json; leave it out"
    ]


def test_only_the_groups_in_use_must_fit_the_network(write_dataset, checkpoint: Path, tmp_path: Path) -> None:
    parts = {"arm": {"start": 0, "end": 5}, "legs": {"start": 5, "end": 26}}
    data = write_dataset(tmp_path / "set", episodes=2, width=26, modality={"state": parts, "action": parts})
    free = "model.embodiment=robocasa_panda_omron"  # a tag without a modality config in the checkpoint
    lines = report("gr00t_n17/finetune", overrides(data, checkpoint, tmp_path, free))
    assert [line.split(": ", 1)[1].split(";")[0] for line in lines] == [
        "26 values a step are more than the model's max_state_dim = 24",
        "26 values a step are more than the model's max_action_dim = 20",
    ]
    arm = "model.modality={state: [arm], action: {arm: {}}}"
    assert checked("gr00t_n17/finetune", overrides(data, checkpoint, tmp_path, free, arm)).model.modality is not None


def test_words_that_the_weights_know_keep_their_ids(write_dataset, checkpoint: Path, tmp_path: Path) -> None:
    from recipes.build import build_processor
    from recipes.sources import open_all

    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    words = {"<unk>": 7, "user": 8, "\n": 9, "slowly": 10, "push": 11}
    file = json.loads((copy / "processor_config.json").read_text())
    file["training"] = {"processor": {"tokenizer": "words"}, "tokenizer": {"kind": "words", "words": words}}
    (copy / "processor_config.json").write_text(json.dumps(file))
    data = write_dataset(tmp_path / "set", episodes=2, modality=None)
    free = "model.embodiment=robocasa_panda_omron"
    # said again by the recipe, or known from the checkpoint alone
    for more in ((free,), (free, "model.processor.tokenizer=words")):
        recipe = checked("gr00t_n17/finetune", overrides(data, copy, tmp_path, *more))
        (dataset,) = datasets = open_all(recipe)
        found = build_processor(recipe, datasets).tokenizer.words
        dataset.close()
        assert {word: found[word] for word in words} == words
        assert {"block", "0", "1"} <= found.keys()
        assert len(set(found.values())) == len(found)
