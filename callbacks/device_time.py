"""Time on the device's own clock, taken without waiting for it: marks in its stream, read once per interval.

Two marks around a host call say how long the device had nothing to do meanwhile: where work is still queued the first
mark is reached late, and both fall together; where the queue is empty their distance is what the device stood still.
"""

from typing import Any

import torch

Span = tuple[Any, Any]
"""Two marks: from, to."""


class DeviceTime:
    """Marks in the current stream of a CUDA device. A CPU has no clock of its own: no mark, no span, and None read.

    Args:
        device: the device this rank trains on.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks = device.type == "cuda"
        self._free: list[Any] = []
        self._last: Any = None

    def mark(self) -> Any:
        """A mark behind all work queued so far; None on a CPU."""
        if not self._marks:
            return None
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._last = event
        return event

    def span(self, begin: Any) -> list[Span]:
        """From `begin` to here, as a list of one; empty on a CPU."""
        return [] if begin is None else [(begin, self.mark())]

    def wait(self) -> None:
        """Until the last mark is reached: the one synchronisation of a logging interval."""
        if self._last is not None:
            self._last.synchronize()

    def seconds(self, spans: list[Span]) -> float | None:
        """Time of the spans, whose marks are free again afterwards; None on a CPU. `wait` must have been called."""
        if not self._marks:
            return None
        total = 0.0
        for begin, end in spans:
            total += begin.elapsed_time(end) / 1000  # milliseconds
            self._free += (begin, end)
        return total
