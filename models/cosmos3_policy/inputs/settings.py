"""Choices of the input path, checked together."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VIEWS = ("wrist", "left", "right")
PROMPTS = ("json", "plain")
AUGMENT_ON = ("device", "cpu")


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """The random part of the image path; `crop` is the share of each side that is kept, the others are strengths."""

    crop: float = 0.95
    brightness: float = 0.3
    contrast: float = 0.4
    saturation: float = 0.5
    hue: float = 0.08

    def __post_init__(self) -> None:
        problems = []
        if not 0 < self.crop <= 1:
            problems.append(f"augment.crop={self.crop}: a share of the side in (0, 1]")
        for name in ("brightness", "contrast", "saturation", "hue"):
            if not 0 <= getattr(self, name) < math.inf:
                problems.append(f"augment.{name}={getattr(self, name)}: 0 or more, and finite")
        if 0.5 < self.hue < math.inf:
            problems.append(f"augment.hue={self.hue}: at most 0.5, half a turn")
        if problems:
            raise ValueError("processor settings: " + "; ".join(problems))


@dataclass(frozen=True, kw_only=True)
class ProcessorConfig:
    """Choices of the input path; defaults are those of the published DROID recipe."""

    views: Mapping[str, str] | None = None
    """Camera of each place of the picture: wrist on top, left and right halved below it. Null takes `data.cameras` in
    this order; with one camera the picture is that camera's alone."""
    tier: str = "480"
    """Set of canvas sizes, such as 256 and 480: pictures are padded to the one of the nearest shape and never enlarged.
    `fit` pads to whole latents only."""
    fps: float = 15.0
    """Frames a second of the clip, which set the clock of its positions and stand in the prompt."""
    horizon: int = 32
    """Action steps of a chunk; the clip has one frame more. A multiple of 4, the frames of one latent frame."""
    prompt: str = "json"
    """`json`: the caption as one field of a JSON description of the clip; `plain`: sentences one after another."""
    framing: str | None = None
    """What the prompt says of the cameras; null says it of a wrist camera above two cameras of the scene."""
    caption_dropout: float = 0.1
    """Share of training samples whose prompt is empty, drawn by (seed, position): what guidance subtracts."""
    caption_separator: str = " | "
    """Splits a task text into paraphrases, of which each sample draws one. Empty takes texts as they are."""
    idle_frames: bool = True
    """Say in the prompt how many steps of the chunk the robot stands still."""
    gripper: Sequence[str] = ()
    """Columns, or single values of columns as `action[6]`, that are turned into 1 - value for the network."""
    augment: AugmentConfig | None = dataclasses.field(default_factory=AugmentConfig)
    """Random crop and colours, one draw for all frames and views of a sample; null for none."""
    augment_on: str = "device"
    """`device`: whole batches where the network runs. `cpu`: frame by frame in the loader, the stock way, to compare
    with: the same draws and, but for the last level of a few pixels, the same pictures at seconds of a core each."""
    tokenizer: str | None = None
    """Hub id or folder of the tokenizer; null takes the one beside the weights; "words" makes a vocabulary of the
    dataset's own words, for models trained from scratch."""
    max_tokens: int = 4096
    """Longest prompt; what is beyond is cut off."""
    domain: int = 8
    """Slot of the robot in the action heads; 8 is DROID's."""

    def __post_init__(self) -> None:
        if isinstance(self.augment, Mapping):
            object.__setattr__(self, "augment", AugmentConfig(**self.augment))
        object.__setattr__(self, "gripper", (self.gripper,) if isinstance(self.gripper, str) else tuple(self.gripper))
        object.__setattr__(self, "tier", str(self.tier))
        problems = []
        if self.views is not None:
            object.__setattr__(self, "views", dict(self.views))
            if set(self.views) not in ({"wrist"}, set(VIEWS)):
                problems.append(f"views names {sorted(self.views)}; give {list(VIEWS)}, or wrist alone")
        for name, value, allowed in (("prompt", self.prompt, PROMPTS), ("augment_on", self.augment_on, AUGMENT_ON)):
            if value not in allowed:
                problems.append(f"{name}={value!r}; allowed: {', '.join(allowed)}")
        if not 0 < self.fps < 1000:
            problems.append(f"fps={self.fps}: frames a second, above 0")
        if self.horizon < 4 or self.horizon % 4:
            problems.append(f"horizon={self.horizon}: a multiple of 4, as many frames make one latent frame")
        if not 0 <= self.caption_dropout < 1:
            problems.append(f"caption_dropout={self.caption_dropout}: in [0, 1)")
        if self.max_tokens < 1:
            problems.append(f"max_tokens={self.max_tokens}: 1 or more")
        if self.domain < 0:
            problems.append(f"domain={self.domain}: 0 or more")
        if problems:
            raise ValueError("processor settings: " + "; ".join(problems))

    @property
    def num_frames(self) -> int:
        """Frames of the clip: the one of now and one for each action."""
        return self.horizon + 1

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of all settings."""
        return tuple(field.name for field in dataclasses.fields(cls))

    def to_dict(self) -> dict[str, Any]:
        """JSON values from which the settings can be made again."""
        values = dataclasses.asdict(self)
        return {**values, "gripper": list(self.gripper)}
