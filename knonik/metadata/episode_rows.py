"""The episode lists of all LeRobot versions, read into one form before any path is resolved."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from knonik.metadata.files import MetadataError, entry, json_lines, parquet_table

_LINES = "meta/episodes.jsonl"
_FOLDER = "meta/episodes"


@dataclass(frozen=True, kw_only=True)
class EpisodeRows:
    """Episodes sorted by id. columns: numeric columns [E] by name on disk. source: the file they are from."""

    columns: dict[str, NDArray[Any]]
    tasks: list[tuple[str, ...]]
    source: str

    def ints(self, name: str) -> NDArray[np.int64]:
        """A required column as whole numbers."""
        if name not in self.columns:
            raise MetadataError(f"{self.source}: column {name} is missing; it has {', '.join(sorted(self.columns))}")
        return self.columns[name].astype(np.int64)


def is_episode_file(key: str) -> bool:
    """Whether a key is one of the Parquet files with a v3.0 episode list."""
    return key.startswith(f"{_FOLDER}/") and key.endswith(".parquet")


def episode_columns(body: bytes, source: str) -> Any:
    """The columns of one such file that describe episodes, as an Arrow table."""
    # Per-episode statistics make up most of the bytes and are not needed here.
    return parquet_table(body, source, leave_out=("stats/",))


def rows_v2(files: Mapping[str, bytes]) -> EpisodeRows:
    """Episodes of a v2.0 or v2.1 dataset."""
    lines = json_lines(files, _LINES)
    columns = {name: np.array([_whole(line, name) for line in lines], np.int64) for name in ("episode_index", "length")}
    return _sorted(columns, [_texts(line.get("tasks")) for line in lines], _LINES)


def rows_v3(parts: Mapping[str, Any]) -> EpisodeRows:
    """Episodes of a v3.0 dataset, from the `episode_columns` of its files by key."""
    if not parts:
        raise MetadataError(
            f"{_FOLDER}: no parquet file there; a v3.0 dataset lists its episodes in "
            f"{_FOLDER}/chunk-000/file-000.parquet"
        )
    table = pa.concat_tables([parts[key] for key in sorted(parts)], promote_options="permissive")
    columns = {}
    for name in table.column_names:
        column = table.column(name)
        if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
            if column.null_count and not name.startswith("videos/"):
                raise MetadataError(f"{_FOLDER}: column {name} has {column.null_count} empty values")
            columns[name] = column.to_numpy()
    tasks = table.column("tasks").to_pylist() if "tasks" in table.column_names else [None] * len(table)
    return _sorted(columns, [_texts(item) for item in tasks], _FOLDER)


def _sorted(columns: dict[str, NDArray[Any]], tasks: list[tuple[str, ...]], source: str) -> EpisodeRows:
    rows = EpisodeRows(columns=columns, tasks=tasks, source=source)
    ids = rows.ints("episode_index")
    if not len(ids):
        raise MetadataError(f"{source}: lists no episode")
    order = np.argsort(ids, kind="stable")
    twice = ids[order][1:][np.diff(ids[order]) == 0]
    if len(twice):
        raise MetadataError(f"{source}: episode_index {twice[0]} stands there twice")
    if np.any(rows.ints("length") <= 0):
        raise MetadataError(f"{source}: length of episode {ids[rows.ints('length') <= 0][0]} is not positive")
    return EpisodeRows(
        columns={name: column[order] for name, column in columns.items()},
        tasks=[tasks[i] for i in order],
        source=source,
    )


def _whole(line: Mapping[str, Any], name: str) -> int:
    value = entry(line, name, _LINES)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise MetadataError(f"{_LINES}: {name} is {value!r}; a whole number was expected")
    return int(value)


def _texts(item: Any) -> tuple[str, ...]:
    if item is None:
        return ()
    return (item,) if isinstance(item, str) else tuple(str(text) for text in item)
