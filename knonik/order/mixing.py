"""How well an order mixes, measured on the samples it gives: an order of blocks is reported as what it is."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from knonik.order.plan import Planner

_STRETCHES = 32  # places of the epoch that are looked at


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """Mixing seen over one epoch.

    episodes_per_batch: distinct episodes in a batch over all ranks, mean. episodes_per_batch_random: the same for as
    many samples picked at random. distance: how far apart in stored order the samples are that follow each other in one
    lane (and one part), mean; distance_random: of random pairs. All are near the value at random in an exact order.
    held_samples, reuse_batches: see `Planner`.
    """

    episodes_per_batch: float
    episodes_per_batch_random: float
    distance: float
    distance_random: float
    held_samples: int
    reuse_batches: int

    def __str__(self) -> str:
        return (
            f"{self.episodes_per_batch:.1f} episodes in a batch ({self.episodes_per_batch_random:.1f} at random), "
            f"lane neighbours {self.distance:.0f} rows apart ({self.distance_random:.0f} at random), GOPs used over "
            f"{self.reuse_batches} batches, up to {self.held_samples} samples held"
        )


def measure_mixing(planner: "Planner", seed: int = 0) -> Mixing:
    """Look at samples in 32 places spread over the first epoch; reads nothing but the order.

    Args:
        seed: of the random comparison.
    """
    size = max(planner.global_batch, 2 * planner.lanes)
    begins = np.linspace(0, max(0, planner.num_anchors - size), _STRETCHES).astype(np.int64)
    positions = begins[:, None] + np.arange(size)
    parts, episodes, frames = planner.samples(positions.reshape(-1))
    rows = planner.rows(parts, episodes, frames)
    # One number per (part, episode), so that episodes of two datasets are never the same.
    names = np.unique(np.stack([parts, episodes]), axis=1, return_inverse=True)[1].reshape(positions.shape)
    random = np.random.default_rng(seed)
    everywhere = random.choice(planner.num_anchors, positions.size).reshape(positions.shape)
    other_parts, other_episodes, other_frames = planner.samples(everywhere.reshape(-1))
    other_names = np.unique(np.stack([other_parts, other_episodes]), axis=1, return_inverse=True)[1]
    other_rows = planner.rows(other_parts, other_episodes, other_frames)
    batch = slice(0, planner.global_batch)
    return Mixing(
        episodes_per_batch=_distinct(names[:, batch]),
        episodes_per_batch_random=_distinct(other_names.reshape(positions.shape)[:, batch]),
        distance=_distance(parts.reshape(positions.shape), rows.reshape(positions.shape), planner.lanes),
        distance_random=_distance(other_parts.reshape(positions.shape), other_rows.reshape(positions.shape), 1),
        held_samples=planner.held_samples,
        reuse_batches=planner.reuse_batches,
    )


def _distinct(names: NDArray[np.int64]) -> float:
    return float(np.mean([len(np.unique(batch)) for batch in names]))


def _distance(parts: NDArray[np.int64], rows: NDArray[np.int64], lanes: int) -> float:
    same = parts[:, lanes:] == parts[:, :-lanes]
    far = np.abs(rows[:, lanes:] - rows[:, :-lanes])[same]
    return float(far.mean()) if far.size else 0.0
