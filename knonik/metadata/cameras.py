"""Cameras as meta/info.json declares them: video, images inside the Parquet files, depth maps."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knonik.metadata.episode_rows import EpisodeRows
from knonik.metadata.episodes import CameraTable, DepthSpec
from knonik.metadata.files import MetadataError
from knonik.metadata.object_paths import video_paths
from knonik.stores.base import ObjectInfo

logger = logging.getLogger(__name__)


def camera_tables(
    info: Mapping[str, Any],
    features: Mapping[str, Mapping[str, Any]],
    rows: EpisodeRows,
    chunks_size: int,
    objects: Mapping[str, ObjectInfo],
    data_keys: tuple[str, ...],
    data_object: NDArray[np.int64],
) -> dict[str, CameraTable]:
    """The table of every camera that can be read; one that cannot is left out with a warning that says why."""
    folders = {part for key in objects for part in key.split("/")[:-1]}
    cameras: dict[str, CameraTable] = {}
    for name, feature in features.items():
        if feature["dtype"] == "image":
            if is_depth(feature):
                # As colours its values would come out wrong, which is worse than a missing camera.
                logger.warning("camera %s holds depth maps as images, which are not read; it is left out", name)
                continue
            cameras[name] = CameraTable(
                keys=data_keys, object=data_object, start_s=np.zeros(len(data_object)), kind="image"
            )
        elif feature["dtype"] == "video":
            if name not in folders:
                logger.warning("camera %s is declared in meta/info.json but has no files; it is left out", name)
                continue
            depth = depth_spec(name, feature) if is_depth(feature) else None
            cameras[name] = _video(info, name, depth, rows, chunks_size, objects)
    return cameras


def _video(
    info: Mapping[str, Any],
    name: str,
    depth: DepthSpec | None,
    rows: EpisodeRows,
    chunks_size: int,
    objects: Mapping[str, ObjectInfo],
) -> CameraTable:
    paths, per_episode = video_paths(info, rows, name, chunks_size, objects)
    keys, number = distinct(paths)
    ids = rows.ints("episode_index")
    start = np.zeros(len(ids))
    if not per_episode:
        column = rows.columns.get(f"videos/{name}/from_timestamp")
        if column is None:
            raise MetadataError(f"{rows.source}: column videos/{name}/from_timestamp is missing")
        start = column.astype(np.float64)
    if not np.all(np.isfinite(start)):
        raise MetadataError(
            f"{rows.source}: videos/{name}/from_timestamp of episode {ids[~np.isfinite(start)][0]} is empty"
        )
    return CameraTable(keys=keys, object=number, start_s=start, kind="video" if depth is None else "depth", depth=depth)


def distinct(paths: Sequence[str]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Distinct paths, sorted, and the index of each path among them."""
    keys = sorted(set(paths))
    number = {key: i for i, key in enumerate(keys)}
    return tuple(keys), np.array([number[path] for path in paths], np.int64)


def is_depth(feature: Mapping[str, Any]) -> bool:
    """Whether a feature is marked as a depth map, in either spelling, inside `info` (newer) or `video_info` (older)."""
    details = _details(feature)
    return bool(details.get("is_depth_map") or details.get("video.is_depth_map"))


def depth_spec(name: str, feature: Mapping[str, Any]) -> DepthSpec:
    """How the codes of a depth video become metres: what the feature declares, LeRobot's defaults where it is silent.

    Raises:
        MetadataError: a value is no number, or the values make no invertible scale.
    """
    details = _details(feature)
    given: dict[str, Any] = {}
    for field, key in (("min_m", "video.depth_min"), ("max_m", "video.depth_max"), ("shift_m", "video.shift")):
        value = details.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise MetadataError(f"meta/info.json: feature {name}: {key} is {value!r}; metres as a number were expected")
        given[field] = float(value)
    log = details.get("video.use_log")
    if not isinstance(log, bool | None):
        raise MetadataError(f"meta/info.json: feature {name}: video.use_log is {log!r}; it must be true or false")
    spec = DepthSpec(**given, **({} if log is None else {"log": log}))
    if spec.max_m <= spec.min_m or (spec.log and spec.min_m + spec.shift_m <= 0):
        raise MetadataError(
            f"meta/info.json: feature {name}: depth from {spec.min_m} to {spec.max_m} m with shift {spec.shift_m} m "
            "is no scale; video.depth_max must exceed video.depth_min, and depth_min + shift must be positive"
        )
    return spec


def _details(feature: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for key in ("video_info", "info"):
        if isinstance(part := feature.get(key), dict):
            merged |= part
    return merged
