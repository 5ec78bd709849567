"""Measures on held-out data every so many optimizer steps and after the last, outside of the measured time.

Lightning's own validation loop counts micro-batches, leaves a run's last step out unless it falls on the interval,
skips the one that is due where a run continues, and takes no validation data beside a DataModule without its hook. This
callback counts optimizer steps and runs before the checkpoint of its step, which then holds the result.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from callbacks.step_clock import StepClock
from callbacks.step_hooks import StepCallback

logger = logging.getLogger(__name__)

LOSS = "val/loss"


class Validation(StepCallback):
    """Calls `measure` on every rank and hands its metrics to every logger.

    Args:
        clock: the run's clock; the time of a measurement is no time of a step.
        measure: gives metrics by name, the same on every rank, and leaves the module as it was.
        every_n_steps: optimizer steps between two measurements.
    """

    def __init__(
        self, clock: StepClock, measure: Callable[[LightningModule], Mapping[str, float]], every_n_steps: int
    ) -> None:
        self.clock = clock
        self.measure = measure
        self.every_n_steps = every_n_steps
        self.latest: dict[str, float] = {}
        self.latest_step = 0
        self.best: float | None = None
        self.best_step = 0
        self._step_before = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step_before = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._step_before:
            return  # a micro-batch of a step that is still accumulating
        self._step_before = step
        if step % self.every_n_steps and step != trainer.max_steps:
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)  # the step's own work belongs to the step
        began = time.perf_counter()
        plugin: Any = trainer.precision_plugin
        with self.clock.paused(), plugin.val_step_context():
            metrics = dict(self.measure(pl_module))
        self.latest, self.latest_step = metrics, step
        if LOSS in metrics and (self.best is None or metrics[LOSS] < self.best):
            self.best, self.best_step = metrics[LOSS], step
        # for callbacks that watch a metric; as a row of their own in the logs, which train metrics share only at times
        pl_module.log_dict(metrics, on_step=True, on_epoch=False, logger=False)
        row = {**metrics, "time/validation_s": time.perf_counter() - began}
        for log in trainer.loggers:
            log.log_metrics(row, step=step - 1)  # where Lightning puts the training metrics of this step
        if trainer.is_global_zero:
            shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if name.count("/") == 1)
            logger.info("step %d  %s  (%.1f s)", step, shown, row["time/validation_s"])

    def summary(self) -> dict[str, float | int]:
        """Figures for `summary.json`: those of the last measurement, and the best loss; empty before the first."""
        if not self.latest:
            return {}
        figures: dict[str, float | int] = {name.replace("/", "_"): value for name, value in self.latest.items()}
        figures["val_step"] = self.latest_step
        if self.best is not None:
            figures |= {"val_loss_best": self.best, "val_loss_best_step": self.best_step}
        return figures

    def state_dict(self) -> dict[str, Any]:
        """Saved with a checkpoint, so that a run that continues knows its best."""
        return {
            "latest": dict(self.latest),
            "latest_step": self.latest_step,
            "best": self.best,
            "best_step": self.best_step,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.latest, self.latest_step = dict(state_dict["latest"]), state_dict["latest_step"]
        self.best, self.best_step = state_dict["best"], state_dict["best_step"]
