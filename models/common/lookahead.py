"""The frozen part of the next micro-batch beside the trained part of this one. Exact.

What a frozen part gives does not depend on the update that a step makes, so it may run before that update: on a stream
of its own, its products fill the time in which the trained part waits for memory, for the wire or for its next launch.
On the CPU the same calls run one after the other, in the same order.

The batch is the one that the trainer has drawn already; it counts as trained only when its own step takes it, so a
checkpoint between the two says that it is still to come.
"""

import contextlib
import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

AHEAD = "ahead"
"""Entry of the inputs under which the result of the frozen part stands."""


class Prepared(dict[str, Any]):
    """A micro-batch's inputs, made ahead on their device.

    Attributes:
        drawn: the batch they were made of, for whoever counts what is trained.
    """

    drawn: Any = None

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Where they are already."""
        return self


class Lookahead:
    """Runs `frozen` one micro-batch ahead.

    Args:
        frozen: inputs -> what the trained part needs of them: tensors, nested in tuples, lists, mappings or dataclasses
            as may be.
            Its weights are never trained, it draws no random numbers and it changes nothing that others read.
        device: where it runs.
    """

    def __init__(self, frozen: Callable[[Mapping[str, Any]], Any], device: torch.device) -> None:
        self.frozen = frozen
        self._gpu = device.type == "cuda"
        self._side = torch.cuda.Stream(device) if self._gpu else None
        self._next: Prepared | None = None
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._pending: deque[tuple[torch.cuda.Event, ...]] = deque(maxlen=64)
        self._busy_s = self._waited_s = 0.0
        self._measured = 0
        self.made, self.taken, self._lost = 0, 0, 0

    def start(self, drawn: Any, inputs_of: Callable[[Any], Mapping[str, Any]]) -> None:
        """Make the inputs of the next micro-batch and queue its frozen part; returns without waiting for the device.

        Args:
            drawn: that micro-batch as the loader gave it.
            inputs_of: moves it to the device and makes its inputs, and counts nothing.
        """
        with self._on_side():
            prepared = Prepared(inputs_of(drawn))
            with torch.no_grad():
                prepared[AHEAD] = self.frozen(prepared)
        prepared.drawn = drawn
        self._next = prepared
        self.made += 1

    def swap(self, drawn: Any) -> Any:
        """The inputs made of this very batch, if they have been; otherwise the batch itself."""
        prepared = self._next
        if prepared is None or prepared.drawn is not drawn:
            return drawn
        self._next = None
        return prepared

    def result(self, inputs: Mapping[str, Any]) -> Any:
        """What the frozen part gives for a step's inputs: made ahead, or made now where it was not."""
        if AHEAD not in inputs:
            if self.made > self.taken + self._lost:
                self._lost = self.made - self.taken
                logger.info("lookahead: what was made ahead is not the micro-batch that came; it runs now")
            if self._side is not None:  # tables that the frozen part keeps may be under way on the other stream
                torch.cuda.current_stream().wait_stream(self._side)
            with torch.no_grad():
                return self.frozen(inputs)
        self.taken += 1
        self._wait(inputs)
        return inputs[AHEAD]

    def clear(self) -> None:
        """Forget what was made ahead, as at the end of a run."""
        self._next = None

    def summary(self) -> dict[str, float]:
        """Seconds per micro-batch: the frozen part by itself, and what the step still waited for it; GPU only.

        Reads the finished part of the record, and waits for nothing.
        """
        while self._pending and all(event.query() for event in self._pending[0]):
            began, ended, asked, had = self._pending.popleft()
            self._busy_s += began.elapsed_time(ended) / 1e3
            self._waited_s += asked.elapsed_time(had) / 1e3
            self._measured += 1
        if not self._measured:
            return {}
        return {
            "lookahead_busy_s": self._busy_s / self._measured,
            "lookahead_wait_s": self._waited_s / self._measured,
        }

    @contextlib.contextmanager
    def _on_side(self) -> Iterator[None]:
        if self._side is None:
            yield
            return
        # After all that is queued: this step's forward pass. Beside it runs the backward pass, the sum over the ranks
        # and the update; and tables that were made on the main stream are there.
        self._side.wait_stream(torch.cuda.current_stream())
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._side):
            began.record()
            yield
            ended.record()
        self._events = began, ended

    def _wait(self, inputs: Mapping[str, Any]) -> None:
        """Let the main stream wait for the side stream, and keep the memory until the main stream is done with it."""
        if self._side is None:
            return
        assert self._events is not None
        main = torch.cuda.current_stream()
        asked, had = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        asked.record()
        main.wait_event(self._events[1])
        had.record()
        self._pending.append((*self._events, asked, had))
        for tensor in _tensors(inputs):
            if tensor.is_cuda:
                tensor.record_stream(main)


def next_drawn(trainer: Any) -> Any:
    """The micro-batch that Lightning has drawn for the next turn of its training loop; None where it has none.

    It draws one ahead of a loader without a length, to know whether the present one is the last.
    """
    fetcher = getattr(trainer.fit_loop, "_data_fetcher", None)
    batches = getattr(fetcher, "batches", None)
    return batches[0][0] if batches else None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
