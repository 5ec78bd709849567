"""Everything about an opened dataset that is wrong, or that will make training from it slow, before it is used.

Metadata that contradicts itself is refused by `open`; here is what only the files and the columns show. Headers,
columns and one frame of each camera are read, no more; `knonik.verify` decodes every frame.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knonik.dataset import Dataset
from knonik.index.stock import TOLERANCE_S
from knonik.metadata.episodes import EpisodeTable
from knonik.stores.base import Store

_LONG_GOP = 16  # frames; from here on a random frame costs several times a sequential one
_NUMERIC = ("float", "int", "uint", "bool")
_SHOWN = 5  # objects or episodes named in one line


@dataclass(frozen=True, kw_only=True)
class Findings:
    """problems: what training would stumble over or learn wrongly. warnings: what costs time or deserves a look.
    facts: what the dataset is, by name."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)


def check_dataset(dataset: Dataset, columns: Sequence[str] | None = None) -> Findings:
    """Look at data files, columns, texts, times and videos of a dataset.

    Args:
        columns: numeric columns to look into; None = all.
    """
    found = Findings()
    table = dataset.episodes
    found.facts["rows"] = f"{len(dataset):,} in {len(table):,} episodes, {dataset.version}, {dataset.fps:g} fps"
    _info(dataset, found)
    broken = _cut_off(dataset.store, dataset.episodes)
    found.problems.extend(_cut_off_lines(dataset.episodes, broken))
    dataset.index.wait()
    if broken:  # the rest is told of the other episodes
        keep = table.ids[~np.isin(table.data_object, broken)]
        if not len(keep):
            return found
        dataset = dataset.subset(keep.tolist())
    _columns(dataset, columns, found)
    _texts(dataset, found)
    damaged = dataset.index.errors
    found.problems.extend(str(damaged[key]) for key in sorted(damaged))
    for camera in (*dataset.cameras, *dataset.depth_cameras):
        _camera(dataset, camera, found)
    return found


def _info(dataset: Dataset, found: Findings) -> None:
    info = json.loads(dataset.store.read("meta/info.json"))
    for key, held in (("total_episodes", len(dataset.episodes)), ("total_frames", len(dataset))):
        told = info.get(key)
        if told is not None and told != held:
            found.warnings.append(f"meta/info.json: {key} is {told}, the episode table has {held:,}")
    short = int((dataset.episodes.length < 2).sum())
    if short:
        found.warnings.append(f"{short} episodes have fewer than 2 rows")


def data_file_problems(store: Store, episodes: EpisodeTable) -> list[str]:
    """Parquet files without their end, as a recorder leaves them that was stopped; one short read a file."""
    return _cut_off_lines(episodes, _cut_off(store, episodes))


def _cut_off(store: Store, episodes: EpisodeTable) -> list[int]:
    sizes = store.sizes("data")
    broken = []
    for number, key in enumerate(episodes.data_keys):
        size = sizes.get(key, 0)
        tail = store.read_range(key, size - 8, 8) if size >= 12 else b""
        if tail[-4:] != b"PAR1" or int.from_bytes(tail[:4], "little") > size - 12:
            broken.append(number)
    return broken


def _cut_off_lines(episodes: EpisodeTable, broken: Sequence[int]) -> list[str]:
    return [
        f"{episodes.data_keys[number]}: no Parquet footer, the recording was cut off; episodes "
        f"{_few(episodes.ids[episodes.data_object == number].tolist())} cannot be read"
        for number in broken
    ]


def _columns(dataset: Dataset, columns: Sequence[str] | None, found: Findings) -> None:
    stored = _stored_statistics(dataset)
    numeric = [key for key, feature in dataset.features.items() if feature["dtype"].startswith(_NUMERIC)]
    for key in columns if columns is not None else numeric:
        values = _column(dataset, key, found)
        if values is None:
            continue
        rows = _rows(dataset)
        wild = rows[~np.isfinite(values[rows]).all(axis=1)]
        if len(wild):
            episodes = np.unique(_episode_of(dataset, wild)).tolist()
            found.problems.append(f"column {key}: {len(wild):,} rows are not finite, in episodes {_few(episodes)}")
            continue
        mean = stored.get(key, {}).get("mean")
        if mean is None or key == "index":
            continue
        own = dataset.statistics(key)
        told = np.asarray(mean, np.float64).reshape(-1)
        scale = np.maximum(np.abs(own["max"] - own["min"]), 1e-6)
        if told.shape != own["mean"].shape or np.any(np.abs(told - own["mean"]) > 0.01 * scale):
            found.warnings.append(
                f"meta/stats.json: the mean of {key} is not that of the rows (merged or cut since it was written?); "
                "the rows' own statistics are used here"
            )


def _column(dataset: Dataset, key: str, found: Findings) -> Any:
    """Values of a column; None, and a problem, where they cannot be had."""
    try:
        return dataset.column(key)
    except (ValueError, OSError, KeyError) as error:
        if (line := f"column {key}: {error}") not in found.problems:
            found.problems.append(line)
        return None


def _rows(dataset: Dataset) -> NDArray[np.int64]:
    """Rows of the episodes in use."""
    table = dataset.episodes
    inside = np.arange(len(dataset)) - np.repeat(np.cumsum(table.length) - table.length, table.length)
    return np.repeat(table.first_row, table.length) + inside


def _stored_statistics(dataset: Dataset) -> dict[str, Any]:
    if not dataset.store.exists("meta/stats.json"):
        return {}
    stored: dict[str, Any] = json.loads(dataset.store.read("meta/stats.json"))
    return stored


def _texts(dataset: Dataset, found: Findings) -> None:
    if "task_index" not in dataset.features:
        found.warnings.append("there is no column task_index; samples have no text")
        return
    column = _column(dataset, "task_index", found)
    if column is None:
        return
    values = np.unique(column[_rows(dataset)]).tolist()
    if unknown := [value for value in values if value not in dataset.tasks]:
        found.problems.append(f"task_index {_few(unknown)} stand in the rows but not in the table of tasks under meta/")
    if empty := [value for value in values if value in dataset.tasks and not dataset.tasks[value].strip()]:
        found.warnings.append(f"the text of task_index {_few(empty)} is empty")
    if list(dataset.tasks) != sorted(dataset.tasks) or list(dataset.tasks) != list(range(len(dataset.tasks))):
        found.warnings.append(
            "the table of tasks is not 0, 1, 2, ... in order: it is read by value here; loaders that go by position "
            "give other texts"
        )
    found.facts["tasks"] = f"{len(values):,} in use of {len(dataset.tasks):,}"


def _camera(dataset: Dataset, camera: str, found: Findings) -> None:
    table = dataset.episodes.cameras[camera]
    if table.kind != "image":
        _times(dataset, camera, found)
        _videos(dataset, camera, found)
    episode = int(dataset.episodes.ids[0])
    try:
        # A frame of the middle is free of the oddities of beginnings and ends, which are told by themselves.
        shape = dataset.frame(episode=episode, camera=camera, frame=int(dataset.episodes.length[0]) // 2).shape
        found.facts[f"{camera} frames"] = f"{shape[0]}x{shape[1]}, {table.kind}"
    except (ValueError, RuntimeError, OSError) as error:
        if str(error) not in found.problems:
            found.problems.append(f"{camera}: {error}")


def _times(dataset: Dataset, camera: str, found: Findings) -> None:
    far = dataset.index.num_far_rows(camera)
    if far:
        found.problems.append(
            f"{camera}: {far:,} rows have no frame within {TOLERANCE_S:g} s of their timestamp; asking for them is an "
            "error, as in the stock loader. match='index' pairs row k with frame k where the times are wrong"
        )
    times = _column(dataset, "timestamp", found) if "timestamp" in dataset.features else None
    if times is not None:
        first = times[dataset.episodes.first_row, 0]
        late = np.unique(first.round(4))
        if len(late) == 1 and abs(late[0]) > TOLERANCE_S:
            line = (
                f"timestamps of every episode begin at {late[0]:g} s, not at 0: by the stock rule row k shows the "
                f"frame {late[0] * dataset.fps:+.0f} places on. match='index' pairs row k with frame k"
            )
            if line not in found.warnings:
                found.warnings.append(line)


def _videos(dataset: Dataset, camera: str, found: Findings) -> None:
    longest, uneven, largest, frames, size = 0, [], 0.0, 0, 0
    codecs: set[str] = set()
    sizes = dataset.store.sizes("videos") | dataset.store.sizes("video")
    for key in dataset.episodes.cameras[camera].keys:
        if key in dataset.index.errors:
            continue  # told already
        index = dataset.index.object(key)
        codecs.add(index.codec.name)
        frames, size = frames + len(index), size + sizes.get(key, 0)
        longest = max(longest, int(np.diff(np.append(index.first_frames, len(index))).max(initial=0)))
        steps = np.diff(index.frame_times_s)
        off = float(np.abs(steps - 1 / dataset.fps).max(initial=0.0))
        if off > TOLERANCE_S:
            uneven.append(key)
            largest = max(largest, off)
    if uneven:
        found.warnings.append(
            f"{camera}: frames of {_few(uneven)} are not 1/{dataset.fps:g} s apart, by up to {largest:.4f} s (variable "
            "frame rate, or dropped frames); rows go by time"
        )
    if longest > _LONG_GOP:
        found.warnings.append(
            f"{camera}: up to {longest} frames between key frames, so a frame in exact order costs about "
            f"{longest // 2} decodes; order='blocks' (recipes: data.order: blocks) decodes each group once"
        )
    told = _told_codec(dataset.features[camera])
    if told and codecs and told not in codecs:
        found.warnings.append(f"{camera}: meta/info.json says {told}, the files hold {', '.join(sorted(codecs))}")
    if frames:
        found.facts[f"{camera} video"] = (
            f"{', '.join(sorted(codecs))}, {size / frames / 1e3:.1f} kB a frame, at most {longest} frames a GOP"
        )


def _told_codec(feature: dict[str, Any]) -> str | None:
    info = feature.get("info") or feature.get("video_info") or {}
    told = str(info.get("video.codec") or "")
    return {"libsvtav1": "av1", "libx264": "h264", "avc": "h264", "h265": "hevc"}.get(told, told) or None


def _episode_of(dataset: Dataset, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    table = dataset.episodes
    order = np.argsort(table.first_row)
    place = np.searchsorted(table.first_row[order], rows, side="right") - 1
    return table.ids[order][np.maximum(place, 0)]


def _few(values: Sequence[Any]) -> str:
    shown = ", ".join(str(value) for value in values[:_SHOWN])
    return shown if len(values) <= _SHOWN else f"{shown} and {len(values) - _SHOWN:,} more"
