"""Problems that only show when values are seen together, or beside the dataset; all of them in one report."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.check import check, checked
from recipes.check_data import size
from recipes.load import RecipeError, load
from recipes.run_folder import RunFolder


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from knonik.write.lerobot import EpisodeData, write_lerobot

    def episodes():
        for length in (9, 24):
            yield EpisodeData(
                columns={
                    "observation.state": np.zeros((length, 7), np.float32),
                    "action": np.zeros((length, 7), np.float32),
                },
                frames={"observation.images.front": np.zeros((length, 32, 48, 3), np.uint8)},
                task="wave",
            )

    where = tmp_path_factory.mktemp("check") / "set"
    write_lerobot(where, episodes(), fps=10, robot_type="none", codec="h264")
    return where


def report(name: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        checked(name, list(overrides))
    return caught.value.problems


def tiny(dataset: Path, tmp_path: Path, *overrides: str) -> tuple[str, ...]:
    return (f"data.uri={dataset}", "model.size=tiny", f"run.dir={tmp_path / 'run'}", *overrides)


def test_a_sound_recipe_passes(dataset: Path, tmp_path: Path) -> None:
    recipe = checked("gr00t_n17/finetune", list(tiny(dataset, tmp_path)))
    assert check(recipe, world_size=4) == []


def test_everything_wrong_is_told_at_once(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    lines = report(
        "gr00t_n17/finetune",
        *tiny(
            dataset,
            tmp_path,
            "trainer.max_stesp=10",
            "optimizer.lr=fast",
            "data.cameras=[observation.images.frnt]",
            "data.horizon=20",
            "model.embodiment_id=77",
        ),
    )
    text = "\n".join(lines)
    assert "trainer.max_stesp: unknown key (did you mean 'max_steps'?)" in text
    assert "optimizer.lr: expected float" in text
    assert "data.global_batch_size: 32 is not divisible by the 3 ranks; the nearest is 30 or 33" in text
    assert "data.cameras: 'observation.images.frnt' is no camera" in text
    assert "did you mean 'observation.images.front'" in text
    assert "data.horizon: 20 is more than the model's action_horizon" in text
    assert "model.embodiment_id: 77 is not a slot" in text
    assert len(lines) == 6


def test_what_only_two_keys_together_show(dataset: Path, tmp_path: Path) -> None:
    both = tiny(dataset, tmp_path, "data.cache.decoded=1GB", "data.transport=yuv420p")
    assert report("gr00t_n17/finetune", *both) == [
        "data.transport: yuv420p does not go with data.cache.decoded, which keeps resized RGB frames; give rgb24, or "
        "data.cache.decoded=0"
    ]
    ranges = tmp_path / "ranges.json"
    for held, expected in (
        ({"1": [[0, 40]]}, "data.ranges: ranges file"),
        ({"9": [[0, 4]]}, "data.ranges: episode"),
        ({"0": [[0, 2]]}, "data.ranges: no anchor steps: 2 episodes"),
    ):
        ranges.write_text(json.dumps(held))
        (line,) = report("gr00t_n17/finetune", *tiny(dataset, tmp_path, f"data.ranges={ranges}"))
        assert line.startswith(expected)


def test_sizes_may_be_numbers_or_text(dataset: Path, tmp_path: Path) -> None:
    sizes = ("data.cache.ram=0", "data.cache.disk=4GB", "data.cache.decoded=2000000", "data.order=blocks")
    recipe = checked("gr00t_n17/finetune", list(tiny(dataset, tmp_path, *sizes, "data.block_window=256")))
    assert [size(recipe, name) for name in ("ram", "disk", "decoded")] == [0, 4 * 10**9, 2_000_000]


def test_a_missing_dataset_is_named(tmp_path: Path) -> None:
    lines = report("gr00t_n17/finetune", *tiny(tmp_path / "nowhere", tmp_path))
    assert len(lines) == 1
    assert lines[0].startswith("data.uri:")
    assert "nowhere" in lines[0]


def test_one_batch_key_only(dataset: Path, tmp_path: Path) -> None:
    assert "both" in report("gr00t_n17/finetune", *tiny(dataset, tmp_path, "data.batch_size=8"))[0]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.config={max_state_dim: 3}", "data.state: 7 values a step are more than the model's max_state_dim = 3"),
        ("model.config={max_state_dmi: 8}", "did you mean 'max_state_dim'"),
        ("model.processor.crop_fracton=0.9", "did you mean 'crop_fraction'"),
        ("model.processor.crop_fraction=1.5", "crop_fraction"),
        ("data.action=[actoin]", "did you mean 'action'"),
        ("data.episodes=[0, 7]", "data.episodes: [7]"),
        ("schedule.warmup_ratio=2.0", "schedule.warmup_ratio"),
        ("checkpoint.keep=0", "checkpoint.keep"),
        ("run.first=nothing", "run.first"),
        ("trainer.max_steps=0", "trainer.max_steps"),
        ("model.config={crop_fraction: 0.9}", "model.config.crop_fraction: has no effect; give model.processor.crop"),
        ("model.config={load_bf16: true}", "model.config.load_bf16: has no effect"),
        ("model.weights=/nowhere/released", "model.weights: '/nowhere/released' does not exist"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas"),
        ("optimizer.weight_decay=-1.0", "optimizer.weight_decay"),
        ("optimizer={fold_clip: true, fused: false}", "optimizer.fold_clip: true, but only the fused update clips"),
        ("model.config={max_state_dim: wide}", "model.config.max_state_dim: expected int, got str 'wide'"),
        ("model.processor.tokenizer=3", "model.processor.tokenizer: expected str, got int 3"),
        ("model.processor.color_jitter=5", "model.processor.color_jitter: expected a list, got 5"),
        ("trainer.gradient_clip_val=-1", "trainer.gradient_clip_val: -1.0 is not positive"),
        ("optimizer.lr=.nan", "optimizer.lr: nan is not positive and finite"),
        ("trainer.max_time=00:10:00", "trainer.max_time: '00:10:00' is not of the form DD:HH:MM:SS"),
        ("trainer.accelerator=cdua", "trainer.accelerator: 'cdua' is unknown (did you mean 'cuda'?)"),
        ("seed=-1", "seed: -1 is not in 0 to"),
        ("data.cameras=[]", "data.cameras: the list is empty; name at least one; null means all"),
        ("data.episodes=[]", "data.episodes: the list is empty"),
        ("data.action=[]", "data.action: the list is empty"),
        ("data.action=[action, action]", "data.action: 'action' stands there twice"),
        ("data.state=[observation.images.front]", "holds video, not numbers; those are observation.state, action"),
        ("data.episodes=[0]", "of 16 steps fits into no episode, the longest has 9 rows; give at most 9, or data.edge"),
        ("precision=bf16-true", "precision: 'bf16-true' is not one of"),
        ("data.cache.ram=lots", "data.cache.ram: 'lots' is not a size; give bytes, or a number with kB, MB, GB"),
        ("data.cache.disk=-1", "data.cache.disk: -1 is not a size"),
        ("data.cache.disk=[]", "data.cache.disk: expected str, got list []"),
        (
            "data.cache.decoded=1kB",
            "data.cache.decoded: 1kB is too small for the frames of all rows; give at least 1MB",
        ),
        ("data.transport=yuv", "data.transport: 'yuv' is not one of 'rgb24', 'yuv420p'"),
        ("data.block_window=512", "data.block_window: has no effect with data.order=exact; give data.order=blocks"),
        ("data.max_bad_share=0.1", "data.max_bad_share: has no effect with data.on_bad_sample=raise"),
        ("data.validation=1.0", "data.validation: 1.0 is not in [0, 1)"),
        ("data.validation=0.0001", "data.validation: validation=0.0001 holds out none of 2 episodes"),
        ("data.ranges=/nowhere.json", "data.ranges: /nowhere.json is no file"),
        ("data.match=place", "data.match: 'place' is not one of 'time', 'index'"),
        ("data.ring_batches=0", "data.ring_batches: 0 is not positive"),
    ],
)
def test_each_problem_names_its_key(dataset: Path, tmp_path: Path, override: str, expected: str) -> None:
    assert expected in "\n".join(report("gr00t_n17/finetune", *tiny(dataset, tmp_path, override)))


def test_a_run_continues_only_with_its_own_recipe(dataset: Path, tmp_path: Path) -> None:
    overrides = list(tiny(dataset, tmp_path))
    recipe = checked("gr00t_n17/finetune", overrides)
    RunFolder(recipe.run.dir).create(recipe)
    longer = [*overrides, "trainer.max_steps=20000", "data.global_batch_size=64", "logger=wandb"]
    assert checked("gr00t_n17/finetune", longer).trainer.max_steps == 20000
    drifted = [*overrides, "optimizer.lr=5e-4"]
    lines = report("gr00t_n17/finetune", *drifted)
    assert "optimizer.lr: was 0.001" in lines[0]
    assert "--allow-drift" in lines[-1]
    assert checked("gr00t_n17/finetune", drifted, allow_drift=True).optimizer.lr == 5e-4


def test_the_quickstart_needs_no_dataset_yet(tmp_path: Path) -> None:
    recipe = load("quickstart", [f"data.uri={tmp_path / 'later'}"])
    assert check(recipe, world_size=1) == []


def test_the_model_and_its_processor_are_looked_at_together(dataset: Path, tmp_path: Path) -> None:
    wrong = ("model.config={max_state_dmi: 8, hidden_size: 1.5}", "model.processor.crop_fracton=0.9")
    keys = [line.split(":")[0] for line in report("gr00t_n17/finetune", *tiny(dataset, tmp_path, *wrong))]
    assert sorted(keys) == ["model.config.hidden_size", "model.config.max_state_dmi", "model.processor.crop_fracton"]


def test_short_episodes_are_fine_beside_long_ones_or_repeated(dataset: Path, tmp_path: Path) -> None:
    checked("gr00t_n17/finetune", list(tiny(dataset, tmp_path, "data.episodes=[0,1]")))
    checked("gr00t_n17/finetune", list(tiny(dataset, tmp_path, "data.episodes=[0]", "data.edge=repeat")))


def test_a_run_folder_that_cannot_be_made_is_named(dataset: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for where in (file, file / "below"):
        line = report("gr00t_n17/finetune", *tiny(dataset, tmp_path, f"run.dir={where}"))[0]
        assert line == f"run.dir: {where} cannot be a folder, {file} is a file"


def test_a_cache_folder_that_cannot_be_made_is_named(dataset: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    (line,) = report("gr00t_n17/finetune", *tiny(dataset, tmp_path, f"data.cache.dir={file}"))
    assert line.startswith(f"data.cache.dir: nothing can be kept in {file}")


def test_a_damaged_data_file_is_named_unless_its_episodes_are_left_out(dataset: Path, tmp_path: Path) -> None:
    from knonik.write.lerobot import EpisodeData, write_lerobot

    low = {key: np.zeros((24, 7), np.float32) for key in ("observation.state", "action")}
    frames = {"observation.images.front": np.zeros((24, 32, 48, 3), np.uint8)}
    folder = tmp_path / "damaged"
    episodes = (EpisodeData(columns=low, frames=frames, task="wave") for _ in range(2))
    write_lerobot(folder, episodes, fps=10, robot_type="none", codec="h264", version="v2.1")
    path = folder / "data/chunk-000/episode_000001.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    for _ in range(2):  # without an index, and with one
        (line,) = report("gr00t_n17/finetune", *tiny(folder, tmp_path))
        assert line.startswith("data.uri: data/chunk-000/episode_000001.parquet: ")
        assert "data.episodes" in line
    checked("gr00t_n17/finetune", list(tiny(folder, tmp_path, "data.episodes=[0]")))


def test_a_feature_without_a_shape_is_named(dataset: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(dataset, tmp_path / "set")
    info = json.loads((copy / "meta/info.json").read_text())
    del info["features"]["action"]["shape"]
    (copy / "meta/info.json").write_text(json.dumps(info))
    assert "shape of action is None" in report("gr00t_n17/finetune", *tiny(copy, tmp_path))[0]


def test_a_first_stage_made_differently_is_not_reused(tmp_path: Path) -> None:
    from recipes.stages import BACKBONE_FILE, first_stage, with_first_stage

    recipe = load("quickstart", [f"run.dir={tmp_path / 'run'}"])
    first = first_stage(recipe)
    assert first is not None
    RunFolder(first.run.dir).create(first)
    (Path(first.run.dir) / BACKBONE_FILE).touch()
    reused = with_first_stage(recipe, started_at=0.0)
    assert reused.model.backbone_weights == str(Path(first.run.dir) / BACKBONE_FILE)
    other = load("quickstart", [f"run.dir={tmp_path / 'run'}", "data.cameras=[observation.images.side]"])
    with pytest.raises(RecipeError, match=r"data\.cameras: was .*"):
        with_first_stage(other, started_at=0.0)


def test_a_grounding_stage_runs_in_one_process(tmp_path: Path) -> None:
    recipe = load("quickstart_grounding", [f"data.uri={tmp_path / 'later'}"])
    assert check(recipe, world_size=1) == []
    assert check(recipe, world_size=2) == ["run.stage: a grounding stage runs in one process, torchrun started 2"]


def test_nodes_and_ranks_must_multiply(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    lines = report("gr00t_n17/finetune", *tiny(dataset, tmp_path))
    assert lines == ["trainer.num_nodes: 1 nodes of 8 ranks are not the 16 ranks that torchrun started"]
    assert checked("gr00t_n17/finetune", list(tiny(dataset, tmp_path, "trainer.num_nodes=2"))).trainer.num_nodes == 2


def test_a_disk_bound_below_one_extent_is_named_for_a_store(dataset: Path, tmp_path: Path, new_bucket: Any) -> None:
    files = {f"set/{path.relative_to(dataset)}": path.read_bytes() for path in dataset.rglob("*") if path.is_file()}
    bucket, _ = new_bucket(files)
    overrides = (*tiny(dataset, tmp_path, "data.cache.disk=1MB"), f"data.uri=s3://{bucket}/set")
    assert report("gr00t_n17/finetune", *overrides) == [
        "data.cache.disk: 1MB is too small; give at least 4MiB, or 0 to keep none"
    ]


def test_generated_data_needs_a_local_folder() -> None:
    assert any(
        "data.uri: s3://bucket/set lies on S3" in line for line in report("quickstart", "data.uri=s3://bucket/set")
    )


def test_a_depth_camera_is_told_as_such(dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    shutil.copytree(dataset, folder)
    info = json.loads((folder / "meta/info.json").read_text())
    info["features"]["observation.images.front"]["info"]["is_depth_map"] = True
    (folder / "meta/info.json").write_text(json.dumps(info))
    lines = report("gr00t_n17/finetune", *tiny(folder, tmp_path, "data.cameras=[observation.images.front]"))
    assert "data.cameras: 'observation.images.front' holds depth maps, which no model takes; leave it out" in lines
