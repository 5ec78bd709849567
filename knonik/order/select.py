"""Which steps of a dataset are anchors: episode subsets, a split by episode, and ranges of frames inside episodes."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knonik.metadata.episodes import EpisodeTable
from knonik.order.anchors import Anchors, mix64

Ranges = Mapping[int, Sequence[tuple[int, int]]]
"""Episode id to half-open ranges (first frame, one past the last frame)."""


def read_ranges(source: Ranges | str | os.PathLike[str], episodes: EpisodeTable) -> Ranges:
    """Checked ranges, sorted and merged, from a mapping or a JSON file {"episode id": [[start, stop], ...], ...}.

    Args:
        episodes: table of the whole dataset: an id may be one that is not in use, but never one that does not exist.

    Raises:
        ValueError: not such a file, or a range is empty or reaches beyond its episode.
        KeyError: an episode id does not exist.
    """
    where, named = "ranges", source
    if not isinstance(named, Mapping):
        where = f"ranges file {Path(named)}"
        try:
            named = json.loads(Path(named).read_text())
        except ValueError as error:
            raise ValueError(f"{where}: not valid JSON ({error})") from error
        if not isinstance(named, dict):
            raise ValueError(f"{where}: holds {type(named).__name__}; an object of episode ids is expected")
    try:
        by_id = {int(episode): [whole_range(*pair) for pair in pairs] for episode, pairs in named.items()}
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: expected episode ids, each with a list of [start, stop] frames ({error})"
        ) from error
    positions = episodes.positions(np.array(list(by_id), np.int64)) if by_id else np.zeros(0, np.int64)
    for (episode, pairs), length in zip(by_id.items(), episodes.length[positions].tolist(), strict=True):
        for start, stop in pairs:
            if not 0 <= start < stop <= length:
                raise ValueError(
                    f"{where}: episode {episode} has the range [{start}, {stop}); allowed is 0 <= start < stop <= "
                    f"{length}, its number of rows"
                )
    return {episode: merged(by_id[episode]) for episode in sorted(by_id)}


def common_ranges(one: Ranges, other: Ranges) -> Ranges:
    """What lies in both."""
    return {
        episode: merged(
            (max(a, c), min(b, d)) for a, b in one[episode] for c, d in other[episode] if max(a, c) < min(b, d)
        )
        for episode in one.keys() & other.keys()
    }


def whole_range(start: Any, stop: Any) -> tuple[int, int]:
    """Both ends as whole numbers.

    Raises:
        ValueError, TypeError: one is none; a part of a frame is never cut off in silence.
    """
    for end in (start, stop):
        if not float(end).is_integer():
            raise ValueError(f"{end!r} is no whole number")
    return int(start), int(stop)


def merged(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted ranges of which no two overlap or touch."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(pairs):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def find_anchors(episodes: EpisodeTable, ranges: Ranges | None, horizon: int = 1) -> Anchors:
    """The anchor steps of some episodes.

    Args:
        episodes: the episodes in use.
        ranges: frames that may be anchors; an episode not named has none. They choose anchors and not rows: a window
            may reach beyond its range, as with the published frame filter of DROID. None allows every frame.
        horizon: 1 = an anchor's windows may reach beyond the episode; H > 1 = the last H-1 steps of an episode, not of
            a range, are no anchors.

    Raises:
        ValueError: no step is left; says what took them away.
    """
    if horizon < 1:
        raise ValueError(f"horizon is {horizon}; it counts steps and must be 1 or more")
    room = np.maximum(episodes.length - (horizon - 1), 0)
    if ranges is None:
        ids, starts, stops = episodes.ids, np.zeros(len(episodes), np.int64), room
    else:
        rows = [
            (episode, start, min(stop, last))
            for episode, last in zip(episodes.ids.tolist(), room.tolist(), strict=True)
            for start, stop in ranges.get(episode, ())
        ]
        ids, starts, stops = np.array(rows, np.int64).reshape(-1, 3).T.copy()
    kept = stops > starts
    anchors = Anchors(ids=ids[kept], starts=starts[kept], counts=(stops - starts)[kept])
    if not len(anchors):
        longest = int(episodes.length.max()) if len(episodes) else 0
        limits = "" if ranges is None else f", ranges name {len(ranges)} episodes"
        raise ValueError(
            f"no anchor steps: {len(episodes)} episodes, the longest has {longest} rows, horizon is {horizon}{limits}"
        )
    return anchors


def split_episodes(episodes: EpisodeTable, validation: float, seed: int = 0) -> tuple[list[int], list[int]]:
    """(training ids, validation ids): each episode is put by a keyed hash of its own id.

    So an episode never changes sides when others are added or left out, and shares are met on average, not exactly.

    Args:
        validation: share of episodes to hold out, above 0 and below 1.
        seed: another seed, another split.

    Raises:
        ValueError: the share is not possible, or leaves one side empty; names the nearest share that does not.
    """
    if not 0 < validation < 1:
        raise ValueError(f"validation={validation} is not allowed; give a share of the episodes between 0 and 1")
    key = mix64(mix64(seed) ^ 0xA0761D6478BD642F)  # other draws of the same seed shall not follow the split
    places = {episode: mix64(key ^ mix64(episode)) / 2**64 for episode in episodes.ids.tolist()}
    held_out = [episode for episode, place in places.items() if place < validation]
    kept = [episode for episode, place in places.items() if place >= validation]
    if len(places) < 2:
        raise ValueError(f"validation={validation}: {len(places)} episodes cannot be split; 2 or more are needed")
    if not held_out:
        raise ValueError(
            f"validation={validation} holds out none of {len(places)} episodes with seed {seed}; the smallest share "
            f"that holds out one is {(int(min(places.values()) * 1e4) + 1) / 1e4}"
        )
    if not kept:
        raise ValueError(
            f"validation={validation} leaves none of {len(places)} episodes to train on with seed {seed}; the "
            f"greatest share that leaves one is {int(max(places.values()) * 1e4) / 1e4}"
        )
    return kept, held_out


def digest_arrays(digest: Any, *arrays: NDArray[np.int64]) -> None:
    """Add arrays to a hash so that no two lists of arrays look alike."""
    for array in arrays:
        digest.update(f"{len(array)}\0".encode())
        digest.update(np.ascontiguousarray(array, np.int64).tobytes())
