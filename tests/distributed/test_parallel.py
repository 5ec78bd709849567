"""Sharding changes where weights lie and nothing else: same losses, same gradients, checkpoints for any ranks.

Two starts of torchrun, of four and of two ranks; all tests look at what they have left.
"""

import warnings
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from models.common import sharded_state
from models.common.mesh import MeshStrategy
from recipes.load import load
from recipes.run_folder import RunFolder, is_whole
from recipes.strategy import PRECISION, build_strategy

WORKER = Path(__file__).with_name("parallel_worker.py")
UNITS = 3  # the tiny head's transformer blocks

distributed = pytest.mark.distributed
spec = spec_from_file_location("parallel_worker", WORKER)
assert spec is not None
assert spec.loader is not None
worker = module_from_spec(spec)
spec.loader.exec_module(worker)
SAVED, STEPS = worker.parallel_runs.SAVED, worker.parallel_runs.STEPS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    """One process, nothing compiled, nothing recomputed."""
    return worker.train(worker.make_module(), save=folder / "plain.ckpt")


@pytest.fixture(scope="module")
def four(folder: Path, plain: dict[str, Any]) -> dict[str, Any]:
    done = worker.parallel_runs.start(WORKER, folder, 4)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / "ranks4.pt", weights_only=True)


@pytest.fixture(scope="module")
def two(folder: Path, four: dict[str, Any]) -> dict[str, Any]:
    done = worker.parallel_runs.start(WORKER, folder, 2)  # ends with a rank killed on purpose
    assert (folder / "killed").is_dir(), done.stderr[-4000:]
    return torch.load(folder / "ranks2.pt", weights_only=True)


def assert_same(plain: dict[str, Any], other: dict[str, Any], name: str) -> None:
    assert other["losses"] == pytest.approx(plain["losses"][-len(other["losses"]) :], rel=1e-5), name
    if len(other["losses"]) == STEPS:
        assert other["gradients"].keys() == plain["gradients"].keys(), name
        largest = max(float(value.abs().max()) for value in plain["gradients"].values())
        for key, value in plain["gradients"].items():
            assert float((other["gradients"][key] - value).abs().max()) <= 1e-6 * largest, (name, key)


@distributed
def test_every_combination_is_the_plain_run(plain: dict[str, Any], four: dict[str, Any], two: dict[str, Any]) -> None:
    for kind, results in (("hsdp", four), ("ddp", two), ("fsdp", two)):
        names = [name for name in results if name.startswith(f"{kind} ") and "bf16" not in name]
        assert len(names) >= len(worker.CHECKPOINTING) + 1
        for name in names:
            assert_same(plain, results[name], name)
            assert (results[name]["graphs"] > 0) == name.endswith("compiled"), name


@distributed
def test_the_update_clips_sharded_gradients_as_a_pass_before_it_does(
    plain: dict[str, Any], two: Any, four: Any
) -> None:
    for results in (two, four):
        assert results["folded"]["losses"] == pytest.approx(plain["losses"], rel=1e-5)


@distributed
def test_accumulated_steps_add_over_replicas_once(plain: dict[str, Any], four: dict[str, Any]) -> None:
    assert_same(plain, four["accumulated"], "accumulated")
    kinds = [kind for kind, phase, size, _ in four["accumulated"]["collectives"] if phase == "backward"]
    assert kinds.count("all_reduce") == STEPS * (UNITS + 1)
    assert kinds.count("reduce_scatter") == 2 * STEPS * (UNITS + 1)


@distributed
@pytest.mark.parametrize("name", ["no dit", "top layer"])
def test_frozen_parameters_cost_nothing(two: dict[str, Any], name: str) -> None:
    """No gradient, no optimizer state, no shard, no activation for a backward; what is gathered is trained."""
    facts = two[name]
    config = {"no dit": {"tune_diffusion_model": False}, "top layer": {"tune_top_llm_layers": 1}}[name]
    reference = worker.train(worker.make_module(**config))
    assert_same(reference, facts, name)
    assert facts["frozen"] > 0
    of_frozen, of_trained = facts["kept"]
    assert of_frozen == {"calls": STEPS, "tensors": 0}
    assert of_trained["calls"] == STEPS
    assert of_trained["tensors"] > 0
    for key in ("frozen_gradients", "frozen_shards", "states_too_many", "unsharded"):
        assert facts[key] == 0, key
    gathers = [(phase, size) for kind, phase, size, _ in facts["collectives"] if kind == "all_gather"]
    forward = sum(size for phase, size in gathers if phase == "forward")
    backward = sum(size for phase, size in gathers if phase == "backward")
    assert forward == STEPS * sum(facts["padded"].values())
    # what is outside of the blocks, and the last block, stays from one pass to the other
    freed = {"no dit": (), "top layer": ("vl_self_attention.transformer_blocks.0.", "model.transformer_blocks.0.")}[
        name
    ]
    again = sum(size for key, size in facts["padded"].items() if any(f"action_head.{unit}" in key for unit in freed))
    assert (again > 0) == bool(freed)
    assert backward == STEPS * again


@distributed
def test_bfloat16_gathers_half_the_bytes_and_sums_in_float32(two: dict[str, Any]) -> None:
    seen = two["bf16"]["collectives"]
    gathered = {dtype: sum(size for kind, _, size, d in seen if kind == "all_gather" and d == dtype) for dtype in
                (torch.bfloat16, torch.float32, torch.uint8)}  # fmt: skip
    assert sum(gathered.values()) > 0
    assert {dtype for kind, _, _, dtype in seen if kind == "reduce_scatter"} == {torch.float32}
    assert gathered[torch.bfloat16] > 20 * gathered[torch.float32]
    assert two["bf16"]["losses"] == pytest.approx(two["ddp bf16"]["losses"], rel=2e-2)


@distributed
def test_a_sharded_checkpoint_continues_on_any_number_of_ranks(
    folder: Path, plain: dict[str, Any], four: dict[str, Any], two: dict[str, Any]
) -> None:
    for results in (four, two):
        for name in [name for name in results if name.startswith("resumed")]:
            assert len(results[name]["losses"]) == STEPS - SAVED
            assert_same(plain, results[name], name)
    assert {"resumed hsdp", "resumed fsdp", "resumed from a file"} <= four.keys()
    assert {"resumed fsdp", "resumed ddp"} <= two.keys()
    assert_same(plain, worker.train(worker.make_module(), resume=folder / "hsdp.ckpt"), "one rank")


@distributed
def test_a_consolidated_checkpoint_is_that_of_one_process(
    folder: Path, plain: dict[str, Any], four: dict[str, Any]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = sharded_state.read(folder / "hsdp.ckpt")
    single = torch.load(folder / "plain.ckpt", weights_only=True)
    assert whole.keys() == single.keys()
    weights, states = whole.pop("state_dict"), whole.pop("optimizer_states")
    for name, value in four["saved"]["weights"].items():
        assert torch.equal(weights[f"network.{name}"], value), name  # of the very step, whatever was trained since
    expected, expected_states = single.pop("state_dict"), single.pop("optimizer_states")
    assert whole == single
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
    assert [state["param_groups"] for state in states] == [state["param_groups"] for state in expected_states]
    for index, value in expected_states[0]["state"].items():
        torch.testing.assert_close(states[0]["state"][index], value, rtol=1e-4, atol=1e-7)


@distributed
def test_a_kill_while_saving_leaves_the_checkpoint_before(
    folder: Path, plain: dict[str, Any], two: dict[str, Any]
) -> None:
    run = RunFolder(folder / "killed")
    assert list(run.checkpoints.glob(f"{sharded_state.WRITING}-*")), "the kill came too late to tell"
    newest = run.latest_checkpoint()
    assert newest is not None
    assert newest[1] == SAVED
    assert_same(plain, worker.train(worker.make_module(), resume=newest[0]), "after a kill")
    sharded_state.clear(run.checkpoints)
    assert [path.name for path in run.checkpoints.iterdir()] == [newest[0].name]
    next(newest[0].glob("*.distcp")).write_bytes(b"short")
    assert not is_whole(newest[0])
    assert run.latest_checkpoint() is None


def test_the_strategy_follows_the_ranks() -> None:
    recipe = load("quickstart", ["parallel.shard=2"])
    hybrid, sharded = build_strategy(recipe, 4), build_strategy(recipe, 2)
    assert isinstance(hybrid, MeshStrategy)
    assert (hybrid.replicate, hybrid.shard) == (2, 2)
    assert isinstance(sharded, MeshStrategy)
    assert (sharded.replicate, sharded.shard) == (1, 2)
    assert sharded.policy is None
    bf16 = build_strategy(load("quickstart", ["parallel.shard=2", "precision=fsdp-bf16"]), 2)
    assert isinstance(bf16, MeshStrategy)
    assert bf16.policy is not None
    assert bf16.policy.reduce_dtype == torch.float32
    assert not bf16.policy.cast_forward_inputs
    assert PRECISION["fsdp-bf16"] == "bf16-mixed"
    plain = load("quickstart", [])
    assert build_strategy(plain, 1) == "auto"
    assert isinstance(build_strategy(plain, 2), DDPStrategy)
    wide = build_strategy(load("quickstart", ["parallel.bucket_mb=100"]), 2)
    assert isinstance(wide, DDPStrategy)
    assert wide._ddp_kwargs["bucket_cap_mb"] == 100
    with pytest.raises(ValueError, match="3 ranks"):
        build_strategy(recipe, 3)
