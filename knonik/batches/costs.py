"""Tokens of samples before any picture is read: their rows and texts, handed to who knows how they become tokens."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from knonik.batches.batch import Batch
from knonik.batches.gather import Gather
from knonik.order.plan import BatchPlan, Planner

Tokens = Callable[[Batch], Sequence[int]]
"""Tokens of each sample [B] of a batch without pictures; a function of what the batch holds and of nothing else."""

Int64Array = NDArray[np.int64]


class SampleCosts:
    """Tokens of the samples at global positions; called from the planning thread alone."""

    def __init__(self, planner: Planner, gather: Gather, tokens: Tokens) -> None:
        self._planner, self._gather, self._tokens = planner, gather, tokens

    def __call__(self, positions: Int64Array) -> Sequence[int]:
        parts, episodes, frames = self._planner.samples(positions)
        begin = int(positions[0])
        plan = BatchPlan(
            begin=begin,
            end=begin + len(positions),
            positions=positions,
            datasets=parts,
            episodes=episodes,
            frames=frames,
            seen={},
            jobs=[],
        )
        return self._tokens(self._gather.batch(plan, {}))
