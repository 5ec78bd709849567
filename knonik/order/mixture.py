"""Several datasets as one endless stream of samples in exact shares, under a declared policy for what differs.

Positions are dealt in blocks of K slots. Each block gives every part a fixed number of slots, in an order of its own
that is a function of (seed, block); the part's samples follow its own endless order without gaps. So shares are exact
over every block, each part runs through permutations of its anchors, and any position is found without those before.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from knonik.order.anchors import mix64, mix64_array

if TYPE_CHECKING:
    from knonik.dataset import Dataset

Int64Array = NDArray[np.int64]
PADS = ("error", "zero")
MISSING = ("error", "black")
_EXACT_SLOTS = 4096  # blocks up to this size are tried for weights that come out to the last digit
_MOST_SLOTS = 1 << 16
_ROUGH = 1e-3  # relative error of a weight that is accepted if no such block is found


@dataclass(frozen=True, kw_only=True)
class Part:
    """A dataset of a mixture.

    weight: share of the samples relative to the other parts; None in all parts = as many as their anchors. cameras:
    name in the batch to the dataset's own key, for those to use; None = all under their own names. columns: name in the
    batch to the dataset's own column, where they differ.
    """

    dataset: "Dataset"
    weight: float | None = None
    cameras: Mapping[str, str] | None = None
    columns: Mapping[str, str] = field(default_factory=dict)

    def camera(self, name: str) -> str | None:
        """The dataset's own key of a camera of the batch, None if it has none."""
        if self.cameras is not None:
            return self.cameras.get(name)
        return name if name in (*self.dataset.cameras, *self.dataset.depth_cameras) else None

    def column(self, name: str) -> str:
        """The dataset's own name of a column of the batch."""
        return self.columns.get(name, name)


class Mixture:
    """Datasets read as one, in exact shares; goes wherever a `Dataset` goes into a loader.

    Args:
        parts: at least one. Their place is `Batch.dataset`.
        fps: None: window offsets count each dataset's own steps. A number: they count steps of 1 / fps seconds, and
            each dataset gives its nearest step, the later one of two; a slower dataset then repeats rows.
        pad: what to do where state or action have different widths: `error`, or `zero` to fill up with zeros.
        missing_cameras: what a part without one of the cameras gives: `error`, or `black` pictures.

    Attributes:
        cameras, depth_cameras: names in the batch, over all parts.

    Raises:
        ValueError: a policy, weight or camera is not possible; names part and argument.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        fps: float | None = None,
        pad: str = "error",
        missing_cameras: str = "error",
    ) -> None:
        if not parts:
            raise ValueError("parts is empty; give at least one Part")
        for argument, value, allowed in (("pad", pad, PADS), ("missing_cameras", missing_cameras, MISSING)):
            if value not in allowed:
                raise ValueError(f"{argument}={value!r} is not known; allowed: {', '.join(allowed)}")
        if fps is not None and not 0 < fps < math.inf:
            raise ValueError(f"fps={fps} is not allowed; give a positive number, or None for each dataset's own steps")
        self.parts, self.fps, self.pad, self.missing_cameras = tuple(parts), fps, pad, missing_cameras
        for number, part in enumerate(self.parts):
            own = (*part.dataset.cameras, *part.dataset.depth_cameras)
            if unknown := sorted(set((part.cameras or {}).values()) - set(own)):
                raise ValueError(f"parts[{number}].cameras names {unknown}; {part.dataset.uri} has {list(own)}")
        self.cameras = _names(self.parts, depth=False)
        self.depth_cameras = _names(self.parts, depth=True)
        if both := sorted(set(self.cameras) & set(self.depth_cameras)):
            raise ValueError(
                f"cameras {both} are colour in some parts and depth in others; rename them in Part.cameras"
            )
        given = [part.weight for part in self.parts if part.weight is not None]
        if given and len(given) < len(self.parts):
            raise ValueError(f"{len(given)} of {len(self.parts)} parts have a weight; give it in all parts or in none")
        if any(not 0 < weight < math.inf for weight in given):
            raise ValueError(f"weights {given} are not allowed; each must be a positive number")

    @property
    def uri(self) -> str:
        """The places of all parts."""
        return " + ".join(part.dataset.uri for part in self.parts)

    @property
    def fingerprint(self) -> str:
        """Digest of the parts' fingerprints, their weights and the policy."""
        said = [
            [part.dataset.fingerprint, part.weight, sorted((part.cameras or {}).items()), sorted(part.columns.items())]
            for part in self.parts
        ]
        text = json.dumps([said, self.fps, self.pad, self.missing_cameras])
        return hashlib.sha256(text.encode()).hexdigest()

    def __len__(self) -> int:
        return sum(len(part.dataset) for part in self.parts)

    def offsets(self, part: int, offsets: Sequence[int] | range) -> list[int]:
        """Window offsets in steps of a part's dataset."""
        if self.fps is None:
            return list(offsets)
        ratio = self.parts[part].dataset.fps / self.fps
        # Rates such as 29.97 are not exact: a step a millionth short of the middle counts as the middle.
        return [math.floor(offset * ratio + 0.5 + 1e-6) for offset in offsets]

    def image_shape(self, camera: str) -> tuple[int, int]:
        """(height, width) of a camera's pictures, the same in all parts that have it.

        Raises:
            ValueError: they differ; KeyError: no part has the camera.
        """
        shapes = {
            number: part.dataset.image_shape(own)
            for number, part in enumerate(self.parts)
            if (own := part.camera(camera)) is not None
        }
        if not shapes:
            raise KeyError(f"camera {camera!r} is in no part; there are {self.cameras + self.depth_cameras}")
        if len(set(shapes.values())) > 1:
            listed = ", ".join(f"parts[{number}] {height}x{width}" for number, (height, width) in shapes.items())
            raise ValueError(
                f"camera {camera}: pictures differ in size ({listed}) and cannot be in one batch; resize them in a "
                f"prefix, or leave the camera out of a part with Part.cameras"
            )
        return next(iter(shapes.values()))

    def close(self) -> None:
        """Close all datasets."""
        for part in self.parts:
            part.dataset.close()


def _names(parts: Iterable[Part], *, depth: bool) -> list[str]:
    names: dict[str, None] = {}
    for part in parts:
        own = part.dataset.depth_cameras if depth else part.dataset.cameras
        mapping = {key: key for key in own} if part.cameras is None else part.cameras
        names |= dict.fromkeys(name for name, key in mapping.items() if key in own)
    return list(names)


def slot_counts(weights: Sequence[float]) -> list[int]:
    """Slots of each part in a block, in the proportions of `weights`.

    The smallest block in which every weight comes out exactly (relative error below 1e-9), if 4096 slots allow it, else
    the smallest within 1e-3.

    Raises:
        ValueError: a weight is so small that 65,536 slots do not come that near to it; names its part.
    """
    shares = np.asarray(weights, np.float64) / math.fsum(weights)
    sizes = np.arange(len(shares), _MOST_SLOTS + 1)
    worst = np.zeros(len(sizes))
    total = np.zeros(len(sizes), np.int64)
    for share in shares.tolist():
        counts = np.rint(sizes * share)
        worst = np.maximum(worst, np.abs(counts / (sizes * share) - 1))
        total += counts.astype(np.int64)
    worst[total != sizes] = np.inf
    for limit, most in ((1e-9, _EXACT_SLOTS), (_ROUGH, _MOST_SLOTS)):
        (fitting,) = np.nonzero((worst < limit) & (sizes <= most))
        if len(fitting):
            return [int(count) for count in np.rint(sizes[fitting[0]] * shares)]
    least = int(np.argmin(shares))
    raise ValueError(
        f"the weight of parts[{least}] is a share of {shares[least]:.2e}; blocks of up to {_MOST_SLOTS} slots do not "
        f"give it to within {_ROUGH:.1%}. Raise its weight, round the weights, or leave the part out"
    )


class Slots:
    """Position of the mixture -> (part, position in the part's own endless order).

    Args:
        counts: [P] slots of each part in a block.
        seed: chooses the order of the slots in each block.
        lanes: blocks are dealt separately for the positions of each remainder modulo `lanes`, and a part's position
            has the same remainder, so that the lanes of a part's order are lanes of the mixture.
    """

    def __init__(self, counts: Sequence[int], *, seed: int, lanes: int = 1) -> None:
        self.counts, self._lanes = np.array(counts, np.int64), lanes
        self.num_slots = int(self.counts.sum())
        self._labels = np.repeat(np.arange(len(counts)), self.counts)
        self._first = (np.cumsum(self.counts) - self.counts)[self._labels]
        self._key = np.uint64(mix64(mix64(seed) ^ 0x8EBC6AF09C88C6E3))

    def take(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(parts, own positions) of positions [n]."""
        if len(self.counts) == 1:
            return np.zeros_like(positions), positions
        turns, lanes = np.divmod(positions, self._lanes)
        blocks, slots = np.divmod(turns, self.num_slots)
        met, inverse = np.unique(blocks * self._lanes + lanes, return_inverse=True)
        part_of, rank_of = self._deal(met)
        parts = part_of[inverse, slots]
        own_turns = blocks * self.counts[parts] + rank_of[inverse, slots]
        return parts, own_turns * self._lanes + lanes

    def span(self, part: int, samples: int) -> int:
        """Turns of one lane among which any `samples` successive samples of a part lie, at most."""
        count = int(self.counts[part])
        if count == self.num_slots:
            return samples
        # Worst: the first at the beginning of its block and the last at the end of another.
        return ((samples - 2) // count + 2) * self.num_slots if samples > 1 else 1

    def _deal(self, blocks: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Part of each slot and how many slots of that part come before it in the block, both [blocks, slots]."""
        keys = mix64_array(blocks.astype(np.uint64) + self._key)
        noise = mix64_array(keys[:, None] + np.arange(self.num_slots, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        parts = self._labels[np.argsort(noise, axis=1, kind="stable")]
        order = np.argsort(parts, axis=1, kind="stable")
        ranks = np.empty_like(order)
        np.put_along_axis(ranks, order, np.broadcast_to(np.arange(self.num_slots) - self._first, order.shape), axis=1)
        return parts, ranks
