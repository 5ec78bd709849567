"""Recipes of the Cosmos-3 policy: what they say resolves, and what does not fit is told with its key before a run."""

import importlib.util
from pathlib import Path

import pytest

from recipes.build import optimizer, schedule
from recipes.check import check, checked
from recipes.families.cosmos3_policy import memory
from recipes.family import family
from recipes.load import RecipeError, available, examine, from_dict, load, to_dict

SMOKE = "cosmos3_policy/smoke"


def values(world: Path, folder: Path, *more: str) -> list[str]:
    return [f"data.uri={world / 'data'}", f"data.cache.dir={world / 'cache'}", f"run.dir={folder / 'run'}", *more]


def problems(world: Path, folder: Path, *more: str, ranks: int = 1) -> list[str]:
    recipe, told = examine(SMOKE, values(world, folder, *more))
    return told + check(recipe, world_size=ranks, told=told)


def test_the_reference_recipe_is_the_published_one() -> None:
    recipe = load("cosmos3_policy/droid", ["data.uri=/droid"])
    rates = optimizer(recipe)
    assert (rates.betas, rates.weight_decay, rates.weight_decay_on) == ((0.9, 0.99), 0.05, "all")
    assert rates.lr_multipliers == {"action_heads": 5.0}
    line = schedule(recipe)
    assert [rates.lr * line.factor(step) for step in (0, 10_000)] == pytest.approx([8e-5, 7.2e-5])
    assert (recipe.parallel.shard, recipe.data.batch_size, recipe.trainer.max_steps) == (8, 32, 10_000)
    assert recipe.data.horizon == 32
    assert recipe.ema is not None
    assert (recipe.ema.kind, recipe.ema.rate) == ("power", 0.1)


@pytest.mark.parametrize(("name", "ranks", "batch"), [("droid", 256, 8192), ("droid_8gpu", 8, 8192)])
def test_the_batch_stays_when_the_gpus_are_fewer(name: str, ranks: int, batch: int) -> None:
    recipe = load(f"cosmos3_policy/{name}", ["data.uri=/droid"])
    assert recipe.data.batch_size is not None
    assert recipe.data.batch_size * ranks * recipe.trainer.accumulate_grad_batches == batch
    assert not [line for line in check(recipe, world_size=ranks) if not line.startswith("data.uri: no LeRobot")]


def test_96_gpus_share_what_comes_nearest() -> None:
    recipe = load("cosmos3_policy/droid_96gpu_hsdp", ["data.uri=/droid"])
    assert recipe.data.batch_size is not None
    per_step = 96 * recipe.data.batch_size * recipe.trainer.accumulate_grad_batches
    assert abs(per_step - 8192) <= 48  # half of what one more sample per GPU would be
    assert recipe.parallel.sizes(96) == (12, 8)


def test_a_recipe_comes_back_from_its_plain_values() -> None:
    recipe = load(SMOKE)
    assert from_dict(to_dict(recipe)) == recipe


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("model.lora={targets: [llm]}", "model.lora: is a key of gr00t_n17, and model.name is cosmos3_policy; leave"),
        ("model.name=cosmos3", "model.name: 'cosmos3' is not one of 'gr00t_n17', 'cosmos3_policy'"),
        ("model.vea=/x", "model.vea: unknown key (did you mean 'vae'?)"),
        ("model.vae=/nowhere", "model.vae: '/nowhere' is no folder of a video encoder"),
        ("model.weights=/nowhere", "model.weights: '/nowhere' does not exist"),
        ("model.keep_action_heads=true", "model.keep_action_heads: has no effect without model.weights"),
        ("model.size=released", "model.vae: a released network needs a video encoder"),
        ("model.config={hidden_sise: 64}", "model.config.hidden_sise: unknown key (did you mean 'hidden_size'?)"),
        ("model.config={action_dim: 6}", "data.action: an action has 7 values, the network's rows have 6"),
        ("model.processor.fsp=5", "model.processor.fsp: unknown key (did you mean 'fps'?)"),
        ("model.processor.fps=15", "model.processor.fps: 15 is not the 5 frames a second of"),
        ("model.processor.horizon=8", "model.processor.horizon: is that of the data section; give data.horizon"),
        ("model.processor.tier=big", "model.processor.tier: 'big' is unknown; allowed: 256, 480, 704, 720, fit"),
        ("model.processor.domain=4", "model.processor.domain: 4 is no slot; allowed: 0 to 3"),
        ("model.processor.tokenizer=null", "model.processor.tokenizer: null takes the one beside model.weights"),
        (
            "model.processor.tokenizer=bytes",
            "model.processor.tokenizer: 'bytes' is no folder, and no hub id OWNER/NAME",
        ),
        ("model.processor.tokenizer=/", "model.processor.tokenizer: / holds no tokenizer.json"),
        ("model.processor.augment=true", "model.processor.augment: True is not a section of keys; those are crop,"),
        ("model.processor.gripper=[6]", "model.processor.gripper[0]: expected str, got int 6"),
        ("model.processor.gripper=['action[7]']", "model.processor.gripper names 'action[7]'; there are observation"),
        ("model.vae=''", "model.vae: '' is no folder of a video encoder"),
        ("model.vae=/", "model.vae: '/' is no folder of a video encoder, which holds a config.json"),
        ("model.weights=''", "model.weights: '' does not exist; give a folder, a hub id"),
        ("data.state=[]", "data.state: the list is empty"),
        (
            "data.action=[timestamp]",
            "data.action: the state has 7 values (observation.state), the action 1 (timestamp); ",
        ),
        ("data.horizon=-4", "data.horizon: -4 is not positive"),
        (
            "data.horizon=1000",
            "a chunk of 1000 steps fits into no episode, the longest has 24 rows; give at most 20, or",
        ),
        ("model.processor.prompt=xml", "model.processor.prompt='xml'; allowed: json, plain"),
        ("model.processor.augment={hue: 0.7}", "model.processor.augment.hue=0.7: at most 0.5"),
        ("model.processor.augment={hues: 0.1}", "model.processor.augment.hues: unknown key (did you mean 'hue'?)"),
        (
            "model.processor.gripper=[grip]",
            "model.processor.gripper: 'grip' is no column that is read, nor one of its values, as",
        ),
        ("model.processor.views={wrist: observation.images.front}", "'observation.images.front' is none of the cam"),
        ("model.processor.views={wrist: observation.images.top}", "data.cameras: ['observation.images.wrist', 'obs"),
        ("data.cameras=[observation.images.top, observation.images.wrist]", "data.cameras: a picture is made of one"),
        ("data.horizon=10", "data.horizon: 10 is no multiple of 4, the frames of one latent frame"),
        ("data.mixture=[{uri: /a}]", "data.mixture: cosmos3_policy trains on one dataset"),
        ("data.pack_tokens=0", "data.pack_tokens: 0 is not positive"),
        ("data.pack_tokens=27", "data.pack_tokens: 27 holds no sample: clip, state and actions are 27; give more"),
        ("validation.open_loop_stride=9", "validation.open_loop_stride: 9 is not in 1 to data.horizon = 8"),
        ("data.validation=0", "validation: no episode is held out"),
        ("evaluation={world: tabletop}", "evaluation: cosmos3_policy has no world to act in"),
        ("run.first=quickstart_grounding", "run.first: cosmos3_policy has no stage before it"),
        ("graphs=head", "graphs: head is of models whose batches have one shape"),
        ("compile.scope=model", "compile.scope: model would compile every pack of other lengths anew"),
        ("checkpointing={mode: layers, last_k: 3}", "checkpointing.last_k: 3 is more than the blocks there are"),
        ("optimizer.lr_multipliers={heads: 5}", "optimizer.lr_multipliers.heads: cosmos3_policy has no such part"),
        ("trainer.num_nodes=2", "trainer.num_nodes: 2 nodes need 2 ranks or more, and there is 1: start torchrun on"),
        ("compile={scope: blocks, dynamic: false}", "compile.dynamic: false would compile every pack of other lengths"),
        ("compile.inductor={triton.mix_order_reduction: 7}", "mix_order_reduction: 7 is neither true nor false"),
        ("schedule.warmup_ratio=0.1", "schedule.warmup_ratio: kind=linear has no warm-up"),
        ("schedule.warmup_steps=5", "schedule.warmup_steps: kind=linear has no warm-up"),
        ("schedule.cycle_steps=10", "schedule.cycle_steps: 10 ends before trainer.max_steps = 200"),
        ("schedule.kind=cosine", "schedule.cycle_steps: has no effect with kind=cosine"),
    ],
)
def test_each_problem_names_its_key(world: Path, tmp_path: Path, given: str, expected: str) -> None:
    assert expected in "\n".join(problems(world, tmp_path, given))


@pytest.mark.parametrize(
    "given",
    [
        "model.processor.gripper=[6]",
        "model.processor.augment=true",
        "model.processor.tier=256.0",
        "data.state=[]",
        "data.action=[timestamp]",
        "data.horizon=-4",
        "data.horizon=1000",
        "data.mixture=[{uri: /a}, {uri: /b, weight: 0}]",
    ],
)
def test_one_mistake_is_one_line(world: Path, tmp_path: Path, given: str) -> None:
    assert len(problems(world, tmp_path, given)) == 1


def test_a_tier_may_be_given_as_the_number_it_looks_like(world: Path, tmp_path: Path) -> None:
    assert problems(world, tmp_path, "model.processor.tier=256") == []


def test_all_that_is_wrong_is_told_at_once_though_there_is_no_dataset() -> None:
    """One setting that is wrong hides no other one, and none needs the dataset to be told."""
    given = {
        "model.processor.fps": "0",
        "model.processor.caption_dropout": "x",
        "model.processor.domain": "90",
        "model.processor.augment": "{hue: 0.7, crop: x}",
        "model.processor.views": "{wrist: a}",
        "model.processor.gripper": "[grip]",
        "model.processor.tier": "big",
        "data.horizon": "10",
    }
    recipe, told = examine("cosmos3_policy/droid", [f"{name}={value}" for name, value in given.items()])
    lines = told + check(recipe, world_size=8, told=told)
    assert lines[0] == "data.uri: required, give it as data.uri=..."
    for name in (*given, "model.processor.augment.hue", "model.processor.augment.crop"):
        assert any(line.startswith(name) for line in lines), name
    assert len(lines) == 10


def test_one_wrong_key_of_a_model_leaves_it_that_model(world: Path, tmp_path: Path) -> None:
    (line,) = problems(world, tmp_path, "model.vea=/x")
    assert line.startswith("model.vea: unknown key")


@pytest.mark.parametrize(
    "given", ["checkpointing=full", "compile=blocks", "model=tiny", "model.name=x", "model.processor=5"]
)
def test_a_section_that_is_none_is_told_once_and_nothing_that_follows_from_it(
    world: Path, tmp_path: Path, given: str
) -> None:
    (line,) = problems(world, tmp_path, given)
    assert line.startswith(given.split("=")[0] + ": ")


def test_the_smoke_recipe_and_each_rung_of_the_ladder_pass(world: Path, tmp_path: Path) -> None:
    for more in ((), *((f"+ladder={rung}",) for rung in range(6))):
        assert problems(world, tmp_path, *more) == []


def test_more_samples_than_the_prefetch_holds_are_refused_with_the_numbers(world: Path, tmp_path: Path) -> None:
    """A sample is 9 frames of 3 cameras of 64x64: 331,776 bytes; 8 of them, twice, are more than 5 MB."""
    (line,) = problems(world, tmp_path, "data.ring_bytes=5MB")
    assert line.startswith(
        "data.batch_size: 8 outruns the prefetch: 2 batches made ahead are 16 samples of 331776 byte"
    )
    assert "holds 15 samples. Give a batch_size of at most 7" in line
    assert problems(world, tmp_path, "data.ring_bytes=5MB", "data.batch_size=7") == []
    (line,) = problems(world, tmp_path, "data.ring_bytes=5MB", "data.batch_size=64", "data.pack_tokens=2000")
    assert "data.batch_size: 64 outruns the prefetch" in line
    half = ("data.transport=yuv420p", "data.batch_size=15")
    assert problems(world, tmp_path, "data.ring_bytes=5MB", *half) == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_block_window_that_cannot_be_held_is_refused_before_the_start(
    world: Path, tmp_path: Path, ranks: int
) -> None:
    """8 GiB are 25,890 samples of 331,776 bytes, of which two batches take 16."""
    import knonik

    fits = 25_874 * ranks + 8
    for window, refused in ((fits, False), (fits + 2 * ranks, True)):
        found = problems(world, tmp_path, "data.order=blocks", f"data.block_window={window}", ranks=ranks)
        assert bool(found) == refused
        if refused:
            assert found[0].startswith(f"data.block_window: the pictures of {window} samples of 331776 bytes")
            assert f"give a block_window well below {fits}, or order=exact" in found[0]
    # Nothing is refused that the loader would take.
    cameras = [f"observation.images.{name}" for name in ("wrist", "top", "side")]
    with knonik.open(world / "data", cache_dir=tmp_path) as dataset, pytest.raises(ValueError, match="hold_bytes"):
        knonik.Loader(
            dataset,
            batch_size=8,
            windows=dict.fromkeys(cameras, range(9)),
            cameras=cameras,
            order="blocks",
            block_window=window,
            world_size=ranks,
        )


def test_the_rungs_differ_in_what_they_name() -> None:
    rungs = [load("cosmos3_policy/droid_8gpu", ["data.uri=/d", f"+ladder={rung}"]) for rung in range(6)]
    assert [rung.data.startup for rung in rungs] == ["rows"] + ["columns"] * 5
    assert [rung.model.processor["augment_on"] for rung in rungs] == ["cpu"] * 2 + ["device"] * 4
    assert [rung.compile.scope for rung in rungs] == ["none"] * 3 + ["blocks"] * 3
    fusion = "triton.mix_order_reduction"
    assert [rung.compile.inductor.get(fusion) for rung in rungs[3:]] == [True, False, False]
    assert [rung.checkpointing.mode for rung in rungs] == ["full"] * 5 + ["layers"]
    assert rungs[5].checkpointing.layers == tuple(range(33))
    assert load(SMOKE, ["+ladder=5"]).checkpointing.layers == (0,)


@pytest.mark.parametrize("name", [name for name in available() if name.startswith("cosmos3_policy/")])
def test_every_recipe_can_be_rehearsed_in_one_process_without_a_download(name: str, tmp_path: Path) -> None:
    given = ["+rehearse=cpu", f"data.uri={tmp_path / 'none'}", "data.generate=null", f"run.dir={tmp_path / 'run'}"]
    recipe, told = examine(name, given)
    assert [line.split(":")[0] for line in told + check(recipe, world_size=1)] == ["data.uri"]
    assert recipe.model.weights is None


def test_what_the_user_gives_wins_over_a_rung() -> None:
    assert load(SMOKE, ["model.processor.augment_on=device", "+ladder=0"]).model.processor["augment_on"] == "device"
    for wrong, expected in (("+ladder=9", "'9' is not one of 0, 1, 2, 3, 4, 5"), ("+lader=0", "did you mean 'ladder'")):
        with pytest.raises(RecipeError, match=expected):
            load(SMOKE, [wrong])


def test_a_missing_package_is_told_with_its_extra(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "diffusers" else object())
    (line,) = problems(world, tmp_path)
    assert line.endswith("install the extra: pip install -e '.[cosmos3]'")


def test_the_memory_of_a_rank_is_told_by_part(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = checked(SMOKE, values(world, tmp_path))
    table = family(recipe).memory_table(recipe, 1)
    assert "0.2 M parameters, 0.1 M trained" in table
    assert "a pack of 8 samples of 177 tokens: 150 of the caption, 18 of the clip, 9 of state and actions" in table
    # the reference recipe: the fact sheet's picture, 32 samples on a rank, 8 ranks a copy
    monkeypatch.setattr(memory, "_pack", lambda recipe, ranks: (32, 3060, 736 * 544))
    reference = family(recipe).memory_table(load("cosmos3_policy/droid", ["data.uri=/d"]), 256)
    static = next(line for line in reference.splitlines() if line.startswith("static")).split()
    assert [float(value) for value in static[2:5]] == pytest.approx([3.49, 6.98, 3.49], abs=0.01)
    assert "a pack of 32 samples of 3,243 tokens" in reference


def test_a_file_of_another_kind_is_no_weights(world: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no tensors")
    lines = problems(world, tmp_path, f"model.weights={tmp_path / 'notes.txt'}", f"model.vae={tmp_path}")
    assert any("model.weights: " in line and "notes.txt is no safetensors file" in line for line in lines)


def test_a_distributed_checkpoint_without_its_index_is_told_before_a_run(world: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "__0_0.distcp").write_bytes(b"x")
    lines = problems(world, tmp_path, f"model.weights={tmp_path / 'run'}", f"model.vae={tmp_path}")
    assert any(line.startswith("model.weights: ") and "and no .metadata, their index" in line for line in lines)
