"""What GR00T measures on held-out episodes during training."""

from typing import TYPE_CHECKING, Any

from recipes.families.gr00t_n17.slots import model
from recipes.held_out import first_episodes, loss_samples, open_loop_samples
from recipes.schema import Recipe
from recipes.sources import held_out_part, horizon_of

if TYPE_CHECKING:
    from knonik import Dataset
    from models.gr00t_n17.inputs.processor import Processor
    from models.gr00t_n17.validation import Validation


def build_validation(
    recipe: Recipe, datasets: "list[Dataset]", processor: "Processor", *, batch_size: int, rank: int, world_size: int
) -> "Validation":
    """What `validation` measures.

    Args:
        recipe: with a `validation` section.
        datasets: each with all its episodes, those held out among them.
        processor: as in training.
        batch_size: samples of a rank that go through the network together.
        rank, world_size: this process' share.
    """
    from models.gr00t_n17.validation import Validation

    settings = recipe.validation
    assert settings is not None
    held_out = [part for dataset in datasets if (part := held_out_part(recipe, dataset)) is not None]
    assert len(held_out) == len(datasets), "`check` has seen to it"
    share: dict[str, Any] = {"batch_size": batch_size, "rank": rank, "world_size": world_size}
    stride = settings.open_loop_stride or horizon_of(recipe)
    samples = settings.batches * batch_size * world_size
    loss = loss_samples(recipe, held_out, processor, samples, **share) if samples else ()
    open_loop: Any = ()
    if settings.open_loop_episodes:
        chosen = [first_episodes(dataset, settings.open_loop_episodes) for dataset in held_out]
        open_loop = open_loop_samples(recipe, chosen, processor, stride, **share)
    return Validation(
        processor,
        seed=recipe.seed,
        loss_batches=loss,
        open_loop_batches=open_loop,
        open_loop_steps=stride,
        flow_draws=model(recipe).flow_draws,
    )
