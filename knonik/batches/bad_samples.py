"""Samples that cannot be made: raised, or replaced by a good one of the same batch, counted and listed."""

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
        policy: `raise` stops at the first; `skip` puts the nearest good sample of the batch in its place.
        max_share: with `skip`, distinct bad samples that are tolerated, as a share of `num_anchors`.
        num_anchors: samples of one epoch.
    """

    def __init__(self, policy: str, *, max_share: float, num_anchors: int) -> None:
        if policy not in POLICIES:
            raise ValueError(f"on_bad_sample={policy!r} is not known; allowed: {', '.join(POLICIES)}")
        if not 0 <= max_share <= 1:
            raise ValueError(f"max_bad_share={max_share} is not allowed; give a share from 0 to 1")
        self.skip = policy == "skip"
        self._max_share, self._num_anchors = max_share, num_anchors
        self._lock = threading.Lock()
        self._met: dict[tuple[int, int, int], BadSample] = {}
        self._replaced = 0

    def replaced(self, plan: BatchPlan, flat: Mapping[str, NDArray[Any]], bad: Mapping[int, Exception]) -> BatchPlan:
        """Copy the pictures of the nearest good sample over each bad one; the plan that says so.

        Positions stay: they name places in the order, and random draws follow them.

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
        episodes, frames, datasets = plan.episodes.copy(), plan.frames.copy(), plan.datasets.copy()
        seen = {camera: values.copy() for camera, values in plan.seen.items()}
        for index in bad:
            source = int(good[np.argmin(np.abs(good - index))])
            for values in (episodes, frames, datasets, *seen.values()):
                values[index] = values[source]
            for camera, pictures in flat.items():
                steps = seen[camera].shape[1]
                pictures[index * steps : (index + 1) * steps] = pictures[source * steps : (source + 1) * steps]
        return replace(plan, episodes=episodes, frames=frames, datasets=datasets, seen=seen)

    def listed(self) -> list[BadSample]:
        """Distinct bad samples met so far."""
        with self._lock:
            return list(self._met.values())

    def gauges(self) -> dict[str, float]:
        """`bad_samples`, distinct ones met, and `bad_samples_replaced`, times one was replaced."""
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
