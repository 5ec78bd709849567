"""Which samples a batch holds and which frames they need: functions of (seed, position) that read nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from knonik.dataset import Dataset
from knonik.order import AnchorOrder

EDGES = ("repeat", "inside")
_BLOCK_SAMPLES = 2048
Offsets = Sequence[int] | range
Int64Array = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class GopJob:
    """Frames of one GOP that a batch needs.

    dataset: which part of the source. camera: its name in the batch. source_camera: the key in its own dataset.
    key: video object. group: number of the GOP inside it. numbers: frames inside the object. places: where each goes,
    as index into the camera's [B * T] frames of the batch.
    """

    dataset: int
    camera: str
    source_camera: str
    key: str
    group: int
    numbers: list[int]
    places: list[int]


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """What one rank's share of a batch consists of.

    begin: global position of the first sample of the batch over all ranks. positions, datasets, episodes, frames: [B]
    global position, part of the source, episode id and anchor step of each sample. seen: camera to frames [B, T] inside
    the episode. jobs: GOPs to decode, each named once. blank: camera to places [n] that no job fills because the part
    has no such camera; they are to be black.
    """

    begin: int
    positions: Int64Array
    datasets: Int64Array
    episodes: Int64Array
    frames: Int64Array
    seen: dict[str, Int64Array]
    jobs: list[GopJob]
    blank: dict[str, Int64Array] = field(default_factory=dict)


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
        nothing = np.zeros(0, np.int64)
        self._block: tuple[Int64Array, Int64Array, Int64Array] = (nothing, nothing, nothing)
        self._block_begin = 0
        self.reuse_batches = 1  # batches over which the samples of one GOP are spread and worth decoding together

    def plan(self, begin: int) -> BatchPlan:
        """This rank's share of the batch that starts at global position `begin`."""
        positions, episodes, frames = self._samples(begin)
        seen: dict[str, Int64Array] = {}
        jobs: list[GopJob] = []
        for camera in self._cameras:
            seen[camera], _ = self._dataset.window(episodes, frames, self._windows[camera])
            jobs += self._jobs(camera, episodes, seen[camera])
        return BatchPlan(
            begin=begin,
            positions=positions,
            datasets=np.zeros(len(positions), np.int64),
            episodes=episodes,
            frames=frames,
            seen=seen,
            jobs=jobs,
        )

    def _samples(self, begin: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Positions, episodes and frames of a batch, [B] each, cut from a block resolved at once.

        Permuting 32 positions costs as much as permuting 1000, so batches to come are resolved along.
        """
        size = len(self._share)
        number, off = divmod(begin - self._block_begin, self.global_batch)
        if off or not 0 <= number * size < len(self._block[0]):
            batches = max(1, _BLOCK_SAMPLES // size)
            starts = begin + self.global_batch * np.arange(batches, dtype=np.int64)
            positions = (starts[:, None] + self._share).reshape(-1)
            self._block, self._block_begin, number = (positions, *self._resolve(positions)), begin, 0
        positions, episodes, frames = (part[number * size : (number + 1) * size].copy() for part in self._block)
        return positions, episodes, frames

    def _resolve(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        epochs, items = positions // self.num_anchors, positions % self.num_anchors
        episodes, frames = np.empty_like(positions), np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            episodes[chosen], frames[chosen] = self._order(epoch).take(items[chosen])
        return episodes, frames

    def _order(self, epoch: int) -> AnchorOrder:
        if epoch not in self._orders:
            self._orders = {}  # batches go forward: an epoch left does not come back
            self._orders[epoch] = self._dataset.order(
                seed=self._seed, epoch=epoch, horizon=self.horizon, shuffle=self._shuffle
            )
        return self._orders[epoch]

    def _jobs(self, camera: str, episodes: Int64Array, seen: Int64Array) -> list[GopJob]:
        index = self._dataset.index
        keys, numbers = index.locate_many(np.repeat(episodes, seen.shape[1]), camera, seen.reshape(-1))
        jobs: dict[tuple[str, int], GopJob] = {}
        for place, (key, number) in enumerate(zip(keys, numbers.tolist(), strict=True)):
            gop = key, index.object(key).gop_number(number)
            job = jobs.get(gop)
            if job is None:
                job = jobs[gop] = GopJob(
                    dataset=0, camera=camera, source_camera=camera, key=key, group=gop[1], numbers=[], places=[]
                )
            job.numbers.append(number)
            job.places.append(place)
        return list(jobs.values())
