"""The two file layouts of a LeRobot dataset: one file per episode (v2.1), or several episodes to a file (v3.0)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from knonik.video.encode import Mp4Joiner
from knonik.write.statistics import ImageHistogram, column_stats, stats_json

CHUNK_SIZE = 1000
VERSIONS = ("v3.0", "v2.1")
PATHS = {
    "v3.0": (
        "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    ),
    "v2.1": (
        "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    ),
}

Stats = dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class EncodedEpisode:
    """What is left of an episode once its frames are encoded."""

    columns: Mapping[str, NDArray[Any]]
    task: str
    task_index: int
    index: int
    first_row: int
    length: int
    mp4: Mapping[str, bytes]
    images: Mapping[str, ImageHistogram]

    def table(self, schema: pa.Schema) -> pa.Table:
        arrays = []
        for field in schema:
            values = np.ascontiguousarray(self.columns[field.name])
            if pa.types.is_fixed_size_list(field.type):
                flat = pa.array(values.reshape(-1), field.type.value_type)
                arrays.append(pa.FixedSizeListArray.from_arrays(flat, field.type.list_size))
            else:
                arrays.append(pa.array(values.reshape(-1), field.type))
        return pa.Table.from_arrays(arrays, schema=schema)

    def stats(self) -> Stats:
        low = {key: column_stats(values) for key, values in self.columns.items()}
        return {**low, **{key: image.stats() for key, image in self.images.items()}}


class Layout(Protocol):
    """Where episodes go: one file each (v2.1), or several to a file (v3.0)."""

    def add(self, episode: EncodedEpisode, schema: pa.Schema) -> None: ...

    def finish(self) -> None: ...


class LayoutV21:
    """One parquet and one mp4 per episode and camera; jsonl metadata."""

    def __init__(self, work: Path) -> None:
        self._work = work

    def add(self, episode: EncodedEpisode, schema: pa.Schema) -> None:
        data_path, video_path = PATHS["v2.1"]
        names: dict[str, Any] = {"episode_chunk": episode.index // CHUNK_SIZE, "episode_index": episode.index}
        pq.write_table(episode.table(schema), _parent(self._work / data_path.format(**names)))
        for key, part in episode.mp4.items():
            _parent(self._work / video_path.format(video_key=key, **names)).write_bytes(part)
        row = {"episode_index": episode.index, "tasks": [episode.task], "length": episode.length}
        _append(self._work / "meta" / "episodes.jsonl", row)
        stats = {"episode_index": episode.index, "stats": stats_json(episode.stats())}
        _append(self._work / "meta" / "episodes_stats.jsonl", stats)

    def finish(self) -> None:
        pass


class LayoutV30:
    """Several episodes per parquet (a row group each) and per mp4; parquet metadata."""

    def __init__(self, work: Path, fps: float, episodes_per_file: int) -> None:
        self._work, self._fps, self._per_file = work, fps, episodes_per_file
        self._file = -1
        self._data: pq.ParquetWriter | None = None
        self._parts: dict[str, list[bytes]] = {}
        self._rows: list[dict[str, Any]] = []

    def add(self, episode: EncodedEpisode, schema: pa.Schema) -> None:
        if episode.index % self._per_file == 0:
            self._close_file()
            self._file += 1
            path = _parent(self._work / PATHS["v3.0"][0].format(**self._place()))
            self._data = pq.ParquetWriter(path, schema, compression="snappy")
        assert self._data is not None
        self._data.write_table(episode.table(schema), row_group_size=max(episode.length, 1))
        row: dict[str, Any] = {"episode_index": episode.index, "tasks": [episode.task], "length": episode.length}
        row |= {f"data/{name}": value for name, value in self._place().items()}
        row |= {"dataset_from_index": episode.first_row, "dataset_to_index": episode.first_row + episode.length}
        for key, part in episode.mp4.items():
            self._parts.setdefault(key, []).append(part)
            row |= {f"videos/{key}/{name}": value for name, value in self._place().items()}
        for key, stats in stats_json(episode.stats()).items():
            row |= {f"stats/{key}/{name}": value for name, value in stats.items()}
        self._rows.append(row)

    def finish(self) -> None:
        self._close_file()
        for row in self._rows:
            row |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
        path = _parent(self._work / "meta/episodes/chunk-000/file-000.parquet")
        pq.write_table(pa.Table.from_pylist(self._rows), path, compression="snappy", row_group_size=1000)

    def _place(self) -> dict[str, int]:
        return {"chunk_index": self._file // CHUNK_SIZE, "file_index": self._file % CHUNK_SIZE}

    def _close_file(self) -> None:
        if self._data is None:
            return
        self._data.close()
        for key, parts in self._parts.items():
            path = _parent(self._work / PATHS["v3.0"][1].format(video_key=key, **self._place()))
            rows = self._rows[-len(parts) :]
            if len(parts) == 1:  # a file that was never joined keeps its header at the end, as recorders leave it
                path.write_bytes(parts[0])
                spans = [(0.0, rows[0]["length"] / self._fps)]
            else:
                with Mp4Joiner(path, fps=self._fps) as joiner:
                    spans = [joiner.add(part) for part in parts]
            for row, (begin, end) in zip(rows, spans, strict=True):
                row |= {f"videos/{key}/from_timestamp": begin, f"videos/{key}/to_timestamp": end}
        self._parts = {}


def write_tasks(work: Path, tasks: Mapping[str, int], version: str) -> None:
    if version == "v2.1":
        for task, index in tasks.items():
            _append(work / "meta" / "tasks.jsonl", {"task_index": index, "task": task})
        return
    # The text is the index of a pandas frame; this is the note by which pandas finds its index again.
    text = {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object", "metadata": None}
    number = {**text, "name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"}
    pandas = {"index_columns": ["task"], "column_indexes": [], "columns": [number, text], "pandas_version": "2.2.0"}
    fields = [pa.field("task_index", pa.int64()), pa.field("task", pa.string())]
    schema = pa.schema(fields, metadata={"pandas": json.dumps(pandas)})
    table = pa.Table.from_arrays(
        [pa.array(tasks.values(), pa.int64()), pa.array(tasks.keys(), pa.string())], schema=schema
    )
    pq.write_table(table, work / "meta" / "tasks.parquet")


def _parent(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _append(path: Path, row: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def dump_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=4, ensure_ascii=False), encoding="utf-8")
