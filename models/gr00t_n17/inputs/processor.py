"""Batches of robot data to network inputs, and predicted actions back to robot units."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from models.common import draws
from models.common.batch import Batch
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.inputs.images import FirstResize, ImageSettings, ImageTransform, plan_cameras
from models.gr00t_n17.inputs.text import PromptBuilder, ReleasedTokenizer, Tokenizer, load_tokenizer

STATISTICS = ("min", "max", "mean", "std", "q01", "q99")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessorConfig:
    """Choices of the input path; defaults are those of the released checkpoint's processor."""

    shortest_image_edge: int | None = 256
    crop_fraction: float | None = 0.95
    color_jitter: tuple[float, float, float, float] | None = None
    """Strength of brightness, contrast, saturation, hue; the stock fine-tuning script uses (0.3, 0.4, 0.5, 0.08)."""
    min_pixels: int = 65536
    max_pixels: int = 16777216
    duplicate_frames: bool = True
    """Copy each still image into all time slots of a patch. False halves `pixel_values`; the sums round differently."""
    state_dropout_prob: float = 0.2
    """Share of training samples whose normalised state is replaced by zeros, drawn by (seed, position)."""
    use_percentiles: bool = True
    clip_outliers: bool = True
    mask_padded_steps: bool = False
    """Leave steps behind the end of an episode out of the loss; False trains the repeated last action."""
    formalize_language: bool = True
    tokenizer: str = "nvidia/Cosmos-Reason2-2B"
    """Hub id or folder of the backbone's tokenizer, or "words" for a vocabulary of the dataset's own words."""
    prompt_length: int | None = None
    """Pad prompts to this many tokens (static shapes); null pads to the longest prompt of each batch."""

    def __post_init__(self) -> None:
        problems = []
        if self.shortest_image_edge is not None and self.shortest_image_edge < 1:
            problems.append(f"shortest_image_edge={self.shortest_image_edge}: at least 1, or null for no resize")
        if self.crop_fraction is not None and not 0 < self.crop_fraction <= 1:
            problems.append(f"crop_fraction={self.crop_fraction}: in (0, 1], or null for no crop")
        if self.color_jitter is not None:
            object.__setattr__(self, "color_jitter", tuple(float(value) for value in self.color_jitter))
            if len(self.color_jitter) != 4 or min(self.color_jitter) < 0 or self.color_jitter[3] > 0.5:
                problems.append(
                    f"color_jitter={self.color_jitter}: four strengths (brightness, contrast, saturation, hue) of at "
                    "least 0, the hue at most 0.5"
                )
        if not 0 < self.min_pixels <= self.max_pixels:
            problems.append(f"min_pixels={self.min_pixels}, max_pixels={self.max_pixels}: 0 < min_pixels <= max_pixels")
        if not 0 <= self.state_dropout_prob < 1:
            problems.append(f"state_dropout_prob={self.state_dropout_prob}: in [0, 1)")
        if problems:
            raise ValueError("processor settings: " + "; ".join(problems))


class Normalizer:
    """Linear map of [low, high] to [-1, 1] per dimension; dimensions of no extent become 0."""

    def __init__(self, statistics: Mapping[str, Any], *, use_percentiles: bool, clip: bool) -> None:
        names = ("q01", "q99") if use_percentiles else ("min", "max")
        self.low, self.high = (np.asarray(statistics[name], dtype=np.float64).reshape(-1) for name in names)
        self.flat = np.isclose(self.low, self.high)
        self.clip = clip

    @property
    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.low)

    def forward(self, values: np.ndarray) -> np.ndarray:
        """float32 [..., D] in robot units -> float32 [..., D].

        The quotient is formed in float64 and rounded to float32 before it is stretched, as the reference does it.
        """
        extent = np.where(self.flat, 1.0, self.high - self.low)
        share = ((values - self.low) / extent).astype(np.float32)
        out = np.where(self.flat, np.float32(0), share * np.float32(2) - np.float32(1))
        return np.clip(out, -1, 1) if self.clip else out

    def inverse(self, values: np.ndarray) -> np.ndarray:
        """float32 [..., D] -> float32 [..., D] in robot units; values outside [-1, 1] are clipped first."""
        share = (np.clip(values, -1, 1) + np.float32(1)) / np.float32(2)
        return (share * (self.high - self.low) + self.low).astype(np.float32)


class Processor:
    """Network inputs of one embodiment with a fixed set of cameras, state and action keys.

    `prepare` is the per-sample work on the CPU, `to_network` the image work on the batch's device. Several state or
    action keys are concatenated in the order given, then padded with zeros to the network's widths.
    """

    def __init__(
        self,
        config: GR00TN17Config,
        processor_config: ProcessorConfig,
        *,
        cameras: Sequence[str],
        statistics: Mapping[str, Mapping[str, Any]],
        state_keys: Sequence[str],
        action_keys: Sequence[str],
        horizon: int,
        embodiment_id: int,
        tokenizer: Tokenizer | None = None,
        seed: int = 0,
    ) -> None:
        self.config = config
        self.processor_config = processor_config
        self.cameras = list(cameras)
        self.state_keys, self.action_keys = list(state_keys), list(action_keys)
        self.horizon, self.embodiment_id, self.seed = int(horizon), int(embodiment_id), int(seed)
        missing = [key for key in (*self.state_keys, *self.action_keys) if key not in statistics]
        if missing:
            raise ValueError(f"no statistics for {missing}; given are {sorted(statistics)}")
        self.statistics = {
            key: {
                name: np.asarray(statistics[key][name], dtype=np.float64)
                for name in STATISTICS
                if name in statistics[key]
            }
            for key in dict.fromkeys((*self.state_keys, *self.action_keys))
        }
        options = {"use_percentiles": processor_config.use_percentiles, "clip": processor_config.clip_outliers}
        self.normalizers = {key: Normalizer(values, **options) for key, values in self.statistics.items()}
        self.state_dim = sum(self.normalizers[key].dim for key in self.state_keys)
        self.action_dim = sum(self.normalizers[key].dim for key in self.action_keys)
        self._check()
        if tokenizer is None:
            if processor_config.tokenizer == "words":
                raise ValueError("processor.tokenizer=words: pass tokenizer=WordTokenizer.from_texts(dataset tasks)")
            tokenizer = ReleasedTokenizer(processor_config.tokenizer)
        self.tokenizer = tokenizer
        self.prompts = PromptBuilder(tokenizer, config.backbone, formalize_language=processor_config.formalize_language)
        vision = config.backbone.vision
        self.image_settings = ImageSettings(
            shortest_image_edge=processor_config.shortest_image_edge,
            crop_fraction=processor_config.crop_fraction,
            color_jitter=processor_config.color_jitter,
            min_pixels=processor_config.min_pixels,
            max_pixels=processor_config.max_pixels,
            patch_size=vision.patch_size,
            merge_size=vision.spatial_merge_size,
            temporal_patch_size=vision.temporal_patch_size,
            duplicate_frames=processor_config.duplicate_frames,
        )
        self.images = ImageTransform(self.image_settings, seed=self.seed)

    def _check(self) -> None:
        config, problems = self.config, []
        if not self.cameras:
            problems.append("data.cameras is empty; the model needs at least one camera")
        if self.state_dim > config.max_state_dim:
            problems.append(f"the state has {self.state_dim} dimensions, max_state_dim is {config.max_state_dim}")
        if self.action_dim > config.max_action_dim:
            problems.append(f"the action has {self.action_dim} dimensions, max_action_dim is {config.max_action_dim}")
        if not 1 <= self.horizon <= config.action_horizon:
            problems.append(f"horizon={self.horizon} must lie in 1..action_horizon={config.action_horizon}")
        if not 0 <= self.embodiment_id < config.max_num_embodiments:
            problems.append(f"embodiment_id={self.embodiment_id} must lie in 0..{config.max_num_embodiments - 1}")
        if problems:
            raise ValueError("processor does not fit the model: " + "; ".join(problems))

    def prepare(self, batch: Batch) -> dict[str, Tensor]:
        """Per-sample CPU work: prompt ids, normalised and padded state, action and mask.

        Returns input_ids, attention_mask int64 [B, S]; state [B, 1, Ds], action and action_mask [B, H, Da] float32;
        embodiment_id, position int64 [B]. Action entries are left out where `batch.action` is empty.
        """
        missing = [camera for camera in self.cameras if camera not in batch.images]
        if missing:
            raise ValueError(f"cameras {missing} are not in the batch, which has {sorted(batch.images)}")
        sizes = [_frame_size(batch.images[camera]) for camera in self.cameras]
        times = batch.images[self.cameras[0]].data.shape[1]  # [B, T, ...], of frames as of planes
        tokens = [plan.tokens for plan in plan_cameras(self.image_settings, sizes)] * times
        input_ids, attention_mask = self.prompts.batch(batch.text, tokens, length=self.processor_config.prompt_length)
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "state": self._state(batch),
            "embodiment_id": torch.full((len(input_ids),), self.embodiment_id, dtype=torch.int64),
            "position": batch.position.to(torch.int64),
        }
        if batch.action:
            inputs["action"], inputs["action_mask"] = self._action(batch)
        return inputs

    def frame_prefix(self) -> FirstResize | None:
        """What a data layer may do to frames once and keep; None where the path begins with a random step."""
        edge = self.image_settings.shortest_image_edge
        return FirstResize(edge) if edge else None

    def to_network(self, batch: Batch, augment: bool) -> dict[str, Any]:
        """The network's inputs on the batch's device: `batch.inputs` with the images of all cameras.

        With `augment` the crop and the colours are random and the state is dropped, all as functions of (seed,
        position). `embodiment_id` becomes one integer: the whole batch shares it, and the per-embodiment layers then
        need no gather per sample. `image_grid_thw` stays on the CPU.
        """
        inputs: dict[str, Any] = dict(batch.inputs)
        inputs["embodiment_id"] = self.embodiment_id
        position, probability = inputs["position"], self.processor_config.state_dropout_prob
        if augment and probability > 0:
            keep = draws.uniform(self.seed, "state_dropout", position, (1, 1)) >= probability
            inputs["state"] = inputs["state"] * keep
        pixel_values, grids = self.images(batch.images, self.cameras, position, augment=augment)
        return {**inputs, "pixel_values": pixel_values, "image_grid_thw": grids}

    def decode_actions(self, actions: Tensor) -> dict[str, np.ndarray]:
        """Normalised actions [B, H, Da] -> {action key: float32 [B, horizon, D]} in robot units."""
        values = actions.detach().to("cpu", torch.float32).numpy()[:, : self.horizon]
        out, start = {}, 0
        for key in self.action_keys:
            normalizer = self.normalizers[key]
            out[key] = normalizer.inverse(values[..., start : start + normalizer.dim])
            start += normalizer.dim
        return out

    def _state(self, batch: Batch) -> Tensor:
        parts = [self._normalized(batch.state, key) for key in self.state_keys]
        if parts and parts[0].shape[1] != 1:
            raise ValueError(f"the state has {parts[0].shape[1]} time steps, the model reads 1; use window [0] for it")
        return _padded(parts, len(batch.text), 1, self.config.max_state_dim)

    def _action(self, batch: Batch) -> tuple[Tensor, Tensor]:
        parts = [self._normalized(batch.action, key) for key in self.action_keys]
        if parts[0].shape[1] != self.horizon:
            raise ValueError(
                f"the batch has {parts[0].shape[1]} action steps, the processor's horizon is {self.horizon}"
            )
        rows, width = self.config.action_horizon, self.config.max_action_dim
        action = _padded(parts, len(batch.text), rows, width)
        mask = torch.zeros_like(action)
        mask[:, : self.horizon, : self.action_dim] = 1.0
        if self.processor_config.mask_padded_steps:
            mask[:, : self.horizon] *= (~batch.action_is_pad).unsqueeze(-1)
        return action, mask

    def _normalized(self, values: Mapping[str, Tensor], key: str) -> np.ndarray:
        if key not in values:
            raise ValueError(f"{key!r} is not in the batch, which has {sorted(values)}; see data.state and data.action")
        array, normalizer = values[key].numpy(), self.normalizers[key]
        if array.shape[-1] != normalizer.dim:
            raise ValueError(f"{key!r} has {array.shape[-1]} dimensions, its statistics have {normalizer.dim}")
        return normalizer.forward(array)

    def to_dict(self) -> dict[str, Any]:
        """JSON values from which `from_dict` makes an equal processor."""
        return {
            "config": self.config.to_dict(),
            "processor": dataclasses.asdict(self.processor_config),
            "cameras": self.cameras,
            "statistics": {k: {n: v.tolist() for n, v in values.items()} for k, values in self.statistics.items()},
            "state_keys": self.state_keys,
            "action_keys": self.action_keys,
            "horizon": self.horizon,
            "embodiment_id": self.embodiment_id,
            "tokenizer": self.tokenizer.to_dict(),
            "seed": self.seed,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The processor that `to_dict` described."""
        values = dict(values)
        return cls(
            GR00TN17Config.from_dict(values.pop("config")),
            ProcessorConfig(**values.pop("processor")),
            tokenizer=load_tokenizer(values.pop("tokenizer")),
            **values,
        )


def _frame_size(images: Any) -> tuple[int, int]:
    """(height, width) of frames uint8 [B, T, H, W, 3], or of colour planes that say their size."""
    if isinstance(images, Tensor):
        return images.shape[2], images.shape[3]
    return images.height, images.width


def _padded(parts: Sequence[np.ndarray], batch: int, rows: int, width: int) -> Tensor:
    """Parts [B, R, D_i] side by side in the upper left corner of zeros [B, rows, width]."""
    out = torch.zeros(batch, rows, width)
    start = 0
    for part in parts:
        out[:, : part.shape[1], start : start + part.shape[2]] = torch.from_numpy(part)
        start += part.shape[2]
    return out
