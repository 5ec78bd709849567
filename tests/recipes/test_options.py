"""Training options in recipes: what does not go together is told before a run, and each one trains."""

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks.run_record import RunRecord
from recipes.check import check, checked
from recipes.load import RecipeError, load
from recipes.run_folder import RunFolder
from recipes.schema_options import ParallelConfig
from recipes.train import train

SMALL = (
    "data.global_batch_size=null",
    "data.batch_size=2",
    "data.decode_threads=1",
    "trainer.max_steps=2",
    "trainer.log_every_n_steps=1",
    "trainer.accelerator=cpu",
    "schedule.warmup_steps=1",
)
FROZEN = "model.config={tune_llm: false, tune_visual: false}"


def values(data: Path, folder: Path, *more: str) -> list[str]:
    fixed = (f"data.uri={data}", "model.size=tiny", f"run.dir={folder / 'run'}", f"data.cache.dir={folder / 'cache'}")
    return [*fixed, "data.horizon=8", FROZEN, *more]


def problems(data: Path, folder: Path, *more: str, ranks: int = 1) -> list[str]:
    return check(load("gr00t_n17/finetune", values(data, folder, *more)), world_size=ranks)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["parallel.shard=3"], "parallel: 1 x 3 (replicate x shard) are not the 4 ranks of this run; with replicate"),
        (["parallel.replicate=3"], "parallel: 3 x 1 (replicate x shard) are not the 4 ranks"),
        (["parallel.bucket_mb=0"], "parallel.bucket_mb: 0.0 is not positive"),
        (["parallel.bucket_mb=100", "parallel.shard=2"], "parallel.bucket_mb: has no effect with parallel.shard above"),
        (["precision=fsdp-bf16"], "precision: fsdp-bf16 is about how sharded weights are gathered"),
        (["parallel.shard=2", "precision=bf16-mixed", "model.precision=bf16"], "model.precision: bf16 keeps half of"),
        (["parallel.shard=2", "compile.scope=model"], "compile.scope: model leaves no block to gather by itself"),
        (["parallel.shard=2", "graphs=head"], "graphs: head cannot hold the gathers of sharded weights"),
        (["compile.scope=blocks", "compile.mode=reduce-overhead", "graphs=head"], "both capture CUDA graphs"),
        (["compile.scope=blocks", "compile.inductor.max_autotun=true"], "unknown key 'max_autotun' (did you mean 'max"),
        (
            ["lookahead=stream", "model.config.tune_visual=true"],
            "lookahead: stream runs frozen layers ahead, and model",
        ),
        (["lookahead=stream", "model.config.tune_top_llm_layers=2"], "model.config.tune_top_llm_layers=2 leaves none"),
        (
            ["lookahead=stream", "model.config.tune_top_llm_layers=1", "compile.scope=model"],
            "lookahead: stream has to cut the backbone below its 1 trained layers",
        ),
        (
            ["checkpointing={mode: full, parts: [vison]}"],
            "checkpointing.parts: 'vison' is no part of the model (did you",
        ),
        (
            ["checkpointing={mode: full, parts: [vision]}"],
            "vision runs without gradients and keeps nothing; those that",
        ),
        (
            ["checkpointing={mode: layers, last_k: 5}"],
            "checkpointing.last_k: 5 is more than the blocks there are: vl_s",
        ),
        (["checkpointing={mode: layers, layers: [3]}"], "checkpointing.layers: not all parts have a block 3 (vl_self"),
        (["checkpointing={mode: selective, save: [aten.mmm]}"], "checkpointing.save: aten.mmm matches no operation"),
    ],
)
def test_what_does_not_go_together_is_told(arm_dataset: Path, tmp_path: Path, given: list[str], expected: str) -> None:
    (line,) = problems(arm_dataset, tmp_path, *given, ranks=4)
    assert expected in line


def test_values_of_one_section_are_judged_together(arm_dataset: Path, tmp_path: Path) -> None:
    wrong = ("checkpointing={mode: layers, save: [aten.mm]}", "ema={kind: power, decay: 0.9}", "compile.scoop=blocks")
    with pytest.raises(RecipeError) as caught:
        checked("gr00t_n17/finetune", values(arm_dataset, tmp_path, *wrong))
    assert caught.value.problems == [
        "compile.scoop: unknown key (did you mean 'scope'?)",
        "checkpointing: mode=layers: exactly one of last_k, every_k and layers is needed, none is set",
        "checkpointing: save is read in mode=selective only, and mode=layers: set it to null",
        "ema: decay is read with kind=constant only, and kind=power: set it to null",
    ]


def test_a_stage_that_would_ignore_an_option_says_so() -> None:
    recipe = load("quickstart_grounding", ["lookahead=stream", "checkpointing.mode=full"])
    lines = [line for line in check(recipe, world_size=1) if "has no effect in a grounding stage" in line]
    assert [line.split(":")[0] for line in lines] == ["checkpointing", "lookahead"]


def test_ranks_are_shared_as_the_recipe_says() -> None:
    assert ParallelConfig().sizes(8) == (8, 1)
    assert ParallelConfig(shard=4).sizes(8) == (2, 4)
    assert ParallelConfig(replicate=1).sizes(8) == (1, 8)
    assert ParallelConfig(replicate=2, shard=2).sizes(4) == (2, 2)
    for wrong in (ParallelConfig(shard=3), ParallelConfig(replicate=16), ParallelConfig(replicate=2, shard=2)):
        with pytest.raises(ValueError, match="are not the 8 ranks"):
            wrong.sizes(8)


def test_the_base_recipe_of_compile_names_what_it_turns_off() -> None:
    recipe = load("gr00t_n17/bridge_8gpu_fsdp", ["data.uri=/nowhere"])
    assert (recipe.compile.scope, recipe.parallel.shard, recipe.model.precision) == ("blocks", 8, "lean")
    assert recipe.compile.inductor == {"triton.mix_order_reduction": False}
    changed = load(
        "gr00t_n17/bridge_8gpu_fsdp", ["data.uri=/nowhere", "compile.inductor.triton.mix_order_reduction=true"]
    )
    assert changed.compile.inductor == {"triton.mix_order_reduction": True}


def test_the_old_name_of_a_precision_means_the_same(tmp_path: Path) -> None:
    old = load("gr00t_n17/finetune", ["data.uri=/nowhere", "precision=32-true", f"run.dir={tmp_path}"])
    assert old.precision == "fp32"
    RunFolder(tmp_path).create(old)
    stored = json.loads((tmp_path / "recipe.json").read_text())
    (tmp_path / "recipe.json").write_text(json.dumps({**stored, "precision": "32-true"}))
    assert RunFolder(tmp_path).drift(old) == []


def test_exact_options_may_change_while_a_run_goes_on(tmp_path: Path) -> None:
    fixed = ["data.uri=/nowhere", f"run.dir={tmp_path}"]
    RunFolder(tmp_path).create(load("gr00t_n17/finetune", fixed))
    exact = ["parallel.shard=2", "checkpointing.mode=full", "lookahead=stream", "graphs=head", "ema={kind: power}"]
    assert RunFolder(tmp_path).drift(load("gr00t_n17/finetune", [*fixed, *exact])) == []
    others = ["compile.scope=blocks", "precision=fp32", "optimizer.fused=false"]
    drift = RunFolder(tmp_path).drift(load("gr00t_n17/finetune", [*fixed, *others]))
    assert [line.split(":")[0] for line in drift] == ["compile.scope", "optimizer.fused", "precision"]


@pytest.fixture
def run(arm_dataset: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Train two steps of a tiny network with a frozen backbone; gives the summary and the losses."""

    def trained(name: str, *overrides: str) -> dict[str, Any]:
        folder = tmp_path / name
        recipe = checked("gr00t_n17/finetune", values(arm_dataset, folder, *SMALL, *overrides))
        summary, code = train(recipe, time.perf_counter())
        assert code == 0
        assert summary is not None
        return {**summary, "losses": [row["loss"] for row in RunRecord(folder / "run").rows()]}

    return trained


def test_recomputing_changes_nothing(run: Any) -> None:
    plain = run("plain")
    for chosen, blocks in (
        ("{mode: full}", {"vl_self_attention": [0], "dit": [0, 1, 2, 3]}),
        ("{mode: layers, last_k: 2, parts: [dit]}", {"dit": [2, 3]}),
        ("{mode: selective, save: [aten.addmm]}", {"vl_self_attention": [0], "dit": [0, 1, 2, 3]}),
        ("{mode: auto, memory_gb: 0.00001}", {"vl_self_attention": [0], "dit": [0, 1, 2, 3]}),
    ):
        other = run(chosen.split()[1][:4], f"checkpointing={chosen}")
        assert other["recomputed_blocks"] == blocks
        assert (other["losses"], other["weights_digest"]) == (plain["losses"], plain["weights_digest"])


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_blocks_train_to_the_same_loss(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from models.gr00t_n17 import parallelize

    # traced and split as for the compiler, without its minutes; the compiler's own results: tests/models
    compile_network = functools.partial(parallelize.compile_network, backend="aot_eager")
    monkeypatch.setattr(parallelize, "compile_network", compile_network)
    plain = run("plain")
    compiled = run("compiled", "compile={scope: blocks, on_failure: raise}")
    assert compiled["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert compiled["compile_failures"] == {}
    assert compiled["compile_graphs"] > 0


@pytest.mark.parametrize("exact", ["lookahead=stream", "graphs=head", "ema={kind: constant, decay: 0.5}"])
def test_exact_options_train_to_the_same_weights(run: Any, exact: str) -> None:
    plain, other = run("plain"), run("other", exact)
    assert (other["losses"], other["weights_digest"]) == (plain["losses"], plain["weights_digest"])


def test_a_kept_average_is_in_the_checkpoint(run: Any, tmp_path: Path) -> None:
    run("averaged", "ema={kind: constant, decay: 0.5}")
    path, _ = RunFolder(tmp_path / "averaged" / "run").latest_checkpoint() or (None, 0)
    assert path is not None
    state = torch.load(path, weights_only=True)["state_dict"]
    name = "action_head.model.proj_out_1.weight"
    assert not torch.equal(state[f"ema.{name}"], state[f"network.{name}"])


def test_options_that_round_differently_stay_close(run: Any) -> None:
    plain = run("plain")
    assert run("loop", "optimizer.fused=false")["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert run("folded", "optimizer.fold_clip=true")["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert run("autocast", "precision=bf16-mixed")["losses"] == pytest.approx(plain["losses"], rel=2e-2)


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["parallel.shard=2", "parallel.shard=2 precision=fsdp-bf16 model.precision=lean"])
def test_two_ranks_share_one_copy(run: Any, arm_dataset: Path, tmp_path: Path, how: str) -> None:
    folder = tmp_path / "sharded"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "recipes"]
    given = [*SMALL, "data.batch_size=1", *how.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, "train", "gr00t_n17/finetune", *values(arm_dataset, folder, *given)],
        env=environment,
        timeout=900,
        check=True,
        capture_output=True,
    )
    losses = [row["loss"] for row in RunRecord(folder / "run").rows()]
    alone = how.replace("parallel.shard=2", "").replace("fsdp-bf16", "bf16-mixed").split()
    assert losses == pytest.approx(run("plain", *alone)["losses"], rel=2e-2 if alone else 1e-5)
