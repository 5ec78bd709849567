"""README.md of an exported policy: facts of the run, nothing else."""

from dataclasses import dataclass

from models.common.model_card import RunFacts, card


@dataclass(frozen=True, kw_only=True)
class CardFacts(RunFacts):
    """What a model card says.

    domain: slot of the robot in the action heads. horizon, fps: actions of a chunk and how many a second. prompt: the
    format of the training's captions, which a server must use too. averaged: the weights are averages over the steps.
    """

    domain: int
    horizon: int
    fps: float
    prompt: str
    averaged: bool


def model_card(facts: CardFacts) -> str:
    """The card as Markdown with the header fields the hub knows."""
    return card(
        facts,
        library="diffusers",
        tags=("robotics", "cosmos3"),
        about="A Cosmos-3 policy in Diffusers' layout: `transformer/` is what was trained, everything else comes from "
        "the checkpoint it started from. `processor.json` says how observations become inputs and predictions actions; "
        "the recipe it was trained with is `training_recipe.json`.",
        rows={
            "robot's slot of the action heads": str(facts.domain),
            "chunk": f"{facts.horizon} actions at {facts.fps:g} a second",
            "prompt format": facts.prompt,
            "weights": "averaged over the steps" if facts.averaged else "of the last step",
        },
    )
