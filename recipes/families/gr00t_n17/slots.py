"""What a recipe says of GR00T alone: its keys of `model`, embodiment slots, and the files beside its weights."""

from pathlib import Path
from typing import TYPE_CHECKING

from recipes.parts import parts
from recipes.schema import Recipe
from recipes.schema_data import PartConfig
from recipes.schema_model import GR00TN17ModelConfig

if TYPE_CHECKING:
    from models.gr00t_n17.checkpoint.folder import CheckpointFolder

DEFAULT_EMBODIMENT = "new_embodiment"


def model(recipe: Recipe) -> GR00TN17ModelConfig:
    """The `model` section, known to be this family's."""
    assert isinstance(recipe.model, GR00TN17ModelConfig)
    return recipe.model


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
