"""Rotation of uint8 images about their centre, one angle per sample, with OpenCV's fixed-point bilinear warp.

The arithmetic of albumentations' `Rotate` over `cv2.warpAffine`: coordinates in 1/32 pixel, weights in 1/1024, borders
mirrored without repeating the edge. Equal level by level (OpenCV 4.13 and 4.14 on x86).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from models.common import draws

_COORDINATE = 1024.0  # the reference rounds each addend of a coordinate to 1/1024 pixel


class _Source(NamedTuple):
    """For each output pixel: upper left source pixel and the fraction towards the next, in 1/32; int64 [B, H, W]."""

    row: Tensor
    column: Tensor
    down: Tensor
    across: Tensor


def draw_angle(seed: int, positions: Tensor, limit: float) -> Tensor:
    """Degrees float64 [B], uniform in [-limit, limit]."""
    u = draws.uniform(seed, "rotation", positions)
    return (u.to(torch.float64) * 2.0 - 1.0) * limit


def rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """uint8 [B, M, 3, H, W] and float64 [B] -> the same shape; positive angles turn counter-clockwise."""
    height, width = images.shape[-2:]
    source = _source(degrees.to(images.device, torch.float64), height, width)
    planes = images.flatten(1, 2).flatten(2)  # [B, M * 3, H * W]
    out = torch.zeros(planes.shape, dtype=torch.float32, device=images.device)
    for row, down in ((source.row, 32 - source.down), (source.row + 1, source.down)):
        for column, across in ((source.column, 32 - source.across), (source.column + 1, source.across)):
            place = _mirrored(row, height) * width + _mirrored(column, width)
            index = place.flatten(1)[:, None].expand(-1, planes.shape[1], -1)
            # Weights and sums are integers below 2^18: exact in float32 in any order.
            out += planes.gather(2, index) * (down * across).flatten(1)[:, None].to(torch.float32)
    return out.add_(512).mul_(2.0**-10).floor_().to(torch.uint8).view_as(images)


def _source(degrees: Tensor, height: int, width: int) -> _Source:
    radians = degrees * (math.pi / 180)
    cos, sin = radians.cos(), radians.sin()
    centre = (width / 2 - 0.5, height / 2 - 0.5)
    shift = ((1 - cos) * centre[0] - sin * centre[1], sin * centre[0] + (1 - cos) * centre[1])
    # The inverse of [[cos, sin], [-sin, cos]] and its shift as the reference forms them, not simplified: sums that end
    # beside half a unit would otherwise round the other way.
    scale = 1.0 / (cos * cos + sin * sin)
    a, b, c = cos * scale, -sin * scale, sin * scale
    shift = (-a * shift[0] - b * shift[1], -c * shift[0] - a * shift[1])
    x = torch.arange(width, device=degrees.device, dtype=torch.float64)
    y = torch.arange(height, device=degrees.device, dtype=torch.float64)
    axes = []
    for along, across, start in ((a, b, shift[0]), (c, a, shift[1])):
        step = (along[:, None] * x * _COORDINATE).round().long()
        base = ((across[:, None] * y + start[:, None]) * _COORDINATE).round().long() + 16
        axes.append((base[:, :, None] + step[:, None, :]) >> 5)
    return _Source(axes[1] >> 5, axes[0] >> 5, axes[1] & 31, axes[0] & 31)


def _mirrored(index: Tensor, size: int) -> Tensor:
    """Indices beyond the border reflected about the edge pixel."""
    if size == 1:
        return torch.zeros_like(index)
    period = 2 * (size - 1)
    index = index.remainder(period)
    return torch.where(index >= size, period - index, index)
