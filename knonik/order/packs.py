"""Packs: batches by the tokens their samples come to, instead of by their number.

The global order is cut greedily from where a step begins: a pack takes the next samples as long as they fit into the
budget and are no more than the bound. Pack k of a step goes to rank k, so every rank has exactly one pack in every
step. Where packs begin follows from the position at which the run began and from nothing else: neither from the number
of ranks nor from what was read ahead. So the saved position, counted in samples, is all that a resumed run needs, and
on another number of ranks it cuts the very same packs.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from knonik.order.plan import BatchPlan, Planner

Int64Array = NDArray[np.int64]
Cost = Callable[[Int64Array], Sequence[int] | Int64Array]

_LOOK = 4, 64  # packs whose costs are asked for at once: one question for many samples costs less


class Packs:
    """Cuts the order into packs.

    Args:
        cost: tokens of the samples at global positions [n]; a function of the position alone, asked for each of them
            once as long as positions rise.
        budget: tokens a pack may hold.
        most: samples a pack may hold.
    """

    def __init__(self, cost: Cost, *, budget: int, most: int) -> None:
        for name, value in (("pack_tokens", budget), ("batch_size", most)):
            if value < 1:
                raise ValueError(f"{name}={value} is not allowed; give 1 or more")
        self._cost, self._budget, self.most = cost, budget, most
        self._begin = 0
        self._known = np.zeros(0, np.int64)  # costs from `_begin` on

    def cut(self, begin: int, count: int) -> Int64Array:
        """[count + 1] positions: `begin`, and where each of the next `count` packs ends.

        Raises:
            ValueError: a single sample costs more than the budget; names it.
        """
        ends = np.empty(count + 1, np.int64)
        ends[0] = begin
        for number in range(count):
            first = int(ends[number])
            costs = self._costs(first, min(self.most, self._budget), count - number)
            if costs[0] > self._budget:
                raise ValueError(
                    f"the sample at position {first} has {int(costs[0])} tokens, more than pack_tokens={self._budget} "
                    "allows for a whole pack; raise pack_tokens, or make samples smaller"
                )
            fitting = int(np.searchsorted(np.cumsum(costs), self._budget, side="right"))
            ends[number + 1] = first + fitting
        return ends

    def _costs(self, first: int, samples: int, packs: int) -> Int64Array:
        """Costs of `samples` samples from position `first` on."""
        off = first - self._begin
        if not 0 <= off <= len(self._known):
            self._begin, self._known, off = first, np.zeros(0, np.int64), 0
        if len(self._known) - off < samples:
            from_ = self._begin + len(self._known)
            wanted = from_ + np.arange(max(samples - (len(self._known) - off), samples * int(np.clip(packs, *_LOOK))))
            found = np.asarray(self._cost(wanted))
            if found.shape != wanted.shape or found.dtype.kind not in "iu" or (found < 1).any():
                least = f" of at least {found.min()}" if found.size and found.dtype.kind in "iuf" else ""
                raise ValueError(
                    f"the cost of {len(wanted)} samples came as {found.shape} values of type {found.dtype}{least}; one "
                    "whole number above 0 is expected for each"
                )
            found = found.astype(np.int64)
            self._known, self._begin, off = np.concatenate([self._known[off:], found]), first, 0
        return self._known[off : off + samples]


class PackPlanner:
    """A planner whose batches are packs; the rest is as for `Planner`, which it is made around.

    Attributes:
        global_batch: samples of a step over all ranks, at most.
    """

    lanes = 1
    reuse_batches = 1
    held_samples = 0

    def __init__(self, planner: Planner, packs: Packs, *, rank: int, world_size: int) -> None:
        self._planner, self._packs, self._rank, self._world_size = planner, packs, rank, world_size
        self.num_anchors, self.digest = planner.num_anchors, planner.digest
        self.global_batch = packs.most * world_size

    def plan(self, begin: int) -> BatchPlan:
        """This rank's pack of the step that starts at global position `begin`."""
        ends = self._packs.cut(begin, self._world_size)
        own = np.arange(ends[self._rank], ends[self._rank + 1], dtype=np.int64)
        return self._planner.resolve(own, begin=begin, end=int(ends[-1]))
