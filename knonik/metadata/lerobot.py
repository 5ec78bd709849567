"""Read the metadata of a LeRobot v2.0, v2.1 or v3.0 dataset, where it lies, into one schema.

Real datasets break their own documentation in small ways (paths that do not follow the declared template, cameras
without files, unknown keys); what is unambiguous is read, anything else is an error that names the file and the key.
"""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from knonik.metadata.cameras import camera_tables, distinct
from knonik.metadata.episode_rows import EpisodeRows, episode_columns, is_episode_file, rows_v2, rows_v3
from knonik.metadata.episodes import EpisodeTable
from knonik.metadata.files import MetadataError, entry, json_lines, json_object, parquet_table, read_in_order
from knonik.metadata.modality import MODALITY_FILE, Modality, parse_modality
from knonik.metadata.object_paths import data_paths
from knonik.stores.base import ObjectInfo, Store

__all__ = ["VERSIONS", "Metadata", "MetadataError", "read_metadata"]

VERSIONS = ("v2.0", "v2.1", "v3.0")
_MEDIA_FOLDERS = ("data", "videos", "video")
_OWN_FOLDER = ".knonik"  # what this library publishes beside a dataset is no part of it
_INFO = "meta/info.json"


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """A dataset's schema and episode table.

    fps: frames per second. features: the declarations of info.json, unchanged. tasks: task_index -> text.
    objects: key -> size and version of all data and video objects. fingerprint: SHA-256 over the metadata's bytes and
    the keys and sizes of `objects`, so a copy of the dataset elsewhere has the same one. modality: GR00T's names for
    the parts, None where the dataset has no such file.
    """

    version: str
    fps: float
    features: dict[str, dict[str, Any]]
    tasks: dict[int, str]
    episodes: EpisodeTable
    objects: dict[str, ObjectInfo]
    fingerprint: str
    modality: Modality | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Key -> bytes of all data and video objects."""
        return {key: info.size for key, info in self.objects.items()}


def read_metadata(store: Store) -> Metadata:
    """Read everything under `meta/` and list the data and video objects.

    Raises:
        FileNotFoundError: there is no meta/info.json.
        MetadataError: a file or key is missing or wrong.
    """
    # Listed side by side: one after another they would be most of the time to open a dataset on a distant store.
    with ThreadPoolExecutor(len(_MEDIA_FOLDERS), thread_name_prefix="knonik-list") as pool:
        media = [pool.submit(_listing, store, folder) for folder in _MEDIA_FOLDERS]
        listed = _listing(store, "meta")
    if _INFO not in listed:
        raise FileNotFoundError(f"no LeRobot dataset at {store.uri}: looked for {_INFO}")
    objects = {key: found for part in media for key, found in part.result().items()}
    digest = hashlib.sha256()
    files: dict[str, bytes] = {}
    episode_parts: dict[str, Any] = {}
    # Big files are hashed, cut down to what is needed and dropped one by one: their sum may be gigabytes.
    for key, body in read_in_order(store, {key: found.size for key, found in listed.items()}):
        digest.update(f"{key}\0{len(body)}\0".encode())
        digest.update(body)
        if is_episode_file(key):
            episode_parts[key] = episode_columns(body, key)
        elif key in _FILES:
            files[key] = body
    for key in sorted(objects):
        digest.update(f"{key}\0{objects[key].size}\0".encode())

    info = json_object(files[_INFO], _INFO)
    version = str(entry(info, "codebase_version", _INFO))
    if version not in VERSIONS:
        raise MetadataError(f"{_INFO}: codebase_version is {version!r}; read are {', '.join(VERSIONS)}")
    fps = _positive(info, "fps")
    features = _features(info)
    rows = rows_v3(episode_parts) if version == "v3.0" else rows_v2(files)
    return Metadata(
        version=version,
        fps=fps,
        features=features,
        tasks=_tasks(files),
        episodes=_table(rows, info, features, objects),
        objects=objects,
        fingerprint=digest.hexdigest(),
        modality=parse_modality(files[MODALITY_FILE], features) if MODALITY_FILE in files else None,
    )


_FILES = (_INFO, "meta/episodes.jsonl", "meta/tasks.jsonl", "meta/tasks.parquet", MODALITY_FILE)


def _listing(store: Store, folder: str) -> dict[str, ObjectInfo]:
    return {key: found for key, found in store.objects(folder).items() if _OWN_FOLDER not in key.split("/")}


def _features(info: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    features = entry(info, "features", _INFO)
    if not isinstance(features, dict):
        raise MetadataError(f"{_INFO}: features must be an object of name -> declaration")
    for name, feature in features.items():
        if not isinstance(feature, dict) or not isinstance(feature.get("dtype"), str):
            raise MetadataError(f"{_INFO}: feature {name} is {feature!r}; an object with a dtype was expected")
    return features


def _table(
    rows: EpisodeRows,
    info: Mapping[str, Any],
    features: Mapping[str, dict[str, Any]],
    objects: Mapping[str, ObjectInfo],
) -> EpisodeTable:
    ids, length = rows.ints("episode_index"), rows.ints("length")
    chunks_size = info.get("chunks_size") or 1000
    if not isinstance(chunks_size, int) or chunks_size <= 0:
        raise MetadataError(f"{_INFO}: chunks_size is {chunks_size!r}; it must be a positive whole number")
    paths, per_episode = data_paths(info, rows, chunks_size, objects)
    data_keys, data_object = distinct(paths)
    data_row = np.zeros(len(ids), np.int64)
    if not per_episode:
        # Without the column, files hold episodes in the order of their ids, which the rows' own ids must confirm.
        listed = "dataset_from_index" in rows.columns
        start_row = rows.ints("dataset_from_index") if listed else np.cumsum(length) - length
        # Row numbers count over the dataset; inside a file they count from its first episode.
        file_start = np.full(len(data_keys), np.iinfo(np.int64).max)
        np.minimum.at(file_start, data_object, start_row)
        data_row = start_row - file_start[data_object]
    return EpisodeTable(
        ids=ids,
        length=length,
        first_row=np.cumsum(length) - length,
        data_keys=data_keys,
        data_object=data_object,
        data_row=data_row,
        tasks=tuple(rows.tasks),
        cameras=camera_tables(info, features, rows, chunks_size, objects, data_keys, data_object),
        data_info=tuple(objects[key] for key in data_keys),
    )


def _tasks(files: Mapping[str, bytes]) -> dict[int, str]:
    """task_index -> text, by value: tables may be unsorted and have gaps."""
    if "meta/tasks.parquet" in files:
        source = "meta/tasks.parquet"
        table = parquet_table(files[source], source)
        # The text is a pandas index, stored under its own name or, if it had none, under a generated one.
        text = next((name for name in ("task", "__index_level_0__") if name in table.column_names), None)
        if text is None or "task_index" not in table.column_names:
            raise MetadataError(f"{source}: needs columns task and task_index, has {', '.join(table.column_names)}")
        pairs = list(zip(table.column("task_index").to_pylist(), table.column(text).to_pylist(), strict=True))
    elif "meta/tasks.jsonl" in files:
        source = "meta/tasks.jsonl"
        pairs = [(entry(line, "task_index", source), entry(line, "task", source)) for line in json_lines(files, source)]
    else:
        raise MetadataError(
            "meta/tasks.parquet and meta/tasks.jsonl are both missing; one must give task_index and task"
        )
    tasks: dict[int, str] = {}
    for index, task in pairs:
        if index is None or task is None:
            raise MetadataError(f"{source}: a row has an empty task_index or task")
        if tasks.setdefault(int(index), str(task)) != str(task):
            raise MetadataError(f"{source}: task_index {index} has two texts, {tasks[int(index)]!r} and {task!r}")
    return tasks


def _positive(info: Mapping[str, Any], key: str) -> float:
    value = entry(info, key, _INFO)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise MetadataError(f"{_INFO}: {key} is {value!r}; it must be a positive number")
    return float(value)
