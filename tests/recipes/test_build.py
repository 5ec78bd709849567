"""Every recipe's network can be built, at its real size, without memory for its weights."""

import pytest
import torch

from recipes.build import model_config
from recipes.load import available, load


@pytest.mark.parametrize("name", available())
def test_every_recipe_builds_on_the_meta_device(name: str) -> None:
    from models.gr00t_n17.network import GR00TN17

    recipe = load(name, ["data.uri=/data"])
    with torch.device("meta"):
        network = GR00TN17(model_config(recipe))
    total = sum(parameter.numel() for parameter in network.parameters())
    if recipe.model.size == "released":
        assert total == 3_144_016_000
        assert sum(p.numel() for p in network.parameters() if p.requires_grad) == 1_620_515_968
    else:
        assert total < 2_000_000
