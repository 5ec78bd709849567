"""How long training waited for its data: the share of the steps, the tail, and the rank to blame."""

import math
import statistics
from array import array
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from callbacks.window import Window

LONG_WAIT_S = 1.0


class Tail:
    """The exact distribution of all values so far, 8 bytes each; a row late in a run costs what an early one does."""

    def __init__(self) -> None:
        self._ordered = array("d")
        self.total = 0.0

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, values: Iterable[float]) -> None:
        """Take in a few values; many belong into `restore`."""
        for value in values:
            insort(self._ordered, value)
            self.total += value

    def restore(self, values: Iterable[float]) -> None:
        """Take in many values at once."""
        self._ordered = array("d", sorted([*self._ordered, *values]))
        self.total = math.fsum(self._ordered)

    def quantile(self, q: float) -> float:
        """Smallest value that a share `q` of all values does not exceed; 0.0 of nothing."""
        if not self._ordered:
            return 0.0
        rank = -(-len(self._ordered) * q // 1)  # ceiling
        return self._ordered[max(0, int(rank) - 1)]

    def above(self, limit: float) -> int:
        """Number of values above a limit."""
        return len(self._ordered) - bisect_right(self._ordered, limit)


class DataWait:
    """Meter of the host clock around the fetch, maximum over ranks in each step.

    A step is charged with what the slowest rank waited: the others stand still until it arrives at the all-reduce.
    """

    def __init__(self) -> None:
        self._waits = Tail()  # taken over the whole run
        self._step_s = 0.0
        self._idle_s = 0.0
        self._knows_idle = False
        self._blamed: Counter[int] = Counter()

    def restore(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Take in the recorded steps of an earlier start of the same run."""
        self._waits.restore(row["data_wait_s"] for row in rows)
        self._step_s += sum(row["step_s"] for row in rows)
        self._idle_s += sum(row["device_idle_s"] for row in rows if not math.isnan(row["device_idle_s"]))

    def measure(self, window: Window) -> dict[str, float]:
        self._waits.add(window.wait_s)
        self._step_s += sum(window.step_s)
        for wait, rank in zip(window.wait_s, window.slowest_rank, strict=True):
            if wait > LONG_WAIT_S / 1000:
                self._blamed[rank] += 1
        idle = [seconds for seconds in window.device_idle_s if not math.isnan(seconds)]
        self._idle_s += sum(idle)
        metrics = {
            "time/data_wait_s": statistics.fmean(window.wait_s),
            "time/data_wait_frac": sum(window.wait_s) / max(sum(window.step_s), 1e-9),
            "time/data_wait_p50_s": self._waits.quantile(0.50),
            "time/data_wait_p99_s": self._waits.quantile(0.99),
            "time/data_wait_max_s": self._waits.quantile(1.0),
            "time/data_waits_over_1s": float(self.over_1s),
        }
        if idle:
            self._knows_idle = True
            metrics["time/device_idle_s"] = statistics.fmean(idle)
            metrics["time/device_idle_frac"] = sum(idle) / max(sum(window.step_s), 1e-9)
        if self.slowest_rank is not None:
            metrics["time/data_wait_slowest_rank"] = float(self.slowest_rank)
        return metrics

    @property
    def over_1s(self) -> int:
        return self._waits.above(LONG_WAIT_S)

    @property
    def slowest_rank(self) -> int | None:
        """Rank that was most often last with its data; None when no rank ever waited a millisecond."""
        return self._blamed.most_common(1)[0][0] if self._blamed else None

    def summary(self) -> dict[str, float | int | None]:
        """Figures of the whole run for `summary.json`."""
        idle = {"device_idle_s": self._idle_s} if self._knows_idle else {}
        return {
            **idle,
            "data_wait_s": self._waits.total,
            "data_wait_frac": self._waits.total / self._step_s if self._step_s else 0.0,
            "data_wait_p50_s": self._waits.quantile(0.50),
            "data_wait_p99_s": self._waits.quantile(0.99),
            "data_wait_max_s": self._waits.quantile(1.0),
            "data_waits_over_1s": self.over_1s,
            "data_wait_slowest_rank": self.slowest_rank,
        }
