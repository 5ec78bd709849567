"""What in the `data` section is wrong by itself or beside another of its keys, without a look at the dataset."""

import dataclasses
import math
from pathlib import Path

from recipes.parts import key, parts
from recipes.schema import Recipe
from recipes.schema_data import DataConfig

SIZES = ("ram", "disk", "decoded")
# Keys that each part of a mixture has for itself.
_OF_A_PART = ("cameras", "state", "action", "episodes", "ranges", "modality")


def data_problems(recipe: Recipe) -> list[str]:
    """Problems of sizes, shares, lists, and keys that would do nothing."""
    return [
        *_source(recipe),
        *_sizes(recipe),
        *_idle(recipe),
        *_shares(recipe),
        *_files(recipe),
        *_lists(recipe),
        *_mixture(recipe),
    ]


def size(recipe: Recipe, name: str) -> int | None:
    """Bytes of `data.cache.NAME`; None where the recipe leaves it to the data layer.

    Raises:
        ValueError: not a size.
    """
    value = getattr(recipe.data.cache, name)
    return None if value is None else parsed_size(value)


def parsed_size(value: int | str) -> int:
    """Bytes of a size given as a number or as text such as 4GB.

    Raises:
        ValueError: not a size.
    """
    from knonik.sizes import parse_size

    return parse_size(value)


def _source(recipe: Recipe) -> list[str]:
    if (recipe.data.uri is None) == (recipe.data.mixture is None):
        what = "neither" if recipe.data.uri is None else "both; set one of them to null"
        return [f"data.uri: give it or data.mixture; the recipe gives {what}"]
    return []


def _sizes(recipe: Recipe) -> list[str]:
    problems = []
    for name in SIZES:
        try:
            size(recipe, name)
        except ValueError as error:
            problems.append(f"data.cache.{name}: {error}")
    if not problems and size(recipe, "decoded") and recipe.data.transport != "rgb24":
        problems.append(
            f"data.transport: {recipe.data.transport} does not go with data.cache.decoded, which keeps resized RGB "
            "frames; give rgb24, or data.cache.decoded=0"
        )
    return problems


def _idle(recipe: Recipe) -> list[str]:
    """Keys that change nothing because of the value of another."""
    data, problems = recipe.data, []
    if data.block_window is not None and data.order != "blocks":
        problems.append(f"data.block_window: has no effect with data.order={data.order}; give data.order=blocks")
    if data.max_bad_share is not None and data.on_bad_sample != "skip":
        problems.append(
            f"data.max_bad_share: has no effect with data.on_bad_sample={data.on_bad_sample}; "
            "give data.on_bad_sample=skip"
        )
    if data.startup == "rows" and any(part.uri.startswith("s3://") for part in parts(recipe)):
        problems.append("data.startup: rows is for datasets on this machine; give columns")
    if data.mixture is None:
        problems += [
            f"data.{name}: has no effect without data.mixture"
            for name in ("fps", "missing_cameras")
            if getattr(data, name) != getattr(DataConfig, name)
        ]
    return problems


def _shares(recipe: Recipe) -> list[str]:
    data, problems = recipe.data, []
    if not 0 <= data.validation < 1:
        problems.append(f"data.validation: {data.validation} is not in [0, 1)")
    if data.max_bad_share is not None and not (0 < data.max_bad_share <= 1 and math.isfinite(data.max_bad_share)):
        problems.append(f"data.max_bad_share: {data.max_bad_share} is not in (0, 1]")
    if data.validation_episodes is not None and data.validation:
        problems.append("data.validation_episodes: give it or data.validation; set one of them to null or 0")
    return problems


def _files(recipe: Recipe) -> list[str]:
    return [
        f"{key(recipe, number, name)}: {value} is no file"
        for number, part in enumerate(parts(recipe))
        for name, value in (("ranges", part.ranges), ("modality", part.modality))
        if isinstance(value, str) and not Path(value).is_file()
    ]


def _lists(recipe: Recipe) -> list[str]:
    """Lists that are empty or name something twice."""
    problems = []
    held_out = (("data.validation_episodes", recipe.data.validation_episodes),)
    for where, values in (*_lists_of_parts(recipe), *held_out):
        if values is not None and not values:
            hint = "; null means all" if where.endswith(("cameras", ".episodes")) else ""
            problems.append(f"{where}: the list is empty; name at least one{hint}")
        twice = sorted({value for value in values or () if (values or ()).count(value) > 1})
        if twice:
            problems.append(f"{where}: {twice[0]!r} stands there twice")
    return problems


def _lists_of_parts(recipe: Recipe) -> list[tuple[str, tuple[int | str, ...] | None]]:
    """(key, list) of every list in the recipe's parts."""
    found: list[tuple[str, tuple[int | str, ...] | None]] = []
    for number, part in enumerate(parts(recipe)):
        cameras = None if part.cameras is None else tuple(part.cameras.values())
        if recipe.data.mixture is None:
            cameras = recipe.data.cameras  # as they are written: a name that stands twice is one key of a mapping
        found.append((key(recipe, number, "cameras"), cameras))
        found += [(key(recipe, number, name), getattr(part, name)) for name in ("episodes", "state", "action")]
    return found


def _mixture(recipe: Recipe) -> list[str]:
    data = recipe.data
    if data.mixture is None:
        return []
    if not data.mixture:
        return ["data.mixture: the list is empty; name at least one dataset"]
    defaults = {field.name: field.default for field in dataclasses.fields(DataConfig)}
    problems = [
        f"data.{name}: has no effect with data.mixture; give it in each part"
        for name in _OF_A_PART
        if getattr(data, name) != defaults[name]
    ]
    if data.generate is not None:
        problems.append("data.generate: does not go with data.mixture, which reads datasets that exist")
    if data.validation_episodes is not None:
        problems.append("data.validation_episodes: ids of which part? give data.validation, a share of each")
    if data.fps is not None and not 0 < data.fps < math.inf:
        problems.append(f"data.fps: {data.fps} is not positive and finite")
    weights = [part.weight for part in data.mixture]
    for number, part in enumerate(data.mixture):
        where = f"data.mixture[{number}]"
        if part.weight is not None and not 0 < part.weight < math.inf:
            problems.append(f"{where}.weight: {part.weight} is not positive and finite")
        if part.weight is None and any(weight is not None for weight in weights):
            problems.append(f"{where}.weight: give a weight in all parts or in none")
        if part.horizon is not None and not 0 < part.horizon <= data.horizon:
            problems.append(f"{where}.horizon: {part.horizon} is not in 1 to data.horizon = {data.horizon}")
        if part.cameras is not None and not part.cameras:
            problems.append(f"{where}.cameras: the section is empty; name at least one; null means all")
    return problems + _shared_cameras(recipe)


def _shared_cameras(recipe: Recipe) -> list[str]:
    """Parts that name their cameras must name the same ones, or the policy for missing ones must allow it."""
    mixture = recipe.data.mixture or ()
    named = [set(part.cameras) for part in mixture if part.cameras]
    if recipe.data.missing_cameras == "black" or not named:
        return []
    every = set().union(*named)
    return [
        f"data.mixture[{number}].cameras: lacks {sorted(every - set(part.cameras))}, which other parts have; name one "
        "for it, or give data.missing_cameras=black"
        for number, part in enumerate(mixture)
        if part.cameras and every - set(part.cameras)
    ]
