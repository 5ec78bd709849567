"""Which samples a batch holds and which frames they need: functions of (seed, position) that read nothing."""

import hashlib
import itertools
import logging
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from knonik.dataset import Dataset
from knonik.order.anchors import mix64
from knonik.order.blocks import BLOCK_WINDOW, LANES
from knonik.order.endless import ORDERS, EndlessOrder
from knonik.order.mixing import measure_mixing
from knonik.order.mixture import Mixture, Part, Slots, slot_counts
from knonik.order.select import digest_arrays

logger = logging.getLogger(__name__)

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

    begin: global position of the first sample of the batch over all ranks. end: where the next batch begins.
    positions, datasets, episodes, frames: [B] global position, part of the source, episode id and anchor step of each
    sample. seen: camera to frames [B, T] inside the episode. jobs: GOPs to decode, each named once. blank: camera to
    places [n] that no job fills because the part has no such camera; they are to be black.
    """

    begin: int
    end: int
    positions: Int64Array
    datasets: Int64Array
    episodes: Int64Array
    frames: Int64Array
    seen: dict[str, Int64Array]
    jobs: list[GopJob]
    blank: dict[str, Int64Array] = field(default_factory=dict)


class Planner:
    """Resolves positions of the endless global order into samples and frames.

    The global order runs on over epochs: position p of a dataset is item p % N of epoch p // N, N being the number of
    anchors; a mixture deals its positions to its parts, each of which runs on in the same way. A batch may straddle
    epochs, so no sample is dropped or padded and every epoch is exactly a permutation.

    Args:
        source: a dataset or a mixture.
        batch_size: samples of this rank.
        windows: camera or column key to step offsets; those of all keys decide which steps `inside` takes.
        cameras: names of the cameras to plan for.
        order: `exact`, or `blocks` for long GOPs; see `knonik.order.blocks`.
        block_window, lanes: of the order `blocks`: samples over which those of a GOP are spread at least, over all
            lanes, and the number of lanes, which the world size should divide.

    Attributes:
        num_anchors: anchors of all parts: an epoch's samples.
        global_batch: samples of a batch over all ranks. lanes: those of the order, 1 unless it is `blocks`.
        digest: short text that changes with whatever the order depends on beside the seed, and with nothing else.
        reuse_batches: the samples of a GOP that are decoded together lie in at most so many successive batches of a
            rank; 1 in an exact order, where waiting for more would not pay.
        held_samples: samples of this rank that are waiting at any time although pictures of their GOPs have been used
            already, at most; 0 in an exact order.

    Raises:
        ValueError: a window, an edge policy, a camera or an order is not possible; names the argument.
    """

    def __init__(
        self,
        source: Dataset | Mixture,
        *,
        batch_size: int,
        seed: int,
        windows: Mapping[str, Offsets],
        edge: str,
        cameras: Sequence[str],
        rank: int,
        world_size: int,
        shuffle: bool,
        order: str = "exact",
        block_window: int = BLOCK_WINDOW,
        lanes: int = LANES,
    ) -> None:
        for name, text, allowed in (("edge", edge, EDGES), ("order", order, ORDERS)):
            if text not in allowed:
                raise ValueError(f"{name}={text!r} is not known; allowed: {', '.join(allowed)}")
        sizes = {"batch_size": batch_size, "world_size": world_size, "block_window": block_window, "lanes": lanes}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name}={value} is not allowed; give 1 or more")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank} is not allowed; with world_size={world_size} give 0..{world_size - 1}")
        if empty := [key for key, offsets in windows.items() if not len(offsets)]:
            raise ValueError(f"windows of {empty} are empty; give at least one offset, such as [0]")
        if order == "blocks" and not shuffle:
            raise ValueError("order='blocks' needs shuffle=True; without shuffle the order is the stored one")
        self._mixture = source if isinstance(source, Mixture) else Mixture([Part(dataset=source)])
        self._cameras = list(cameras)
        self._check_cameras()
        self._windows = [
            {key: self._mixture.offsets(number, offsets) for key, offsets in windows.items()}
            for number in range(len(self._mixture.parts))
        ]
        self._share = rank + world_size * np.arange(batch_size, dtype=np.int64)
        self.global_batch = batch_size * world_size
        if order == "blocks" and lanes % world_size:
            logger.warning("%d ranks do not divide lanes=%d: some GOPs are decoded by several ranks", world_size, lanes)
        self.lanes = lanes if order == "blocks" else 1
        self._build_orders(seed, edge, shuffle, block_window if order == "blocks" else 0)
        nothing = np.zeros(0, np.int64)
        self._block: tuple[Int64Array, ...] = (nothing, nothing, nothing, nothing)
        self._block_begin = 0
        if order == "blocks" and logger.isEnabledFor(logging.INFO):
            logger.info("order blocks with block_window=%d: %s", block_window, measure_mixing(self))

    def _check_cameras(self) -> None:
        known = self._mixture.cameras + self._mixture.depth_cameras
        if unknown := [camera for camera in self._cameras if camera not in known]:
            raise ValueError(f"cameras={unknown} are not in the dataset; it has {known}")
        for number, part in enumerate(self._mixture.parts):
            missing = [camera for camera in self._cameras if part.camera(camera) is None]
            if missing and self._mixture.missing_cameras == "error":
                raise ValueError(
                    f"parts[{number}] ({part.dataset.uri}) has no camera {missing}; name its own in Part.cameras, "
                    f"leave the camera out, or give missing_cameras='black'"
                )

    def _build_orders(self, seed: int, edge: str, shuffle: bool, block_window: int) -> None:
        lanes, parts = self.lanes, self._mixture.parts
        # `inside` asks for anchors whose whole future window lies in the episode; the past is repeated at its start.
        futures = [max((max(offsets) for offsets in windows.values()), default=0) for windows in self._windows]
        horizons = [1 + max(0, future) if edge == "inside" else 1 for future in futures]
        anchors = [part.dataset.anchors(horizon) for part, horizon in zip(parts, horizons, strict=True)]
        self.num_anchors = sum(map(len, anchors))
        weights = [part.weight or len(own) for part, own in zip(parts, anchors, strict=True)]
        self._slots = Slots(slot_counts(weights) if len(parts) > 1 else [1], seed=seed, lanes=lanes)
        self._orders: list[EndlessOrder] = []
        for number, part in enumerate(parts):
            own_seed = seed if number == 0 else mix64(mix64(seed) ^ number)  # parts with equal content shall differ
            if not block_window:
                self._orders.append(EndlessOrder(anchors[number], seed=own_seed, shuffle=shuffle))
                continue
            windows: dict[str, list[int]] = {}
            for camera in self._cameras:
                if own := part.camera(camera):
                    windows.setdefault(own, []).extend(self._windows[number][camera])
            # A part with few of the slots passes its window slowly: a smaller one bounds what is held at any time.
            window = -(-block_window * int(self._slots.counts[number]) // (self._slots.num_slots * lanes))
            self._orders.append(
                EndlessOrder.blocks(
                    part.dataset, anchors[number], seed=own_seed, windows=windows, window=window, lanes=lanes
                )
            )
        # Samples of a lane are `lanes` positions apart; n successive positions touch at most (n - 2) // B + 2 batches.
        longest = [order.longest_window for order in self._orders]
        span = (max(self._slots.span(number, samples) for number, samples in enumerate(longest)) - 1) * lanes + 1
        self.reuse_batches = (span - 2) // self.global_batch + 2 if span > 1 else 1
        self.held_samples = self._most_held() if block_window else 0
        digest = hashlib.sha256(b"".join(order.digest() for order in self._orders))
        if len(parts) > 1:
            digest_arrays(digest, self._slots.counts, np.array([lanes]))
        self.digest = digest.hexdigest()[:16]

    def _most_held(self) -> int:
        """Bound of the samples that wait while GOPs are decoded for `reuse_batches` batches at a time."""
        batch_size = len(self._share)
        ahead = (self.reuse_batches - 1) * self.global_batch
        turn = self._slots.num_slots * self.lanes
        total = 0
        for count, order in zip(self._slots.counts.tolist(), self._orders, strict=True):
            among = ahead if count == self._slots.num_slots else min(ahead, count * self.lanes * (ahead // turn + 2))
            # The GOPs of the windows under way, in this epoch and in the later ones that the look ahead meets.
            total += min(among, order.longest_window * self.lanes * (1 + -(-among // len(order))))
        world_size = self.global_batch // batch_size
        uneven = self.lanes if self.lanes % world_size else 0  # then ranks share lanes, not always equally
        return min(-(-total // world_size) + uneven, (self.reuse_batches - 1) * batch_size)

    def plan(self, begin: int) -> BatchPlan:
        """This rank's share of the batch that starts at global position `begin`."""
        return self._plan(*self._samples(begin), begin=begin, end=begin + self.global_batch)

    def resolve(self, positions: Int64Array, *, begin: int, end: int) -> BatchPlan:
        """The plan of a batch of the samples at `positions` [B], whatever rank they would belong to."""
        return self._plan(positions, *self.samples(positions), begin=begin, end=end)

    def _plan(
        self,
        positions: Int64Array,
        datasets: Int64Array,
        episodes: Int64Array,
        frames: Int64Array,
        *,
        begin: int,
        end: int,
    ) -> BatchPlan:
        seen: dict[str, Int64Array] = {}
        jobs: list[GopJob] = []
        blank: dict[str, Int64Array] = {}
        members = [np.flatnonzero(datasets == number) for number in range(len(self._orders))]
        for camera in self._cameras:
            steps = len(self._windows[0][camera])
            seen[camera] = np.zeros((len(positions), steps), np.int64)
            unfilled: list[Int64Array] = []
            for number, chosen in enumerate(members):
                if not len(chosen):
                    continue
                part = self._mixture.parts[number]
                offsets = self._windows[number][camera]
                seen[camera][chosen], _ = part.dataset.window(episodes[chosen], frames[chosen], offsets)
                places = (chosen[:, None] * steps + np.arange(steps)).reshape(-1)
                own = part.camera(camera)
                if own is None:
                    unfilled.append(places)
                    continue
                jobs += self._jobs(number, camera, own, episodes[chosen], seen[camera][chosen], places)
            if unfilled:
                blank[camera] = np.concatenate(unfilled)
        return BatchPlan(
            begin=begin,
            end=end,
            positions=positions,
            datasets=datasets,
            episodes=episodes,
            frames=frames,
            seen=seen,
            jobs=jobs,
            blank=blank,
        )

    def _samples(self, begin: int) -> tuple[Int64Array, ...]:
        """Positions, parts, episodes and frames of a batch, [B] each, cut from a block resolved at once.

        Permuting 32 positions costs as much as permuting 1000, so batches to come are resolved along; of a tiny set not
        more than two epochs, each of which has its own permutation.
        """
        size = len(self._share)
        number, off = divmod(begin - self._block_begin, self.global_batch)
        if off or not 0 <= number * size < len(self._block[0]):
            batches = max(1, min(_BLOCK_SAMPLES // size, 2 * self.num_anchors // self.global_batch))
            starts = begin + self.global_batch * np.arange(batches, dtype=np.int64)
            positions = (starts[:, None] + self._share).reshape(-1)
            self._block, self._block_begin, number = (positions, *self.samples(positions)), begin, 0
        return tuple(part[number * size : (number + 1) * size].copy() for part in self._block)

    def samples(self, positions: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """(parts, episode ids, frames) at global positions [n], in any order."""
        parts, own = self._slots.take(positions)
        episodes, frames = np.empty_like(positions), np.empty_like(positions)
        for number, order in enumerate(self._orders):
            (chosen,) = np.nonzero(parts == number)
            if len(chosen):
                episodes[chosen], frames[chosen] = order.take(own[chosen])
        return parts, episodes, frames

    def rows(self, parts: Int64Array, episodes: Int64Array, frames: Int64Array) -> Int64Array:
        """Row number of samples [n], each inside its own part."""
        rows = np.empty_like(frames)
        for number, part in enumerate(self._mixture.parts):
            (chosen,) = np.nonzero(parts == number)
            rows[chosen] = part.dataset.rows(episodes[chosen], frames[chosen])
        return rows

    def _jobs(
        self, number: int, camera: str, own: str, episodes: Int64Array, seen: Int64Array, places: Int64Array
    ) -> list[GopJob]:
        index = self._mixture.parts[number].dataset.index
        keys, numbers = index.locate_many(np.repeat(episodes, seen.shape[1]), own, seen.reshape(-1))
        ids = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        objects = np.fromiter(map(ids.__getitem__, keys), np.int64, len(keys))
        groups = np.empty_like(numbers)
        for key, i in ids.items():
            (chosen,) = np.nonzero(objects == i)
            groups[chosen] = index.groups(key, numbers[chosen])
        # Long windows come to thousands of frames a batch: they are sorted by GOP, and Python sees whole GOPs only.
        order = np.lexsort((groups, objects))
        objects, sorted_groups = objects[order], groups[order]
        starts = np.flatnonzero((objects[1:] != objects[:-1]) | (sorted_groups[1:] != sorted_groups[:-1])) + 1
        bounds = [0, *starts.tolist(), len(order)] if len(order) else [0]
        numbers_of, places_of, first = numbers[order].tolist(), places[order].tolist(), order.tolist()
        jobs = [
            (
                first[begin],
                GopJob(
                    dataset=number,
                    camera=camera,
                    source_camera=own,
                    key=keys[first[begin]],
                    group=int(sorted_groups[begin]),
                    numbers=numbers_of[begin:end],
                    places=places_of[begin:end],
                ),
            )
            for begin, end in itertools.pairwise(bounds)
        ]
        return [job for _, job in sorted(jobs, key=operator.itemgetter(0))]
