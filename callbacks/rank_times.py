"""Which rank is slow: each rank's own time in a step, without its wait for the others."""

import statistics
from dataclasses import dataclass

from callbacks.window import Window

# A rank is named when it is behind by this much of a step: less is the noise of any machine.
LEAST_SHARE = 0.02
LEAST_S = 0.001


@dataclass(frozen=True, kw_only=True)
class Behind:
    """The slowest rank; seconds are means over steps.

    `extra_s` is its time above the lower median of all ranks: what the others wait for it.
    """

    rank: int
    own_s: float
    extra_s: float


def slowest(own_s: list[float], step_s: float) -> Behind | None:
    """The slowest of the ranks by their mean own times; None where they are alike, or where there is one."""
    if len(own_s) < 2:
        return None
    rank = max(range(len(own_s)), key=own_s.__getitem__)
    extra_s = own_s[rank] - statistics.median_low(own_s)
    if extra_s < max(LEAST_S, LEAST_SHARE * step_s):
        return None
    return Behind(rank=rank, own_s=own_s[rank], extra_s=extra_s)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Means over the steps that are no warm-up, by rank, in seconds."""

    step_s: float
    """Of the slowest rank in each step."""
    own_s: list[float]
    """Step less the wait for the other ranks."""
    wait_s: list[float]
    """Wait for the loader."""
    peer_s: float
    """Least wait for the others: the exchange of gradients itself, as far as nothing hides it."""

    @property
    def slowest(self) -> Behind | None:
        return slowest(self.own_s, self.step_s)

    @property
    def slowest_by_work(self) -> Behind | None:
        """The same without the loader's part."""
        return slowest([own - wait for own, wait in zip(self.own_s, self.wait_s, strict=True)], self.step_s)


class RankTimes:
    """Meter of the ranks against each other; silent on one rank.

    Attributes:
        latest: times of the last window; None before, or where all its steps were warm-up.
    """

    def __init__(self) -> None:
        self.latest: Times | None = None
        self._steps = 0
        self._sums: list[list[float]] = []  # of step, then own, wait and peer wait of each rank

    def measure(self, window: Window) -> dict[str, float]:
        places = window.timed() if window.steps_of_ranks else []
        sums = [[sum(window.step_s[place] for place in places)]]
        for columns in (window.steps_of_ranks, window.waits_of_ranks, window.peer_waits_of_ranks):
            sums.append([sum(columns[place][rank] for place in places) for rank in range(window.world_size)])
        self.latest = _times(sums, len(places))
        self._steps += len(places)
        if places:
            self._sums = [
                [*map(sum, zip(a, b, strict=True))] for a, b in zip(self._sums or _zeros(sums), sums, strict=True)
            ]
        return _metrics(self.latest) if window.world_size > 1 else {}

    @property
    def whole(self) -> Times | None:
        """Times of this start of the run so far."""
        return _times(self._sums, self._steps)

    def summary(self) -> dict[str, float | int | None]:
        """Figures of this start of the run for `summary.json`; empty on one rank."""
        times = self.whole
        if times is None or len(times.own_s) == 1:
            return {}
        behind = times.slowest
        return {
            "slowest_rank": None if behind is None else behind.rank,
            "slowest_rank_extra_s": 0.0 if behind is None else behind.extra_s,
            "peer_wait_s": times.peer_s,
        }


def _zeros(sums: list[list[float]]) -> list[list[float]]:
    return [[0.0] * len(column) for column in sums]


def _times(sums: list[list[float]], steps: int) -> Times | None:
    if not steps:
        return None
    (step_s,), of_ranks, wait_s, peer_s = [[value / steps for value in column] for column in sums]
    own_s = [step - peer for step, peer in zip(of_ranks, peer_s, strict=True)]
    return Times(step_s=step_s, own_s=own_s, wait_s=wait_s, peer_s=min(peer_s))


def _metrics(times: Times | None) -> dict[str, float]:
    if times is None:
        return {}
    metrics = {"time/peer_wait_s": times.peer_s}
    if (behind := times.slowest) is not None:
        metrics |= {"time/slowest_rank": float(behind.rank), "time/slowest_rank_extra_s": behind.extra_s}
    return metrics
