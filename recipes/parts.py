"""The datasets of a recipe in one form: those of `data.mixture`, or the one of `data.uri` as its only part."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.schema import Recipe
from recipes.schema_data import PartConfig

if TYPE_CHECKING:
    from models.gr00t_n17.checkpoint.folder import CheckpointFolder

DEFAULT_EMBODIMENT = "new_embodiment"

# Keys of a part that are spelled in another section when there is no mixture.
_ELSEWHERE = {
    "embodiment": "model.embodiment",
    "embodiment_id": "model.embodiment_id",
    "groups": "model.modality",
    "weight": "data.uri",
}


def parts(recipe: Recipe) -> tuple[PartConfig, ...]:
    """One part for each dataset, with what it leaves to `data` and `model` filled in."""
    data, model = recipe.data, recipe.model
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


def slot(recipe: Recipe, part: PartConfig) -> int:
    """Slot of the per-embodiment layers: as given, or that of the tag in the checkpoint's table.

    Raises:
        ValueError: no such tag.
    """
    from models.gr00t_n17.inputs.embodiments import slot_of

    if part.embodiment_id is not None:
        return part.embodiment_id
    folder = checkpoint_folder(recipe)
    return slot_of(part.embodiment or DEFAULT_EMBODIMENT, None if folder is None else folder.embodiment_ids)


def slots(recipe: Recipe) -> tuple[int, ...]:
    """Slots that samples of the recipe use, each once, in rising order."""
    return tuple(sorted({slot(recipe, part) for part in parts(recipe)}))


def checkpoint_folder(recipe: Recipe) -> "CheckpointFolder | None":
    """The files beside the weights, where these lie on this machine and have a config.json."""
    from models.gr00t_n17.checkpoint.folder import CONFIG_FILE, CheckpointFolder

    source = recipe.model.weights
    return CheckpointFolder(source) if source is not None and (Path(source) / CONFIG_FILE).is_file() else None


def key(recipe: Recipe, number: int, name: str) -> str:
    """The dotted key under which a user finds `name` of part `number`."""
    if recipe.data.mixture is not None:
        return f"data.mixture[{number}].{name}"
    return _ELSEWHERE.get(name, f"data.{name}")
