"""What limits a run, in one line, and what to change.

The time of the steps, with the pauses between them, is split into what the devices lost: waiting for the loader, for
one slow rank, for the exchange of gradients, for checkpoints and validation. The largest of these is the verdict, if it
is at least `LEAST` of the time; else the run is limited by its own computation, which is what one pays for.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from callbacks.gauges import Stages
from callbacks.host import Host
from callbacks.memory import Memory
from callbacks.mfu import Mfu
from callbacks.rank_times import RankTimes, Times
from callbacks.window import Window

LEAST = 0.05
CAUSES = ("compute", "data", "slow_rank", "communication", "pauses")
"""Their places are the values of `perf/limit`."""
FULL = 0.9


@dataclass(frozen=True, kw_only=True)
class Lost:
    """Seconds of the steps that are no warm-up, by cause."""

    step_s: float = 0.0
    pause_s: float = 0.0
    wait_s: float = 0.0
    idle_s: float = 0.0
    """As `wait_s`, but what the device lost by it; equal where no device tells."""
    steps: int = 0

    def plus(self, window: Window) -> "Lost":
        """With the steps of a window."""
        places = window.timed()
        waits = [window.wait_s[place] for place in places]
        idle = [window.device_idle_s[place] for place in places]
        return Lost(
            step_s=self.step_s + sum(window.step_s[place] for place in places),
            pause_s=self.pause_s + sum(window.pause_s),
            wait_s=self.wait_s + sum(waits),
            idle_s=self.idle_s + sum(w if math.isnan(i) else i for w, i in zip(waits, idle, strict=True)),
            steps=self.steps + len(places),
        )

    @property
    def whole_s(self) -> float:
        return max(self.step_s + self.pause_s, 1e-9)


def cause_of(lost: Lost, times: Times | None) -> tuple[str, float]:
    """(cause, its share of the time); for computation what is left of it."""
    steps = lost.steps
    work = times.slowest_by_work if times is not None else None
    shares = {
        "data": lost.idle_s / lost.whole_s,
        "slow_rank": work.extra_s * steps / lost.whole_s if work is not None else 0.0,
        "communication": times.peer_s * steps / lost.whole_s if times is not None else 0.0,
        "pauses": lost.pause_s / lost.whole_s,
    }
    cause = max(shares, key=shares.__getitem__)
    if shares[cause] < LEAST:
        return "compute", 1.0 - sum(shares.values())
    return cause, shares[cause]


class Verdict:
    """Meter that comes after the others and says what limits the run.

    Args:
        ranks, mfu, host, memory: the run's other meters, which have measured the same window.
        stages: reads the loader's stages.

    Attributes:
        cause: of the last window; one of `CAUSES`.
    """

    def __init__(
        self, ranks: RankTimes, mfu: Mfu, host: Host, memory: Memory, stages: Callable[[], Stages] = dict
    ) -> None:
        self.ranks, self.mfu, self.host, self.memory = ranks, mfu, host, memory
        self._stages = stages
        self._whole = Lost()
        self.cause = "compute"
        self._stages_seen: Stages = {}

    def measure(self, window: Window) -> dict[str, float]:
        lost = Lost().plus(window)
        self._whole = self._whole.plus(window)
        self._stages_seen = self._stages() or self._stages_seen  # a loader that is closed may have none to show
        if not lost.steps:
            return {}
        self.cause, share = cause_of(lost, self.ranks.latest)
        return {"perf/limit": float(CAUSES.index(self.cause)), "perf/limit_frac": share}

    def summary(self) -> dict[str, str | float]:
        """Cause, its share and the line for `summary.json`; empty before the first step that is no warm-up."""
        if not self._whole.steps:
            return {}
        cause, share = cause_of(self._whole, self.ranks.whole)
        return {"limited_by": cause, "limited_by_frac": share, "verdict": self.line()}

    def line(self) -> str:
        """What limits this start of the run so far and what to change; empty before anything is known."""
        if not self._whole.steps:
            return ""
        cause, share = cause_of(self._whole, self.ranks.whole)
        says = {
            "data": self._data,
            "slow_rank": self._slow_rank,
            "communication": self._communication,
            "pauses": self._pauses,
            "compute": self._compute,
        }
        return f"limited by {cause.replace('_', ' ')} ({share:.0%} of the time): {says[cause]()}"

    def _data(self) -> str:
        lost, times = self._whole, self.ranks.whole
        text = f"a step of {_ms(lost.step_s / lost.steps)} waits {_ms(lost.wait_s / lost.steps)} for the loader"
        if times is not None and len(times.wait_s) > 1:
            rank = max(range(len(times.wait_s)), key=times.wait_s.__getitem__)
            rest = [wait for other, wait in enumerate(times.wait_s) if other != rank]
            if max(rest) < times.wait_s[rank] / 2:
                text += f", on rank {rank} alone: see what else its machine does"
        return f"{text}; {self._loader()}"

    def _loader(self) -> str:
        """The stage that holds the others up: its threads have always something to do."""
        frac = self.host.cpu_frac
        full = frac is not None and frac >= FULL
        stages = self._stages_seen
        if not {"fetch", "decode"} <= stages.keys():
            if full:
                return "all cores are busy: give it more of them, or less to do"
            return "give it more workers, or a faster source"
        fetch, busy, starved = stages["fetch"]["busy_s"], stages["decode"]["busy_s"], stages["decode"]["starved_s"]
        if fetch > busy:
            return "its decoders wait for packets: look at loader/throttled and the link, or raise data.cache.disk"
        if busy + fetch < starved:
            transform = stages.get("transform", {}).get("busy_s", 0.0)
            if transform > busy:
                return "its transform is slow: move work from there to the device"
            return "its decoders have nothing to do for most of the time: raise data.ring_batches"
        if full:
            return "all cores are busy decoding: set data.cache.decoded, or give it more cores"
        return "decoding is slow and cores are free: raise data.decode_threads"

    def _slow_rank(self) -> str:
        times = self.ranks.whole
        behind = times.slowest_by_work if times is not None else None
        assert behind is not None, "no rank is behind"
        return (
            f"the others wait {_ms(behind.extra_s)} a step for rank {behind.rank}: look at its device's clock and "
            "temperature, and at what else its machine does"
        )

    def _communication(self) -> str:
        times = self.ranks.whole
        assert times is not None, "one rank exchanges nothing"
        return (
            f"every rank waits at least {_ms(times.peer_s)} of {_ms(times.step_s)} for the gradients: raise "
            "data.batch_size or trainer.accumulate_grad_batches, or shard over fewer ranks (parallel.shard)"
        )

    def _pauses(self) -> str:
        return (
            f"{self._whole.pause_s:.1f} s went into checkpoints and validation: raise checkpoint.every_n_steps or "
            "validation.every_n_steps"
        )

    def _compute(self) -> str:
        figures = self.mfu.summary()
        mfu, hfu, free = figures["mfu"], figures["hfu"], self.memory.free_frac
        if self.memory.device.type == "cpu":
            return "the processor computes nearly all the time: a GPU is what helps"
        known = f"MFU {mfu:.2f}" if isinstance(mfu, float) else f"{figures['tflops_per_device']:.1f} TFLOP/s a device"
        if isinstance(mfu, float) and isinstance(hfu, float) and hfu > 1.05 * mfu and free is not None and free > 0.15:
            return (
                f"{known}, HFU {hfu:.2f} and {free:.0%} of the memory free: recompute fewer blocks "
                "(checkpointing.mode: auto)"
            )
        if free is not None and free > 0.4:
            return f"{known} and {free:.0%} of the memory free: raise data.batch_size"
        if isinstance(mfu, float) and mfu < 0.25:
            return f"{known}: set compile.scope: blocks"
        return f"{known}: more devices are what helps"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
