"""`export --layout framework`: a Cosmos-3 run as NVIDIA's framework keeps one, and no such thing for other models."""

import dataclasses
from pathlib import Path

import pytest
import torch

from models.common.dcp_tensors import DcpTensors
from models.common.digest import weights_digest
from models.cosmos3_policy.checkpoint.export import export
from models.cosmos3_policy.checkpoint.weights import load_weights
from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.network import Cosmos3Policy
from recipes import trained
from recipes.export import export_run
from recipes.families.cosmos3_policy.build import model_config
from recipes.families.cosmos3_policy.check import model_problems
from recipes.load import load
from recipes.trained import TrainedRun


def some_run(name: str, monkeypatch: pytest.MonkeyPatch, *, averaged: bool = False) -> Cosmos3Policy:
    """Makes every run one of this recipe at step 7; its network is a tiny Cosmos-3."""
    network = Cosmos3Policy(Cosmos3PolicyConfig.tiny(vocab_size=64))
    network.init_weights(1)
    recipe = load(name, ["data.uri=/nowhere"])
    found = TrainedRun(recipe=recipe, network=network, processor=None, checkpoint=Path("7"), step=7, averaged=averaged)
    monkeypatch.setattr(trained, "load_run", lambda *args, **kwargs: found)
    return network


@pytest.mark.parametrize("averaged", [False, True])
def test_the_framework_starts_from_such_a_folder(
    averaged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = some_run("cosmos3_policy/smoke", monkeypatch, averaged=averaged)
    written = export_run(tmp_path, tmp_path / "out", dtype="float32", layout="framework", averaged=averaged)
    assert (written["step"], written["dtype"]) == (7, "float32")
    with DcpTensors(tmp_path / "out" / "iter_000000007" / "model") as stored:
        assert sum(name.startswith("net.") for name in stored) == len(network.state_dict())
        assert any(name.startswith("net_ema.") for name in stored) is averaged
    again = Cosmos3Policy(network.config)
    load_weights(again, tmp_path / "out", keep_action_heads=True, averaged=averaged)
    assert weights_digest(again.state_dict()) == weights_digest(network.state_dict())


def test_half_the_bytes_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some_run("cosmos3_policy/smoke", monkeypatch)
    export_run(tmp_path, tmp_path / "out", layout="framework")
    with DcpTensors(tmp_path / "out" / "iter_000000007" / "model") as stored:
        assert set(stored.dtypes.values()) == {torch.bfloat16}


def test_gr00t_has_no_such_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some_run("gr00t_n17/finetune", monkeypatch)
    with pytest.raises(ValueError, match="layout='framework': gr00t_n17 has released"):
        export_run(tmp_path, tmp_path / "out", layout="framework")
    assert not (tmp_path / "out").exists()


def test_a_base_without_action_heads_starts_a_policy(tmp_path: Path) -> None:
    """Its config.json says there are none; fresh ones are built, in any width, unless stored ones shall be kept."""
    config = Cosmos3PolicyConfig.tiny(vocab_size=64, action_gen=False)
    base = Cosmos3Policy(config)
    base.init_weights(0)
    export(base, tmp_path / "base", vae=None)
    base_recipe = [f"model.weights={tmp_path / 'base'}", "data.uri=/nowhere", "model.size=released"]
    recipe = load("cosmos3_policy/smoke", [*base_recipe, "model.config={action_dim: 16}"])
    built = model_config(recipe)
    assert built == dataclasses.replace(config, action_gen=True, action_dim=16, extra=built.extra)
    load_weights(Cosmos3Policy(built), tmp_path / "base")
    assert not [line for line in model_problems(recipe) if "model.config" in line]
    kept = load("cosmos3_policy/smoke", [*base_recipe, "model.config={}", "model.keep_action_heads=true"])
    assert [line for line in model_problems(kept) if "model.config.action_gen" in line]
