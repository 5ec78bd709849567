"""Drains the clock once per logging interval, lets the meters measure, and hands the result to every logger."""

import logging
from collections.abc import Sequence
from typing import Any

from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch import LightningModule, Trainer

from callbacks.progress import Progress
from callbacks.run_record import RunRecord
from callbacks.step_clock import StepClock
from callbacks.step_hooks import StepCallback
from callbacks.verdict import Verdict
from callbacks.window import Meter, Window, gather, joined, of_slowest_rank

logger = logging.getLogger(__name__)


class Metrics(StepCallback):
    """Logs the meters' metrics every `log_every_n_steps` optimizer steps and at the end of training.

    The device is synchronised once per interval, never per step. At the end rank 0 says what limited the run.

    What the module logs at a step and the meters' metrics share a row. They do not go through `LightningModule.log`: of
    70 metrics it takes 20 to 100 ms of a row, and some of every step, because Lightning keeps each for averages over an
    epoch and looks through all of them at every call.
    """

    def __init__(
        self,
        clock: StepClock,
        meters: Sequence[Meter],
        record: RunRecord,
        verdict: Verdict | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.clock = clock
        self.meters = meters
        self.record = record
        self.verdict = verdict
        self.progress = progress
        self.latest: dict[str, float] = {}
        self._first_batch_known = False
        self._held: list[Window] = []  # recorded, not yet measured
        self._row: dict[str, float] = {}  # measured, waiting for what the module logs at the same step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        connector: Any = trainer._logger_connector
        log_metrics = connector.log_metrics

        def with_row(metrics: dict[str, Any], step: int | None = None) -> None:
            row, self._row = self._row, {}
            if not row:
                log_metrics(metrics, step=step)
                return
            # What Lightning does there, but it looks for tensors among all values, and a row has none.
            connector._logged_metrics.update(metrics, **row)
            values = {"epoch": trainer.current_epoch, **convert_tensors_to_scalars(metrics), **row}
            at = trainer.fit_loop.epoch_loop._batches_that_stepped if step is None else step
            for log in trainer.loggers:
                log.log_metrics(values, step=at)
                log.save()

        connector.log_metrics = with_row

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.progress is not None:
            self.progress.begin(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self.clock.steps and trainer.global_step % every == 0:
            # Lightning writes what the module logged right after this hook
            self._row = self.flush(trainer, pl_module)
        if self.progress is not None:
            self.progress.show(trainer, self.latest, self.verdict)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._write_row(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Record the steps a checkpoint holds before it is written: a run that continues from it has no gap."""
        if self.clock.steps:
            self._held.append(self._record(trainer, pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write_row(trainer)
        if self.clock.steps or self._held:
            metrics = self.flush(trainer, pl_module)
            for log in trainer.loggers:
                log.log_metrics(metrics, step=trainer.global_step)
        if self.verdict is not None and trainer.is_global_zero and (line := self.verdict.line()):
            logger.info("%s", line)

    def flush(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
        """Measure the steps since the last call; every rank must call it at the same step."""
        if self.clock.steps:
            self._held.append(self._record(trainer, pl_module))
        window, self._held = joined(self._held), []
        metrics: dict[str, float] = {}
        for meter in self.meters:
            metrics.update(meter.measure(window))
        if self.clock.first_batch_s is not None:
            if not self._first_batch_known:
                self.clock.first_batch_s = of_slowest_rank(self.clock.first_batch_s, pl_module.device)
                self._first_batch_known = True
            metrics["time/first_batch_s"] = self.clock.first_batch_s
        self.latest = {"loss": sum(window.loss) / len(window), **metrics}
        return metrics

    def _write_row(self, trainer: Trainer) -> None:
        """A row of its own, where the module logged nothing at that step."""
        row, self._row = self._row, {}
        if row:
            for log in trainer.loggers:
                log.log_metrics(row, step=trainer.global_step - 1)

    def _record(self, trainer: Trainer, pl_module: LightningModule) -> Window:
        window = gather(self.clock.drain(), pl_module.device)
        if trainer.is_global_zero:
            self.record.append(window)
        return window
