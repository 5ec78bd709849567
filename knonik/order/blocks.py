"""The order `blocks`: runs of anchors that share GOPs are kept near each other, so that each GOP is decoded once.

In every epoch the runs are permuted and laid end to end. That stream is cut into `lanes` equal contiguous shares;
position p belongs to lane p % lanes, so a batch mixes all lanes, and where the world size divides the lanes a GOP is
met by one rank only, but for the at most lanes - 1 runs an epoch that a share's border cuts. Inside a lane, whole runs
are joined to windows and the samples of a window are permuted. Every anchor comes once an epoch; nothing depends on
ranks.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from knonik.order.anchors import Anchors, Permutation, mix64, mix64_array

if TYPE_CHECKING:
    from knonik.dataset import Dataset

Int64Array = NDArray[np.int64]
BLOCK_WINDOW, LANES = 1024, 8  # of a loader that is not told others
_ROWS = 1 << 16  # anchors looked up in the index at once: bounds memory on sets of many millions
_WINDOWS_KEPT = 256


class BlockOrder:
    """The block order of one epoch; item i is the number of an anchor in stored order.

    Args:
        lengths: [R] anchors of each run, in stored order.
        seed, epoch: choose the permutations.
        window: samples a window of one lane holds at least, but for the last window of each lane.
        lanes: shares of the stream.
        begin: global position of the epoch's first item, which decides the lane of each item.
    """

    def __init__(self, lengths: Int64Array, *, seed: int, epoch: int, window: int, lanes: int, begin: int = 0) -> None:
        self._total, self._target, self._lanes = int(lengths.sum()), window, lanes
        self._permuted = Permutation(len(lengths), seed, epoch).take(np.arange(len(lengths)))
        self._starts = (np.cumsum(lengths) - lengths)[self._permuted]  # first anchor of each run, in stream order
        self._ends = np.cumsum(lengths[self._permuted])  # where it ends in the stream
        self._before = self._ends - lengths[self._permuted]
        self._offset = begin % lanes
        lane = np.arange(lanes)
        self._first = (lane - self._offset) % lanes  # first item of each lane
        counts = np.maximum(0, -(-(self._total - self._first) // lanes))
        self._lane_begin = np.append(0, np.cumsum(counts))
        self._key = mix64(mix64(mix64(seed + 0x9E3779B97F4A7C15) ^ epoch) + 0xE7037ED1A0B428DB)
        self._bounds: dict[int, list[int]] = {}
        self._windows: dict[int, Int64Array] = {}

    def __len__(self) -> int:
        return self._total

    def take(self, items: Int64Array) -> Int64Array:
        """Anchor numbers of many items [n], each in [0, len)."""
        lanes = (items + self._offset) % self._lanes
        places = self._lane_begin[lanes] + (items - self._first[lanes]) // self._lanes
        anchors = np.empty_like(items)
        for lane in np.unique(lanes).tolist():
            (chosen,) = np.nonzero(lanes == lane)
            bounds = self.window_bounds(lane)
            windows = np.searchsorted(bounds, places[chosen], side="right") - 1
            for window in np.unique(windows).tolist():
                inside = chosen[windows == window]
                anchors[inside] = self._window(bounds[window], bounds[window + 1])[places[inside] - bounds[window]]
        return anchors

    def window_bounds(self, lane: int) -> list[int]:
        """Where the windows of a lane begin and end in the permuted stream, rising."""
        if lane not in self._bounds:
            begin, stop = int(self._lane_begin[lane]), int(self._lane_begin[lane + 1])
            cuts = self._ends[np.searchsorted(self._ends, begin, side="right") :]
            cuts = cuts[: np.searchsorted(cuts, stop)].tolist()
            bounds, after = [begin], bisect_left(cuts, begin + self._target)
            while after < len(cuts):
                bounds.append(cuts[after])
                after = bisect_left(cuts, cuts[after] + self._target, lo=after)
            # The rest stays a smaller window: joined to the one before, it would double what has to be held.
            self._bounds[lane] = [*bounds, stop]
        return self._bounds[lane]

    def _window(self, begin: int, stop: int) -> Int64Array:
        """Anchors of the window [begin, stop) of the stream, permuted."""
        found = self._windows.get(begin)
        if found is None:
            if len(self._windows) >= _WINDOWS_KEPT + self._lanes:
                self._windows.clear()
            stream = np.arange(begin, stop)
            run = np.searchsorted(self._ends, stream, side="right")
            anchors = self._starts[run] + stream - self._before[run]
            noise = mix64_array(stream.astype(np.uint64) + np.uint64(self._key))
            found = self._windows[begin] = anchors[np.argsort(noise, kind="stable")]
        return found


def longest_window(lengths: Int64Array, window: int) -> int:
    """No window of `BlockOrder` holds more samples than this."""
    return window + int(lengths.max()) - 1


def gop_runs(
    dataset: "Dataset", anchors: Anchors, windows: Mapping[str, Sequence[int] | range], longest: int
) -> Int64Array:
    """Anchors [R] of each run: as short as possible so that no two runs need frames of one GOP.

    Cameras need not have their GOPs at the same steps, and windows reach from one into the next: a run ends only where
    no camera has a GOP that both sides need, which may be at the end of the episode. Such a run of more than `longest`
    anchors is cut between GOPs of the camera with the longest ones, and GOPs of the other cameras or of windows that
    lie across a cut are decoded once on each side.

    Args:
        windows: camera key to step offsets from the anchor.
        longest: anchors above which a run of several GOPs is cut.
    """
    total = len(anchors)
    # Pictures stored one by one decode alone: they need no run.
    videos = [camera for camera in windows if dataset.episodes.cameras[camera].kind != "image"]
    free = np.full(total, bool(videos))  # no GOP is needed on both sides of the anchor's beginning
    free[anchors.ends - anchors.counts] = True  # all there is without video: runs are the stretches of anchors
    ids = np.repeat(anchors.ids, anchors.counts)
    same_episode = ids[1:] == ids[:-1]
    leading, num_leading = np.ones(total, np.bool_), total + 1
    for camera in videos:
        low = high = _groups(dataset, camera, anchors, min(windows[camera]))
        if max(windows[camera]) != min(windows[camera]):
            high = _groups(dataset, camera, anchors, max(windows[camera]))
        # GOPs rise within an episode, and a window has all between its ends: it is clear of the one before it when it
        # begins behind it. Episodes lie in any order and may share a GOP where they meet.
        free[1:] &= np.where(same_episode, low[1:] > high[:-1], low[1:] != high[:-1])
        own = np.append(True, high[1:] != high[:-1])
        if own.sum() < num_leading:
            leading, num_leading = own, int(own.sum())
    starts = np.append(np.flatnonzero(free), total)
    pieces: list[Int64Array] = []
    for run in np.flatnonzero(np.diff(starts) > longest).tolist():
        begin, stop = int(starts[run]), int(starts[run + 1])
        cuts = (begin + np.flatnonzero(leading[begin:stop])).tolist()
        pieces.append(np.array(_packed(cuts, begin, stop, longest), np.int64))
    starts = np.unique(np.concatenate([starts, *pieces]))
    lengths: Int64Array = np.diff(starts)
    return lengths


def _packed(cuts: list[int], begin: int, stop: int, longest: int) -> list[int]:
    """Those of `cuts` that part [begin, stop) into pieces of at most `longest` where single GOPs allow it."""
    chosen, last = [], begin
    for cut, following in zip(cuts, [*cuts[1:], stop], strict=True):
        if cut > last and following - last > longest:
            chosen.append(cut)
            last = cut
    return chosen


def _groups(dataset: "Dataset", camera: str, anchors: Anchors, offset: int) -> Int64Array:
    """One number per anchor, equal where the frames at `offset` are of the same GOP of the same object."""
    codes = np.empty(len(anchors), np.int64)
    numbers_of: dict[str, int] = {}
    for begin in range(0, len(anchors), _ROWS):
        part = slice(begin, min(begin + _ROWS, len(anchors)))
        episodes, frames = anchors.take(np.arange(part.start, part.stop))
        seen, _ = dataset.window(episodes, frames, [offset])
        keys, numbers = dataset.index.locate_many(episodes, camera, seen[:, 0])
        objects = np.array([numbers_of.setdefault(key, len(numbers_of)) for key in keys])
        codes[part] = objects << 40
        names = list(numbers_of)
        for number in np.unique(objects).tolist():
            if not dataset.index.usable(names[number]):
                continue  # no frame of it will ever be decoded
            (chosen,) = np.nonzero(objects == number)
            first_frames = dataset.index.object(names[number]).first_frames
            codes[begin + chosen] += np.searchsorted(first_frames, numbers[chosen], side="right")
    return codes
