"""What only shows beside the dataset: cameras, features, widths, episodes and chunk length that it must have."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.check_data import size
from recipes.parse import nearest
from recipes.schema import Recipe

_NO_NUMBERS = ("video", "image", "string")


def dataset_problems(recipe: Recipe) -> list[str]:
    """Problems of the `data` section with the dataset it names, which is opened, but decodes nothing."""
    problems = _lists(recipe)
    if not recipe.data.uri:
        return problems  # reported as missing already
    from recipes.stages import dataset_to_come

    if dataset_to_come(recipe):
        return problems
    import knonik
    from knonik.cache import CacheFolderError

    try:
        dataset = knonik.open(recipe.data.uri, cache_dir=recipe.data.cache.dir, match=recipe.data.match)
    except CacheFolderError as error:
        return [*problems, f"data.cache.dir: {error}"]
    except (OSError, ValueError) as error:
        return [*problems, f"data.uri: {error}"]
    with dataset:
        problems += [
            f"data.cameras: {camera!r} holds depth maps, which no model takes; leave it out"
            if camera in dataset.depth_cameras
            else f"data.cameras: {camera!r} is no camera of {recipe.data.uri}{nearest(camera, dataset.cameras)}"
            for camera in recipe.data.cameras or ()
            if camera not in dataset.cameras
        ]
        if not dataset.cameras:
            problems.append(f"data.uri: {recipe.data.uri} has no camera; a policy needs at least one video feature")
        problems += _disk(recipe, dataset.store.is_local)
        problems += _episodes(recipe, dataset) or _anchors(recipe, dataset)
        for section, keys, limit in (
            ("state", recipe.data.state, "max_state_dim"),
            ("action", recipe.data.action, "max_action_dim"),
        ):
            problems += _width(recipe, dataset.features, section, keys, limit)
    return problems


def _disk(recipe: Recipe, is_local: bool) -> list[str]:
    from knonik.fetch.disk import EXTENT_BYTES

    try:
        limit = size(recipe, "disk")
    except ValueError:
        return []  # reported already
    if is_local or not limit or limit >= EXTENT_BYTES:
        return []
    least = f"{EXTENT_BYTES >> 20}MiB"
    return [f"data.cache.disk: {recipe.data.cache.disk} is too small; give at least {least}, or 0 to keep none"]


def _lists(recipe: Recipe) -> list[str]:
    """Lists that are empty or name something twice."""
    lists: dict[str, tuple[Any, ...] | None] = {
        "cameras": recipe.data.cameras,
        "episodes": recipe.data.episodes,
        "state": recipe.data.state,
        "action": recipe.data.action,
    }
    problems = []
    for key, values in lists.items():
        if values is not None and not values:
            hint = "; null means all" if key in ("cameras", "episodes") else ""
            problems.append(f"data.{key}: the list is empty; name at least one{hint}")
        twice = sorted({value for value in values or () if (values or ()).count(value) > 1})
        if twice:
            problems.append(f"data.{key}: {twice[0]!r} stands there twice")
    return problems


def _episodes(recipe: Recipe, dataset: Any) -> list[str]:
    length = dict(zip(dataset.episodes.ids.tolist(), dataset.episodes.length.tolist(), strict=True))
    absent = [episode for episode in recipe.data.episodes or () if episode not in length]
    if absent:
        return [f"data.episodes: {absent} are not in {recipe.data.uri}, which has {len(length)} episodes"]
    longest = max(length[episode] for episode in recipe.data.episodes or length)
    if recipe.data.edge == "inside" and longest < recipe.data.horizon:
        return [
            f"data.horizon: a chunk of {recipe.data.horizon} steps fits into no episode, the longest has {longest} "
            f"rows; give at most {longest}, or data.edge=repeat"
        ]
    return []


def _anchors(recipe: Recipe, dataset: Any) -> list[str]:
    """Frame ranges, the held-out share, and whether what is left fits the bound of the decoded frames."""
    from recipes.build import training_part

    if recipe.data.episodes is not None:
        dataset = dataset.subset(list(recipe.data.episodes))
    if recipe.data.ranges is not None and Path(recipe.data.ranges).is_file():
        try:
            dataset = dataset.subset(ranges=recipe.data.ranges)
        except (ValueError, KeyError) as error:
            return [f"data.ranges: {error.args[0]}"]
    if not 0 <= recipe.data.validation < 1:
        return []
    try:
        dataset = training_part(recipe, dataset)
    except ValueError as error:
        return [f"data.validation: {error}"]
    try:
        # The column that `open` has read by now: whether the data files of these episodes can be read at all.
        dataset.columns(["timestamp"] if "timestamp" in dataset.features else [])
    except (OSError, ValueError) as error:
        return [f"data.uri: {error}; leave its episodes out with data.episodes, `knonik check` names all of them"]
    try:
        dataset.anchors(recipe.data.horizon if recipe.data.edge == "inside" else 1)
    except ValueError as error:
        return [f"data.ranges: {error}; give other ranges, episodes or data.horizon"]
    return _decoded(recipe, dataset)


def _decoded(recipe: Recipe, dataset: Any) -> list[str]:
    from models.gr00t_n17.inputs.images import FirstResize
    from models.gr00t_n17.inputs.processor import ProcessorConfig

    try:
        limit = size(recipe, "decoded")
        edge = ProcessorConfig(**recipe.model.processor).shortest_image_edge
    except (TypeError, ValueError):
        return []  # reported where it belongs
    if not limit:
        return []
    needed = 0
    for camera in recipe.data.cameras or dataset.cameras:
        if camera in dataset.cameras:
            frame = dataset.image_shape(camera)
            needed += len(dataset) * 3 * math.prod(FirstResize(edge).shape(*frame) if edge else frame)
    if needed > limit:
        return [
            f"data.cache.decoded: {recipe.data.cache.decoded} is too small for the frames of {len(dataset):,} rows; "
            f"give at least {-(-needed // 10**6)}MB, or 0 to keep none"
        ]
    return []


def _width(recipe: Recipe, features: Mapping[str, Any], section: str, keys: tuple[str, ...], limit: str) -> list[str]:
    from recipes.build import model_config

    low = [name for name, feature in features.items() if feature["dtype"] not in _NO_NUMBERS]
    problems = []
    width = 0
    for key in keys:
        shape = features.get(key, {}).get("shape")
        if key not in features:
            problems.append(f"data.{section}: {key!r} is no feature of the dataset{nearest(key, low)}")
        elif key not in low:
            held = features[key]["dtype"]
            problems.append(f"data.{section}: {key!r} holds {held}, not numbers; those are {', '.join(low)}")
        elif not isinstance(shape, list) or not all(isinstance(size, int) and size > 0 for size in shape):
            problems.append(
                f"data.uri: meta/info.json: shape of {key} is {shape!r}; it must be a list of whole numbers"
            )
        else:
            width += math.prod(shape)
    if problems:
        return problems
    try:
        allowed = getattr(model_config(recipe), limit)
    except (TypeError, ValueError):
        return []  # reported with the model
    if isinstance(allowed, int) and width > allowed:
        return [
            f"data.{section}: {width} values a step are more than the model's {limit} = {allowed}; "
            f"name fewer, or set model.config.{limit}, which released weights do not allow"
        ]
    return []
