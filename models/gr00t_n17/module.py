"""GR00T N1.7 under Lightning: loss of a batch with per-sample draws, beside what training is for every model."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models.common import draws
from models.common.graphs import CudaCapture, HeadGraphs
from models.common.optim import OptimizerConfig, ScheduleConfig
from models.common.step_options import EmaConfig
from models.common.step_options import Graphs as GraphsChoice
from models.common.step_options import Lookahead as LookaheadChoice
from models.common.training_module import Loss, TrainingModule
from models.gr00t_n17.ahead import frozen_layers, lookahead_problem, run_frozen
from models.gr00t_n17.feature_store import FeatureCache
from models.gr00t_n17.flops import step_flops
from models.gr00t_n17.layers.grids import Grid
from models.gr00t_n17.network import GR00TN17
from models.gr00t_n17.parallelize import shard
from models.gr00t_n17.recompute import recompute_flops

logger = logging.getLogger(__name__)


class GR00TN17Module(TrainingModule):
    """Training of a built network on the dicts of `Processor.to_network`.

    Args:
        network: the model; its `requires_grad` flags say what is trained.
        seed: noise and time of a sample are functions of (seed, position, draw).
        optimizer, schedule, lookahead, ema: as for `TrainingModule`.
        flow_draws: independent (noise, time) draws per sample that share one backbone pass.
        feature_cache: keeps the outputs of a frozen backbone; the inputs then carry `features.with_keys`' keys.
        graphs: `head` replays the head's loss and its gradients as one CUDA graph per shape.
    """

    network: GR00TN17

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
        if flow_draws < 1:
            raise ValueError(f"flow_draws={flow_draws}: at least 1 draw per sample is needed")
        if network.config.noise_beta_beta != 1.0:
            raise ValueError(
                f"noise_beta_beta={network.config.noise_beta_beta}: only 1.0, the released value, can be drawn"
            )
        super().__init__(network, seed=seed, optimizer=optimizer, schedule=schedule, lookahead=lookahead, ema=ema)
        self.flow_draws = int(flow_draws)
        self.feature_cache = feature_cache
        self._last_shapes: tuple[int, int, tuple[Grid, ...], bool] | None = None
        self._flops: dict[tuple[int, int, tuple[Grid, ...], bool], tuple[int, int]] = {}
        self._recompute_flops: dict[tuple[int, int, tuple[Grid, ...], bool], int] = {}
        self._backbone_share = 1.0
        self.graphs = graphs
        self._head_graphs: HeadGraphs | None = None

    def shard_network(self, mesh: Any, policy: Any) -> None:
        shard(self.network, mesh, policy)

    def frozen_part(self) -> Callable[[Mapping[str, Any]], Any] | str:
        problem = lookahead_problem(self.network)
        if problem is not None:
            return problem
        whole = frozen_layers(self.network) == len(self.network.backbone.language_model.layers)
        return partial(run_frozen, self.network, self.feature_cache, whole)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.graphs == "head" and self._head_graphs is None:
            head = self.network.action_head
            if self.trainer.strategy.root_device.type != "cuda":
                logger.warning("graphs: off, CUDA graphs need a GPU; the head runs as usual")
            else:
                accumulates = self.trainer.accumulate_grad_batches > 1
                self._head_graphs = HeadGraphs(head.loss, head, CudaCapture(), accumulates=accumulates)
                head.loss = self._head_graphs  # type: ignore[method-assign, assignment]

    def micro_batch_loss(self, inputs: Mapping[str, Any]) -> Loss:
        """Mean over all unmasked entries of the chunks; it counts by how many they are."""
        noise, time = self.flow_variables(inputs["position"])
        mean = self._loss(inputs, noise, time)
        self._last_shapes = self._shapes(inputs)
        weight = inputs["action_mask"].sum(dtype=torch.float32) * self.flow_draws + 1e-6  # what the mean was divided by
        return Loss(mean, weight)

    def _loss(self, inputs: Mapping[str, Any], noise: Tensor, time: Tensor) -> Tensor:
        """Mean loss of a micro-batch; the backbone runs where its features are not there yet."""
        features = None
        if self._ahead is not None:
            features, self._backbone_share = self._ahead.result(inputs)
        elif self.feature_cache is not None:
            features, self._backbone_share = run_frozen(self.network, self.feature_cache, True, inputs)
        return self.network(inputs, noise=noise, time=time, features=features)

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

    def option_figures(self) -> dict[str, float]:
        figures = super().option_figures()
        if self._head_graphs is not None:
            graphs = self._head_graphs
            figures |= {"graphs": graphs.captured, "graph_replays": graphs.replays, "graph_eager_calls": graphs.eager}
        return figures

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
