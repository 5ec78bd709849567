"""What is wrong in the Cosmos-3 policy's input path: its settings, and the cameras and columns they name.

Each setting is looked at by itself, so that one that is wrong hides nothing that is wrong with the others.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.checkpoint_source import is_hub_id
from recipes.families.cosmos3_policy.build import model_config
from recipes.parse import misfits, nearest
from recipes.parts import key
from recipes.schema import Recipe
from recipes.schema_data import PartConfig

if TYPE_CHECKING:
    from knonik import Dataset
    from models.cosmos3_policy.config import Cosmos3PolicyConfig
    from models.cosmos3_policy.inputs.settings import ProcessorConfig

VIEWS = (1, 3)  # cameras of a picture: one by itself, or a wrist camera above two of the scene
_KEY = "model.processor."
_TOKENIZER_PLACES = ("", "tokenizer", "text_tokenizer")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def sound_settings(recipe: Recipe) -> "tuple[ProcessorConfig, list[str]]":
    """The input path's choices, and what is wrong with them; a default stands in the place of each that is wrong."""
    from models.cosmos3_policy.inputs.settings import AugmentConfig, ProcessorConfig

    given = dict(recipe.model.processor)
    if type(given.get("tier")) is int:
        given["tier"] = str(given["tier"])  # as `model.processor.tier=256` is read
    inside: list[str] = []  # of augment, whose other keys stand
    problems = misfits(ProcessorConfig, {name: held for name, held in given.items() if name != "augment"}, _KEY[:-1])
    augment = given.get("augment")
    if isinstance(augment, dict):
        inside = misfits(AugmentConfig, augment, f"{_KEY}augment")
        given["augment"] = _without(augment, inside, f"{_KEY}augment.")
    elif augment is not None:
        names = ", ".join(field.name for field in dataclasses.fields(AugmentConfig))
        problems.append(
            f"{_KEY}augment: {augment!r} is not a section of keys; those are {names}; or give null for none"
        )
    if "horizon" in given:
        problems.append(f"{_KEY}horizon: is that of the data section; give data.horizon")
    if recipe.data.horizon > 0 and recipe.data.horizon % 4:
        problems.append(f"data.horizon: {recipe.data.horizon} is no multiple of 4, the frames of one latent frame")
    elif recipe.data.horizon > 0:
        given["horizon"] = recipe.data.horizon
    given = _without(given, problems)
    problems = [*inside, *problems]
    settings = None
    while settings is None:  # the values of augment are looked at before the others
        try:
            settings = ProcessorConfig(**given)
        except ValueError as error:
            text = str(error).removeprefix("processor settings: ")
            begins = "|".join(("augment.", *ProcessorConfig.names()))  # a problem begins with the name of its setting
            found = [f"{_KEY}{line}" for line in re.split(rf"; (?=(?:{begins})\b)", text)]
            problems += found
            rest = _without(given, found)
            if len(rest) == len(given):
                raise  # of no setting that was given: a default of ours
            given = rest
    if settings.augment is None and settings.augment_on != "device":
        problems.append(f"{_KEY}augment_on: has no effect without {_KEY}augment")
    return settings, problems


def _without(given: dict[str, Any], problems: Sequence[str], path: str = _KEY) -> dict[str, Any]:
    """The settings of which none of the problems is told."""
    wrong = {re.split(r"\W", line.removeprefix(path), maxsplit=1)[0] for line in problems if line.startswith(path)}
    return {name: held for name, held in given.items() if name not in wrong}


def named_problems(recipe: Recipe, settings: "ProcessorConfig") -> list[str]:
    """Names in the settings that mean nothing, as far as that shows without the dataset."""
    from models.cosmos3_policy.vision.canvas import FIT, TIERS

    problems = _tokenizer(recipe)
    if settings.tier != FIT and settings.tier not in TIERS:
        problems.append(f"{_KEY}tier: {settings.tier!r} is unknown; allowed: {', '.join([*TIERS, FIT])}")
    if recipe.data.cameras:
        problems += _views(settings, recipe.data.cameras, "data.cameras")
    columns = (*recipe.data.state, *recipe.data.action)
    if recipe.data.mixture is None:
        problems += [
            f"{_KEY}gripper: {name!r} is no column that is read, nor one of its values, as {columns[0]}[0]"
            f"{nearest(_column(name), columns)}"
            for name in settings.gripper
            if columns and name not in columns and _column(name) not in columns
        ]
    return problems


def _column(name: str) -> str:
    return re.sub(r"\[-?\d+\]$", "", name)


def _tokenizer(recipe: Recipe) -> list[str]:
    """A tokenizer that is not there; what a hub has is known when it is fetched."""
    source = recipe.model.processor.get("tokenizer")
    if source is None:
        if recipe.model.weights is None:
            return [
                f"{_KEY}tokenizer: null takes the one beside model.weights, and there are none; give words, or a hub "
                "id or folder"
            ]
        return []
    if not isinstance(source, str) or source == "words":
        return []  # of another type: reported already
    if source and Path(source).is_dir():
        if any(Path(source, place, file).is_file() for place in _TOKENIZER_PLACES for file in _TOKENIZER_FILES):
            return []
        return [f"{_KEY}tokenizer: {source} holds no {_TOKENIZER_FILES[0]}, nor does a tokenizer/ in it"]
    if is_hub_id(source):
        return []
    return [f"{_KEY}tokenizer: {source!r} is no folder, and no hub id OWNER/NAME; or give words"]


def _views(settings: "ProcessorConfig", cameras: Sequence[str], where: str) -> list[str]:
    """Cameras that are read beside the places of the picture."""
    if settings.views is None:
        if len(set(cameras)) not in VIEWS and len(set(cameras)) == len(cameras):
            return [
                f"{where}: a picture is made of one camera, or of a wrist camera and two of the scene; {len(cameras)} "
                f"are read: {list(cameras)}"
            ]
        return []
    unknown = [camera for camera in settings.views.values() if camera not in cameras]
    if unknown:
        return [
            f"{_KEY}views: {camera!r} is none of the cameras that are read{nearest(camera, cameras)}"
            for camera in unknown
        ]
    unused = [camera for camera in cameras if camera not in settings.views.values()]
    return [f"{where}: {unused} are read and decoded, but are no view; leave them out"] if unused else []


def part_problems(recipe: Recipe, number: int, part: PartConfig, dataset: "Dataset") -> list[str]:
    """Cameras, clock and widths of the dataset's columns beside what the policy reads."""
    settings, told = sound_settings(recipe)
    try:
        config = model_config(recipe)
    except (TypeError, ValueError, OSError):
        return []  # reported with the model
    problems = []
    if not any(line.startswith(f"{_KEY}fps") for line in told) and abs(dataset.fps - settings.fps) > 1e-3:
        problems.append(
            f"{_KEY}fps: {settings.fps:g} is not the {dataset.fps:g} frames a second of {part.uri}; give "
            f"{_KEY}fps={dataset.fps:g}, which the positions of the clip follow"
        )
    if not recipe.data.cameras:
        problems += _views(settings, dataset.cameras, key(recipe, number, "cameras"))
    if not (told or problems or named_problems(recipe, settings)):
        problems += _picture(recipe, number, config, settings, dataset)
    return problems + _columns(recipe, config, settings, part, dataset)


def _picture(
    recipe: Recipe, number: int, config: "Cosmos3PolicyConfig", settings: "ProcessorConfig", dataset: "Dataset"
) -> list[str]:
    """Frames of which no picture can be made, and packs too small for a single clip of them."""
    from models.cosmos3_policy.vision.canvas import latent_frames
    from models.cosmos3_policy.vision.compose import plan_canvas

    views = tuple(recipe.data.cameras or dataset.cameras)
    if settings.views is not None:
        views = tuple(settings.views.values())
    if any(camera not in dataset.cameras for camera in views):
        return []  # reported with the dataset
    try:
        canvas = plan_canvas(settings.tier, [dataset.image_shape(camera) for camera in views])
    except ValueError as error:
        return [f"{key(recipe, number, 'cameras')}: {error}"]
    rows, columns = (-(-side // config.latent_patch_size) for side in canvas.cropped_latent_size)
    # and a caption, however short
    least = latent_frames(settings.num_frames) * rows * columns + settings.num_frames + 1
    budget = recipe.data.pack_tokens
    if budget is not None and 0 < budget < least:
        return [f"data.pack_tokens: {budget} holds no sample: clip, state and actions are {least - 1}; give more"]
    return []


def _columns(
    recipe: Recipe, config: "Cosmos3PolicyConfig", settings: "ProcessorConfig", part: PartConfig, dataset: "Dataset"
) -> list[str]:
    from models.cosmos3_policy.inputs.actions import ActionLayout

    if not part.state or not part.action:
        return []  # reported with the lists

    def widths(names: tuple[str, ...]) -> dict[str, int]:
        features: Any = dataset.features
        return {name: math.prod(features[name]["shape"]) for name in names}

    # of columns that are not read: reported with the settings
    gripper = tuple(name for name in settings.gripper if {name, _column(name)} & {*part.state, *part.action})
    try:
        ActionLayout(widths(part.state), widths(part.action), gripper=gripper, width=config.action_dim)
    except ValueError as error:
        text = str(error).removeprefix("processor does not fit the data: ")
        lines = re.split(r"; (?=gripper names|an action has)", text)
        return [f"{_KEY}{line}" if line.startswith("gripper") else f"data.action: {line}" for line in lines]
    return []
