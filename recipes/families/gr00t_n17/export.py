"""A run of GR00T as a checkpoint folder in the released layout."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.gr00t_n17.checkpoint.export import export
from models.gr00t_n17.checkpoint.model_card import CardFacts, model_card
from recipes.export import changes, fingerprint_of, summary_of
from recipes.families.gr00t_n17.slots import checkpoint_folder

if TYPE_CHECKING:
    from recipes.trained import TrainedRun


def export_trained(trained: "TrainedRun", out: Path, *, run: Path, dtype: str, stored: dict[str, Any]) -> None:
    """Write network, processor and model card.

    Args:
        run: the run folder. stored: the recipe it was started with, as plain values.
    """
    export(
        trained.network,
        trained.processor,
        out,
        dtype=dtype,
        base=checkpoint_folder(trained.recipe),
        recipe=stored,
        card=_card(run, trained, stored, dtype),
    )


def _card(run: Path, trained: "TrainedRun", stored: dict[str, Any], dtype: str) -> str:
    summary = summary_of(run, trained.step)
    parts = getattr(trained.processor, "parts", [trained.processor])  # of a mixture
    facts = CardFacts(
        name=trained.recipe.run.name,
        embodiments={part.embodiment: part.embodiment_id for part in parts},
        dtype=dtype,
        steps=trained.step,
        base=stored["model"]["weights"],
        data=stored["data"]["uri"],
        fingerprint=summary.get("fingerprint") or fingerprint_of(run),
        changes=changes(stored),
        summary=summary,
    )
    return model_card(facts)
