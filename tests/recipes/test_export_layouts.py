"""`export --layout framework`: a Cosmos-3 run as NVIDIA's framework keeps one, and no such thing for other models."""

from pathlib import Path

import pytest
import torch

from models.common.dcp_tensors import DcpTensors
from models.common.digest import weights_digest
from models.cosmos3_policy.checkpoint.weights import load_weights
from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.network import Cosmos3Policy
from recipes import trained
from recipes.export import export_run
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
