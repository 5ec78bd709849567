"""Ranges of frames whose file names episodes by words of their own, such as the published window filter of DROID."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from knonik.dataset import Dataset
from knonik.metadata.episode_rows import is_episode_file
from knonik.metadata.files import MetadataError, json_lines, parquet_table, read_in_order
from knonik.order.select import Ranges, merged, whole_range

DROID_KEY = (
    "gs://xembodiment_data/r2d2/r2d2-data-full/{0}/recordings/MP4--gs://xembodiment_data/r2d2/r2d2-data-full/{0}/"
    "trajectory.h5"
)
"""How DROID's filter names an episode; {0} stands for the name in the dataset."""

_LINES = "meta/episodes.jsonl"


def episode_names(dataset: Dataset, column: str) -> dict[str, int]:
    """Name -> episode id, from a column of the dataset's list of episodes; those without a name are left out.

    Raises:
        MetadataError: the list has no such column, or a name stands there twice.
    """
    listed = {key: info.size for key, info in dataset.store.objects("meta").items()}
    wanted = {key: size for key, size in listed.items() if is_episode_file(key) or key == _LINES}
    names: dict[str, int] = {}
    for key, body in read_in_order(dataset.store, wanted):
        if key == _LINES:
            lines = json_lines({key: body}, key)
            columns: Mapping[str, Sequence[object]] = {
                name: [line.get(name) for line in lines] for name in set().union(*lines)
            }
        else:
            table = parquet_table(body, key, leave_out=("stats/", "videos/"))
            kept = [name for name in ("episode_index", column) if name in table.column_names]
            columns = {name: [] for name in table.column_names} | table.select(kept).to_pydict()
        if column not in columns:
            raise MetadataError(f"{key}: column {column} is missing; it has {', '.join(sorted(columns))}")
        for name, episode in zip(columns[column], columns["episode_index"], strict=True):
            if name not in (None, "") and names.setdefault(str(name), int(str(episode))) != episode:
                raise MetadataError(f"{key}: {column} {name!r} names episodes {names[str(name)]} and {episode}")
    return names


def named_ranges(
    source: str | Path, dataset: Dataset, names: Mapping[str, int], *, key: str = DROID_KEY, horizon: int = 0
) -> Ranges:
    """Anchor ranges by episode id, for `knonik.open(ranges=...)`.

    Args:
        source: JSON file {name: [[start, stop], ...], ...} of frames.
        key: how the file names an episode, {0} in the place of its name.
        horizon: frames after an anchor that must be kept too; 0 asks only the anchor to be. Ranges that touch or
            overlap are one: it is the frames that are kept or not.

    Raises:
        ValueError: the file is not of this form, names none of the episodes, or keeps no anchor of any.
    """
    if "{0}" not in key:
        raise ValueError(f"key={key!r} is one name for all episodes; put {{0}} where the name of each stands")
    try:
        given = json.loads(Path(source).read_text())
        if not isinstance(given, dict):
            raise TypeError(f"it holds {type(given).__name__}")
        by_name = {str(name): [whole_range(*pair) for pair in pairs] for name, pairs in given.items()}
        for name, pairs in by_name.items():
            for start, stop in pairs:
                if not 0 <= start <= stop:
                    raise ValueError(f"{name!r} has [{start}, {stop}]")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: expected names, each with a list of [start, stop] frames ({error})") from error
    length = dict(zip(dataset.episodes.ids.tolist(), dataset.episodes.length.tolist(), strict=True))
    found: dict[int, list[tuple[int, int]]] = {}
    met = 0
    for name, episode in names.items():
        said = key.replace("{0}", name)
        if said not in by_name or episode not in length:
            continue
        met += 1
        cut = [(start, min(stop, length[episode]) - horizon) for start, stop in merged(by_name[said])]
        if kept := [(start, stop) for start, stop in cut if start < stop]:
            found[episode] = kept
    if not met:
        looked_for = key.replace("{0}", next(iter(names), ""))
        raise ValueError(
            f"{source} names none of the {len(names)} episodes of {dataset.uri}: it has names like "
            f"{next(iter(by_name), '')!r}, looked for were {looked_for!r} and the like. Say with "
            "--key how the file names an episode, or with --column which column has the names"
        )
    if not found:
        raise ValueError(
            f"{source} keeps no anchor: of the {met} episodes it names in {dataset.uri}, none has {1 + horizon} frames "
            "in a row that are kept; give a smaller --horizon, or another filter"
        )
    return found
