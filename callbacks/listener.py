"""Listens to Lightning's loop: when the loader is asked, and what a step's time must not count.

Lightning brackets every fetch with a profiler action, on whatever loader is used. Listening there puts the clock
exactly around the call it times. Saving a checkpoint is bracketed too, and PyTorch tells when it compiles.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

from lightning.pytorch.profilers import PassThroughProfiler, Profiler

from callbacks.device_time import DeviceTime, Span

FETCH = "[_TrainingEpochLoop].train_dataloader_next"
EXCLUDED = "[Callback]ModelCheckpoint"

Reason = Literal["pause", "compile"]

_UNHEARD = nullcontext("")


class Listener(Profiler):
    """Passes every action on to the profiler in use and keeps the time of those the clock asks for.

    Attributes:
        fetch_s: host seconds of each fetch since they were last taken.
        fetch_spans: the same fetches on the device's own clock; empty on a CPU.
        excluded_s: seconds that are no step's, by what they went into.
    """

    def __init__(self, inner: Profiler, device_time: DeviceTime) -> None:
        super().__init__()
        self.inner = inner
        self._passes_on = not isinstance(inner, PassThroughProfiler)
        self.device_time = device_time
        self.fetch_s: list[float] = []
        self.fetch_spans: list[Span] = []
        self.excluded: dict[Reason, float] = {"pause": 0.0, "compile": 0.0}
        self._fetch_started = 0.0
        self._fetch_mark: Any = None
        self._excluded_started = 0.0
        self._excluded_depth = 0
        self._reason: Reason = "pause"

    @property
    def excluded_s(self) -> float:
        return sum(self.excluded.values())

    def take_excluded(self) -> dict[Reason, float]:
        """Seconds left out since the last call."""
        taken, self.excluded = self.excluded, {"pause": 0.0, "compile": 0.0}
        return taken

    def exclude(self, reason: Reason = "pause") -> None:
        """Leave the time until `include` out; pairs may be nested, and the outermost says why."""
        if not self._excluded_depth:
            self._excluded_started = time.perf_counter()
            self._reason = reason
        self._excluded_depth += 1

    def include(self) -> None:
        """Count time again."""
        self._excluded_depth -= 1
        if not self._excluded_depth:
            self.excluded[self._reason] += time.perf_counter() - self._excluded_started

    def profile(self, action_name: str) -> AbstractContextManager[str]:  # type: ignore[override]
        """Bracket an action; for one that nobody listens to this costs next to nothing, and a step has some 80."""
        if self._passes_on or action_name == FETCH or action_name.startswith(EXCLUDED):
            return super().profile(action_name)
        return _UNHEARD

    def start(self, action_name: str) -> None:
        if action_name == FETCH:
            self._fetch_mark = self.device_time.mark()
            self._fetch_started = time.perf_counter()
        elif action_name.startswith(EXCLUDED):
            self.exclude()
        if self._passes_on:
            self.inner.start(action_name)

    def stop(self, action_name: str) -> None:
        if self._passes_on:
            self.inner.stop(action_name)
        if action_name == FETCH:
            self.fetch_s.append(time.perf_counter() - self._fetch_started)
            self.fetch_spans += self.device_time.span(self._fetch_mark)
        elif action_name.startswith(EXCLUDED):
            self.include()

    def summary(self) -> str:
        return self.inner.summary()

    def describe(self) -> None:
        self.inner.describe()

    def setup(self, stage: Any, local_rank: int | None = None, log_dir: str | None = None) -> None:
        self.inner.setup(stage, local_rank, log_dir)

    def teardown(self, stage: Any) -> None:
        self.inner.teardown(stage)


class CompileWatch:
    """Tells the listener while PyTorch compiles, so that a step that compiles is not taken for a slow one."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self._open = 0

    def start(self) -> None:
        """Watch from now on; PyTorch's compiler is loaded when Lightning is."""
        from torch._dynamo.callback import callback_handler

        if self._begin not in callback_handler.start_callbacks:  # a reset of the compiler forgets who listens
            callback_handler.register_start_callback(self._begin)
            callback_handler.register_end_callback(self._end)

    def stop(self) -> None:
        """Leave PyTorch as it was found."""
        from torch._dynamo.callback import callback_handler

        if self._begin in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(self._begin)
        if self._end in callback_handler.end_callbacks:
            callback_handler.remove_end_callback(self._end)

    def _begin(self, arguments: Any) -> None:
        self._open += 1
        self.listener.exclude("compile")

    def _end(self, arguments: Any) -> None:
        if self._open:
            self._open -= 1
            self.listener.include()
