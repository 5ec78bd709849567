"""Save and stop on SIGTERM, SIGUSR1 or Ctrl-C (SIGINT), at the same step on every rank.

Signals reach the ranks at different moments. After each optimizer step the ranks add up their "asked to stop" flags;
the sum is started asynchronously on a CPU group and read one step later, so neither host nor device waits for it.
"""

import logging
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer

from callbacks.step_hooks import StepCallback

logger = logging.getLogger(__name__)


class Preemption(StepCallback):
    """Stops training cleanly when the scheduler or the user asks for it; a second Ctrl-C stops at once.

    Args:
        save: called on every rank with the trainer, at the same step, after the last step that is kept.

    Attributes:
        signal: number of the signal that stopped the run; None while nothing did.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self, save: Callable[[Trainer], None]) -> None:
        self.save = save
        self.signal: int | None = None
        self._asked = 0
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[dist.Work | None, torch.Tensor] | None = None
        self._previous: dict[int, Any] = {}
        self._step_before = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.world_size > 1 and self._group is None:
            self._group = dist.new_group(backend="gloo")
        # Lightning's own check broadcasts and reads a device tensor before every batch: a synchronisation per step
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # installed here, after Lightning has put its own handlers in place
        self._previous = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        self._step_before = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step_before:
            return  # in the middle of an accumulated step there is nothing consistent to save
        self._step_before = trainer.global_step
        stopped_by = self._agreed()
        if stopped_by:
            self.signal = stopped_by
            logger.warning("%s: saving step %d and stopping", signal.Signals(stopped_by).name, trainer.global_step)
            self.save(trainer)
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._pending and self._pending[0] is not None:
            self._pending[0].wait()
        self._pending = None
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._asked == number:
            raise KeyboardInterrupt
        self._asked = number

    def _agreed(self) -> int:
        """The signal all ranks agreed on at the step before; 0 for none."""
        if self._group is None:
            return self._asked
        agreed = 0
        if self._pending is not None:
            work, flag = self._pending
            assert work is not None
            work.wait()
            agreed = int(flag)
        flag = torch.tensor(self._asked)
        self._pending = (dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True), flag)
        return agreed
