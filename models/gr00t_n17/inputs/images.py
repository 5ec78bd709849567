"""Frames to vision-tower patches on the batch's device: resize, crop, colour jitter, smart resize, normalise, patchify.

The path of the released processor, with its rounding to uint8 levels after every step: shorter side to 256 by area, a
95 % crop (random in training, centred otherwise), shorter side to 256 again, colour jitter, then the Qwen resize to
multiples of 32. All cameras of equal size are one batch. Steps that change nothing are not run.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.common import draws
from models.common.color_jitter import color_jitter, draw_jitter
from models.common.resample import multiple_size, resize_area, resize_bicubic, shortest_edge_size


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """What the image path needs of the processor's and the network's configuration."""

    shortest_image_edge: int | None
    crop_fraction: float | None
    color_jitter: tuple[float, float, float, float] | None
    min_pixels: int
    max_pixels: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    duplicate_frames: bool


@dataclass(frozen=True)
class ImagePlan:
    """Sizes (height, width) of one camera's frames after each step, and the patch grid."""

    resized: tuple[int, int]
    cropped: tuple[int, int]
    spare: tuple[int, int]  # largest crop offset (down, right)
    restored: tuple[int, int]
    final: tuple[int, int]
    grid: tuple[int, int]
    tokens: int


@functools.lru_cache(maxsize=256)
def plan_image(settings: ImageSettings, height: int, width: int, outer: tuple[int, int] | None = None) -> ImagePlan:
    """Sizes for a frame of height x width; the crop box is laid out in a frame of size `outer` (None: its own).

    480x640 in the released settings: 256x341, crop 243x323, 256x340, 256x352: a grid of 16x22 patches, 88 tokens.
    """
    edge, fraction = settings.shortest_image_edge, settings.crop_fraction
    resized = shortest_edge_size(height, width, edge) if edge else (height, width)
    frame = outer or resized
    cropped = (max(1, int(frame[0] * fraction)), max(1, int(frame[1] * fraction))) if fraction else resized
    spare = (frame[0] - cropped[0], frame[1] - cropped[1]) if fraction else (0, 0)
    restored = shortest_edge_size(*cropped, edge) if edge else cropped
    final = multiple_size(
        *restored,
        factor=settings.patch_size * settings.merge_size,
        min_pixels=settings.min_pixels,
        max_pixels=settings.max_pixels,
    )
    grid = (final[0] // settings.patch_size, final[1] // settings.patch_size)
    return ImagePlan(resized, cropped, spare, restored, final, grid, grid[0] * grid[1] // settings.merge_size**2)


def plan_cameras(settings: ImageSettings, sizes: Sequence[tuple[int, int]]) -> list[ImagePlan]:
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
    """The path's first step alone, shorter side to `edge` by area: it draws nothing, so its results can be kept.

    A data layer that hands over frames of this size saves decoding them again and three quarters of their bytes or
    more; `ImageTransform` finds nothing left to resize and gives the same values. Smaller frames stay as they are.

    Attributes:
        key: names the arithmetic; results under equal keys are equal.
    """

    def __init__(self, edge: int) -> None:
        self.edge = edge
        self.key = f"gr00t-area-{edge}"

    def shape(self, height: int, width: int) -> tuple[int, int]:
        """Size of the result for a frame of the given size."""
        return shortest_edge_size(height, width, self.edge) if min(height, width) > self.edge else (height, width)

    def __call__(self, frames: Tensor) -> Tensor:
        """uint8 [N, H, W, 3] -> uint8 [N, h, w, 3]."""
        size = self.shape(*frames.shape[1:3])
        return resize_area(frames.permute(0, 3, 1, 2).contiguous(), *size).permute(0, 2, 3, 1).contiguous()


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
        settings = self.settings
        sizes = [(images[camera].shape[2], images[camera].shape[3]) for camera in cameras]
        plans = plan_cameras(settings, sizes)
        batch, times = images[cameras[0]].shape[:2]
        patches: list[Tensor | None] = [None] * len(cameras)
        for size, plan in dict.fromkeys(zip(sizes, plans, strict=True)):
            members = [i for i in range(len(cameras)) if (sizes[i], plans[i]) == (size, plan)]
            # [B, T, V, H, W, 3] -> planar [B, T * V, 3, H, W]
            frames = torch.stack([images[cameras[i]] for i in members], dim=2)
            frames = frames.flatten(1, 2).permute(0, 1, 4, 2, 3).contiguous()
            frames = self._to_levels(frames, plan, position, augment)
            grouped = patchify(frames.flatten(0, 1), settings).view(
                batch, times, len(members), *_patch_shape(plan, settings)
            )
            for place, i in enumerate(members):
                patches[i] = grouped[:, :, place]
        if len(dict.fromkeys(zip(sizes, plans, strict=True))) == 1:
            pixel_values = grouped.flatten(0, 3)  # one group holds the cameras in order already
        else:
            pixel_values = torch.cat([part for part in patches if part is not None], dim=2).flatten(0, 2)
        return pixel_values, _grids(tuple(plan.grid for plan in plans), batch * times)

    def _to_levels(self, frames: Tensor, plan: ImagePlan, position: Tensor, augment: bool) -> Tensor:
        """uint8 [B, M, 3, H, W] -> uint8 [B, M, 3, *plan.final]."""
        batch, views = frames.shape[:2]
        frames = resize_area(frames.flatten(0, 1), *plan.resized).unflatten(0, (batch, views))
        if plan.cropped != plan.resized:
            frames = self._crop(frames, plan, position, augment)
        frames = resize_area(frames.flatten(0, 1), *plan.restored).unflatten(0, (batch, views))
        if augment and self.settings.color_jitter is not None:
            frames = color_jitter(frames, draw_jitter(self.seed, position, self.settings.color_jitter))
        return resize_bicubic(frames.flatten(0, 1), *plan.final).unflatten(0, (batch, views))

    def _crop(self, frames: Tensor, plan: ImagePlan, position: Tensor, augment: bool) -> Tensor:
        height, width = plan.cropped
        spare = plan.spare
        if not augment:
            top, left = spare[0] // 2, spare[1] // 2
            return frames[..., top : top + height, left : left + width].contiguous()
        u = draws.uniform(self.seed, "crop", position, (2,))
        top = (u[:, 0] * (spare[0] + 1)).long()
        left = (u[:, 1] * (spare[1] + 1)).long()
        rows = top[:, None] + torch.arange(height, device=frames.device)
        columns = left[:, None] + torch.arange(width, device=frames.device)
        flat = rows[:, :, None] * frames.shape[-1] + columns[:, None, :]  # [B, h, w]
        planes = frames.flatten(1, 2).flatten(2)  # [B, M * 3, H * W]
        index = flat.flatten(1)[:, None, :].expand(-1, planes.shape[1], -1)
        return planes.gather(2, index).view(*frames.shape[:3], height, width)


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
