"""How long a rank waited for the others: from the end of its own backward until the gradients were exchanged.

Ranks that exchange gradients take the same time for a step, so step times do not tell which one is slow. What differs
is when each has done its own work. When a backward is done, the autograd engine runs its callbacks in the order they
were queued: one queued at the start of the backward comes before the data-parallel wrapper's, which waits.
Collectives inside the forward, as of sharded parameters, are part of the rank's own time and even it out.
"""

import time
from typing import Any

import torch
from torch import Tensor

from callbacks.device_time import DeviceTime, Span


class PeerWait:
    """Takes that time of every micro-batch, on the host's clock on a CPU, else on the device's."""

    def __init__(self, device_time: DeviceTime) -> None:
        self.device_time = device_time
        self.host_s = 0.0
        self.spans: list[Span] = []
        self._done_at: float | None = None
        self._mark: Any = None

    def before_backward(self, loss: Tensor) -> None:
        if loss.requires_grad:
            loss.register_hook(self._queue)  # type: ignore[no-untyped-call]

    def after_backward(self) -> None:
        if self._done_at is None:
            return
        self.host_s += time.perf_counter() - self._done_at
        self.spans += self.device_time.span(self._mark)
        self._done_at = self._mark = None

    def take(self) -> tuple[float, list[Span]]:
        """Seconds and spans since the last call."""
        taken = self.host_s, self.spans
        self.host_s, self.spans = 0.0, []
        return taken

    def _queue(self, gradient: Tensor) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._done)

    def _done(self) -> None:
        self._done_at = time.perf_counter()
        self._mark = self.device_time.mark()
