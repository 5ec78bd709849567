"""The stock timestamp rule, vectorised: which frame of a video object belongs to a row.

The stock loader asks for q = from_timestamp + timestamp(row) and takes the frame with the nearest pts (the first on a
tie), which must lie within 1e-4 s. That is kept here, with one repair: `from_timestamp` is a running float sum of
container durations and drifts, so it only serves to find the integer number of the episode's first frame, and the exact
time of that frame replaces it. `match_rows_by_index` counts rows instead, for sets whose timestamps are off.
"""

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

TOLERANCE_S = 1e-4  # the stock loader's default `tolerance_s`


@dataclass(frozen=True, kw_only=True)
class ObjectRows:
    """Rows of one object's episodes.

    first: [K] first frame of each episode. frames: [R] frame of each row. off_s: [R] distance |pts - q|, seconds;
    infinite for a row whose timestamp is not a number.
    """

    first: NDArray[np.int64]
    frames: NDArray[np.int64]
    off_s: NDArray[np.float64]


def nearest(times: NDArray[np.float64], queries: NDArray[np.float64]) -> NDArray[np.int64]:
    """Index of the value in rising `times` [F] nearest to each query [Q], the first on a tie."""
    right = np.clip(np.searchsorted(times, queries), 1, max(1, len(times) - 1))
    left = right - 1
    right = np.minimum(right, len(times) - 1)
    return np.where(queries - times[left] <= times[right] - queries, left, right)


def match_rows(
    key: str,
    times: NDArray[np.float64],
    start_s: NDArray[np.float64],
    length: NDArray[np.int64],
    timestamps: NDArray[np.float64],
) -> ObjectRows:
    """Apply the rule to one object.

    Args:
        key: object, for messages.
        times: [F] presentation times of its frames, seconds.
        start_s: [K] from_timestamp of its episodes, in rising order.
        length: [K] rows of each episode.
        timestamps: [R] timestamp of every row, episodes one after another, R = sum of `length`.
    """
    first, base = _starts(key, times, start_s, length)
    queries = np.repeat(base, length) + timestamps
    frames = nearest(times, queries)
    # The stock check compares in float32, where a time and its own rounding agree even hours into a file.
    off = np.abs(times[frames].astype(np.float32) - queries.astype(np.float32))
    off_s = np.where(np.isnan(off), np.inf, off.astype(np.float64))  # NaN would pass every comparison
    return ObjectRows(first=first, frames=frames, off_s=off_s)


def match_rows_by_index(
    key: str, times: NDArray[np.float64], start_s: NDArray[np.float64], length: NDArray[np.int64]
) -> ObjectRows:
    """Give row k of an episode the k-th frame after the episode's first, whatever the rows' timestamps say.

    For datasets whose timestamps are those of a step's end, so that the stock rule is one frame late everywhere.
    Arguments are those of `match_rows`. Rows beyond the last frame get the last one, and as `off_s` the time they are
    beyond it at the object's mean frame interval.
    """
    first, _ = _starts(key, times, start_s, length)
    rows = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    wanted = np.repeat(first, length) + rows
    frames = np.minimum(wanted, len(times) - 1)
    interval = (times[-1] - times[0]) / max(1, len(times) - 1) or 1.0
    return ObjectRows(first=first, frames=frames, off_s=(wanted - frames) * interval)


def _starts(
    key: str, times: NDArray[np.float64], start_s: NDArray[np.float64], length: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """First frame of each episode, and the time that stands for its from_timestamp."""
    near = nearest(times, start_s)
    drift = np.abs(times[near] - start_s)
    tiled = np.cumsum(length) - length
    if length.sum() == len(times) and (np.any(drift > TOLERANCE_S) or np.array_equal(near, tiled)):
        # The episodes fill the object exactly, so counting frames beats float times. A constant shift of all pts is
        # kept: it is no drift, and rows that break the tolerance because of it must be reported.
        if drift.max() > TOLERANCE_S:
            logger.info(
                "%s: from_timestamp drifts by up to %.2g s; episodes are placed by counting frames", key, drift.max()
            )
        origin = times[0] if drift[0] <= TOLERANCE_S else 0.0
        return tiled, times[tiled] - times[0] + origin
    if np.any(drift > TOLERANCE_S):
        rows, frames = int(length.sum()), len(times)
        logger.warning(
            "%s: from_timestamp is up to %.2g s away from any frame, and %d rows do not fill %d frames",
            key,
            drift.max(),
            rows,
            frames,
        )
    return near, start_s
