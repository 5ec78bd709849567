"""What the data layer reports about itself, beside the other metrics."""

from collections.abc import Callable, Mapping

from callbacks.window import Window

Stages = Mapping[str, Mapping[str, float]]
"""Seconds and items of each stage of a loader since its start: `busy_s`, `starved_s`, `blocked_s`, `items`."""


class Gauges:
    """Meter of this rank's loader: bounds, their use and counters since the start, as `loader/NAME`.

    Args:
        read: gives the values now; called once per logging interval. Rank 0's are the ones logged.
        stages: gives the stages now; logged as `loader/STAGE_busy_s` and so on.
    """

    def __init__(self, read: Callable[[], Mapping[str, float]], stages: Callable[[], Stages] = dict) -> None:
        self._read = read
        self._stages = stages

    def measure(self, window: Window) -> dict[str, float]:
        values = {f"loader/{name}": float(value) for name, value in self._read().items()}
        for stage, figures in self._stages().items():
            values |= {f"loader/{stage}_{name}": float(value) for name, value in figures.items()}
        return values
