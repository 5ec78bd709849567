"""Samples per second, step time, and how far into the data the run is."""

import statistics
from array import array
from collections.abc import Iterable

from callbacks.window import Window


class Throughput:
    """Meter of rates over the window; checkpoints and validation are not in the step times.

    Args:
        samples_per_epoch: anchors of the dataset, to express progress in epochs; 0 when the data has no end.
    """

    def __init__(self, samples_per_epoch: int) -> None:
        self.samples_per_epoch = samples_per_epoch
        self.samples_seen = 0
        self._step_s = array("d")

    def restore(self, samples: Iterable[int], step_s: Iterable[float]) -> None:
        """Take in the steps of an earlier start of the same run."""
        self.samples_seen += sum(samples)
        self._step_s.extend(step_s)

    def measure(self, window: Window) -> dict[str, float]:
        self.samples_seen += sum(window.samples)
        self._step_s.extend(window.step_s)
        rate = sum(window.samples) / max(sum(window.step_s), 1e-9)
        metrics = {
            "time/step_s": statistics.fmean(window.step_s),
            "throughput/samples_per_s": rate,
            "throughput/samples_per_s_per_gpu": rate / window.world_size,
            "data/samples_seen": float(self.samples_seen),
        }
        if self.samples_per_epoch:
            metrics["data/epoch"] = self.samples_seen / self.samples_per_epoch
        return metrics

    def summary(self) -> dict[str, float | int]:
        """Figures of the whole run for `summary.json`."""
        return {
            "samples_seen": self.samples_seen,
            "samples_per_s": self.samples_seen / sum(self._step_s) if self._step_s else 0.0,
            "step_s_median": statistics.median(self._step_s) if self._step_s else 0.0,
        }
