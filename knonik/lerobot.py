"""Read the metadata of a LeRobot v2.0, v2.1 or v3.0 dataset, where it lies, into one schema.

Real datasets break their own documentation in small ways (paths that do not follow the declared template, cameras
without files, unknown keys); what is unambiguous is read, anything else is an error that names the file and the key.
"""

import hashlib
import io
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from knonik.episodes import CameraTable, EpisodeTable
from knonik.store import Store, StoreError

logger = logging.getLogger(__name__)

VERSIONS = ("v2.0", "v2.1", "v3.0")
DATA_TEMPLATES = (
    "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
)
VIDEO_TEMPLATES = (
    "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
)
_MEDIA_FOLDERS = ("data", "videos", "video")


class MetadataError(ValueError):
    """The dataset's metadata is missing, damaged or contradicts its files."""


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """A dataset's schema and episode table.

    fps: frames per second. features: the declarations of info.json, unchanged. tasks: task_index -> text.
    sizes: key -> bytes of all data and video objects. fingerprint: SHA-256 over metadata bytes and `sizes`.
    """

    version: str
    fps: float
    features: dict[str, dict[str, Any]]
    tasks: dict[int, str]
    episodes: EpisodeTable
    sizes: dict[str, int]
    fingerprint: str


def read_metadata(store: Store) -> Metadata:
    """Read everything under `meta/` and list the data and video objects.

    Raises:
        FileNotFoundError: there is no meta/info.json.
        MetadataError: a file or key is missing or wrong.
    """
    files = {key: store.read(key) for key in store.sizes("meta")}
    if "meta/info.json" not in files:
        raise FileNotFoundError(f"no LeRobot dataset at {store.uri}: looked for meta/info.json")
    sizes = {key: size for folder in _MEDIA_FOLDERS for key, size in store.sizes(folder).items()}
    info = _json_object(files["meta/info.json"], "meta/info.json")
    version = str(_get(info, "codebase_version", "meta/info.json"))
    if version not in VERSIONS:
        raise MetadataError(f"meta/info.json: codebase_version is {version!r}; read are {', '.join(VERSIONS)}")
    fps = _positive(info, "fps")
    features = _get(info, "features", "meta/info.json")
    if not isinstance(features, dict):
        raise MetadataError("meta/info.json: features must be an object of name -> declaration")
    for name, feature in features.items():
        if not isinstance(feature, dict) or not isinstance(feature.get("dtype"), str):
            raise MetadataError(f"meta/info.json: feature {name} is {feature!r}; an object with a dtype was expected")
    rows = _episodes_v3(files) if version == "v3.0" else _episodes_v2(files)
    return Metadata(
        version=version,
        fps=fps,
        features=features,
        tasks=_tasks(files),
        episodes=_table(rows, info, features, sizes),
        sizes=sizes,
        fingerprint=_fingerprint(files, sizes),
    )


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Episode rows before paths are resolved. columns: numeric columns [E] by name on disk. source: their file."""

    columns: dict[str, NDArray[Any]]
    tasks: list[tuple[str, ...]]
    source: str

    def ints(self, name: str) -> NDArray[np.int64]:
        if name not in self.columns:
            raise MetadataError(f"{self.source}: column {name} is missing; it has {', '.join(sorted(self.columns))}")
        return self.columns[name].astype(np.int64)


def _episodes_v2(files: Mapping[str, bytes]) -> _Rows:
    source = "meta/episodes.jsonl"
    lines = _json_lines(files, source)
    columns = {
        name: np.array([int(_get(line, name, source)) for line in lines], np.int64)
        for name in ("episode_index", "length")
    }
    return _sorted(columns, [_texts(line.get("tasks")) for line in lines], source)


def _episodes_v3(files: Mapping[str, bytes]) -> _Rows:
    keys = sorted(key for key in files if key.startswith("meta/episodes/") and key.endswith(".parquet"))
    if not keys:
        raise MetadataError(
            "meta/episodes: no parquet file there; a v3.0 dataset lists its episodes in "
            "meta/episodes/chunk-000/file-000.parquet"
        )
    parts = []
    for key in keys:
        with _parquet(files[key], key) as file:
            # Per-episode statistics make up most of the bytes and are not needed here.
            names = [name for name in file.schema_arrow.names if not name.startswith("stats/")]
            parts.append(file.read(columns=names))
    table = pa.concat_tables(parts, promote_options="default")
    columns = {}
    for name in table.column_names:
        column = table.column(name)
        if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
            if column.null_count and not name.startswith("videos/"):
                raise MetadataError(f"meta/episodes: column {name} has {column.null_count} empty values")
            columns[name] = column.to_numpy()
    tasks = table.column("tasks").to_pylist() if "tasks" in table.column_names else [None] * len(table)
    return _sorted(columns, [_texts(entry) for entry in tasks], "meta/episodes")


def _sorted(columns: dict[str, NDArray[Any]], tasks: list[tuple[str, ...]], source: str) -> _Rows:
    rows = _Rows(columns=columns, tasks=tasks, source=source)
    ids = rows.ints("episode_index")
    if not len(ids):
        raise MetadataError(f"{source}: lists no episode")
    order = np.argsort(ids, kind="stable")
    twice = ids[order][1:][np.diff(ids[order]) == 0]
    if len(twice):
        raise MetadataError(f"{source}: episode_index {twice[0]} stands there twice")
    if np.any(rows.ints("length") <= 0):
        raise MetadataError(f"{source}: length of episode {ids[rows.ints('length') <= 0][0]} is not positive")
    return _Rows(
        columns={name: column[order] for name, column in columns.items()},
        tasks=[tasks[i] for i in order],
        source=source,
    )


def _table(rows: _Rows, info: Mapping[str, Any], features: Mapping[str, Any], sizes: Mapping[str, int]) -> EpisodeTable:
    ids, length = rows.ints("episode_index"), rows.ints("length")
    chunks_size = info.get("chunks_size") or 1000
    if not isinstance(chunks_size, int) or chunks_size <= 0:
        raise MetadataError(f"meta/info.json: chunks_size is {chunks_size!r}; it must be a positive whole number")
    cameras: dict[str, CameraTable] = {}
    for name, feature in features.items():
        if feature["dtype"] != "video":
            continue
        if not any(f"/{name}/" in key for key in sizes):
            logger.warning("camera %s is declared in meta/info.json but has no files; it is left out", name)
            continue
        if _is_depth(feature):
            # Its 12-bit codes would come out as wrong colours, which is worse than a missing camera.
            logger.warning("camera %s holds depth maps, which are not read yet; it is left out", name)
            continue
        paths, per_episode = _resolve(
            info, "video_path", VIDEO_TEMPLATES, rows, f"videos/{name}", name, chunks_size, sizes
        )
        keys, number = np.unique(np.array(paths), return_inverse=True)
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
        cameras[name] = CameraTable(
            keys=tuple(keys.tolist()), object=number.reshape(-1).astype(np.int64), start_s=start
        )

    paths, per_episode = _resolve(info, "data_path", DATA_TEMPLATES, rows, "data", None, chunks_size, sizes)
    data_keys, data_object = np.unique(np.array(paths), return_inverse=True)
    data_object = data_object.reshape(-1).astype(np.int64)
    data_row = np.zeros(len(ids), np.int64)
    if not per_episode:
        start_row = rows.ints("dataset_from_index")
        # Row numbers count over the dataset; inside a file they count from its first episode.
        file_start = np.full(len(data_keys), np.iinfo(np.int64).max)
        np.minimum.at(file_start, data_object, start_row)
        data_row = start_row - file_start[data_object]
    return EpisodeTable(
        ids=ids,
        length=length,
        first_row=np.cumsum(length) - length,
        data_keys=tuple(data_keys.tolist()),
        data_object=data_object,
        data_row=data_row,
        tasks=tuple(rows.tasks),
        cameras=cameras,
    )


def _is_depth(feature: Mapping[str, Any]) -> bool:
    """Both spellings of the mark, inside `info` (newer) or `video_info` (older)."""
    details = feature.get("info") or feature.get("video_info") or {}
    return bool(details.get("is_depth_map") or details.get("video.is_depth_map"))


def _resolve(
    info: Mapping[str, Any],
    template_key: str,
    defaults: Sequence[str],
    rows: _Rows,
    column_prefix: str,
    camera: str | None,
    chunks_size: int,
    sizes: Mapping[str, int],
) -> tuple[list[str], bool]:
    """Object key of every episode, and whether each episode has an object of its own.

    The declared template is tried first, then the standard ones of both generations, each also with the folder `video`
    in place of `videos`: the first under which all objects exist wins.
    """
    ids = rows.ints("episode_index")
    chunk, file = (rows.columns.get(f"{column_prefix}/{name}") for name in ("chunk_index", "file_index"))
    declared = info.get(template_key)
    candidates = [str(declared)] if declared else []
    candidates += [template for template in defaults if template not in candidates]
    candidates += [
        f"video/{template.removeprefix('videos/')}" for template in candidates if template.startswith("videos/")
    ]
    failures = []
    for template in candidates:
        joined = "{chunk_index" in template or "{file_index" in template
        if joined and (chunk is None or file is None):
            failures.append(
                f"{template} needs columns {column_prefix}/chunk_index and file_index, which {rows.source} lacks"
            )
            continue
        try:
            paths = [
                template.format(
                    episode_index=episode,
                    episode_chunk=episode // chunks_size,
                    chunk_index=int(chunk[i]) if chunk is not None else 0,
                    file_index=int(file[i]) if file is not None else 0,
                    video_key=camera,
                )
                for i, episode in enumerate(ids.tolist())
            ]
        except (KeyError, ValueError, IndexError) as error:
            failures.append(f"{template} cannot be filled in ({error!r})")
            continue
        missing = [path for path in paths if path not in sizes]
        if not missing:
            if declared and template != declared:
                logger.warning(
                    "meta/info.json: %s %r does not match the files; they follow %r", template_key, declared, template
                )
            return paths, not joined
        failures.append(f"{template}: {len(missing)} of {len(paths)} are missing, the first is {missing[0]}")
    what = f"video files of camera {camera}" if camera else "data files"
    raise MetadataError(
        f"meta/info.json: no {template_key} template leads to all {what}. Tried: " + "; ".join(failures)
    )


def _tasks(files: Mapping[str, bytes]) -> dict[int, str]:
    """task_index -> text, by value: tables may be unsorted and have gaps."""
    if "meta/tasks.parquet" in files:
        source = "meta/tasks.parquet"
        with _parquet(files[source], source) as file:
            table = file.read()
        # The text is a pandas index, stored under its own name or, if it had none, under a generated one.
        text = next((name for name in ("task", "__index_level_0__") if name in table.column_names), None)
        if text is None or "task_index" not in table.column_names:
            raise MetadataError(f"{source}: needs columns task and task_index, has {', '.join(table.column_names)}")
        pairs = list(zip(table.column("task_index").to_pylist(), table.column(text).to_pylist(), strict=True))
    elif "meta/tasks.jsonl" in files:
        source = "meta/tasks.jsonl"
        pairs = [(_get(line, "task_index", source), _get(line, "task", source)) for line in _json_lines(files, source)]
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


def _fingerprint(files: Mapping[str, bytes], sizes: Mapping[str, int]) -> str:
    digest = hashlib.sha256()
    for key in sorted(files):
        digest.update(f"{key}\0{len(files[key])}\0".encode())
        digest.update(files[key])
    for key in sorted(sizes):
        digest.update(f"{key}\0{sizes[key]}\0".encode())
    return digest.hexdigest()


def _texts(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(str(text) for text in entry)


def _get(mapping: Mapping[str, Any], key: str, source: str) -> Any:
    if key not in mapping:
        raise MetadataError(f"{source}: key {key} is missing; it has {', '.join(sorted(mapping))}")
    return mapping[key]


def _positive(info: Mapping[str, Any], key: str) -> float:
    value = _get(info, key, "meta/info.json")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise MetadataError(f"meta/info.json: {key} is {value!r}; it must be a positive number")
    return float(value)


def _json_object(body: bytes, source: str) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError as error:
        raise MetadataError(f"{source}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise MetadataError(f"{source}: holds {type(value).__name__}, an object was expected")
    return value


def _json_lines(files: Mapping[str, bytes], source: str) -> list[dict[str, Any]]:
    if source not in files:
        raise MetadataError(f"{source} is missing")
    # Not splitlines(): texts may hold characters such as U+2028, which it would take for line ends.
    lines = files[source].split(b"\n")
    return [_json_object(line, f"{source} line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def _parquet(body: bytes, source: str) -> Any:
    try:
        return pq.ParquetFile(io.BytesIO(body))
    except (pa.ArrowException, OSError, StoreError) as error:
        raise MetadataError(f"{source}: not a readable Parquet file ({error})") from error
