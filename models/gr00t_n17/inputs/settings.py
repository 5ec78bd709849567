"""Choices of the input path, checked together."""

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ProcessorConfig:
    """Choices of the input path; defaults are those of the released checkpoint's processor."""

    shortest_image_edge: int | None = 256
    """Image recipe A: length of the shorter side. Null is recipe B, which squashes to `image_target_size`."""
    crop_fraction: float | None = 0.95
    """Share of each side the crop keeps; null takes `image_crop_size` over `image_target_size`, or crops nothing."""
    color_jitter: tuple[float, float, float, float] | None = None
    """Strength of brightness, contrast, saturation, hue; the stock fine-tuning script uses (0.3, 0.4, 0.5, 0.08)."""
    image_target_size: tuple[int, int] | None = None
    """[height, width] to which frames are squashed; has a meaning without `shortest_image_edge` or `crop_fraction`."""
    image_crop_size: tuple[int, int] | None = None
    """With `image_target_size` the share the crop keeps; has a meaning without `crop_fraction`."""
    letter_box_transform: bool = False
    """Pad frames with black to a square before anything else."""
    random_rotation_angle: float | None = None
    """Largest angle of rotation in training in degrees, either way; one angle for all images of a sample."""
    random_crop: bool = True
    """False crops the centre in training too, as it is done in deployment."""
    min_pixels: int = 65536
    max_pixels: int = 16777216
    duplicate_frames: bool = True
    """Copy each still image into all time slots of a patch. False halves `pixel_values`; the sums round differently."""
    state_dropout_prob: float = 0.2
    """Share of training samples whose normalised state is replaced by zeros, drawn by (seed, position)."""
    exclude_state: bool = False
    """Replace every state by zeros, also at inference."""
    use_percentiles: bool = True
    """Normalise by the 1 % and 99 % quantiles instead of by the extremes; relative actions always take the extremes."""
    clip_outliers: bool = True
    use_relative_action: bool = True
    """Learn groups whose rep is RELATIVE as differences to the state; False leaves them absolute."""
    apply_sincos_state_encoding: bool = False
    """Give state groups named in `sin_cos` to the network as sine and cosine; False leaves them as they are."""
    mask_padded_steps: bool = False
    """Leave steps behind the end of an episode out of the loss; False trains the repeated last action."""
    formalize_language: bool = True
    tokenizer: str = "nvidia/Cosmos-Reason2-2B"
    """Hub id or folder of the backbone's tokenizer, or "words" for a vocabulary of the dataset's own words."""
    prompt_length: int | None = None
    """Pad prompts to this many tokens (static shapes); null pads to the longest prompt of each batch."""
    prompt_multiple: int | None = None
    """Pad prompts to the next multiple of this many tokens: few shapes, and less padding than one fixed length."""

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
        for name in ("image_target_size", "image_crop_size"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, tuple(int(side) for side in value))
                if len(value) != 2 or min(value) < 1:
                    problems.append(f"{name}={list(value)}: [height, width] of at least 1, or null")
        if self.random_rotation_angle is not None and not 0 <= self.random_rotation_angle <= 180:
            problems.append(f"random_rotation_angle={self.random_rotation_angle}: in [0, 180] degrees, or null")
        if self.prompt_multiple is not None and (self.prompt_multiple < 1 or self.prompt_length is not None):
            problems.append(
                f"prompt_multiple={self.prompt_multiple}, prompt_length={self.prompt_length}: give a multiple of at "
                "least 1 or one fixed length, not both"
            )
        if not 0 < self.min_pixels <= self.max_pixels:
            problems.append(f"min_pixels={self.min_pixels}, max_pixels={self.max_pixels}: 0 < min_pixels <= max_pixels")
        if not 0 <= self.state_dropout_prob < 1:
            problems.append(f"state_dropout_prob={self.state_dropout_prob}: in [0, 1)")
        if problems:
            raise ValueError("processor settings: " + "; ".join(problems))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of all settings."""
        return tuple(field.name for field in dataclasses.fields(cls))
