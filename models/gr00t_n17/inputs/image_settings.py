"""What the image path is told: sizes, crop and augmentation, from a recipe or from a checkpoint's processor file."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from models.gr00t_n17.config import VisionConfig
    from models.gr00t_n17.inputs.settings import ProcessorConfig

logger = logging.getLogger(__name__)

Size = tuple[int, int]
"""Height and width."""

_JITTER = ("brightness", "contrast", "saturation", "hue")


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """What the image path needs of the processor's and the network's configuration.

    Two recipes exist, told apart as the upstream code does it. A: `shortest_image_edge` scales the shorter side and
    keeps the aspect. B: without it `image_target_size` squashes to a fixed size. The crop is `crop_fraction` or, where
    that is not given, `image_crop_size` over `image_target_size`. With the edge and the fraction given, both sizes are
    ignored: released processor files hold all four.
    """

    shortest_image_edge: int | None
    crop_fraction: float | None
    color_jitter: tuple[float, float, float, float] | None
    min_pixels: int
    max_pixels: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    duplicate_frames: bool
    image_target_size: Size | None = None
    image_crop_size: Size | None = None
    letter_box_transform: bool = False
    """Pad frames with black to a square before anything else."""
    random_rotation_angle: float | None = None
    """Largest angle in degrees, either way."""
    random_crop: bool = True
    """False crops the centre in training too, as it is done in deployment."""

    @property
    def recipe(self) -> str:
        """A, B, or "none" where frames keep their size."""
        if self.shortest_image_edge is not None:
            return "A"
        return "B" if self.image_target_size is not None else "none"

    @property
    def fraction(self) -> float | None:
        """Share of each side that the crop keeps; None for no crop."""
        if self.crop_fraction is not None or self.image_crop_size is None or self.image_target_size is None:
            return self.crop_fraction
        return self.image_crop_size[0] / self.image_target_size[0]

    @property
    def is_random(self) -> bool:
        """Whether training sees other images than deployment, so that no two passes over a frame are equal."""
        cropped = self.random_crop and self.fraction is not None and self.fraction < 1
        return cropped or bool(self.random_rotation_angle) or any(self.color_jitter or ())

    def describe(self) -> str:
        """One line for the log."""
        if self.recipe == "A":
            text = f"image recipe A: shorter side to {self.shortest_image_edge}"
        elif self.image_target_size is not None:
            text = f"image recipe B: squashed to {self.image_target_size[0]}x{self.image_target_size[1]}"
        else:
            text = "images keep their size"
        if self.letter_box_transform:
            text += ", black bars to a square first"
        if self.fraction is not None:
            text += f", {'random' if self.random_crop else 'centre'} crop of {self.fraction:.4g} per side"
        if self.random_rotation_angle:
            text += f", rotation up to {self.random_rotation_angle:g} degrees"
        if self.color_jitter is not None:
            text += f", colour jitter {self.color_jitter}"
        return text

    @classmethod
    def of(cls, settings: "ProcessorConfig", vision: "VisionConfig") -> Self:
        """The image settings of a processor whose patches go to the given vision tower."""
        names = (*image_options({}), "min_pixels", "max_pixels", "duplicate_frames", "random_crop")
        return cls(
            **{name: getattr(settings, name) for name in names},
            patch_size=vision.patch_size,
            merge_size=vision.spatial_merge_size,
            temporal_patch_size=vision.temporal_patch_size,
        )

    @classmethod
    def from_processor_kwargs(
        cls,
        kwargs: Mapping[str, Any],
        *,
        min_pixels: int = 65536,
        max_pixels: int = 16777216,
        patch_size: int = 16,
        merge_size: int = 2,
        temporal_patch_size: int = 2,
        duplicate_frames: bool = True,
        random_crop: bool = True,
    ) -> Self:
        """Settings of a `processor_config.json`; the recipe it stands for is logged.

        The other arguments are not in that file: they belong to the backbone and its image processor.
        """
        settings = cls(
            **image_options(kwargs),
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            patch_size=patch_size,
            merge_size=merge_size,
            temporal_patch_size=temporal_patch_size,
            duplicate_frames=duplicate_frames,
            random_crop=random_crop,
        )
        logger.info("%s (processor_config.json)", settings.describe())
        return settings


def image_options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The image settings among the `processor_kwargs` of a released processor file, under the names used here.

    An absent edge or fraction is the released 256 or 0.95; a null one is null, which chooses recipe B.

    Raises:
        ValueError: the file asks for a path that is not implemented, or says too little to choose sizes.
    """
    if kwargs.get("use_albumentations") is False:
        raise ValueError(
            "use_albumentations is false in processor_config.json: that selects a bilinear image path of which no "
            "released checkpoint makes use; only true is implemented"
        )
    if kwargs.get("extra_augmentation_config"):
        raise ValueError("extra_augmentation_config needs segmentation masks, which no batch has; set it to null")
    edge, target = kwargs.get("shortest_image_edge", 256), _size(kwargs, "image_target_size")
    fraction, crop = kwargs.get("crop_fraction", 0.95), _size(kwargs, "image_crop_size")
    if edge is None and target is None:
        raise ValueError("processor_config.json has neither shortest_image_edge nor image_target_size; one is needed")
    if fraction is None and (crop is None or target is None):
        raise ValueError(
            "processor_config.json has no crop_fraction; then image_crop_size and image_target_size are both needed"
        )
    return {
        "shortest_image_edge": edge,
        "crop_fraction": fraction,
        "image_target_size": target,
        "image_crop_size": crop,
        "letter_box_transform": bool(kwargs.get("letter_box_transform")),
        "random_rotation_angle": kwargs.get("random_rotation_angle") or None,
        "color_jitter": _jitter(kwargs.get("color_jitter_params")),
    }


def _size(kwargs: Mapping[str, Any], key: str) -> Size | None:
    value = kwargs.get(key)
    if value is None:
        return None
    if isinstance(value, str) or len(value) != 2:
        raise ValueError(f"{key}={value!r} in processor_config.json: [height, width] or null")
    return int(value[0]), int(value[1])


def _jitter(params: Mapping[str, float] | None) -> tuple[float, float, float, float] | None:
    if params is None:
        return None
    unknown = sorted(set(params) - set(_JITTER))
    if unknown:
        raise ValueError(f"color_jitter_params has {unknown}; known are {list(_JITTER)}")
    brightness, contrast, saturation, hue = (float(params.get(name, 0.0)) for name in _JITTER)
    return brightness, contrast, saturation, hue
