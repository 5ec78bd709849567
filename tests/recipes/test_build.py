"""Every recipe's network can be built, at its real size, without memory for its weights."""

import json
from pathlib import Path

import pytest
import torch

from recipes.build import build_network, model_config, with_local_weights
from recipes.load import available, load


@pytest.mark.parametrize("name", available())
def test_every_recipe_builds_on_the_meta_device(name: str) -> None:
    from models.cosmos3_policy.network import Cosmos3Policy
    from models.gr00t_n17.network import GR00TN17

    recipe = load(name, ["data.mixture=[{uri: /a}]"] if name.endswith("mixture") else ["data.uri=/data"])
    kind, counts = {
        "gr00t_n17": (GR00TN17, (3_144_016_000, 1_620_515_968)),
        "cosmos3_policy": (Cosmos3Policy, (15_173_136_576, 6_982_401_216)),
    }[recipe.model.name]
    with torch.device("meta"):
        network = kind(model_config(recipe))
    total = sum(parameter.numel() for parameter in network.parameters())
    if recipe.model.size == "released":
        assert (total, sum(p.numel() for p in network.parameters() if p.requires_grad)) == counts
    else:
        assert total < 2_000_000


def test_the_checkpoints_own_config_decides(tmp_path: Path) -> None:
    """Depths other than the class's defaults come from the file beside the weights; the recipe's fields win over it."""
    from models.gr00t_n17.checkpoint.weights import save_weights
    from models.gr00t_n17.config import GR00TN17Config
    from models.gr00t_n17.network import GR00TN17

    made = GR00TN17Config.tiny(diffusion_model_cfg={"num_layers": 6})
    (tmp_path / "config.json").write_text(json.dumps(made.to_dict()))
    recipe = load("gr00t_n17/finetune", ["data.uri=/data", f"model.weights={tmp_path}"])
    assert model_config(recipe) == made
    network = GR00TN17(made)
    network.init_weights(0)
    save_weights(network, tmp_path / "model.safetensors")
    built = build_network(with_local_weights(recipe))
    assert all(torch.equal(a, b) for a, b in zip(built.parameters(), network.parameters(), strict=True))
    other = load("gr00t_n17/finetune", ["data.uri=/d", f"model.weights={tmp_path}", "model.config={tune_vlln: false}"])
    assert model_config(other).diffusion_model_cfg.num_layers == 6
    assert not model_config(other).tune_vlln
