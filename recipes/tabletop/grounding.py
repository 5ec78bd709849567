"""The grounding stage: teaches a tiny backbone what "the red block" means before the policy is trained.

A stand-in for pre-training. The backbone of the released model has seen millions of captioned pictures; a randomly
initialised one of less than a million parameters has not, and whether it finds the meaning of a colour word in
demonstrations alone is a matter of luck. So here, and only for such a tiny backbone, it is first trained to say where
the named block is, on freshly rendered tables. Nothing of this is needed, or wanted, for released weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from models.common.optim import OptimizerConfig, ScheduleConfig, adamw
from recipes.tabletop.render import render
from recipes.tabletop.world import ACTION_NAMES, STATE_NAMES, Floats, Layouts, Scene, draw_layouts, instruction

_OPTIMIZER = ("lr", "betas", "eps", "weight_decay", "fused")
_TARGET_NAMES = ("dx", "dy", "x", "y")


@dataclass(frozen=True, kw_only=True)
class GroundingSettings:
    """Values of the stage. A batch holds `layouts_per_batch` tables, each once per block."""

    seed: int
    layouts_per_batch: int
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    probe_width: int = 128


class GroundingProcessor(Protocol):
    """The part of a model's processor that this stage uses: the policy's own tokens and image path."""

    def prepare(self, batch: Any) -> dict[str, Tensor]: ...

    def to_network(self, batch: Any, augment: bool) -> dict[str, Tensor]: ...


@dataclass(kw_only=True)
class GroundingBatch:
    """Shaped like a batch of the data layer, with B = 2 x layouts rows; `target` float32 [B, 4] is dx, dy, x, y."""

    images: dict[str, Tensor]
    state: dict[str, Tensor]
    action: dict[str, Tensor]
    action_is_pad: Tensor
    text: list[str]
    position: Tensor
    target: Tensor
    inputs: Mapping[str, Tensor] = field(default_factory=dict)


def grounding_batch(index: int, *, seed: int, layouts: int, cameras: Sequence[str], horizon: int) -> GroundingBatch:
    """Batch number `index`: a function of its arguments, on tables from the part of the space used for training.

    The gripper is anywhere, half of the time near a block, at z 0.03-0.75, so that both "far" and "right below" are
    seen. Rows 2i and 2i + 1 show table i and name its first and its second block.
    """
    rng = np.random.default_rng([seed, 202, index])
    tables = draw_layouts(seed, "grounding", range(index * layouts, (index + 1) * layouts))
    scene = _random_poses(tables, rng)
    twice = np.repeat(np.arange(layouts), 2)
    named = np.tile(np.array([0, 1]), layouts)
    goal = scene.blocks[twice, named, :2]
    state = np.zeros((2 * layouts, len(STATE_NAMES)), dtype=np.float32)
    state[:, :3] = scene.gripper[twice]
    state[:, 6] = scene.opening[twice]
    frames = render(scene, cameras)
    return GroundingBatch(
        images={camera: torch.from_numpy(frames[camera][twice][:, None]) for camera in cameras},
        state={"observation.state": torch.from_numpy(state)[:, None]},
        action={"action": torch.zeros(2 * layouts, horizon, len(ACTION_NAMES))},
        action_is_pad=torch.zeros(2 * layouts, horizon, dtype=torch.bool),
        text=instruction(scene.colours[twice, named]),
        position=torch.arange(index * 2 * layouts, (index + 1) * 2 * layouts),
        target=torch.from_numpy(np.concatenate([goal - scene.gripper[twice, :2], goal], axis=1).astype(np.float32)),
    )


def _random_poses(tables: Layouts, rng: np.random.Generator) -> Scene:
    count = len(tables)
    anywhere = rng.uniform(-0.9, 0.9, (count, 2))
    spread = rng.choice([0.05, 0.2, 0.4], (count, 1))
    near = tables.blocks[np.arange(count), rng.integers(2, size=count)] + spread * rng.normal(size=(count, 2))
    xy: Floats = np.where(rng.random((count, 1)) < 0.5, near, anywhere)
    gripper = np.concatenate([np.clip(xy, -1.0, 1.0), rng.uniform(0.03, 0.75, (count, 1))], axis=1)
    blocks = np.concatenate([tables.blocks, np.zeros((count, 2, 1))], axis=2)
    return Scene(gripper=gripper, opening=np.ones(count), blocks=blocks, colours=tables.colours)


class GroundingDataset(Dataset[dict[str, Tensor]]):
    """Item i is batch number i as network inputs, with `grounding_target` [B, 4] beside them."""

    def __init__(
        self, processor: GroundingProcessor, settings: GroundingSettings, *, cameras: Sequence[str], horizon: int
    ) -> None:
        self.processor = processor
        self.settings = settings
        self.cameras = tuple(cameras)
        self.horizon = horizon

    def __len__(self) -> int:
        return self.settings.schedule.max_steps

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"grounding batch {index} of {len(self)}")
        batch = grounding_batch(
            index,
            seed=self.settings.seed,
            layouts=self.settings.layouts_per_batch,
            cameras=self.cameras,
            horizon=self.horizon,
        )
        batch.inputs = self.processor.prepare(batch)
        return {**self.processor.to_network(batch, augment=False), "grounding_target": batch.target}


class GroundingModule(pl.LightningModule):
    """Trains `backbone` and a probe that reads the mean of its features over the words.

    Over the words, not the picture: the action head asks the text positions where to go, and they can only know if
    the backbone has looked the named block up. The probe is thrown away; the backbone is the result.
    """

    def __init__(self, backbone: nn.Module, *, width: int, settings: GroundingSettings) -> None:
        super().__init__()
        self.settings = settings
        self.backbone = backbone
        # Own generator state, so that the probe depends on the seed alone and not on what was built before.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.probe = nn.Sequential(
                nn.Linear(width, settings.probe_width),
                nn.GELU(),
                nn.Linear(settings.probe_width, len(_TARGET_NAMES)),
            )

    def training_step(self, inputs: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(inputs), inputs["grounding_target"])
        self.log("grounding/loss", loss)
        return loss

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Where the named block is: [B, 4] as dx, dy from the gripper and x, y on the table."""
        out = self.backbone(
            inputs["input_ids"], inputs["attention_mask"], inputs["pixel_values"], inputs["image_grid_thw"]
        )
        words = (out.attention_mask.bool() & ~out.image_mask.bool()).to(out.features.dtype)[..., None]
        located: Tensor = self.probe((out.features * words).sum(1) / words.sum(1))
        return located

    def configure_optimizers(self) -> Any:
        """AdamW with a linear warm-up from 0, then half a cosine to 0 at the last step."""
        optimizer = adamw(
            [parameter for parameter in self.parameters() if parameter.requires_grad],
            **{name: getattr(self.settings.optimizer, name) for name in _OPTIMIZER},
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.settings.schedule.factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def build_grounding(
    network: Any,
    processor: GroundingProcessor,
    settings: GroundingSettings,
    *,
    cameras: Sequence[str],
    horizon: int,
) -> tuple[GroundingModule, "DataLoader[dict[str, Tensor]]"]:
    """Module and loader for `trainer.fit`, one epoch of `settings.schedule.max_steps` batches.

    The module shares `network.backbone`, which is therefore trained in place. `cameras` and `horizon` are those of the
    policy recipe.
    """
    module = GroundingModule(network.backbone, width=network.config.backbone_embedding_dim, settings=settings)
    dataset = GroundingDataset(processor, settings, cameras=cameras, horizon=horizon)
    return module, DataLoader(dataset, batch_size=None, shuffle=False)
