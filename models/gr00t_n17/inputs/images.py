"""Frames to vision-tower patches on the batch's device: resize, crop, augment, smart resize, normalise, patchify.

The path of the released processor, with its rounding to uint8 levels after every step. Recipe A: shorter side to 256 by
area, a 95 % crop (random in training, centred otherwise), shorter side to 256 again; recipe B squashes to a fixed size
both times. Then rotation and colour jitter where they are set, and the Qwen resize to multiples of 32. All cameras of
equal size are one batch. Steps that change nothing are not run.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from models.common import draws
from models.common.color_jitter import JitterDraws, color_jitter, draw_jitter
from models.common.resample import multiple_size, resize_bicubic, shortest_edge_size
from models.common.resize_area import resize_area, resize_area_frames
from models.common.rotate import draw_angle, rotate
from models.gr00t_n17.inputs.image_settings import ImageSettings, Size

if TYPE_CHECKING:
    from models.gr00t_n17.inputs.settings import ProcessorConfig


@dataclass(frozen=True)
class ImagePlan:
    """Sizes (height, width) of one camera's frames after each step, and the patch grid."""

    padded: Size
    resized: Size
    cropped: Size
    spare: Size  # largest crop offset (down, right)
    restored: Size
    final: Size
    grid: Size
    tokens: int


@functools.lru_cache(maxsize=256)
def plan_image(settings: ImageSettings, height: int, width: int, outer: Size | None = None) -> ImagePlan:
    """Sizes for a frame of height x width; the crop box is laid out in a frame of size `outer` (None: its own).

    480x640 in the released settings: 256x341, crop 243x323, 256x340, 256x352: a grid of 16x22 patches, 88 tokens.
    """
    fraction = settings.fraction
    padded = (max(height, width),) * 2 if settings.letter_box_transform else (height, width)
    resized = _scaled(settings, padded)
    frame = outer or resized
    cropped = (max(1, int(frame[0] * fraction)), max(1, int(frame[1] * fraction))) if fraction else resized
    spare = (frame[0] - cropped[0], frame[1] - cropped[1]) if fraction else (0, 0)
    restored = _scaled(settings, cropped)
    final = multiple_size(
        *restored,
        factor=settings.patch_size * settings.merge_size,
        min_pixels=settings.min_pixels,
        max_pixels=settings.max_pixels,
    )
    grid = (final[0] // settings.patch_size, final[1] // settings.patch_size)
    tokens = grid[0] * grid[1] // settings.merge_size**2
    return ImagePlan(padded, resized, cropped, spare, restored, final, grid, tokens)


def _scaled(settings: ImageSettings, size: Size) -> Size:
    """Size after either of the path's two area resizes."""
    if settings.shortest_image_edge is not None:
        return shortest_edge_size(*size, settings.shortest_image_edge)
    return settings.image_target_size or size


def plan_cameras(settings: ImageSettings, sizes: Sequence[Size]) -> list[ImagePlan]:
    """Plans for the cameras of a sample in order.

    The crop is replayed in pixel coordinates: the first camera decides the box for all. Where the box does not fit
    into a camera at every offset, that camera is cropped by its own fraction at the same relative offset instead: the
    stock replay would cut a box of another size per sample there.
    """
    first = plan_image(settings, *sizes[0])
    plans = []
    for size in sizes:
        own = plan_image(settings, *size)
        fits = own.resized[0] >= first.resized[0] and own.resized[1] >= first.resized[1]
        plans.append(plan_image(settings, *size, first.resized) if fits else own)
    return plans


class FirstResize:
    """The path's first step alone, bars and resize by area: it draws nothing, so its results can be kept.

    A data layer that hands over frames of this size saves decoding them again and three quarters of their bytes or
    more; `ImageTransform` finds nothing left to resize and gives the same values. Frames that would not become smaller
    stay as they are.

    Args:
        edge: recipe A, length of the shorter side.
        target: recipe B, size of the result.
        letter_box: black bars to a square first.

    Attributes:
        key: names the arithmetic; results under equal keys are equal.
    """

    def __init__(self, edge: int | None, *, target: Size | None = None, letter_box: bool = False) -> None:
        if edge is None and target is None:
            raise ValueError("FirstResize needs an edge (recipe A) or a target size (recipe B)")
        self.edge, self.target, self.letter_box = edge, target if edge is None else None, letter_box
        size = str(edge) if self.target is None else f"{self.target[0]}x{self.target[1]}"
        self.key = f"gr00t-area-{size}{'-letterbox' if letter_box else ''}"

    @classmethod
    def of(cls, settings: "ImageSettings | ProcessorConfig") -> "FirstResize | None":
        """The first step of a path; None where frames keep their size."""
        edge, target = settings.shortest_image_edge, settings.image_target_size
        if edge is None and target is None:
            return None
        return cls(edge, target=target, letter_box=settings.letter_box_transform)

    def shape(self, height: int, width: int) -> Size:
        """Size of the result for a frame of the given size."""
        padded = (max(height, width),) * 2 if self.letter_box else (height, width)
        size = self.target if self.target is not None else shortest_edge_size(*padded, self.edge or 0)
        shrinks = size[0] <= padded[0] and size[1] <= padded[1] and size[0] * size[1] < height * width
        return size if shrinks else (height, width)

    def __call__(self, frames: Tensor) -> Tensor:
        """uint8 [N, H, W, 3] -> uint8 [N, h, w, 3]."""
        height, width = frames.shape[1:3]
        size = self.shape(height, width)
        if size == (height, width):
            return frames.contiguous()
        return resize_area_frames(letter_box(frames) if self.letter_box else frames, *size).contiguous()


class Augmentation(NamedTuple):
    """The random part for B samples, the same for all cameras and times of a sample.

    crop: float32 [B, 2], place of the box between its first and last offset down and right, in [0, 1); None crops the
    centre. degrees: float64 [B] or None for no rotation. jitter: or None for no change of colours.
    """

    crop: Tensor | None
    degrees: Tensor | None
    jitter: JitterDraws | None


NO_AUGMENTATION = Augmentation(None, None, None)


def draw_augmentation(settings: ImageSettings, seed: int, position: Tensor) -> Augmentation:
    """Draws for the samples at int64 positions [B], as functions of (seed, position)."""
    angle, strength = settings.random_rotation_angle, settings.color_jitter
    return Augmentation(
        crop=draws.uniform(seed, "crop", position, (2,)) if settings.random_crop else None,
        degrees=draw_angle(seed, position, angle) if angle else None,
        jitter=draw_jitter(seed, position, strength) if strength is not None else None,
    )


class ImageTransform:
    """Frames of all cameras -> `pixel_values` and `image_grid_thw`; draws are functions of (seed, position)."""

    def __init__(self, settings: ImageSettings, *, seed: int) -> None:
        self.settings = settings
        self.seed = seed

    def __call__(
        self, images: Mapping[str, Tensor], cameras: Sequence[str], position: Tensor, *, augment: bool
    ) -> tuple[Tensor, Tensor]:
        """uint8 {camera: [B, T, H, W, 3]} -> float32 [patches, 3 * Tp * P * P] and int64 [B * T * V, 3] (t, h, w).

        Images follow each other sample by sample, within a sample time-major and then in the order of `cameras`;
        patches of an image in merge-block order. The grids stay on the CPU. `position` int64 [B] is only read with
        `augment`.
        """
        drawn = draw_augmentation(self.settings, self.seed, position) if augment else NO_AUGMENTATION
        return self.apply(images, cameras, drawn)

    def apply(self, images: Mapping[str, Tensor], cameras: Sequence[str], drawn: Augmentation) -> tuple[Tensor, Tensor]:
        """The transform with given draws."""
        settings = self.settings
        sizes = [(images[camera].shape[2], images[camera].shape[3]) for camera in cameras]
        plans = plan_cameras(settings, sizes)
        batch, times = images[cameras[0]].shape[:2]
        patches: list[Tensor | None] = [None] * len(cameras)
        for size, plan in dict.fromkeys(zip(sizes, plans, strict=True)):
            members = [i for i in range(len(cameras)) if (sizes[i], plans[i]) == (size, plan)]
            frames = torch.stack([images[cameras[i]] for i in members], dim=2).flatten(1, 2)
            levels = self.augmented(frames, plan, drawn).flatten(0, 1)
            grouped = patchify(resize_bicubic(levels, *plan.final), settings).view(
                batch, times, len(members), *_patch_shape(plan, settings)
            )
            for place, i in enumerate(members):
                patches[i] = grouped[:, :, place]
        if len(dict.fromkeys(zip(sizes, plans, strict=True))) == 1:
            pixel_values = grouped.flatten(0, 3)  # one group holds the cameras in order already
        else:
            pixel_values = torch.cat([part for part in patches if part is not None], dim=2).flatten(0, 2)
        return pixel_values, _grids(tuple(plan.grid for plan in plans), batch * times)

    def augmented(self, frames: Tensor, plan: ImagePlan, drawn: Augmentation) -> Tensor:
        """uint8 [B, M, H, W, 3] -> uint8 [B, M, 3, *plan.restored]: the path up to the backbone's own resize."""
        batch = len(frames)
        frames = frames.flatten(0, 1)
        frames = resize_area_frames(letter_box(frames) if self.settings.letter_box_transform else frames, *plan.resized)
        # planar from here on: [B, M, H, W, 3] -> [B, M, 3, H, W]
        planes = frames.permute(0, 3, 1, 2).contiguous().unflatten(0, (batch, -1))
        if plan.cropped != plan.resized:
            planes = crop(planes, plan, drawn.crop)
        planes = resize_area(planes.flatten(0, 1), *plan.restored).unflatten(0, (batch, -1))
        if drawn.degrees is not None:
            planes = rotate(planes, drawn.degrees)
        return planes if drawn.jitter is None else color_jitter(planes, drawn.jitter)


def letter_box(frames: Tensor) -> Tensor:
    """uint8 [N, H, W, C] -> [N, S, S, C] with S = max(H, W): black bars, the odd row or column behind."""
    height, width = frames.shape[1:3]
    down, right = max(width - height, 0), max(height - width, 0)
    if not down and not right:
        return frames
    return pad(frames, (0, 0, right // 2, right - right // 2, down // 2, down - down // 2))


def crop(planes: Tensor, plan: ImagePlan, share: Tensor | None) -> Tensor:
    """uint8 [B, M, 3, H, W] -> uint8 [B, M, 3, *plan.cropped], at offsets floor(share * (spare + 1)) or the centre."""
    if share is None:
        return centre_box(planes, plan)
    (height, width), spare = plan.cropped, plan.spare
    top, left = (share[:, 0] * (spare[0] + 1)).long(), (share[:, 1] * (spare[1] + 1)).long()
    if planes.device.type == "cpu":
        boxes = zip(planes, top.tolist(), left.tolist(), strict=True)  # a third of the time of a gather
        return torch.stack([sample[..., t : t + height, x : x + width] for sample, t, x in boxes])
    return gathered_boxes(planes, top, left, height, width)


def centre_box(planes: Tensor, plan: ImagePlan) -> Tensor:
    """The box half way between the first and the last offset, rounded up and to the left."""
    (height, width), (top, left) = plan.cropped, (plan.spare[0] // 2, plan.spare[1] // 2)
    return planes[..., top : top + height, left : left + width].contiguous()


def gathered_boxes(planes: Tensor, top: Tensor, left: Tensor, height: int, width: int) -> Tensor:
    """A box [height, width] of each sample of [B, M, 3, H, W] at int64 offsets [B] that the host does not know."""
    rows = top[:, None] + torch.arange(height, device=planes.device)
    columns = left[:, None] + torch.arange(width, device=planes.device)
    flat = rows[:, :, None] * planes.shape[-1] + columns[:, None, :]  # [B, h, w]
    lines = planes.flatten(1, 2).flatten(2)  # [B, M * 3, H * W]
    index = flat.flatten(1)[:, None, :].expand(-1, lines.shape[1], -1)
    return lines.gather(2, index).view(*planes.shape[:3], height, width)


def patchify(frames: Tensor, settings: ImageSettings) -> Tensor:
    """uint8 [N, 3, H, W] -> float32 [N, patches, 3 * Tp * P * P], normalised to [-1, 1] in merge-block order.

    Without `duplicate_frames` Tp is 1: the backbone then adds the weights of the time slots instead.

    Patches of one merge block are neighbours. A still image fills all Tp time slots of a patch. (x - 127.5) / 127.5 is
    x / 255, minus 0.5, over 0.5 in the fused form the reference image processor computes.
    """
    count, channels, height, width = frames.shape
    p, m, t = settings.patch_size, settings.merge_size, settings.temporal_patch_size
    blocks = frames.view(count, channels, height // (p * m), m, p, width // (p * m), m, p)
    blocks = blocks.permute(0, 2, 5, 3, 6, 1, 4, 7).contiguous().to(torch.float32)
    values = blocks.sub_(127.5).div_(127.5).view(count, -1, channels, 1, p, p)
    if not settings.duplicate_frames:
        return values.flatten(2)
    return values.expand(-1, -1, -1, t, -1, -1).reshape(count, values.shape[1], -1)


def _patch_shape(plan: ImagePlan, settings: ImageSettings) -> tuple[int, int]:
    copies = settings.temporal_patch_size if settings.duplicate_frames else 1
    return plan.grid[0] * plan.grid[1], 3 * copies * settings.patch_size**2


@functools.lru_cache(maxsize=64)
def _grids(grids: tuple[tuple[int, int], ...], repeats: int) -> Tensor:
    """On the CPU: the backbone plans by these numbers, and reading them from the device would wait for it."""
    rows = torch.tensor([(1, height, width) for height, width in grids], dtype=torch.int64)
    return rows.repeat(repeats, 1)
