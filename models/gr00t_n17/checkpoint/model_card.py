"""README.md of an exported checkpoint: facts of the run, nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass

from models.common.model_card import RunFacts, card


@dataclass(frozen=True, kw_only=True)
class CardFacts(RunFacts):
    """What a model card says; `embodiments`: tag -> slot of the per-embodiment layers."""

    embodiments: Mapping[str, int]


def model_card(facts: CardFacts) -> str:
    """The card as Markdown with the header fields the hub knows."""
    return card(
        facts,
        library="gr00t",
        tags=("robotics", "gr00t_n1_7"),
        about="A GR00T N1.7 policy in the layout of the released checkpoint: `config.json`, safetensors with their "
        "index, `processor_config.json`, `statistics.json` and `embodiment_id.json`. The recipe it was trained with is "
        "`experiment_cfg/recipe.json`.",
        rows={"embodiments": ", ".join(f"{tag} (slot {slot})" for tag, slot in facts.embodiments.items())},
    )
