"""Write a LeRobot dataset (v3.0 or v2.1 layout) from arrays, one episode at a time.

Episodes are taken from an iterable as they come: memory holds the few episodes being encoded, never the dataset.
Encoding runs on threads (libav releases the interpreter lock), one job per episode and camera.
"""

import io
import logging
import secrets
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from knonik.video.encode import encode_mp4
from knonik.write.layout import (
    CHUNK_SIZE,
    PATHS,
    VERSIONS,
    EncodedEpisode,
    Layout,
    LayoutV21,
    LayoutV30,
    dump_json,
    write_tasks,
)
from knonik.write.statistics import ImageHistogram, column_stats, stats_json

logger = logging.getLogger(__name__)

_INDEX_COLUMNS = ("timestamp", "frame_index", "episode_index", "index", "task_index")


@dataclass(frozen=True, kw_only=True)
class EpisodeData:
    """One episode in memory.

    Attributes:
        columns: low-dimensional data, key to [N, D] or [N]; `observation.state` and `action` by custom, float32.
        frames: camera key to uint8 [N, H, W, 3] rgb, both sides even for 4:2:0.
        task: the instruction.
    """

    columns: Mapping[str, NDArray[Any]]
    frames: Mapping[str, NDArray[np.uint8]]
    task: str

    @property
    def length(self) -> int:
        """Number of rows."""
        return len(next(iter(self.columns.values())))


def write_lerobot(
    dest: Path | str,
    episodes: Iterable[EpisodeData],
    *,
    fps: float,
    robot_type: str,
    version: str = "v3.0",
    codec: str = "av1",
    gop: int = 2,
    episodes_per_file: int = 100,
    crf: int | None = None,
    bframes: int = 0,
    pix_fmt: str = "yuv420p",
    matrix: str | None = None,
    full_range: bool = False,
    workers: int = 2,
) -> Path:
    """Write `episodes` as a LeRobot dataset and return its folder.

    The folder appears whole or not at all: everything is written into a sibling folder that is renamed at the end.

    Args:
        dest: folder to create; must not exist.
        episodes: any iterable; a generator is consumed as encoding goes on.
        fps: rows per second; row k of an episode has timestamp k / fps.
        robot_type: name put into `info.json`.
        version: `v3.0` or `v2.1`.
        codec: `av1`, `h264` or `hevc`, see `knonik.video.encode.encode_mp4`; likewise `gop`, `crf`, `bframes`,
            `pix_fmt`, `matrix` and `full_range`.
        episodes_per_file: v3.0 only, episodes joined in one data file and in one mp4 per camera.
        workers: encoding threads.

    Raises:
        ValueError: an option or an episode is not as described; names which.
        FileExistsError: `dest` exists.
    """
    dest = Path(dest)
    if version not in VERSIONS:
        raise ValueError(f"version={version!r} is not known; allowed: {', '.join(VERSIONS)}")
    for name, value in (("episodes_per_file", episodes_per_file), ("workers", workers), ("fps", fps)):
        if not value > 0:
            raise ValueError(f"{name}={value} is not allowed; give a value above 0")
    if dest.exists():
        raise FileExistsError(f"dest={dest} exists; give a new folder or remove it first")
    work = dest.with_name(f".{dest.name}.{secrets.token_hex(4)}.tmp")
    work.mkdir(parents=True)
    try:
        layout: Layout = LayoutV30(work, fps, episodes_per_file) if version == "v3.0" else LayoutV21(work)
        encoding = {"codec": codec, "gop": gop, "crf": crf, "bframes": bframes}
        encoding |= {"pix_fmt": pix_fmt, "matrix": matrix, "full_range": full_range}
        _write(work, episodes, layout, fps, robot_type, version, encoding, workers)
        work.rename(dest)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return dest


def _write(
    work: Path,
    episodes: Iterable[EpisodeData],
    layout: Layout,
    fps: float,
    robot_type: str,
    version: str,
    encoding: Mapping[str, Any],
    workers: int,
) -> None:
    (work / "meta").mkdir()
    tasks: dict[str, int] = {}
    images: dict[str, ImageHistogram] = {}
    schema, features, rows, count = pa.schema([]), {}, 0, 0
    for episode in _encode_ahead(episodes, tasks, {"fps": fps, **encoding}, workers):
        if not count:
            schema, features = _schema(episode), _features(episode, fps, encoding)
        layout.add(episode, schema)
        for key, image in episode.images.items():
            images[key] = images[key] + image if key in images else image
        rows, count = rows + episode.length, count + 1
    if not count:
        raise ValueError("episodes is empty; a dataset needs at least one episode")
    layout.finish()
    write_tasks(work, tasks, version)
    data_path, video_path = PATHS[version]
    info: dict[str, Any] = {
        "codebase_version": version,
        "robot_type": robot_type,
        "total_episodes": count,
        "total_frames": rows,
        "total_tasks": len(tasks),
        "chunks_size": CHUNK_SIZE,
        "fps": int(fps) if float(fps).is_integer() else fps,
        "splits": {"train": f"0:{count}"},
        "data_path": data_path,
        "video_path": video_path if images else None,
        "features": features,
    }
    if version == "v2.1":
        info |= {"total_videos": count * len(images), "total_chunks": -(-count // CHUNK_SIZE)}
    else:
        info |= {"data_files_size_in_mb": 100, "video_files_size_in_mb": 200}
        whole = {key: column_stats(_read_column(work, key)) for key in schema.names}
        whole |= {key: image.stats() for key, image in images.items()}
        dump_json(work / "meta" / "stats.json", stats_json(whole))
    dump_json(work / "meta" / "info.json", info)
    logger.info("wrote %d episodes, %d rows, %d cameras", count, rows, len(images))


def _encode_ahead(
    episodes: Iterable[EpisodeData], tasks: dict[str, int], options: Mapping[str, Any], workers: int
) -> Iterator[EncodedEpisode]:
    """Yield episodes in order while the next ones are being encoded; at most `workers` + 1 are held."""
    pending: deque[tuple[EncodedEpisode, dict[str, Future[tuple[bytes, ImageHistogram]]]]] = deque()
    first: EpisodeData | None = None
    row = 0
    with ThreadPoolExecutor(workers, thread_name_prefix="knonik-encode") as pool:
        try:
            for index, data in enumerate(episodes):
                first = first or data
                _check(data, first, index)
                task_index = tasks.setdefault(data.task, len(tasks))
                jobs = {key: pool.submit(_encode, frames, options) for key, frames in data.frames.items()}
                pending.append((_indexed(data, index, row, task_index, float(options["fps"])), jobs))
                row += data.length
                if len(pending) > workers:
                    yield _encoded(*pending.popleft())
            while pending:
                yield _encoded(*pending.popleft())
        finally:
            pool.shutdown(cancel_futures=True)


def _encode(frames: NDArray[np.uint8], options: Mapping[str, Any]) -> tuple[bytes, ImageHistogram]:
    target = io.BytesIO()
    encode_mp4(target, frames, **options)
    return target.getvalue(), ImageHistogram.of(frames)


def _encoded(episode: EncodedEpisode, jobs: Mapping[str, Future[tuple[bytes, ImageHistogram]]]) -> EncodedEpisode:
    done = {key: job.result() for key, job in jobs.items()}
    mp4, images = {k: d[0] for k, d in done.items()}, {k: d[1] for k, d in done.items()}
    return EncodedEpisode(**{**vars(episode), "mp4": mp4, "images": images})


def _indexed(data: EpisodeData, index: int, row: int, task_index: int, fps: float) -> EncodedEpisode:
    steps = np.arange(data.length)
    columns = dict(data.columns) | {
        "timestamp": (steps / fps).astype(np.float32),
        "frame_index": steps,
        "episode_index": np.full(data.length, index),
        "index": row + steps,
        "task_index": np.full(data.length, task_index),
    }
    return EncodedEpisode(
        columns=columns, task=data.task, task_index=task_index, index=index, first_row=row, length=data.length,
        mp4={}, images={},
    )  # fmt: skip


def _check(data: EpisodeData, first: EpisodeData, index: int) -> None:
    if not data.columns:
        raise ValueError(f"episode {index} has no columns; give at least one, such as 'action'")
    if clash := set(data.columns) & set(_INDEX_COLUMNS):
        raise ValueError(f"episode {index}: columns {sorted(clash)} are written by the writer; leave them out")
    for kind in ("columns", "frames"):
        given, wanted = getattr(data, kind), getattr(first, kind)
        if given.keys() != wanted.keys():
            raise ValueError(f"episode {index} has {kind} {sorted(given)}, episode 0 has {sorted(wanted)}")
        for key, values in given.items():
            if len(values) != data.length or not data.length:
                raise ValueError(f"episode {index}: {key} has {len(values)} rows, expected {max(data.length, 1)}")
            if values.shape[1:] != wanted[key].shape[1:] or values.dtype != wanted[key].dtype:
                raise ValueError(
                    f"episode {index}: {key} is {values.dtype} {list(values.shape[1:])} per row, "
                    f"episode 0 has {wanted[key].dtype} {list(wanted[key].shape[1:])}"
                )
            if kind == "columns" and (values.ndim > 2 or values.dtype.kind not in "fiub"):
                raise ValueError(f"episode {index}: {key} must be a numeric array [N, D] or [N]")


def _width(values: NDArray[Any]) -> int:
    return int(values.shape[1]) if values.ndim == 2 else 1


def _schema(episode: EncodedEpisode) -> pa.Schema:
    fields = []
    for key, values in episode.columns.items():
        scalar, width = pa.from_numpy_dtype(values.dtype), _width(values)
        fields.append(pa.field(key, scalar if width == 1 else pa.list_(pa.field("element", scalar), width)))
    return pa.schema(fields)


def _features(episode: EncodedEpisode, fps: float, encoding: Mapping[str, Any]) -> dict[str, Any]:
    low = {
        key: {
            "dtype": values.dtype.name,
            "shape": [_width(values)],
            "names": None if key in _INDEX_COLUMNS else [f"{key.split('.')[-1]}_{i}" for i in range(_width(values))],
        }
        for key, values in episode.columns.items()
    }
    video = {}
    for key, image in episode.images.items():
        height, width = image.size
        info = {"height": height, "width": width, "is_depth_map": False, "channels": 3, "g": encoding["gop"]}
        info |= {"codec": encoding["codec"], "pix_fmt": encoding["pix_fmt"]}
        info |= {"fps": int(fps) if float(fps).is_integer() else fps}
        video[key] = {
            "dtype": "video",
            "shape": [height, width, 3],
            "names": ["height", "width", "channels"],
            "info": {**{f"video.{name}": value for name, value in info.items()}, "has_audio": False},
        }
    return {**low, **video}


def _read_column(work: Path, key: str) -> NDArray[Any]:
    """All rows of one column, read back: the statistics of a whole dataset need one column in memory, not all."""
    parts = []
    for path in sorted((work / "data").rglob("*.parquet")):
        column = pq.read_table(path, columns=[key])[key].combine_chunks()
        if pa.types.is_fixed_size_list(column.type):
            parts.append(column.flatten().to_numpy(zero_copy_only=False).reshape(-1, column.type.list_size))
        else:
            parts.append(column.to_numpy(zero_copy_only=False))
    return np.concatenate(parts)
