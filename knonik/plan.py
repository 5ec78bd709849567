"""Which samples a batch holds and which frames they need: functions of (seed, position) that read nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knonik.dataset import Dataset
from knonik.gop import gop_numbers
from knonik.order import AnchorOrder

EDGES = ("repeat", "inside")
Offsets = Sequence[int] | range
Int64Array = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class GopJob:
    """Frames of one GOP that a batch needs.

    camera, key: camera and video object. numbers: frames inside the object. places: where each goes, as index into the
    camera's [B * T] frames of the batch.
    """

    camera: str
    key: str
    numbers: list[int]
    places: list[int]


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """What one rank's share of a batch consists of.

    begin: global position of the first sample of the batch over all ranks. positions, episodes, frames: [B] global
    position, episode id and anchor step of each sample. seen: camera to frames [B, T] inside the episode.
    jobs: GOPs to decode, each named once.
    """

    begin: int
    positions: Int64Array
    episodes: Int64Array
    frames: Int64Array
    seen: dict[str, Int64Array]
    jobs: list[GopJob]


class Planner:
    """Resolves positions of the endless global order into samples and frames.

    The global order runs on over epochs: position p is item p % N of epoch p // N, N being the number of anchors. A
    batch may straddle two epochs, so no sample is dropped or padded and every epoch is exactly a permutation.

    Raises:
        ValueError: a window, an edge policy or a camera is not possible; names the argument.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        seed: int,
        windows: Mapping[str, Offsets],
        edge: str,
        cameras: Sequence[str],
        rank: int,
        world_size: int,
        shuffle: bool,
    ) -> None:
        if edge not in EDGES:
            raise ValueError(f"edge={edge!r} is not known; allowed: {', '.join(EDGES)}")
        for name, value in (("batch_size", batch_size), ("world_size", world_size)):
            if value < 1:
                raise ValueError(f"{name}={value} is not allowed; give 1 or more")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} is not allowed; with world_size={world_size} give 0..{world_size - 1}")
        if unknown := [camera for camera in cameras if camera not in dataset.cameras]:
            raise ValueError(f"cameras={unknown} are not in the dataset; it has {dataset.cameras}")
        if empty := [key for key, offsets in windows.items() if not len(offsets)]:
            raise ValueError(f"windows of {empty} are empty; give at least one offset, such as [0]")
        self._dataset, self._cameras, self._windows = dataset, list(cameras), windows
        self._share = rank + world_size * np.arange(batch_size, dtype=np.int64)
        self._seed, self._shuffle = seed, shuffle
        # `inside` asks for anchors whose whole future window lies in the episode; the past is repeated at its start.
        future = max((max(offsets) for offsets in windows.values()), default=0)
        self.horizon = 1 + max(0, future) if edge == "inside" else 1
        self.global_batch = batch_size * world_size
        self._orders: dict[int, AnchorOrder] = {}
        self.num_anchors = len(self._order(0))

    def plan(self, begin: int) -> BatchPlan:
        """This rank's share of the batch that starts at global position `begin`."""
        positions = begin + self._share
        epochs, items = positions // self.num_anchors, positions % self.num_anchors
        episodes, frames = np.empty_like(positions), np.empty_like(positions)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            chosen = epochs == epoch
            if chosen.any():
                episodes[chosen], frames[chosen] = self._order(epoch).take(items[chosen])
        seen: dict[str, Int64Array] = {}
        jobs: list[GopJob] = []
        for camera in self._cameras:
            seen[camera], _ = self._dataset.window(episodes, frames, self._windows[camera])
            jobs += self._jobs(camera, episodes, seen[camera])
        return BatchPlan(begin=begin, positions=positions, episodes=episodes, frames=frames, seen=seen, jobs=jobs)

    def _order(self, epoch: int) -> AnchorOrder:
        if epoch not in self._orders:
            # Batches go forward, so of earlier epochs only the one just left may still be straddled.
            self._orders = {e: order for e, order in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = self._dataset.order(
                seed=self._seed, epoch=epoch, horizon=self.horizon, shuffle=self._shuffle
            )
        return self._orders[epoch]

    def _jobs(self, camera: str, episodes: Int64Array, seen: Int64Array) -> list[GopJob]:
        index = self._dataset.index
        keys, numbers = index.locate_many(np.repeat(episodes, seen.shape[1]), camera, seen.reshape(-1))
        by_key: dict[str, list[int]] = {}
        for place, key in enumerate(keys):
            by_key.setdefault(key, []).append(place)
        jobs: dict[tuple[str, int], GopJob] = {}
        for key, places in by_key.items():
            wanted = numbers[places]
            for place, number, gop in zip(
                places, wanted.tolist(), gop_numbers(index.object(key), wanted).tolist(), strict=True
            ):
                job = jobs.get((key, gop))
                if job is None:
                    job = jobs[key, gop] = GopJob(camera=camera, key=key, numbers=[], places=[])
                job.numbers.append(number)
                job.places.append(place)
        return list(jobs.values())
