"""A run of the Cosmos-3 policy as a repository in Diffusers' layout, or as NVIDIA's framework keeps one."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from models.cosmos3_policy.checkpoint.export import DTYPES, export
from models.cosmos3_policy.checkpoint.folder import CheckpointFolder
from models.cosmos3_policy.checkpoint.framework import write_framework
from models.cosmos3_policy.checkpoint.model_card import CardFacts, model_card
from recipes.checkpoint_source import local_checkpoint
from recipes.export import run_facts
from recipes.families.cosmos3_policy.build import model
from recipes.schema import Recipe

if TYPE_CHECKING:
    from recipes.trained import TrainedRun

FRAMEWORK = "framework"


def export_trained(
    trained: "TrainedRun", out: Path, *, run: Path, dtype: str, layout: str, stored: dict[str, Any]
) -> None:
    """Write network, processor and model card, and beside them what else the starting checkpoint holds.

    Args:
        run: the run folder. layout: "released" or "framework". stored: the recipe it was started with, as plain values.
    """
    if layout == FRAMEWORK:
        # Its evaluation reads averages: where the network holds them they stand under both names.
        averages = dict[str, Tensor]() if trained.averaged else None
        write_framework(trained.network.state_dict(), out, step=trained.step, averages=averages, dtype=DTYPES[dtype])
        return
    own, settings = model(trained.recipe), trained.processor.settings
    export(
        trained.network,
        out,
        dtype=dtype,
        base=None if own.weights is None else CheckpointFolder(own.weights),
        vae=_encoder(own.vae, trained.recipe),
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


def _encoder(source: str | None, recipe: Recipe) -> Path | None:
    """Folder of the video encoder that a recipe names; None where it is the one beside the weights."""
    if source is None:
        return None
    folder = local_checkpoint(source, recipe.data.cache.dir)
    return CheckpointFolder(folder).vae or folder
