"""A run of the Cosmos-3 policy as a repository in Diffusers' layout."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.cosmos3_policy.checkpoint.export import export
from models.cosmos3_policy.checkpoint.folder import CheckpointFolder
from models.cosmos3_policy.checkpoint.model_card import CardFacts, model_card
from recipes.export import run_facts

if TYPE_CHECKING:
    from recipes.trained import TrainedRun


def export_trained(trained: "TrainedRun", out: Path, *, run: Path, dtype: str, stored: dict[str, Any]) -> None:
    """Write network, processor and model card, and beside them what else the starting checkpoint holds.

    Args:
        run: the run folder. stored: the recipe it was started with, as plain values.
    """
    source, settings = trained.recipe.model.weights, trained.processor.settings
    export(
        trained.network,
        out,
        dtype=dtype,
        base=None if source is None else CheckpointFolder(source),
        processor=trained.processor.to_dict(),
        recipe=stored,
        card=model_card(
            CardFacts(
                **run_facts(run, trained, stored, dtype),
                domain=settings.domain,
                horizon=settings.horizon,
                fps=settings.fps,
                prompt=settings.prompt,
                averaged=trained.averaged,
            )
        ),
    )
