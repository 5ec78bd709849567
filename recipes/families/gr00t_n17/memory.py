"""Static memory that a recipe's training takes, from its network's shapes alone."""

import dataclasses

from recipes.schema import Recipe


def memory_table(recipe: Recipe, ranks: int = 1) -> str:
    """Weights, gradients, optimiser state and averages of a rank by part, as text; activations are not in it.

    Of a checkpoint that lies elsewhere the released sizes are taken.
    """
    import torch

    from models.gr00t_n17 import precision
    from models.gr00t_n17.lora import LoraConfig, freeze_targets
    from models.gr00t_n17.memory import measure
    from models.gr00t_n17.network import GR00TN17
    from recipes.families.gr00t_n17.build import model_config
    from recipes.families.gr00t_n17.slots import model, slots

    mode, lora = model(recipe).precision, model(recipe).lora
    with torch.device("meta"):
        network = GR00TN17(model_config(recipe), slots=None if mode == "stock" else slots(recipe))
    if lora is not None:
        freeze_targets(network, LoraConfig(**dataclasses.asdict(lora)))
    precision.apply(network, mode)
    note = "" if lora is None else f"\nadapters of rank {lora.rank} come on top"
    return measure(network, shard=recipe.parallel.shards(ranks), averaged=recipe.ema is not None).table() + note
