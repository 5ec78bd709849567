"""Samples per second, step time, what neither of them counts, and how far into the data the run is.

Checkpoints, validation and compilation are in no step time. Warm-up steps, the first of a start and those that
compiled, are in no rate; a run that has no other takes these.
"""

import statistics
from array import array
from collections.abc import Mapping, Sequence

from callbacks.window import Window


class Throughput:
    """Meter of rates over the window.

    Args:
        samples_per_epoch: anchors of the dataset, to express progress in epochs; 0 when the data has no end.
    """

    def __init__(self, samples_per_epoch: int) -> None:
        self.samples_per_epoch = samples_per_epoch
        self.samples_seen = 0
        self._timed = _Steps()
        self._warm_up = _Steps()
        self._compile_s = 0.0
        self._pause_s = 0.0

    def restore(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Take in the recorded steps of an earlier start of the same run."""
        for row in rows:
            self._add(int(row["samples"]), row["step_s"], bool(row["warm_up"]), row["compile_s"], row["pause_s"])

    def _add(self, samples: int, step_s: float, warm_up: bool, compile_s: float, pause_s: float) -> None:
        self.samples_seen += samples
        steps = self._warm_up if warm_up else self._timed
        steps.seconds.append(step_s)
        steps.samples += samples
        self._compile_s += compile_s
        self._pause_s += pause_s

    def measure(self, window: Window) -> dict[str, float]:
        for values in zip(window.samples, window.step_s, window.warm_up, window.compile_s, window.pause_s, strict=True):
            self._add(*values)
        places = window.timed() or range(len(window))
        seconds = [window.step_s[place] for place in places]
        rate = sum(window.samples[place] for place in places) / max(sum(seconds), 1e-9)
        metrics = {
            "time/step_s": statistics.fmean(seconds),
            "time/compile_s": self._compile_s,
            "time/pause_s": self._pause_s,
            "throughput/samples_per_s": rate,
            "throughput/samples_per_s_per_gpu": rate / window.world_size,
            "data/samples_seen": float(self.samples_seen),
        }
        if self.samples_per_epoch:
            metrics["data/epoch"] = self.samples_seen / self.samples_per_epoch
        return metrics

    def summary(self) -> dict[str, float | int]:
        """Figures of the whole run for `summary.json`."""
        steps = self._timed if self._timed.seconds else self._warm_up
        return {
            "samples_seen": self.samples_seen,
            "samples_per_s": steps.samples / sum(steps.seconds) if steps.seconds else 0.0,
            "step_s_median": statistics.median(steps.seconds) if steps.seconds else 0.0,
            "warm_up_s": sum(self._warm_up.seconds),
            "compile_s": self._compile_s,
            "pause_s": self._pause_s,
        }


class _Steps:
    """Times of steps, 8 bytes each, and their samples."""

    def __init__(self) -> None:
        self.seconds = array("d")
        self.samples = 0
