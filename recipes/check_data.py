"""What in the `data` section is wrong by itself or beside another of its keys, without a look at the dataset."""

import math
from pathlib import Path

from recipes.schema import Recipe

SIZES = ("ram", "disk", "decoded")


def data_problems(recipe: Recipe) -> list[str]:
    """Problems of sizes, shares, and keys that would do nothing."""
    return [*_sizes(recipe), *_idle(recipe), *_shares(recipe), *_files(recipe)]


def size(recipe: Recipe, name: str) -> int | None:
    """Bytes of `data.cache.NAME`; None where the recipe leaves it to the data layer.

    Raises:
        ValueError: not a size.
    """
    from knonik.sizes import parse_size

    value = getattr(recipe.data.cache, name)
    return None if value is None else parse_size(value)


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
    return problems


def _shares(recipe: Recipe) -> list[str]:
    data, problems = recipe.data, []
    if not 0 <= data.validation < 1:
        problems.append(f"data.validation: {data.validation} is not in [0, 1)")
    if data.max_bad_share is not None and not (0 < data.max_bad_share <= 1 and math.isfinite(data.max_bad_share)):
        problems.append(f"data.max_bad_share: {data.max_bad_share} is not in (0, 1]")
    return problems


def _files(recipe: Recipe) -> list[str]:
    ranges = recipe.data.ranges
    return [f"data.ranges: {ranges} is no file"] if ranges is not None and not Path(ranges).is_file() else []
