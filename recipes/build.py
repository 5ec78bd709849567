"""The one place that turns a recipe's values into objects: dataset, network, processor, module, data module."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.check_data import size
from recipes.parse import nearest
from recipes.schema import Recipe

if TYPE_CHECKING:  # importing these takes seconds; `show` and configuration errors must not wait for them
    from knonik import DataModule, Dataset
    from models.common.optim import OptimizerConfig, ScheduleConfig
    from models.gr00t_n17.config import GR00TN17Config
    from models.gr00t_n17.inputs.processor import Processor
    from models.gr00t_n17.module import GR00TN17Module
    from models.gr00t_n17.network import GR00TN17


SPLIT_SEED = 0  # which episodes are held out depends on their ids alone, also between runs of different seeds


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
    if recipe.model.weights is not None and (file := Path(recipe.model.weights) / "config.json").is_file():
        return GR00TN17Config.from_dict({**json.loads(file.read_text()), **recipe.model.config})
    if recipe.model.size == "tiny":
        return GR00TN17Config.tiny(**recipe.model.config)
    return GR00TN17Config(**recipe.model.config)


def with_local_weights(recipe: Recipe) -> Recipe:
    """The recipe with a checkpoint named by its hub id fetched and named by its folder."""
    from models.gr00t_n17.checkpoint.weights import local_weights

    if recipe.model.weights is None:
        return recipe
    folder = str(local_weights(recipe.model.weights))
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, weights=folder))


def build_dataset(recipe: Recipe) -> "Dataset":
    """Open the dataset where it lies; builds its index when there is none yet."""
    import knonik

    return knonik.open(
        recipe.data.uri,
        cache_dir=recipe.data.cache.dir,
        episodes=list(recipe.data.episodes) if recipe.data.episodes is not None else None,
        ranges=recipe.data.ranges,
        match=recipe.data.match,
    )


def training_part(recipe: Recipe, dataset: "Dataset") -> "Dataset":
    """The dataset without the episodes that `data.validation` keeps out; a view that ends with the dataset."""
    return dataset.split(recipe.data.validation, SPLIT_SEED)[0] if recipe.data.validation else dataset


def cameras(recipe: Recipe, dataset: "Dataset") -> tuple[str, ...]:
    """The cameras the policy sees, in the recipe's order, or all of the dataset."""
    return recipe.data.cameras or tuple(dataset.cameras)


def build_processor(recipe: Recipe, dataset: "Dataset") -> "Processor":
    """Processor with the dataset's own statistics and, for `tokenizer: words`, its own vocabulary."""
    from models.gr00t_n17.inputs.processor import Processor, ProcessorConfig
    from models.gr00t_n17.inputs.text import WordTokenizer

    config = model_config(recipe)
    processor_config = ProcessorConfig(**recipe.model.processor)
    tokenizer = None
    if processor_config.tokenizer == "words":
        tokenizer = WordTokenizer.from_texts(
            dataset.tasks.values(),
            backbone=config.backbone,
            formalize_language=processor_config.formalize_language,
        )
    return Processor(
        config,
        processor_config,
        cameras=cameras(recipe, dataset),
        statistics={key: dataset.statistics(key) for key in (*recipe.data.state, *recipe.data.action)},
        state_keys=recipe.data.state,
        action_keys=recipe.data.action,
        horizon=recipe.data.horizon,
        embodiment_id=recipe.model.embodiment_id,
        tokenizer=tokenizer,
        seed=recipe.seed,
    )


def build_network(recipe: Recipe) -> "GR00TN17":
    """The network with its starting weights: a checkpoint's, or random ones that depend on the seed alone."""
    import torch

    from models.gr00t_n17.checkpoint.weights import load_weights
    from models.gr00t_n17.network import GR00TN17

    with torch.device("meta"):  # no time or memory for an initialisation that is overwritten below
        network = GR00TN17(model_config(recipe))
    network.to_empty(device="cpu")
    if recipe.model.weights is not None:
        load_weights(network, recipe.model.weights)
    else:
        network.init_weights(recipe.seed)
    if recipe.model.backbone_weights is not None:
        load_weights(network, recipe.model.backbone_weights, prefix="backbone.")
    return network


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


def build_module(recipe: Recipe, network: "GR00TN17") -> "GR00TN17Module":
    """The Lightning module around a network."""
    from models.gr00t_n17.module import GR00TN17Module

    return GR00TN17Module(
        network,
        seed=recipe.seed,
        optimizer=optimizer(recipe),
        schedule=schedule(recipe),
        flow_draws=recipe.model.flow_draws,
    )


def build_datamodule(recipe: Recipe, dataset: "Dataset", processor: "Processor", batch_size: int) -> "DataModule":
    """The data module: decodes and prepares in its own threads, finishes the images on the device."""
    import knonik

    return knonik.DataModule(
        dataset,
        batch_size=batch_size,
        seed=recipe.seed,
        windows={key: range(recipe.data.horizon) for key in recipe.data.action},
        edge=recipe.data.edge,
        cameras=cameras(recipe, dataset),
        state=recipe.data.state,
        action=recipe.data.action,
        decode_threads=recipe.data.decode_threads,
        **loader_options(recipe, processor),
        transform=processor.prepare,
        device_transform=lambda batch: processor.to_network(batch, augment=True),
    )


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


def load_trained(network: "GR00TN17", checkpoint: Path) -> None:
    """Put the weights of a training checkpoint into a network; only tensors are read from the file."""
    import torch

    state = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)["state_dict"]
    prefix = "network."
    network.load_state_dict({name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)})
