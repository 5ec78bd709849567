"""What only shows beside the datasets: cameras, features, widths, episodes and chunk length that they must have."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from recipes.check_data import parsed_size, size
from recipes.family import family
from recipes.parse import nearest
from recipes.parts import key, parts
from recipes.ranks import ranks_per_node
from recipes.schema import Recipe
from recipes.schema_data import PartConfig
from recipes.sources import held_out_part, horizon_of, span, training_part

_NO_NUMBERS = ("video", "image", "string")


def dataset_problems(recipe: Recipe, ranks: int = 1) -> list[str]:
    """Problems of the `data` section with the datasets it names, which are opened, but nothing is decoded."""
    from recipes.stages import dataset_to_come

    if dataset_to_come(recipe):
        return []
    problems, frame_bytes = [], 0
    for number, part in enumerate(parts(recipe)):
        if part.uri:  # else reported as missing already
            found, needed = _part(recipe, number, part, ranks)
            problems += found
            frame_bytes += needed
    return problems + ([] if problems else _decoded(recipe, frame_bytes))


def _part(recipe: Recipe, number: int, part: PartConfig, ranks: int) -> tuple[list[str], int]:
    """Problems of one dataset, and the bytes of its frames after the model's first resize."""
    import knonik
    from knonik.cache import CacheFolderError

    try:
        dataset = knonik.open(part.uri, cache_dir=recipe.data.cache.dir, match=recipe.data.match)
    except CacheFolderError as error:
        return [f"data.cache.dir: {error}"], 0
    except (OSError, ValueError) as error:
        return [f"{key(recipe, number, 'uri')}: {error}"], 0
    with dataset:
        problems = _cameras(recipe, number, part, dataset)
        problems += _disk(recipe, dataset.store.is_local)
        rows, training = _episodes(recipe, number, part, dataset)
        problems += rows
        columns: list[str] = []
        for section in ("state", "action"):
            columns += _columns(recipe, number, section, getattr(part, section), dataset.features)
        problems += columns or family(recipe).part_problems(recipe, number, part, dataset)
        problems += [] if problems else _ring(recipe, part, dataset, ranks)
        return problems, 0 if problems or training is None else _frame_bytes(recipe, part, training)


def _cameras(recipe: Recipe, number: int, part: PartConfig, dataset: Any) -> list[str]:
    where = key(recipe, number, "cameras")
    problems = [
        f"{where}: {camera!r} holds depth maps, which no model takes; leave it out"
        if camera in dataset.depth_cameras
        else f"{where}: {camera!r} is no camera of {part.uri}{nearest(camera, dataset.cameras)}"
        for camera in (part.cameras or {}).values()
        if camera not in dataset.cameras
    ]
    if not dataset.cameras:
        problems.append(
            f"{key(recipe, number, 'uri')}: {part.uri} has no camera; a policy needs at least one video feature"
        )
    return problems


def _ring(recipe: Recipe, part: PartConfig, dataset: Any, ranks: int) -> list[str]:
    """A batch, or the most a pack may hold, of which the loader cannot keep one ready while it makes the next; a block
    window whose pictures it cannot hold until their turn."""
    from knonik.batches.ring import ring_size

    cameras = dataset.cameras if part.cameras is None else part.cameras.values()
    values = 3.0 if recipe.data.transport == "rgb24" else 1.5  # of a pixel
    frame_bytes = sum(int(values * math.prod(dataset.image_shape(camera))) for camera in cameras)
    sample_bytes = frame_bytes * family(recipe).clip_frames(recipe)
    size = max(1, recipe.data.batch_size or (recipe.data.global_batch_size or 0) // max(1, ranks))
    try:
        limit = None if recipe.data.ring_bytes is None else parsed_size(recipe.data.ring_bytes)
    except ValueError as error:
        return [f"data.ring_bytes: {error}"]
    try:
        ring_size(
            size,
            sample_bytes,
            ring_batches=recipe.data.ring_batches,
            ring_bytes=limit,
            local_ranks=ranks_per_node(),
        )
    except ValueError as error:
        return [f"data.batch_size: {error}".replace("batch_size: batch_size=", "batch_size: ")]
    return _hold(recipe, size, sample_bytes, ranks)


def _hold(recipe: Recipe, batch_size: int, sample_bytes: int, ranks: int) -> list[str]:
    """What the order `blocks` keeps at least; how much exactly, the loader knows from the places of all key frames."""
    from knonik.batches.hold import HOLD_BYTES
    from knonik.order.blocks import BLOCK_WINDOW, LANES

    data = recipe.data
    if data.order != "blocks" or data.mixture is not None or data.cache.decoded:
        return []
    window = data.block_window or BLOCK_WINDOW
    room = HOLD_BYTES // sample_bytes - 2 * batch_size
    if (window - LANES) // max(1, ranks) <= room:
        return []
    fitting = room * ranks + LANES
    change = f"give a block_window well below {fitting}, or order=exact" if fitting > 2 * LANES else "give order=exact"
    return [
        f"data.block_window: the pictures of {window} samples of {sample_bytes} bytes, {max(1, ranks)} ranks together, "
        f"wait for their turn; a rank holds {HOLD_BYTES} bytes of them and of two batches: {change}"
    ]


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


def _episodes(recipe: Recipe, number: int, part: PartConfig, dataset: Any) -> tuple[list[str], Any]:
    """Episodes, frame ranges and the held-out share; and the dataset that is left to train on, where there is one."""
    if part.episodes == ():
        return [], None  # reported already
    length = dict(zip(dataset.episodes.ids.tolist(), dataset.episodes.length.tolist(), strict=True))
    absent = [episode for episode in part.episodes or () if episode not in length]
    if absent:
        where = key(recipe, number, "episodes")
        return [f"{where}: {absent} are not in {part.uri}, which has {len(length)} episodes"], None
    if recipe.data.horizon < 1:
        return [], None  # reported already
    longest = max(length[episode] for episode in part.episodes or length)
    if recipe.data.edge == "inside" and longest < span(recipe, dataset):
        return [
            f"{key(recipe, number, 'horizon')}: a chunk of {horizon_of(recipe)} steps fits into no episode, the "
            f"longest has {longest} rows; {_shorter(recipe, dataset, longest)}data.edge=repeat"
        ], None
    return _anchors(recipe, number, part, dataset)


def _shorter(recipe: Recipe, dataset: Any, longest: int) -> str:
    """The most steps whose rows an episode of the longest length holds, as an advice."""
    for steps in range(min(recipe.data.horizon, longest), 0, -1):
        shorter = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, horizon=steps))
        if steps % family(recipe).HORIZON_STEP == 0 and span(shorter, dataset) <= longest:
            return f"give at most {steps}, or "
    return "give "


def _anchors(recipe: Recipe, number: int, part: PartConfig, dataset: Any) -> tuple[list[str], Any]:
    if part.episodes is not None:
        dataset = dataset.subset(list(part.episodes))
    if part.ranges is not None:
        try:
            dataset = dataset.subset(ranges=part.ranges)
        except OSError:
            return [], None  # reported already
        except (ValueError, KeyError) as error:
            return [f"{key(recipe, number, 'ranges')}: {error.args[0]}"], None
    if not 0 <= recipe.data.validation < 1:
        return [], None
    try:
        dataset, held_out = training_part(recipe, dataset), held_out_part(recipe, dataset)
    except ValueError as error:
        return [f"data.validation: {error}"], None
    except KeyError as error:
        return [f"data.validation_episodes: {error.args[0]}"], None
    if not len(dataset.episodes):
        return [f"data.validation_episodes: they are all episodes of {part.uri}, none is left to train on"], None
    try:
        # The column that `open` has read by now: whether the data files of these episodes can be read at all.
        dataset.columns(["timestamp"] if "timestamp" in dataset.features else [])
    except (OSError, ValueError) as error:
        return [
            f"{key(recipe, number, 'uri')}: {error}; leave its episodes out with {key(recipe, number, 'episodes')}, "
            "`knonik check` names all of them"
        ], None
    for view, where, change in (
        (dataset, key(recipe, number, "ranges"), "give other ranges, episodes or data.horizon"),
        (held_out if recipe.validation is not None else None, "data.validation", "hold out other episodes"),
    ):
        try:
            if view is not None:
                view.anchors(span(recipe, view))
        except ValueError as error:
            return [f"{where}: {error}; {change}"], None
    return [], dataset


def _frame_bytes(recipe: Recipe, part: PartConfig, dataset: Any) -> int:
    try:
        if not size(recipe, "decoded"):
            return 0
        prefix = family(recipe).frame_prefix(recipe, part)
    except (TypeError, ValueError, OSError):
        return 0  # reported where it belongs
    total = 0
    for camera in dataset.cameras if part.cameras is None else part.cameras.values():
        frame = dataset.image_shape(camera)
        total += len(dataset) * 3 * math.prod(prefix.shape(*frame) if prefix else frame)
    return total


def _decoded(recipe: Recipe, needed: int) -> list[str]:
    try:
        limit = size(recipe, "decoded")
    except ValueError:
        return []  # reported where it belongs
    if not limit or needed <= limit:
        return []
    return [
        f"data.cache.decoded: {recipe.data.cache.decoded} is too small for the frames of all rows; "
        f"give at least {-(-needed // 10**6)}MB, or 0 to keep none"
    ]


def _columns(
    recipe: Recipe, number: int, section: str, names: tuple[str, ...], features: Mapping[str, Any]
) -> list[str]:
    where = key(recipe, number, section)
    low = [name for name, feature in features.items() if feature["dtype"] not in _NO_NUMBERS]
    problems = []
    for name in names:
        shape = features.get(name, {}).get("shape")
        if name not in features:
            problems.append(f"{where}: {name!r} is no feature of the dataset{nearest(name, low)}")
        elif name not in low:
            held = features[name]["dtype"]
            problems.append(f"{where}: {name!r} holds {held}, not numbers; those are {', '.join(low)}")
        elif not isinstance(shape, list) or not all(isinstance(size, int) and size > 0 for size in shape):
            problems.append(
                f"{key(recipe, number, 'uri')}: meta/info.json: shape of {name} is {shape!r}; it must be a list of "
                "whole numbers"
            )
    return problems
