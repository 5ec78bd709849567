"""The one place that turns a recipe's values into objects: dataset, network, processor, module, data module."""

import dataclasses
from typing import TYPE_CHECKING, Any

from recipes.check_data import parsed_size, size
from recipes.family import family
from recipes.load import RecipeError
from recipes.options import prepare_blocks
from recipes.ranks import local_rank
from recipes.schema import Recipe
from recipes.sources import batch_cameras, batch_columns, source

if TYPE_CHECKING:  # importing these takes seconds; `show` and configuration errors must not wait for them
    from lightning.pytorch import LightningModule

    from knonik import DataModule, Dataset
    from models.common.optim import OptimizerConfig, ScheduleConfig


def model_config(recipe: Recipe) -> Any:
    """Sizes of the network: those of the checkpoint's own config where `model.weights` is a folder with one, else the
    named size; the recipe's own fields over both.

    Raises:
        ValueError: for unknown fields or sizes that do not fit together.
    """
    return family(recipe).model_config(recipe)


def with_local_weights(recipe: Recipe) -> Recipe:
    """The recipe with a checkpoint that lies elsewhere fetched and named by its folder.

    Raises:
        RecipeError: it cannot be fetched, or the recipe does not fit what came.
    """
    from recipes.checkpoint_source import is_remote, local_checkpoint

    source = recipe.model.weights
    if source is None:
        return recipe
    try:
        folder = str(local_checkpoint(source, recipe.data.cache.dir))
    except FileNotFoundError as error:
        raise RecipeError([f"model.weights: {error}"]) from error
    local = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, weights=folder))
    # What `check` could not see while the files lay elsewhere.
    if is_remote(source) and (problems := family(local).model_problems(local)):
        raise RecipeError(problems)
    return local


def build_network(recipe: Recipe) -> Any:
    """The network with its starting weights: a checkpoint's, or random ones that depend on the seed alone.

    Args:
        recipe: with its weights named by their folder.
    """
    return family(recipe).build_network(recipe)


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

    given, steps = recipe.schedule, recipe.trainer.max_steps
    if given.kind == "linear":
        return ScheduleConfig(max_steps=steps, kind="linear", cycle_steps=given.cycle_steps)
    ratio = given.warmup_ratio if given.warmup_steps is None else None
    return ScheduleConfig(max_steps=steps, warmup_steps=given.warmup_steps, warmup_ratio=ratio)


def build_module(
    recipe: Recipe, network: Any, *, processor: Any = None, fingerprint: str = "", device_type: str = "cpu"
) -> "LightningModule":
    """The Lightning module around a network.

    Blocks of the network that recompute or are compiled do so from here on.

    Args:
        processor, fingerprint, device_type: of the run, for what depends on the data or the device.
    """
    about: dict[str, Any] = {"processor": processor, "fingerprint": fingerprint, "device_type": device_type}
    prepare_blocks(recipe, network)
    return family(recipe).build_module(recipe, network, **about)


def build_processor(recipe: Recipe, datasets: "list[Dataset]") -> Any:
    """What turns a batch into the network's inputs, and its outputs into actions of the robot.

    Args:
        recipe: with its weights named by their folder.
        datasets: what is trained on of each part.
    """
    return family(recipe).build_processor(recipe, datasets)


def build_datamodule(recipe: Recipe, datasets: "list[Dataset]", processor: Any, batch_size: int) -> "DataModule":
    """The data module: decodes and prepares in its own threads, finishes the images on the device."""
    import knonik

    options = {**loader_options(recipe, processor), **family(recipe).sample_options(recipe, datasets, processor)}
    return knonik.DataModule(
        source(recipe, datasets),
        batch_size=batch_size,
        seed=recipe.seed,
        edge=recipe.data.edge,
        cameras=batch_cameras(recipe, datasets),
        state=batch_columns(recipe, "state"),
        action=batch_columns(recipe, "action"),
        decode_threads=recipe.data.decode_threads,
        **options,
    )


def loader_options(recipe: Recipe, processor: Any) -> dict[str, Any]:
    """How the loader fetches, orders, keeps and hands over; a key the recipe leaves to the data layer is not there."""
    decoded = size(recipe, "decoded")
    options = {
        "ring_batches": recipe.data.ring_batches,
        "ring_bytes": None if recipe.data.ring_bytes is None else parsed_size(recipe.data.ring_bytes),
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
