"""The canvas a picture is put on: sizes by tier, padding, and what of the latents is picture and not padding.

Sizes are those of the public resolution table of Cosmos 3: a tier names a number of pixels, an entry its aspect ratio.
The picture lies at the top left, is made smaller where it does not fit and never larger; the rest is padded. The video
encoder sees the whole canvas, the network only the latents of the picture.
"""

import math
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from models.common.resample import resize_bicubic

PATCH = 16
"""Pixels of a side that become one latent."""

FIT = "fit"
"""The tier without a table: the picture's own size, padded to whole latents."""

TIERS = MappingProxyType(
    {
        "256": {"1,1": (256, 256), "4,3": (256, 320), "3,4": (320, 256), "16,9": (192, 320), "9,16": (320, 192)},
        "480": {
            "1,1": (640, 640),
            "4,3": (544, 736),
            "3,4": (736, 544),
            "16,9": (480, 832),
            "9,16": (832, 480),
            "2,3": (768, 512),
        },
        "704": {"1,1": (960, 960), "4,3": (832, 1088), "3,4": (1088, 832), "16,9": (704, 1280), "9,16": (1280, 704)},
        "720": {"1,1": (960, 960), "4,3": (832, 1104), "3,4": (1104, 832), "16,9": (720, 1280), "9,16": (1280, 720)},
    }
)
"""Aspect ratio (width, height) -> (height, width) of the canvas, by tier."""


@dataclass(frozen=True, kw_only=True)
class Canvas:
    """Sizes are (height, width) in pixels. aspect: the entry of the table, as "4,3"; `content` lies at the top left."""

    source: tuple[int, int]
    content: tuple[int, int]
    size: tuple[int, int]
    aspect: str

    @property
    def image_size(self) -> tuple[int, int, int, int]:
        """Height and width of the canvas, then of the picture on it."""
        return (*self.size, *self.content)

    @property
    def latent_size(self) -> tuple[int, int]:
        """Rows and columns of latents of the canvas."""
        return self.size[0] // PATCH, self.size[1] // PATCH

    @property
    def cropped_latent_size(self) -> tuple[int, int]:
        """Rows and columns of latents that hold nothing but picture."""
        return self.content[0] // PATCH, self.content[1] // PATCH


def choose_canvas(tier: str, height: int, width: int) -> Canvas:
    """The canvas for a picture of height x width: the entry of the tier whose height / width is nearest.

    Tier "fit" takes the picture as it is and pads to whole latents: less for the encoder to do, and another padding at
    the border of the picture than the released policy was trained with.
    """
    if tier != FIT and tier not in TIERS:
        raise ValueError(f"tier is {tier!r}; allowed are {', '.join([*TIERS, FIT])} (model.processor.tier)")
    if height < PATCH or width < PATCH:
        raise ValueError(f"a picture of {height}x{width} pixels is smaller than one latent of {PATCH}x{PATCH} pixels")
    table = TIERS["480" if tier == FIT else tier]
    aspect = min(table, key=lambda name: abs(height / width - table[name][0] / table[name][1]))
    if tier == FIT:
        size = (math.ceil(height / PATCH) * PATCH, math.ceil(width / PATCH) * PATCH)
        return Canvas(source=(height, width), content=(height, width), size=size, aspect=aspect)
    size = table[aspect]
    scale = min(size[0] / height, size[1] / width, 1.0)
    content = (min(size[0], int(scale * height + 0.5)), min(size[1], int(scale * width + 0.5)))
    return Canvas(source=(height, width), content=content, size=size, aspect=aspect)


def place(video: Tensor, canvas: Canvas) -> Tensor:
    """uint8 [..., H, W] of `canvas.source` -> uint8 [..., *canvas.size]."""
    if tuple(video.shape[-2:]) == canvas.size:
        return video
    out = video.new_empty(*video.shape[:-2], *canvas.size)
    if canvas.content != canvas.source:
        video = resize_bicubic(video.flatten(0, -4), *canvas.content).view(*video.shape[:-2], *canvas.content)
    height, width = canvas.content
    out[..., :height, :width] = video
    pad(out, canvas)
    return out


def pad(video: Tensor, canvas: Canvas) -> None:
    """Fill what is right of and below the picture, in place on uint8 [..., *canvas.size].

    The picture is mirrored at its edge (which is not repeated); where the padding is as wide as the picture, that
    cannot be done and the edge is repeated instead, on both sides.
    """
    (height, width), (rows, columns) = canvas.content, canvas.size
    right, below = columns - width, rows - height
    mirror = right < width and below < height
    if right:
        edge = (
            video[..., :height, width - 1 - right : width - 1].flip(-1) if mirror else video[..., :height, width - 1 :]
        )
        video[..., :height, width:] = edge if mirror else edge[..., :1].clone()
    if below:
        edge = video[..., height - 1 - below : height - 1, :].flip(-2) if mirror else video[..., height - 1 : height, :]
        video[..., height:, :] = edge


def crop_latents(latents: Tensor, content_size: tuple[int, int]) -> Tensor:
    """Latents [..., H, W] of a canvas -> those that hold nothing but picture, a view; rows in part padding are dropped.

    `content_size` is (height, width) of the picture in pixels, host integers.
    """
    height, width = content_size[0] // PATCH, content_size[1] // PATCH
    if height > latents.shape[-2] or width > latents.shape[-1]:
        raise ValueError(
            f"a picture of {content_size[0]}x{content_size[1]} pixels has {height}x{width} latents, but the canvas has "
            f"{latents.shape[-2]}x{latents.shape[-1]}; content_size is not of this canvas"
        )
    return latents[..., :height, :width]


def latent_frames(frames: int) -> int:
    """Latent frames of a video: the first frame is one by itself, then four make one."""
    if frames < 1 or (frames - 1) % 4:
        raise ValueError(f"a video of {frames} frames does not divide into 1 + 4 k; 33 is the released length")
    return 1 + (frames - 1) // 4


def empty_canvas(samples: int, frames: int, canvas: Canvas, device: torch.device) -> Tensor:
    """uint8 [N, 3, F, *canvas.size], not initialised."""
    return torch.empty(samples, 3, frames, *canvas.size, dtype=torch.uint8, device=device)
