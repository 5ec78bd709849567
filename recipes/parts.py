"""The datasets of a recipe in one form: those of `data.mixture`, or the one of `data.uri` as its only part."""

import dataclasses

from recipes.schema import Recipe
from recipes.schema_data import PartConfig
from recipes.schema_model import GR00TN17ModelConfig

# Keys of a part that are spelled in another section when there is no mixture.
_ELSEWHERE = {
    "embodiment": "model.embodiment",
    "embodiment_id": "model.embodiment_id",
    "groups": "model.modality",
    "weight": "data.uri",
}


def parts(recipe: Recipe) -> tuple[PartConfig, ...]:
    """One part for each dataset, with what it leaves to `data` and `model` filled in."""
    data = recipe.data
    # what only one family has stays null for the others
    model = recipe.model if isinstance(recipe.model, GR00TN17ModelConfig) else GR00TN17ModelConfig()
    if data.mixture is None:
        return (
            PartConfig(
                uri=data.uri or "",
                embodiment=model.embodiment,
                embodiment_id=model.embodiment_id,
                cameras=None if data.cameras is None else {camera: camera for camera in data.cameras},
                state=data.state,
                action=data.action,
                horizon=data.horizon,
                episodes=data.episodes,
                ranges=data.ranges,
                modality=data.modality,
                groups=model.modality,
            ),
        )
    return tuple(
        dataclasses.replace(
            part,
            embodiment=part.embodiment or model.embodiment,
            embodiment_id=model.embodiment_id if part.embodiment_id is None else part.embodiment_id,
            horizon=part.horizon or data.horizon,
            groups=part.groups or model.modality,
        )
        for part in data.mixture
    )


def key(recipe: Recipe, number: int, name: str) -> str:
    """The dotted key under which a user finds `name` of part `number`."""
    if recipe.data.mixture is not None:
        return f"data.mixture[{number}].{name}"
    return _ELSEWHERE.get(name, f"data.{name}")
