"""Weights by name: shards, dtypes, one error with every wrong name, atomic writes, digests."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from models.common.digest import weights_digest
from models.gr00t_n17.checkpoint.folder import weight_files
from models.gr00t_n17.checkpoint.weights import load_weights, save_weights
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.network import GR00TN17

DIGEST = "0f74fa55f2a75d34b55afdcb4a24ad884865f35311107ce26c9428b8a854bec1"


class Net(nn.Module):
    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.backbone = nn.Linear(4, 3)
        self.head = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
        self.to(dtype)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_the_real_network_survives_a_round_trip(tmp_path: Path) -> None:
    config = GR00TN17Config.tiny()
    torch.manual_seed(0)
    network = GR00TN17(config)
    torch.manual_seed(1)
    other = GR00TN17(config)
    assert weights_digest(network.named_parameters()) != weights_digest(other.named_parameters())
    save_weights(network, tmp_path / "model.safetensors")
    load_weights(other, tmp_path)
    assert weights_digest(network.named_parameters()) == weights_digest(other.named_parameters())


def test_shards_with_an_index_are_read_and_cast(tmp_path: Path) -> None:
    source = Net(0, torch.bfloat16)
    tensors = {name: value.contiguous() for name, value in source.state_dict().items()}
    tensors["backbone.lm_head.weight"] = torch.ones(7, 7)
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, tmp_path / file)
    index = {"weight_map": {name: file for file, members in parts.items() for name in members}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    target = Net(1)
    load_weights(target, tmp_path)
    assert target.backbone.weight.dtype == torch.float32
    assert torch.equal(target.head[0].weight, source.head[0].weight.float())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002"):
        load_weights(target, tmp_path)


def test_one_error_lists_every_wrong_name(tmp_path: Path) -> None:
    tensors = dict(Net(0).state_dict())
    del tensors["head.0.bias"]
    del tensors["head.1.bias"]
    tensors["head.0.weight"] = torch.zeros(5, 5)
    tensors["extra.weight"] = torch.zeros(1)
    save_file(tensors, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match="do not fit") as caught:
        load_weights(Net(1), tmp_path / "w.safetensors")
    text = str(caught.value)
    assert "missing (2):\n  head.{0-1}.bias" in text
    assert "unexpected (1):\n  extra.weight" in text
    assert "head.0.weight: stored (5, 5), network (2, 3)" in text


def test_prefix_loads_and_saves_a_part(tmp_path: Path) -> None:
    source, target = Net(0), Net(1)
    untouched = target.head[0].weight.detach().clone()
    save_weights(source, tmp_path / "backbone.safetensors", prefix="backbone.")
    assert set(load_file(tmp_path / "backbone.safetensors")) == {"backbone.weight", "backbone.bias"}
    load_weights(target, tmp_path / "backbone.safetensors", prefix="backbone.")
    assert torch.equal(target.backbone.weight, source.backbone.weight)
    assert torch.equal(target.head[0].weight, untouched)
    with pytest.raises(ValueError, match=r"missing \(4\)"):
        load_weights(target, tmp_path / "backbone.safetensors")
    with pytest.raises(ValueError, match=r"'tower\.'.*backbone\."):
        load_weights(target, tmp_path / "backbone.safetensors", prefix="tower.")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    save_weights(Net(0), path)

    def broken(tensors: dict, file: str, metadata: dict) -> None:
        Path(file).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("models.gr00t_n17.checkpoint.weights.save_file", broken)
    with pytest.raises(OSError, match="disk full"):
        save_weights(Net(1), path)
    monkeypatch.undo()
    target = Net(2)
    load_weights(target, path)
    assert same(target, Net(0))
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_tied_tensors_are_stored_under_both_names(tmp_path: Path) -> None:
    source = Net(0)
    source.tied = nn.Linear(4, 3)
    source.tied.weight = source.backbone.weight
    save_weights(source, tmp_path / "w.safetensors")
    assert torch.equal(load_file(tmp_path / "w.safetensors")["tied.weight"], source.backbone.weight)


def test_sources_that_do_not_exist_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        weight_files(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such checkpoint file or folder"):
        load_weights(Net(0), tmp_path / "absent")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(FileNotFoundError, match=r"only pytorch_model\.bin: pickled files .* are not read"):
        load_weights(Net(0), tmp_path)


def test_digest_sees_names_dtypes_shapes_and_values_but_not_order() -> None:
    a, b = torch.arange(6.0), torch.ones(2, dtype=torch.bfloat16)
    base = weights_digest({"a": a, "b": b})
    assert base == weights_digest([("b", b), ("a", a)])
    assert base == DIGEST
    for other in (
        {"a": a, "c": b},
        {"a": a.view(2, 3), "b": b},
        {"a": a.to(torch.float64), "b": b},
        {"a": a + 1, "b": b},
        {"a": a},
    ):
        assert weights_digest(other) != base
