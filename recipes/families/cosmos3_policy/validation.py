"""What the Cosmos-3 policy measures on held-out episodes during training."""

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

from recipes.families.cosmos3_policy.build import objective
from recipes.held_out import first_episodes, loss_samples, open_loop_samples
from recipes.schema import Recipe
from recipes.sources import batch_columns, held_out_part, horizon_of

if TYPE_CHECKING:
    from knonik import Dataset
    from models.cosmos3_policy.inputs.processor import Cosmos3Processor
    from models.cosmos3_policy.validation import Validation

AT_ONCE = 8
"""Clips that a rank holds at most, beside those of the training."""


def build_validation(
    recipe: Recipe,
    datasets: "list[Dataset]",
    processor: "Cosmos3Processor",
    *,
    batch_size: int,
    rank: int,
    world_size: int,
) -> "Validation":
    """What `validation` measures; the samples are `batches` times the recipe's batch size, whatever the ranks.

    Args:
        recipe: with a `validation` section.
        datasets: the only one, with all its episodes, those held out among them.
        processor: as in training.
        batch_size: most samples of a rank that go through the network together.
        rank, world_size: this process' share.
    """
    from models.cosmos3_policy.validation import Validation

    settings = recipe.validation
    assert settings is not None
    held_out = [part for dataset in datasets if (part := held_out_part(recipe, dataset)) is not None]
    assert len(held_out) == len(datasets), "`check` has seen to it"
    share: dict[str, Any] = {"batch_size": min(batch_size, AT_ONCE), "rank": rank, "world_size": world_size}
    stride = settings.open_loop_stride or horizon_of(recipe)
    loss: Any = ()
    if settings.batches:
        samples = settings.batches * (recipe.data.batch_size or recipe.data.global_batch_size or 0)
        loss = loss_samples(recipe, held_out, processor, samples, **share)
        loss = dataclasses.replace(loss, prepare=partial(processor.prepare, augment=False))
    open_loop: Any = ()
    if settings.open_loop_episodes:
        chosen = [first_episodes(dataset, settings.open_loop_episodes) for dataset in held_out]
        # the frame of now alone: the policy imagines the others
        chunk = dict.fromkeys(batch_columns(recipe, "action"), range(horizon_of(recipe)))
        open_loop = open_loop_samples(recipe, chosen, processor, stride, windows=chunk, **share)
        open_loop = dataclasses.replace(open_loop, prepare=lambda batch: {})
    return Validation(
        processor,
        seed=recipe.seed,
        objective=objective(recipe),
        loss_batches=loss,
        open_loop_batches=open_loop,
        open_loop_steps=stride,
    )
