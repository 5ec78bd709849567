"""One line per interval: step, loss, rate, data wait, and when the run will be done."""

import logging
import time
from collections.abc import Mapping

from lightning.pytorch import Trainer

from callbacks.verdict import Verdict

logger = logging.getLogger(__name__)


def duration(seconds: float) -> str:
    """`75` -> `1:15`, `4000` -> `1:06:40`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """Logs a line every `every_s` seconds of the host clock, with the remaining time at the rate measured so far.

    `Metrics` calls it after each micro-batch: as a callback of its own it would cost the loop six calls a step.
    """

    def __init__(self, every_s: float = 10.0) -> None:
        self.every_s = every_s
        self._began_at = 0.0
        self._began_step = 0
        self._shown_at = 0.0

    def begin(self, step: int) -> None:
        """Training begins behind this step."""
        self._began_at = self._shown_at = time.monotonic()
        self._began_step = step

    def show(self, trainer: Trainer, latest: Mapping[str, float], verdict: Verdict | None) -> None:
        """A line, if it is time for one and rank 0 has metrics to show."""
        now = time.monotonic()
        if now - self._shown_at < self.every_s or not trainer.is_global_zero:
            return
        done = trainer.global_step - self._began_step
        if not done or not latest:
            return
        self._shown_at = now
        remaining = (now - self._began_at) / done * (trainer.max_steps - trainer.global_step)
        # what limits the run, while it is anything but its own computation
        cause = "compute" if verdict is None else verdict.cause
        logger.info(
            "step %d/%d  loss %.4f  %.1f samples/s  data wait %.1f %%  %s left%s",
            trainer.global_step,
            trainer.max_steps,
            latest["loss"],
            latest.get("throughput/samples_per_s", 0.0),
            100 * latest.get("time/data_wait_frac", 0.0),
            duration(remaining),
            "" if cause == "compute" else f"  limited by {cause.replace('_', ' ')}",
        )
