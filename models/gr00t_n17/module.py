"""GR00T N1.7 under Lightning: loss of a batch with per-sample draws, stock optimiser and schedule, logged numbers."""

import contextlib
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from models.common import draws
from models.common.ema import Ema, without_averages
from models.common.graphs import CudaCapture, HeadGraphs
from models.common.lookahead import Lookahead, next_drawn
from models.common.mesh import sharded_modules
from models.common.optim import (
    OptimizerConfig,
    ScheduleConfig,
    apply_settings,
    build_optimizer,
    from_options,
    settings_of,
)
from models.common.step_options import EmaConfig
from models.common.step_options import Graphs as GraphsChoice
from models.common.step_options import Lookahead as LookaheadChoice
from models.gr00t_n17.ahead import frozen_layers, lookahead_problem, run_frozen
from models.gr00t_n17.checkpoint.trained import FrozenWeights
from models.gr00t_n17.feature_store import FeatureCache
from models.gr00t_n17.flops import step_flops
from models.gr00t_n17.layers.grids import Grid
from models.gr00t_n17.network import GR00TN17
from models.gr00t_n17.parallelize import shard
from models.gr00t_n17.recompute import recompute_flops
from models.gr00t_n17.step_mean import StepMean, gradients, scale_, total_norm

logger = logging.getLogger(__name__)


class GR00TN17Module(LightningModule):
    """Training of a built network on the dicts of `Processor.to_network`.

    Args:
        network: the model; its `requires_grad` flags say what is trained.
        seed: noise and time of a sample are functions of (seed, position, draw).
        optimizer: lr, betas, eps, weight_decay (and fused) of AdamW.
        schedule: max_steps and warmup_steps or warmup_ratio.
        flow_draws: independent (noise, time) draws per sample that share one backbone pass.
        feature_cache: keeps the outputs of a frozen backbone; the inputs then carry `features.with_keys`' keys.
        lookahead: `stream` runs the frozen part of the next micro-batch beside the trained part of this one.
        graphs: `head` replays the head's loss and its gradients as one CUDA graph per shape.
        ema: average of the trained weights over the steps; `averaged` puts it in.
    """

    def __init__(
        self,
        network: GR00TN17,
        *,
        seed: int,
        optimizer: OptimizerConfig | Mapping[str, Any],
        schedule: ScheduleConfig | Mapping[str, Any],
        flow_draws: int = 1,
        feature_cache: FeatureCache | None = None,
        lookahead: LookaheadChoice = "none",
        graphs: GraphsChoice = "none",
        ema: EmaConfig | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if flow_draws < 1:
            raise ValueError(f"flow_draws={flow_draws}: at least 1 draw per sample is needed")
        if network.config.noise_beta_beta != 1.0:
            raise ValueError(
                f"noise_beta_beta={network.config.noise_beta_beta}: only 1.0, the released value, can be drawn"
            )
        self.network = network
        self.seed = int(seed)
        self.optimizer_config: OptimizerConfig = from_options(OptimizerConfig, optimizer, "optimizer")
        self.schedule_config: ScheduleConfig = from_options(ScheduleConfig, schedule, "schedule")
        self.flow_draws = int(flow_draws)
        self.feature_cache = feature_cache
        self._last_step = -1
        self._micro_batch = 0
        self._mean = StepMean()
        self._factor: Tensor | None = None
        self._last_shapes: tuple[int, int, tuple[Grid, ...], bool] | None = None
        self._flops: dict[tuple[int, int, tuple[Grid, ...], bool], tuple[int, int]] = {}
        self._recompute_flops: dict[tuple[int, int, tuple[Grid, ...], bool], int] = {}
        self._backbone_share = 1.0
        self._settings: list[dict[str, Any]] = []
        self._frozen = FrozenWeights(network)
        self.lookahead, self.graphs = lookahead, graphs
        self._ahead: Lookahead | None = None
        self._head_graphs: HeadGraphs | None = None
        self.ema = None if ema is None else Ema(from_options(EmaConfig, ema, "ema"))
        self.train()

    def configure_model(self) -> None:
        """Shard the network where the strategy has a mesh; called once before the optimizer is made."""
        if self.device_mesh is not None and not sharded_modules(self.network):
            shard(self.network, self.device_mesh, getattr(self.trainer.strategy, "policy", None))
        if self.ema is not None:
            self.ema.track(self.network)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A checkpoint holds what is trained; the frozen rest is where the run found it."""
        self._frozen.leave_out(checkpoint, with_digest=self.global_rank == 0)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._frozen.put_back(checkpoint)
        if self.ema is None:
            without_averages(checkpoint["state_dict"])
        else:
            self.ema.complete(checkpoint["state_dict"])

    def on_fit_start(self) -> None:
        # Lightning keeps the modes it finds, and an evaluation before the fit may have left another one.
        self.train()
        if self.lookahead == "stream":
            problem = lookahead_problem(self.network)
            if problem is not None and self.global_rank == 0:
                logger.warning("lookahead: off, %s", problem)
            if problem is None:
                whole = frozen_layers(self.network) == len(self.network.backbone.language_model.layers)
                self._ahead = Lookahead(
                    partial(run_frozen, self.network, self.feature_cache, whole), self.trainer.strategy.root_device
                )
        if self.graphs == "head" and self._head_graphs is None:
            head = self.network.action_head
            if self.trainer.strategy.root_device.type != "cuda":
                logger.warning("graphs: off, CUDA graphs need a GPU; the head runs as usual")
            else:
                accumulates = self.trainer.accumulate_grad_batches > 1
                self._head_graphs = HeadGraphs(head.loss, head, CudaCapture(), accumulates=accumulates)
                head.loss = self._head_graphs  # type: ignore[method-assign, assignment]

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """The inputs that were made of this batch during the step before, if they were."""
        return batch if self._ahead is None else self._ahead.swap(batch)

    def teardown(self, stage: str) -> None:
        """Let go of a micro-batch that no step has taken."""
        if self._ahead is not None:
            self._ahead.clear()

    def training_step(self, inputs: Mapping[str, Any], batch_idx: int = 0) -> Tensor | dict[str, Tensor]:
        """Loss of one micro-batch: its mean where it is the whole step, else its sum.

        Of several micro-batches or ranks the summed error is returned as `loss`, with `loss_sum` and `loss_weight`, the
        size of its mask, beside it; `configure_gradient_clipping` divides the gradient by the mask of the whole step.
        """
        self._count_micro_batch()
        # Dropout comes from the global generator: seeded by the place in the run, it repeats after a resume.
        torch.manual_seed(
            draws.stream_key(self.seed, "step", self.global_step, self._micro_batch, self.global_rank) >> 1
        )
        noise, time = self.flow_variables(inputs["position"])
        mean = self._loss(inputs, noise, time)
        self._last_shapes = self._shapes(inputs)
        weight = inputs["action_mask"].sum(dtype=torch.float32) * self.flow_draws + 1e-6  # what the mean was divided by
        error = mean * weight
        self._mean.add(error, weight)
        self._look_ahead()
        if self._shares() == 1:
            return mean
        return {"loss": error, "loss_sum": error.detach(), "loss_weight": weight}

    def _loss(self, inputs: Mapping[str, Any], noise: Tensor, time: Tensor) -> Tensor:
        """Mean loss of a micro-batch; the backbone runs where its features are not there yet."""
        features = None
        if self._ahead is not None:
            features, self._backbone_share = self._ahead.result(inputs)
        elif self.feature_cache is not None:
            features, self._backbone_share = run_frozen(self.network, self.feature_cache, True, inputs)
        return self.network(inputs, noise=noise, time=time, features=features)

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

    def flow_variables(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Noise [K * B, H, Da] and time [K * B] for int64 positions [B], row k * B + b being draw k of sample b."""
        config = self.network.config
        shape = (config.action_horizon, config.max_action_dim)
        noise, time = [], []
        for draw in range(self.flow_draws):
            noise.append(draws.normal(self.seed, "flow.noise", position, shape, draw=draw))
            u = draws.beta(self.seed, "flow.time", position, alpha=config.noise_beta_alpha, draw=draw)
            time.append((1.0 - u) * config.noise_s)
        return torch.cat(noise), torch.cat(time)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = build_optimizer(self.network, self.optimizer_config)
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

    def option_figures(self) -> dict[str, float]:
        """What the options of the step have come to, for the run's summary."""
        figures = {} if self._ahead is None else self._ahead.summary()
        if self._head_graphs is not None:
            graphs = self._head_graphs
            figures |= {"graphs": graphs.captured, "graph_replays": graphs.replays, "graph_eager_calls": graphs.eager}
        return figures

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the loss of the step and find what its gradient must be divided by."""
        error, weight = self._mean.totals()
        # never to Lightning's progress bar: it fetches such a value from the device in every step, drawn or not
        self.log("train/loss", error / weight, on_step=True, on_epoch=False)
        # Lightning has divided by the number of micro-batches and the strategy by that of ranks.
        shares = self._shares()
        self._factor = shares / weight if shares > 1 else None
        # a tensor on the CPU: Lightning would copy a plain number to the device, which waits for it in every step
        rate = torch.tensor(optimizer.param_groups[0]["lr"])
        self.log("train/lr", rate, on_step=True, on_epoch=False)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Make the gradient that of the step's mean and clip it by its norm, in one pass over all gradients.

        The norm before clipping is logged on steps whose metrics are written.
        """
        grads = gradients(optimizer)
        factor, limit = self._factor, gradient_clip_val or 0.0
        if gradient_clip_algorithm not in (None, "norm"):
            raise ValueError(f"gradient_clip_algorithm={gradient_clip_algorithm!r}: gradients are clipped by norm only")
        if limit > 0 or self._writes_metrics():
            norm = total_norm(grads) * (1.0 if factor is None else factor)
            if self._writes_metrics():
                self.log("train/grad_norm", norm, on_step=True, on_epoch=False)
            if limit > 0:
                clip = torch.clamp(limit / (norm + 1e-6), max=1.0)
                factor = clip if factor is None else clip * factor
        if factor is not None:
            scale_(grads, factor)

    @property
    def step_flops(self) -> int:
        """Model FLOPs of the last micro-batch on this rank: forward and backward, frozen parts forward only."""
        if self._last_shapes is None:
            return 0
        if self._last_shapes not in self._flops:
            batch, length, grids, still = self._last_shapes
            whole, head = (
                step_flops(
                    self.network,
                    image_grids=grids,
                    sequence_length=length,
                    batch_size=batch,
                    draws=self.flow_draws,
                    still_frames=still,
                    cached_features=cached,
                )
                for cached in (False, True)
            )
            self._flops[self._last_shapes] = head, whole - head
        head, backbone = self._flops[self._last_shapes]
        return head + round(self._backbone_share * backbone)

    @property
    def step_recompute_flops(self) -> int:
        """FLOPs that the last micro-batch ran a second time on this rank, for activation checkpointing."""
        if self._last_shapes is None:
            return 0
        if self._last_shapes not in self._recompute_flops:
            batch, length, grids, _ = self._last_shapes
            self._recompute_flops[self._last_shapes] = recompute_flops(
                self.network, image_grids=grids, sequence_length=length, batch_size=batch, draws=self.flow_draws
            )
        return self._recompute_flops[self._last_shapes]

    def _shapes(self, inputs: Mapping[str, Any]) -> tuple[int, int, tuple[Grid, ...], bool]:
        """What the FLOP count needs of a batch, as host integers: size, prompt length, patch grids, still frames."""
        batch, length = inputs["input_ids"].shape
        grids = tuple((h, w) for _, h, w in inputs["image_grid_thw"].tolist())
        vision = self.network.config.backbone.vision
        still = inputs["pixel_values"].shape[-1] == vision.in_channels * vision.patch_size**2
        return batch, length, grids, still

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
