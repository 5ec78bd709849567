"""GR00T N1.7's network, module and samples from a recipe's values."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from recipes.build import device, optimizer, schedule
from recipes.check_data import parsed_size
from recipes.families.gr00t_n17.slots import checkpoint_folder, model, slots
from recipes.parse import nearest
from recipes.schema import Recipe
from recipes.sources import batch_cameras, batch_columns, horizon_of

if TYPE_CHECKING:  # importing these takes seconds; `show` and configuration errors must not wait for them
    from knonik import Dataset
    from models.gr00t_n17.config import GR00TN17Config
    from models.gr00t_n17.module import GR00TN17Module
    from models.gr00t_n17.network import GR00TN17


def model_config(recipe: Recipe) -> "GR00TN17Config":
    """Sizes of the network: those of the checkpoint's own config.json where `model.weights` is a folder with one, else
    the named size; the recipe's own fields over both.

    Raises:
        ValueError: for unknown fields or sizes that do not fit together.
    """
    from models.gr00t_n17.config import GR00TN17Config

    names = [field.name for field in dataclasses.fields(GR00TN17Config)]
    unknown = [key for key in recipe.model.config if key not in names]
    if unknown:
        raise ValueError("\n".join(f"unknown key {key!r}{nearest(key, names)}" for key in unknown))
    if (folder := checkpoint_folder(recipe)) is not None:
        return GR00TN17Config.from_dict(_over(folder.config_values, recipe.model.config))
    if recipe.model.size == "tiny":
        return GR00TN17Config.tiny(**recipe.model.config)
    return GR00TN17Config(**recipe.model.config)


def _over(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values with those of `changes` over them, section by section."""
    merged = dict(values)
    for name, change in changes.items():
        section = merged.get(name)
        both = isinstance(section, Mapping) and isinstance(change, Mapping)
        merged[name] = _over(section or {}, change) if both else change
    return merged


def build_network(recipe: Recipe) -> "GR00TN17":
    """The network with its starting weights: a checkpoint's, or random ones that depend on the seed alone.

    Args:
        recipe: with its weights named by their folder.
    """
    import torch

    from models.common.stored import StoredTensors
    from models.gr00t_n17 import precision
    from models.gr00t_n17.checkpoint.weights import load_weights
    from models.gr00t_n17.lora import LoraConfig, add_lora, freeze_targets
    from models.gr00t_n17.network import GR00TN17

    own = model(recipe)
    adapters = None if own.lora is None else LoraConfig(**dataclasses.asdict(own.lora))
    weights, mode = own.weights, own.precision
    with torch.device("meta"):  # no time or memory for an initialisation that is overwritten below
        network = GR00TN17(model_config(recipe), slots=None if mode == "stock" else slots(recipe))
    if adapters is not None:
        freeze_targets(network, adapters)  # before the dtypes are chosen by what is trained
    if weights is not None:
        with StoredTensors(weights) as stored:
            dtypes = precision.weight_dtypes(network, mode, stored.dtypes)
        load_weights(network, weights, device=device(recipe), dtypes=dtypes)
    else:
        network.to_empty(device="cpu")
        network.init_weights(recipe.seed)
        precision.apply(network, mode, {name: value.dtype for name, value in network.named_parameters()})
    if own.backbone_weights is not None:
        load_weights(network, own.backbone_weights, prefix="backbone.")
    if adapters is not None:
        add_lora(network, adapters, seed=recipe.seed)
    return network


def build_module(
    recipe: Recipe, network: "GR00TN17", *, processor: Any = None, fingerprint: str = "", device_type: str = "cpu"
) -> "GR00TN17Module":
    """The Lightning module, with the cache of the backbone's outputs where the recipe wants one."""
    from models.gr00t_n17.module import GR00TN17Module
    from recipes.families.gr00t_n17.feature_cache import build_feature_cache

    return GR00TN17Module(
        network,
        seed=recipe.seed,
        optimizer=optimizer(recipe),
        schedule=schedule(recipe),
        flow_draws=model(recipe).flow_draws,
        feature_cache=build_feature_cache(recipe, network, processor, fingerprint, device_type),
        lookahead=recipe.lookahead,
        graphs=recipe.graphs,
        ema=recipe.ema,
    )


def sample_options(recipe: Recipe, datasets: "list[Dataset]", processor: Any) -> dict[str, Any]:
    """Steps around the anchor, and what is made of a batch on the loader's threads and on the device."""
    from models.gr00t_n17.features import with_keys

    kept = parsed_size(model(recipe).feature_cache)
    return {
        "windows": windows(recipe, datasets, processor),
        "transform": with_keys(processor.prepare) if kept else processor.prepare,
        "device_transform": lambda batch: processor.to_network(batch, augment=True),
    }


def windows(recipe: Recipe, datasets: "list[Dataset]", processor: Any) -> dict[str, Any]:
    """Steps around the anchor, by column and camera: the chunk of actions, and frames of the past where a checkpoint
    reads some."""
    first = getattr(processor, "parts", [processor])[0]
    past = tuple(first.modalities.video_deltas)
    frames = dict.fromkeys(batch_cameras(recipe, datasets), past) if past != (0,) else {}
    chunk = range(horizon_of(recipe))
    return {**frames, **dict.fromkeys(batch_columns(recipe, "action"), chunk)}
