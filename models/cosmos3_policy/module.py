"""The Cosmos-3 policy under Lightning: one step from videos and captions to the loss of both parts."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from models.common.optim import OptimizerConfig, ScheduleConfig, from_options
from models.common.step_options import EmaConfig
from models.common.step_options import Lookahead as LookaheadChoice
from models.common.training_module import Loss, TrainingModule
from models.cosmos3_policy.flops import PackShape, recompute_flops, step_flops, upstream_flops
from models.cosmos3_policy.network import Cosmos3Policy, Understanding
from models.cosmos3_policy.objective import Flow, ObjectiveConfig, flow_of, losses
from models.cosmos3_policy.parallelize import ACTION_HEADS, shard
from models.cosmos3_policy.validation import Validation


class Prepared(NamedTuple):
    """What a step needs of its frozen parts."""

    flow: Flow
    understanding: Understanding


class Cosmos3PolicyModule(TrainingModule):
    """Training of a built network on the dicts of `Cosmos3Processor.to_network`.

    Args:
        network: the model; its `requires_grad` flags say what is trained.
        vae: frozen, as `vision.vae.VideoEncoder`; no part of the module's state.
        seed: noise and its level are functions of (seed, position).
        optimizer: as for `TrainingModule`; `lr_multipliers` may name `action_heads`.
        schedule, lookahead, ema, nonfinite_patience: as for `TrainingModule`. Ahead of a step run the video encoder,
            the noise and the caption tower.
        objective: shift of the noise levels, weights of the two losses.
    """

    network: Cosmos3Policy
    optimizer_parts: ClassVar = {"action_heads": ACTION_HEADS}

    def __init__(
        self,
        network: Cosmos3Policy,
        vae: Any,
        *,
        seed: int,
        optimizer: OptimizerConfig | Mapping[str, Any],
        schedule: ScheduleConfig | Mapping[str, Any],
        lookahead: LookaheadChoice = "none",
        ema: EmaConfig | Mapping[str, Any] | None = None,
        objective: ObjectiveConfig | Mapping[str, Any] | None = None,
        nonfinite_patience: int | None = 100,
    ) -> None:
        super().__init__(
            network,
            seed=seed,
            optimizer=optimizer,
            schedule=schedule,
            lookahead=lookahead,
            ema=ema,
            nonfinite_patience=nonfinite_patience,
        )
        self.objective: ObjectiveConfig = from_options(ObjectiveConfig, objective or {}, "objective")
        self._vae = (vae,)  # in a tuple it is no submodule, whatever its class is
        self._last_shape: PackShape | None = None
        self._last_clips = (0, 0, 0, 0)
        self._counted = {"own": 0, "upstream": 0}

    def shard_network(self, mesh: Any, policy: Any) -> None:
        shard(self.network, mesh, policy)

    def frozen_part(self) -> Callable[[Mapping[str, Any]], Any] | str:
        return self.prepare

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._vae[0].to(self.trainer.strategy.root_device)

    def micro_batch_loss(self, inputs: Mapping[str, Any]) -> Loss:
        """Mean over the samples; a pack counts by how many it holds."""
        flow, understanding = self.prepare(inputs) if self._ahead is None else self._ahead.result(inputs)
        self._count_flops(flow, inputs["video"])
        vision, action = losses(self.network.generate(flow.packed, understanding), flow)
        vision, action = vision.mean(), action.mean()
        mean = self.objective.vision_weight * vision + self.objective.action_weight * action
        return Loss(mean, mean.new_full((), len(flow.packed)), {"vision": vision, "action": action})

    @torch.no_grad()
    def prepare(self, inputs: Mapping[str, Any]) -> Prepared:
        """Everything before the trained tower; depends on no trained weight and on no generator's state."""
        flow = flow_of(inputs, self._vae[0], seed=self.seed, position=inputs["position"], shift=self.objective.shift)
        return Prepared(flow, self.network.understand(flow.packed))

    def held_out_figures(self, validation: Validation) -> dict[str, float]:
        return validation.measure(self.network, self._vae[0])

    def option_figures(self) -> dict[str, float]:
        figures = super().option_figures()
        if self._counted["own"]:
            # times `mfu` it is what NVIDIA's framework would call MFU
            figures["upstream_flops_ratio"] = self._counted["upstream"] / self._counted["own"]
        return figures

    @property
    def step_flops(self) -> int:
        """Model FLOPs of the last micro-batch on this rank: forward and backward, what is frozen forward only.

        What is frozen is the caption tower and the video encoder, whose part is `step_encoder_flops`.
        """
        if self._last_shape is None:
            return 0
        return step_flops(self.network, self._last_shape) + self.step_encoder_flops

    @property
    def step_encoder_flops(self) -> int:
        """Of `step_flops` those of the video encoder."""
        clips, *size = self._last_clips
        return clips * self._vae[0].flops(*size) if clips else 0

    @property
    def step_recompute_flops(self) -> int:
        """FLOPs that the last micro-batch ran a second time on this rank, for activation checkpointing."""
        return 0 if self._last_shape is None else recompute_flops(self.network, self._last_shape)

    def _count_flops(self, flow: Flow, video: Tensor) -> None:
        """Note the pack's lengths, all host integers, and sum the FLOPs of the run by both countings."""
        config = self.network.config
        self._last_shape = PackShape.of(flow.packed, config)
        clips, _, *size = video.shape
        self._last_clips = (clips, *size)
        theirs = upstream_flops(config, self._last_shape)
        report = getattr(self.network, "checkpointing", None)
        recomputes = report is not None and bool(report.recomputed)
        self._counted["own"] += self.step_flops
        self._counted["upstream"] += theirs.checkpointed if recomputes else theirs.training
        self._counted["upstream"] += clips * self._vae[0].flops(*size, upstream=True)
