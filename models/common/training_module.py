"""What training is the same for every model: one mean over a step, clipping, averages, resuming, working ahead."""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from models.common import draws
from models.common.ema import Ema, without_averages
from models.common.finite import FiniteGuard
from models.common.lookahead import Lookahead, next_drawn
from models.common.mesh import sharded_modules
from models.common.optim import (
    OptimizerConfig,
    ScheduleConfig,
    apply_settings,
    build_optimizer,
    check_parts,
    fold_scale,
    from_options,
    rates_by_part,
    settings_of,
)
from models.common.step_mean import StepMean, gradients, scale_, total_norm
from models.common.step_options import EmaConfig
from models.common.step_options import Lookahead as LookaheadChoice
from models.common.trained import FrozenWeights

logger = logging.getLogger(__name__)


class Loss(NamedTuple):
    """Of a micro-batch, scalars on its device."""

    mean: Tensor
    weight: Tensor
    """By how much it counts beside others in the mean of a step."""
    parts: Mapping[str, Tensor] = {}
    """Means of what it is made of, for the log."""


def begin_with_a_step(checkpoint: dict[str, Any], accumulate: int) -> None:
    """Let a run that accumulates another number of micro-batches than before begin with a whole step.

    Lightning ends a step where the number of micro-batches since the start divides by that number. A checkpoint is of
    the end of a step; counted with another number that may be in the middle of one, which would then be a short one.
    """
    loops = checkpoint.get("loops", {}).get("fit_loop", {})
    done = loops.get("epoch_loop.batch_progress", {}).get("current", {})
    if beyond := done.get("ready", 0) % accumulate:
        for name in done:
            done[name] += accumulate - beyond


class TrainingModule(LightningModule):
    """Training of a built network; a model says in a subclass what its loss is, and what else it knows of a step.

    Args:
        network: the model; its `requires_grad` flags say what is trained.
        seed: random draws are functions of it and of the place in the run.
        optimizer, schedule: fields of `models.common.optim`'s two configs.
        lookahead: `stream` runs the frozen part of the next micro-batch beside the trained part of this one.
        ema: average of the trained weights over the steps; `averaged` puts it in.
        nonfinite_patience: take gradients that are no numbers as 0, for that many steps in a row; None lets them pass.
    """

    optimizer_parts: Mapping[str, Sequence[str]] = {}
    """Parts that may have a learning rate of their own, by the beginnings of their parameters' names."""

    def __init__(
        self,
        network: nn.Module,
        *,
        seed: int,
        optimizer: OptimizerConfig | Mapping[str, Any],
        schedule: ScheduleConfig | Mapping[str, Any],
        lookahead: LookaheadChoice = "none",
        ema: EmaConfig | Mapping[str, Any] | None = None,
        nonfinite_patience: int | None = None,
    ) -> None:
        super().__init__()
        self.network: Any = network
        self.seed = int(seed)
        self.optimizer_config: OptimizerConfig = from_options(OptimizerConfig, optimizer, "optimizer")
        self.schedule_config: ScheduleConfig = from_options(ScheduleConfig, schedule, "schedule")
        self._last_step = -1
        self._micro_batch = 0
        self._mean = StepMean()
        self._part_names: tuple[str, ...] = ()
        self._factor: Tensor | None = None
        self._settings: list[dict[str, Any]] = []
        self._frozen = FrozenWeights(network)
        self._finite = None if nonfinite_patience is None else FiniteGuard(nonfinite_patience)
        self.lookahead = lookahead
        self._ahead: Lookahead | None = None
        self.ema = None if ema is None else Ema(from_options(EmaConfig, ema, "ema"))
        self.train()

    # what a model says

    def micro_batch_loss(self, inputs: Mapping[str, Any]) -> Loss:
        """Loss of one micro-batch."""
        raise NotImplementedError

    def shard_network(self, mesh: Any, policy: Any) -> None:
        """Shard what is trained over a mesh, in place."""
        raise NotImplementedError

    def frozen_part(self) -> Callable[[Mapping[str, Any]], Any] | str:
        """What of a step may run ahead, as `Lookahead` takes it; or why nothing can, in one line."""
        raise NotImplementedError

    # the run

    def configure_model(self) -> None:
        """Shard the network where the strategy has a mesh; called once before the optimizer is made."""
        if self.device_mesh is not None and not sharded_modules(self.network):
            self.shard_network(self.device_mesh, getattr(self.trainer.strategy, "policy", None))
        if self.ema is not None:
            self.ema.track(self.network)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A checkpoint holds what is trained; the frozen rest is where the run found it."""
        self._frozen.leave_out(checkpoint, with_digest=self.global_rank == 0)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._trainer is not None:
            begin_with_a_step(checkpoint, self.trainer.accumulate_grad_batches)
        check_parts(checkpoint, self.optimizer_config)
        self._frozen.put_back(checkpoint)
        if self.ema is None:
            without_averages(checkpoint["state_dict"])
        else:
            self.ema.complete(checkpoint["state_dict"])

    def on_fit_start(self) -> None:
        # Lightning keeps the modes it finds, and an evaluation before the fit may have left another one.
        self.train()
        if self.lookahead == "stream":
            frozen = self.frozen_part()
            if not isinstance(frozen, str):
                self._ahead = Lookahead(frozen, self.trainer.strategy.root_device)
            elif self.global_rank == 0:
                logger.warning("lookahead: off, %s", frozen)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The inputs that were made of this batch during the step before, if they were."""
        return batch if self._ahead is None else self._ahead.swap(batch)

    def teardown(self, stage: str) -> None:
        """Let go of a micro-batch that no step has taken."""
        if self._ahead is not None:
            self._ahead.clear()

    def training_step(self, inputs: Mapping[str, Any], batch_idx: int = 0) -> Tensor | dict[str, Tensor]:
        """Loss of one micro-batch: its mean where it is the whole step, else its sum.

        Of several micro-batches or ranks the summed error is returned as `loss`, with `loss_sum` and `loss_weight`, its
        weight in the mean, beside it; `configure_gradient_clipping` divides the gradient by the weight of the whole
        step.
        """
        self._count_micro_batch()
        # Dropout comes from the global generator: seeded by the place in the run, it repeats after a resume.
        torch.manual_seed(
            draws.stream_key(self.seed, "step", self.global_step, self._micro_batch, self.global_rank) >> 1
        )
        mean, weight, parts = self.micro_batch_loss(inputs)
        error = mean * weight
        self._part_names = tuple(parts)
        self._mean.add(error, weight, *(part * weight for part in parts.values()))
        self._look_ahead()
        if self._shares() == 1:
            return mean
        return {"loss": error, "loss_sum": error.detach(), "loss_weight": weight}

    def _look_ahead(self) -> None:
        """Begin the next micro-batch, which the trainer has drawn already; not after the last one of the run."""
        if self._ahead is None or self._trainer is None:
            return
        ends = self._micro_batch + 1 == self.trainer.accumulate_grad_batches
        if ends and 0 <= self.trainer.max_steps <= self.global_step + 1:
            return
        drawn = next_drawn(self.trainer)
        if drawn is not None:
            self._ahead.start(drawn, self._inputs_of)

    def _inputs_of(self, drawn: Any) -> Mapping[str, Any]:
        """Inputs of a batch on the device, without counting it as trained."""
        source = getattr(getattr(self.trainer, "datamodule", None), "device_inputs", None)
        inputs = self.trainer.strategy.batch_to_device(drawn) if source is None else source(drawn, self.device)
        return inputs  # type: ignore[no-any-return]

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = build_optimizer(self.network, self.optimizer_config, self.optimizer_parts)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.schedule_config.factor(step))
        self._settings = settings_of(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1}}

    def on_train_start(self) -> None:
        """A run that continues follows its configuration, not the one its checkpoint was saved with."""
        for optimizer, schedule in zip(self.trainer.optimizers, self.trainer.lr_scheduler_configs, strict=True):
            scheduler: Any = schedule.scheduler
            apply_settings(optimizer, scheduler, self._settings)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Update the weights, and then their average: before anything saves them."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if self.ema is not None:
            inner = getattr(optimizer, "optimizer", optimizer)
            self.ema.update(self.global_step + 1, getattr(inner, "master", None))

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the network computes with the average of its weights where one is kept."""
        return contextlib.nullcontext() if self.ema is None else self.ema.applied()

    def held_out_figures(self, validation: Any) -> dict[str, float]:
        """Metrics by name of what the model measures on held-out samples; every rank must call it."""
        return dict(validation.measure(self.network))

    def option_figures(self) -> dict[str, float]:
        """What the options of the step have come to, for the run's summary."""
        return {} if self._ahead is None else self._ahead.summary()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the loss of the step and find what its gradient must be divided by."""
        error, weight, *parts = self._mean.totals()
        # never to Lightning's progress bar: it fetches such a value from the device in every step, drawn or not
        self.log("train/loss", error / weight, on_step=True, on_epoch=False)
        for name, part in zip(self._part_names, parts, strict=True):
            self.log(f"train/loss/{name}", part / weight, on_step=True, on_epoch=False)
        # Lightning has divided by the number of micro-batches and the strategy by that of ranks.
        shares = self._shares()
        self._factor = shares / weight if shares > 1 else None
        for part, rate in rates_by_part(optimizer).items():
            # a tensor on the CPU: Lightning would copy a plain number to the device, which waits for it in every step
            name = "train/lr" if part is None else f"train/lr/{part}"
            self.log(name, torch.tensor(rate), on_step=True, on_epoch=False)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Make the gradient that of the step's mean and clip it by its norm, in one pass over all gradients or in none.

        None is needed where `optimizer.fold_clip` leaves it to the update. The norm before clipping is logged on steps
        whose metrics are written.
        """
        grads = gradients(optimizer)
        factor, limit = self._factor, gradient_clip_val or 0.0
        if gradient_clip_algorithm not in (None, "norm"):
            raise ValueError(f"gradient_clip_algorithm={gradient_clip_algorithm!r}: gradients are clipped by norm only")
        if self._finite is not None:
            self._finite.repair_(grads)
            if self._writes_metrics() and self._finite.total is not None:
                self.log("train/nonfinite_steps", self._finite.total, on_step=True, on_epoch=False)
        if limit > 0 or self._writes_metrics():
            norm = total_norm(grads) * (1.0 if factor is None else factor)
            if self._writes_metrics():
                self.log("train/grad_norm", norm, on_step=True, on_epoch=False)
            if limit > 0:
                clip = torch.clamp(limit / (norm + 1e-6), max=1.0)
                factor = clip if factor is None else clip * factor
        if self.optimizer_config.fold_clip:
            fold_scale(optimizer, factor)
        elif factor is not None:
            scale_(grads, factor)

    def _count_micro_batch(self) -> None:
        if self.global_step == self._last_step:
            self._micro_batch += 1
        else:
            self._last_step, self._micro_batch = self.global_step, 0
            self._mean.reset()

    def _shares(self) -> int:
        """Micro-batches times ranks: the parts whose gradients Lightning and its strategy average."""
        return 1 if self._trainer is None else self.trainer.accumulate_grad_batches * self.trainer.world_size

    def _writes_metrics(self) -> bool:
        every = self.trainer.log_every_n_steps
        return every > 0 and (self.global_step + 1) % every == 0
