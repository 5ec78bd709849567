"""What the data layer reports about itself, beside the other metrics."""

from collections.abc import Callable, Mapping

from callbacks.window import Window


class Gauges:
    """Meter of this rank's loader: bounds, their use and counters since the start, as `loader/NAME`.

    Args:
        read: gives the values now; called once per logging interval. Rank 0's are the ones logged.
    """

    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._read = read

    def measure(self, window: Window) -> dict[str, float]:
        return {f"loader/{name}": float(value) for name, value in self._read().items()}
