"""The Cosmos-3 policy on several ranks is the policy on one: same losses, same gradients, whatever options are on.

Two starts of torchrun, of four and of two ranks; all tests look at what they have left.
"""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

WORKER = Path(__file__).with_name("cosmos3_worker.py")
UNITS = 2  # the tiny network's layers

pytestmark = pytest.mark.distributed
spec = spec_from_file_location("cosmos3_worker", WORKER)
assert spec is not None
assert spec.loader is not None
worker = module_from_spec(spec)
spec.loader.exec_module(worker)
SAVED, STEPS = worker.parallel_runs.SAVED, worker.parallel_runs.STEPS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cosmos3")


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    """One process, nothing compiled, nothing recomputed."""
    return worker.train(worker.make_module(), save=folder / "plain.ckpt")


def start(folder: Path, ranks: int) -> dict[str, Any]:
    done = worker.parallel_runs.start(WORKER, folder, ranks)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / f"ranks{ranks}.pt", weights_only=True)


@pytest.fixture(scope="module")
def four(folder: Path, plain: dict[str, Any]) -> dict[str, Any]:
    return start(folder, 4)


@pytest.fixture(scope="module")
def two(folder: Path, four: dict[str, Any]) -> dict[str, Any]:
    return start(folder, 2)


def assert_same(plain: dict[str, Any], other: dict[str, Any], name: str) -> None:
    assert other["losses"] == pytest.approx(plain["losses"][-len(other["losses"]) :], rel=1e-5), name
    if len(other["losses"]) == STEPS:
        assert other["gradients"].keys() == plain["gradients"].keys(), name
        largest = max(float(value.abs().max()) for value in plain["gradients"].values())
        for key, value in plain["gradients"].items():
            assert float((other["gradients"][key] - value).abs().max()) <= 1e-5 * largest, (name, key)


def test_the_plain_run_learns(plain: dict[str, Any]) -> None:
    assert sum(plain["losses"][-3:]) < sum(plain["losses"][:3])


def test_every_combination_is_the_plain_run(plain: dict[str, Any], four: dict[str, Any], two: dict[str, Any]) -> None:
    for kind, results in (("hsdp", four), ("ddp", two), ("fsdp", two)):
        names = [name for name in results if name.startswith(f"{kind} ") and "bf16" not in name]
        assert {f"{kind} none", f"{kind} layers"} <= set(names)
        for name in names:
            assert_same(plain, results[name], name)
            assert (results[name]["graphs"] > 0) == name.endswith("compiled"), name
    assert {f"fsdp {mode}" for mode in worker.CHECKPOINTING} <= two.keys()
    assert {"fsdp selective compiled", "fsdp ahead", "fsdp accumulated", "ddp accumulated"} <= two.keys()


def test_accumulated_steps_add_over_replicas_once(plain: dict[str, Any], four: dict[str, Any]) -> None:
    assert_same(plain, four["accumulated"], "accumulated")
    kinds = [kind for kind, phase, _, _ in four["accumulated"]["collectives"] if phase == "backward"]
    assert kinds.count("all_reduce") == STEPS * (UNITS + 1)
    assert kinds.count("reduce_scatter") == 2 * STEPS * (UNITS + 1)


def test_the_frozen_tower_is_gathered_neither_forward_nor_backward(four: dict[str, Any]) -> None:
    """On 2 x 2 ranks: no gradient, state or shard of it; every gathered element is one of a trained parameter."""
    facts = four["saved"]
    assert facts["frozen"] > 0
    for key in ("frozen_gradients", "frozen_shards", "states_too_many", "unsharded"):
        assert facts[key] == 0, key
    gathers = [(phase, size) for kind, phase, size, _ in facts["collectives"] if kind == "all_gather"]
    forward = sum(size for phase, size in gathers if phase == "forward")
    backward = sum(size for phase, size in gathers if phase == "backward")
    assert forward == STEPS * sum(facts["padded"].values())
    # the last layer and what is outside of the layers stay from one pass to the other
    again = sum(size for key, size in facts["padded"].items() if key.startswith("layers.0."))
    assert backward == STEPS * again > 0


def test_bfloat16_gathers_half_the_bytes_and_sums_in_float32(two: dict[str, Any]) -> None:
    seen = two["bf16"]["collectives"]
    gathered = {
        dtype: sum(size for kind, _, size, d in seen if kind == "all_gather" and d == dtype)
        for dtype in (torch.bfloat16, torch.float32, torch.uint8)
    }
    assert {dtype for kind, _, _, dtype in seen if kind == "reduce_scatter"} == {torch.float32}
    assert gathered[torch.bfloat16] > gathered[torch.float32]
    assert two["bf16"]["losses"] == pytest.approx(two["ddp bf16"]["losses"], rel=2e-2)


def test_a_sharded_checkpoint_continues_on_any_number_of_ranks(
    folder: Path, plain: dict[str, Any], four: dict[str, Any], two: dict[str, Any]
) -> None:
    for results in (four, two):
        for name in [name for name in results if name.startswith("resumed")]:
            assert len(results[name]["losses"]) == STEPS - SAVED
            assert_same(plain, results[name], name)
    assert "resumed from a file" in four
    assert {"resumed fsdp", "resumed ddp"} <= two.keys()
    assert_same(plain, worker.train(worker.make_module(), resume=folder / "hsdp.ckpt"), "one rank")
