"""One line per interval: step, loss, rate, data wait, and when the run will be done."""

import logging
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from callbacks.metrics import Metrics

logger = logging.getLogger(__name__)


def duration(seconds: float) -> str:
    """`75` -> `1:15`, `4000` -> `1:06:40`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress(Callback):
    """Logs a line every `every_s` seconds of the host clock, with the remaining time at the rate measured so far."""

    def __init__(self, metrics: Metrics, every_s: float = 10.0) -> None:
        self.metrics = metrics
        self.every_s = every_s
        self._began_at = 0.0
        self._began_step = 0
        self._shown_at = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began_at = self._shown_at = time.monotonic()
        self._began_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        done = trainer.global_step - self._began_step
        if not trainer.is_global_zero or now - self._shown_at < self.every_s or not done or not self.metrics.latest:
            return
        self._shown_at = now
        remaining = (now - self._began_at) / done * (trainer.max_steps - trainer.global_step)
        latest = self.metrics.latest
        logger.info(
            "step %d/%d  loss %.4f  %.1f samples/s  data wait %.1f %%  %s left%s",
            trainer.global_step,
            trainer.max_steps,
            latest["loss"],
            latest.get("throughput/samples_per_s", 0.0),
            100 * latest.get("time/data_wait_frac", 0.0),
            duration(remaining),
            self._limit(),
        )

    def _limit(self) -> str:
        """What limits the run, while it is anything but its own computation."""
        verdict = self.metrics.verdict
        return (
            "" if verdict is None or verdict.cause == "compute" else f"  limited by {verdict.cause.replace('_', ' ')}"
        )
