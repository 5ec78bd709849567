"""The one place that turns a recipe's values into objects: dataset, network, processor, module, data module."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from recipes.check_data import parsed_size, size
from recipes.load import RecipeError
from recipes.options import prepare_blocks
from recipes.parse import nearest
from recipes.parts import checkpoint_folder, slots
from recipes.ranks import local_rank
from recipes.schema import Recipe
from recipes.sources import batch_cameras, batch_columns, horizon_of, source

if TYPE_CHECKING:  # importing these takes seconds; `show` and configuration errors must not wait for them
    from knonik import DataModule, Dataset
    from models.common.optim import OptimizerConfig, ScheduleConfig
    from models.gr00t_n17.config import GR00TN17Config
    from models.gr00t_n17.feature_store import FeatureCache
    from models.gr00t_n17.inputs.processor import Processor
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


def with_local_weights(recipe: Recipe) -> Recipe:
    """The recipe with a checkpoint that lies elsewhere fetched and named by its folder.

    Raises:
        RecipeError: it cannot be fetched, or the recipe does not fit what came.
    """
    from recipes.check_model import is_remote, model_problems
    from recipes.checkpoint_source import local_checkpoint

    source = recipe.model.weights
    if source is None:
        return recipe
    try:
        folder = str(local_checkpoint(source, recipe.data.cache.dir))
    except FileNotFoundError as error:
        raise RecipeError([f"model.weights: {error}"]) from error
    local = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, weights=folder))
    # What `check` could not see while the files lay elsewhere.
    if is_remote(source) and (problems := model_problems(local)):
        raise RecipeError(problems)
    return local


def build_network(recipe: Recipe) -> "GR00TN17":
    """The network with its starting weights: a checkpoint's, or random ones that depend on the seed alone.

    Args:
        recipe: with its weights named by their folder.
    """
    import torch

    from models.gr00t_n17 import precision
    from models.gr00t_n17.checkpoint.stored import StoredTensors
    from models.gr00t_n17.checkpoint.weights import load_weights
    from models.gr00t_n17.lora import LoraConfig, add_lora, freeze_targets
    from models.gr00t_n17.network import GR00TN17

    adapters = None if recipe.model.lora is None else LoraConfig(**dataclasses.asdict(recipe.model.lora))
    weights, mode = recipe.model.weights, recipe.model.precision
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
    if recipe.model.backbone_weights is not None:
        load_weights(network, recipe.model.backbone_weights, prefix="backbone.")
    if adapters is not None:
        add_lora(network, adapters, seed=recipe.seed)
    return network


def device(recipe: Recipe) -> str:
    """Where this rank's weights go as they are read: its GPU where it has one, so that the host never holds them."""
    import torch

    wanted = recipe.trainer.accelerator in ("auto", "gpu", "cuda")
    return f"cuda:{local_rank()}" if wanted and torch.cuda.is_available() else "cpu"


def optimizer(recipe: Recipe) -> "OptimizerConfig":
    """The optimizer's values, as the models take them."""
    from models.common.optim import OptimizerConfig

    return OptimizerConfig(**dataclasses.asdict(recipe.optimizer))


def schedule(recipe: Recipe) -> "ScheduleConfig":
    """The schedule's values, as the models take them: warm-up in steps where the recipe gives steps."""
    from models.common.optim import ScheduleConfig

    ratio = recipe.schedule.warmup_ratio if recipe.schedule.warmup_steps is None else None
    return ScheduleConfig(
        max_steps=recipe.trainer.max_steps, warmup_steps=recipe.schedule.warmup_steps, warmup_ratio=ratio
    )


def build_module(recipe: Recipe, network: "GR00TN17", features: "FeatureCache | None" = None) -> "GR00TN17Module":
    """The Lightning module around a network, and the cache of its backbone's outputs where there is one.

    Blocks of the network that recompute or are compiled do so from here on.
    """
    from models.gr00t_n17.module import GR00TN17Module

    prepare_blocks(recipe, network)
    return GR00TN17Module(
        network,
        seed=recipe.seed,
        optimizer=optimizer(recipe),
        schedule=schedule(recipe),
        flow_draws=recipe.model.flow_draws,
        feature_cache=features,
        lookahead=recipe.lookahead,
        graphs=recipe.graphs,
        ema=recipe.ema,
    )


def build_datamodule(
    recipe: Recipe, datasets: "list[Dataset]", processor: "Processor", batch_size: int
) -> "DataModule":
    """The data module: decodes and prepares in its own threads, finishes the images on the device."""
    import knonik
    from models.gr00t_n17.features import with_keys

    return knonik.DataModule(
        source(recipe, datasets),
        batch_size=batch_size,
        seed=recipe.seed,
        windows=windows(recipe, datasets, processor),
        edge=recipe.data.edge,
        cameras=batch_cameras(recipe, datasets),
        state=batch_columns(recipe, "state"),
        action=batch_columns(recipe, "action"),
        decode_threads=recipe.data.decode_threads,
        **loader_options(recipe, processor),
        transform=with_keys(processor.prepare) if parsed_size(recipe.model.feature_cache) else processor.prepare,
        device_transform=lambda batch: processor.to_network(batch, augment=True),
    )


def windows(recipe: Recipe, datasets: "list[Dataset]", processor: Any) -> dict[str, Any]:
    """Steps around the anchor, by column and camera: the chunk of actions, and frames of the past where a checkpoint
    reads some."""
    first = getattr(processor, "parts", [processor])[0]
    past = tuple(first.modalities.video_deltas)
    frames = dict.fromkeys(batch_cameras(recipe, datasets), past) if past != (0,) else {}
    chunk = range(horizon_of(recipe))
    return {**frames, **dict.fromkeys(batch_columns(recipe, "action"), chunk)}


def loader_options(recipe: Recipe, processor: "Processor") -> dict[str, Any]:
    """How the loader fetches, orders, keeps and hands over; a key the recipe leaves to the data layer is not there."""
    decoded = size(recipe, "decoded")
    options = {
        "ring_batches": recipe.data.ring_batches,
        "transport": recipe.data.transport,
        "order": recipe.data.order,
        "block_window": recipe.data.block_window,
        "ram_bytes": size(recipe, "ram"),
        "disk_bytes": size(recipe, "disk"),
        "decoded_bytes": decoded,
        # Only worth its time on the CPU when its result is kept: the device does the same for a whole batch at once.
        "prefix": processor.frame_prefix() if decoded else None,
        "on_bad_sample": recipe.data.on_bad_sample,
        "max_bad_share": recipe.data.max_bad_share,
    }
    return {key: value for key, value in options.items() if value is not None}
