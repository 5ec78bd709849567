"""A run of GR00T as a checkpoint folder in the released layout."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.gr00t_n17.checkpoint.export import export
from models.gr00t_n17.checkpoint.model_card import CardFacts, model_card
from recipes.export import run_facts
from recipes.families.gr00t_n17.slots import checkpoint_folder

if TYPE_CHECKING:
    from recipes.trained import TrainedRun


def export_trained(trained: "TrainedRun", out: Path, *, run: Path, dtype: str, stored: dict[str, Any]) -> None:
    """Write network, processor and model card.

    Args:
        run: the run folder. stored: the recipe it was started with, as plain values.
    """
    parts = getattr(trained.processor, "parts", [trained.processor])  # of a mixture
    export(
        trained.network,
        trained.processor,
        out,
        dtype=dtype,
        base=checkpoint_folder(trained.recipe),
        recipe=stored,
        card=model_card(
            CardFacts(
                **run_facts(run, trained, stored, dtype),
                embodiments={part.embodiment: part.embodiment_id for part in parts},
            )
        ),
    )
