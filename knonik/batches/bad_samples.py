"""Samples that cannot be made: raised, or counted, listed and done without.

In a batch of a fixed size the nearest good sample takes the place of a bad one. A pack is without it: it may be of any
size, and what is longer than the bad sample would not fit into its budget.
"""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knonik.order.plan import BatchPlan

logger = logging.getLogger(__name__)

POLICIES = ("raise", "skip")


@dataclass(frozen=True, kw_only=True)
class BadSample:
    """A sample that was left out. dataset: part of the source. reason: the error it gave."""

    dataset: int
    episode: int
    frame: int
    reason: str


class BadSamples:
    """What is done about bad samples, and the list of those met.

    Args:
        policy: `raise` stops at the first; `skip` does without.
        max_share: with `skip`, distinct bad samples that are tolerated, as a share of `num_anchors`.
        num_anchors: samples of one epoch.
        packs: bad samples are left out instead of replaced.
    """

    def __init__(self, policy: str, *, max_share: float, num_anchors: int, packs: bool = False) -> None:
        if policy not in POLICIES:
            raise ValueError(f"on_bad_sample={policy!r} is not known; allowed: {', '.join(POLICIES)}")
        if not 0 <= max_share <= 1:
            raise ValueError(f"max_bad_share={max_share} is not allowed; give a share from 0 to 1")
        self.skip = policy == "skip"
        self._max_share, self._num_anchors, self._packs = max_share, num_anchors, packs
        self._lock = threading.Lock()
        self._met: dict[tuple[int, int, int], BadSample] = {}
        self._replaced = 0

    def settled(self, plan: BatchPlan, flat: Mapping[str, NDArray[Any]], bad: Mapping[int, Exception]) -> BatchPlan:
        """The plan without its bad samples; `flat`, the pictures of each camera, follow it in place from the first on.

        Where samples are replaced, their positions stay: they name places in the order, and random draws follow them.

        Raises:
            the first error, if the bad samples met so far are more than the share, or no sample of the batch is good.
        """
        for index, error in bad.items():
            self._note(plan, index, error)
        first = next(iter(bad.values()))
        allowed = self._max_share * self._num_anchors
        if len(self._met) > allowed:
            first.add_note(
                f"{len(self._met)} bad samples so far, max_bad_share={self._max_share} allows {allowed:g} of "
                f"{self._num_anchors}; see Loader.bad_samples"
            )
            raise first
        good = np.array([index for index in range(len(plan.positions)) if index not in bad])
        if not len(good):
            first.add_note("no sample of the batch is good")
            raise first
        source = good if self._packs else [int(good[np.argmin(np.abs(good - i))]) for i in range(len(plan.positions))]
        for camera, pictures in flat.items():
            steps = plan.seen[camera].shape[1]
            # Upwards: a pack's samples move down, over those that moved before; replaced ones are read where they are.
            for index, place in enumerate(source):
                if index != place:
                    pictures[index * steps : (index + 1) * steps] = pictures[place * steps : (place + 1) * steps]
        return replace(
            plan,
            positions=plan.positions[good] if self._packs else plan.positions,
            datasets=plan.datasets[source],
            episodes=plan.episodes[source],
            frames=plan.frames[source],
            seen={camera: values[source] for camera, values in plan.seen.items()},
        )

    def listed(self) -> list[BadSample]:
        """Distinct bad samples met so far."""
        with self._lock:
            return list(self._met.values())

    def gauges(self) -> dict[str, float]:
        """`bad_samples`, distinct ones met, and `bad_samples_replaced`, times one was replaced or left out."""
        with self._lock:
            return {"bad_samples": len(self._met), "bad_samples_replaced": self._replaced}

    def _note(self, plan: BatchPlan, index: int, error: Exception) -> None:
        place = int(plan.datasets[index]), int(plan.episodes[index]), int(plan.frames[index])
        with self._lock:
            self._replaced += 1
            known = place in self._met
            if not known:
                dataset, episode, frame = place
                self._met[place] = BadSample(dataset=dataset, episode=episode, frame=frame, reason=str(error))
        if not known:
            logger.warning("sample left out: %s", error)
