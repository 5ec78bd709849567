"""One run of training: Lightning's Trainer with its callbacks, loggers and checkpoints around it."""

import logging
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from callbacks.data_wait import DataWait
from callbacks.gauges import Gauges, Stages
from callbacks.host import Host
from callbacks.memory import Memory
from callbacks.metrics import Metrics
from callbacks.mfu import Mfu
from callbacks.preemption import Preemption
from callbacks.progress import Progress
from callbacks.rank_times import RankTimes
from callbacks.run_record import RunRecord
from callbacks.step_clock import StepClock
from callbacks.throughput import Throughput
from callbacks.validation import Validation
from callbacks.verdict import Verdict
from callbacks.window import Meter
from models.common import sharded_state
from models.common.mesh import MeshStrategy
from recipes.checkpoint_io import AtomicCheckpointIO
from recipes.load import to_dict
from recipes.ranks import is_first, ranks_per_node
from recipes.run_folder import RunFolder
from recipes.schema import Recipe
from recipes.strategy import PRECISION, build_strategy

logger = logging.getLogger(__name__)

# Advice of Lightning's that does not hold for this project's loaders, which carry their own threads.
_SILENCED = (
    "does not have many workers",
    "Checkpoint directory .* exists",
    "Experiment logs directory .* exists",  # a start from the same step replaces the rows of the one before
    "in eval mode at the start of training",  # the frozen parts, on purpose
    "isinstance\\(treespec, LeafSpec\\)",  # Lightning 2.6 on PyTorch 2.13
    "overridden `on_before_batch_transfer` in `LightningModule`",  # the data module has none of its own
)


class Run:
    """Trains a module from where the run folder stands and keeps the figures.

    Args:
        recipe: the resolved recipe.
        folder: the run folder, created.
        clock: the run's clock, started with the program.
        samples_per_epoch: size of the dataset in samples; 0 when it has no end.
        resumable: write checkpoints, and save and stop on SIGTERM, SIGUSR1 or Ctrl-C.
        gauges: reads what the loader reports about itself, logged with the other metrics.
        stages: reads how busy each stage of the loader was, logged too, and what the verdict on the loader rests on.
        measure: gives the metrics of held-out data, called as the recipe's `validation` says.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        clock: StepClock,
        *,
        samples_per_epoch: int,
        resumable: bool = True,
        gauges: Callable[[], Mapping[str, float]] = dict,
        stages: Callable[[], Stages] = dict,
        measure: Callable[[LightningModule], Mapping[str, float]] | None = None,
    ) -> None:
        # device lists and advertisements at every start; warnings still come through
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.WARNING)
        self.recipe = recipe
        self.folder = folder
        self.clock = clock
        self.record = RunRecord(folder.path)
        if resumable and is_first():
            folder.set_damaged_aside()
            sharded_state.clear(folder.checkpoints)
        self.checkpoint = folder.latest_checkpoint() if resumable else None
        self.data_wait = DataWait()
        self.throughput = Throughput(samples_per_epoch)
        self.preemption = Preemption(self._save) if resumable else None
        self.trainer = self._trainer([self._checkpoints()] if resumable else [])
        device = self.trainer.strategy.root_device
        self.mfu = Mfu(device, recipe.precision, recipe.metrics.peak_tflops)
        self.memory = Memory(device)
        self.ranks, self.host = RankTimes(), Host()
        self.verdict = Verdict(self.ranks, self.mfu, self.host, self.memory, stages)
        meters: list[Meter] = [self.data_wait, self.throughput, self.ranks, self.mfu, self.memory, self.host]
        self.metrics = Metrics(
            clock, [*meters, Gauges(gauges, stages), self.verdict], self.record, self.verdict, Progress()
        )
        # the clock stops before anything else runs; a signal is acted upon after the checkpoint that may be due
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:0] = [clock, self.metrics]
        self.validation: Validation | None = None
        if measure is not None and recipe.validation is not None:
            self.validation = Validation(clock, measure, recipe.validation.every_n_steps)
            callbacks.insert(2, self.validation)  # before the checkpoint of its step, which then holds the result
        if self.preemption is not None:
            callbacks.append(self.preemption)

    @property
    def start_step(self) -> int:
        """Optimizer steps already done before this start."""
        return self.checkpoint[1] if self.checkpoint else 0

    @property
    def stopped_by(self) -> int | None:
        """Signal that stopped training, if one did."""
        return self.preemption.signal if self.preemption else None

    def fit(self, module: LightningModule, **data: Any) -> None:
        """Train to `trainer.max_steps`, continuing from the newest checkpoint; `data` as for `Trainer.fit`."""
        if self.trainer.is_global_zero:
            self._restore_figures()
        for message in _SILENCED:
            warnings.filterwarnings("ignore", message=f".*{message}.*")
        path = str(self.checkpoint[0]) if self.checkpoint else None
        if path is not None:
            logger.info("continuing from step %d of %s", self.start_step, self.folder.path)
        # weights_only: a checkpoint holds tensors and plain values; nothing in it may run code
        with exits_name_their_signal():
            self.trainer.fit(module, ckpt_path=path, weights_only=True, **data)
        self._finish_saving()

    def save_final(self) -> None:
        """Checkpoint of the last step, unless the cadence has just written it; call it on every rank."""
        self._save(self.trainer)
        step, steps = self.trainer.global_step, self.recipe.trainer.max_steps
        if step < steps:
            spent = self.recipe.trainer.max_time
            logger.warning(
                "trainer.max_time = %s is used up at step %d of %d; give more to train on", spent, step, steps
            )

    def figures(self) -> dict[str, Any]:
        """Everything measured, over all starts of the run."""
        return {
            **self.record.losses(),
            **self.throughput.summary(),
            "first_batch_s": self.clock.first_batch_s,
            **self.data_wait.summary(),
            **self.mfu.summary(),
            **self.memory.summary(),
            **self.ranks.summary(),
            **self.host.summary(),
            **self.verdict.summary(),
            **(self.validation.summary() if self.validation is not None else {}),
        }

    def _restore_figures(self) -> None:
        self.record.resume_at(self.start_step)
        rows = self.record.rows()
        for meter in (self.data_wait, self.throughput, self.mfu):
            meter.restore(rows)

    def _save(self, trainer: Trainer) -> None:
        self._finish_saving()
        path = self.folder.checkpoint_path(trainer.global_step)
        # Saving is a collective: rank 0 decides for all, or a slow rank could already find the file of a fast one.
        if not trainer.strategy.broadcast(path.exists()):
            trainer.save_checkpoint(path)
            self._finish_saving()
        if trainer.is_global_zero:
            self.folder.prune(self.recipe.checkpoint.keep)

    def _finish_saving(self) -> None:
        """Wait for a checkpoint of shards that is being written behind the training; every rank calls it."""
        if isinstance(self.trainer.strategy, MeshStrategy):
            self.trainer.strategy.finish_saving()

    def _checkpoints(self) -> ModelCheckpoint:
        keep = self.recipe.checkpoint.keep
        checkpoints = ModelCheckpoint(
            dirpath=self.folder.checkpoints,
            filename="step-{step:08d}",
            auto_insert_metric_name=False,
            every_n_train_steps=self.recipe.checkpoint.every_n_steps,
            monitor="step" if keep > 0 else None,  # keeps the newest ones
            mode="max",
            save_top_k=keep,
        )
        # A run that continues would save its first step again after one micro-batch of the next: half of a step, with
        # the data position behind it.
        checkpoints._last_global_step_saved = self.start_step
        return checkpoints

    def _trainer(self, callbacks: list[Callback]) -> Trainer:
        recipe = self.recipe
        return Trainer(
            max_steps=recipe.trainer.max_steps,
            max_time=recipe.trainer.max_time,
            accelerator=recipe.trainer.accelerator,
            devices=ranks_per_node(),
            num_nodes=recipe.trainer.num_nodes,
            strategy=build_strategy(recipe),
            precision=PRECISION[recipe.precision],
            accumulate_grad_batches=recipe.trainer.accumulate_grad_batches,
            gradient_clip_val=recipe.trainer.gradient_clip_val,
            log_every_n_steps=recipe.trainer.log_every_n_steps,
            deterministic=recipe.trainer.deterministic,
            detect_anomaly=recipe.trainer.detect_anomaly,
            profiler=recipe.trainer.profiler,
            logger=self._loggers(),
            callbacks=callbacks,
            plugins=[AtomicCheckpointIO()],
            enable_checkpointing=bool(callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,  # the data layer deals the samples out; Lightning must not reshuffle them
            num_sanity_val_steps=0,
        )

    def _loggers(self) -> list[Logger]:
        # one file per start: Lightning's CSV logger clears a folder that it finds in use
        loggers: list[Logger] = [
            CSVLogger(
                self.folder.path,
                name="metrics",
                version=f"from_step_{self.start_step:08d}",
                flush_logs_every_n_steps=self.recipe.trainer.log_every_n_steps,
            )
        ]
        if self.recipe.logger == "wandb":
            from recipes.wandb_run import started, wandb_logger

            loggers.append(started(wandb_logger(self.recipe, self.folder, to_dict(self.recipe))))
        return loggers


@contextmanager
def exits_name_their_signal() -> Iterator[None]:
    """Lightning answers a SIGTERM with exit code 0, as if the work were done, and a Ctrl-C with 1, both in silence."""
    try:
        yield
    except SystemExit as error:
        number = signal.SIGTERM if isinstance(error, SIGTERMException) else signal.SIGINT
        logger.warning("%s: stopped at once; the same command continues from what was saved before", number.name)
        raise SystemExit(128 + number) from error


def set_torch_threads(count: int | None) -> None:
    """Threads of one operation on the CPU; torchrun's ranks otherwise all take every core."""
    if count is not None:
        torch.set_num_threads(count)
