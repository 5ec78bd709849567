"""Image sizes and resizing on uint8 levels, whole batches on any device, with the rounding of the reference libraries.

Each axis is a short weighted sum of gathered rows (2 to 6 taps), not a matrix product: elementwise arithmetic is the
same on every device, where a matrix product would be rounded to TF32 on a GPU or to bfloat16 under autocast. Weights
are computed once per (size in, size out) and device.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate


class Taps(NamedTuple):
    """Output row o is the sum over k of weight[k, o] * row index[k, o]."""

    index: Tensor  # int64 [K, out]
    weight: Tensor  # float32 [K, out]
    bits: int = 0  # fixed-point weights carry 2^bits


def shortest_edge_size(height: int, width: int, edge: int) -> tuple[int, int]:
    """Size after scaling the shorter side to `edge`; the other side is rounded to an integer (half to even)."""
    scale = edge / min(height, width)
    if scale == 1.0:
        return height, width
    return round(height * scale), round(width * scale)


def multiple_size(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Nearest size whose sides are multiples of `factor` and whose area lies in [min_pixels, max_pixels].

    The rule of the Qwen vision-language image processors: round both sides, and scale by the area where it is outside.
    """
    if max(height, width) / min(height, width) > 200:
        raise ValueError(f"an image of {height}x{width} is more than 200 times longer than wide; check the camera")
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / scale / factor) * factor)
        new_width = max(factor, math.floor(width / scale / factor) * factor)
    elif new_height * new_width < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * scale / factor) * factor
        new_width = math.ceil(width * scale / factor) * factor
    return new_height, new_width


def resize_bicubic(images: Tensor, height: int, width: int) -> Tensor:
    """uint8 [N, C, H, W] -> uint8 [N, C, height, width], antialiased bicubic (a = -0.5) on 16-bit fixed-point weights.

    torch's uint8 CPU kernel, which torchvision's and transformers' fast image processors call, and its arithmetic on
    other devices: the horizontal pass comes first and is rounded to uint8 levels before the vertical one.
    """
    if images.shape[-2:] == (height, width):
        return images.contiguous()
    if images.device.type == "cpu":
        return interpolate(images.contiguous(), size=(height, width), mode="bicubic", antialias=True)
    return bicubic_by_taps(images, height, width)


def bicubic_by_taps(images: Tensor, height: int, width: int) -> Tensor:
    """`resize_bicubic` where there is no uint8 kernel."""
    source_height, source_width = images.shape[-2:]
    if source_width != width:
        taps = taps_on(images.device, _bicubic_taps, source_width, width)
        images = _fixed_point(images.transpose(2, 3).contiguous(), taps).transpose(2, 3)
    if source_height != height:
        images = _fixed_point(images.contiguous(), taps_on(images.device, _bicubic_taps, source_height, height))
    return images.contiguous()


def weighted(images: Tensor, taps: Taps) -> Tensor:
    """Weighted row sum along dimension 2 in float32, [N, C, H, W] -> [N, C, out, W].

    Product and sum are two operations: fused they round once instead of twice and ties fall differently.
    """
    out = images.index_select(2, taps.index[0]) * taps.weight[0, :, None]
    for index, weight in zip(taps.index[1:], taps.weight[1:], strict=True):
        out += images.index_select(2, index) * weight[:, None]
    return out


@functools.lru_cache(maxsize=256)
def taps_on(device: torch.device, build: Callable[[int, int], Taps], source: int, target: int) -> Taps:
    """The taps that `build` computes for (source, target), on `device`."""
    taps = build(source, target)
    return Taps(taps.index.to(device), taps.weight.to(device), taps.bits)


def pack(rows: list[list[tuple[int, float]]], bits: int = 0) -> Taps:
    """Taps from a list of (source row, weight) per output row, padded with weight 0."""
    count = max(len(row) for row in rows)
    padded = [row + [(row[-1][0], 0.0)] * (count - len(row)) for row in rows]
    index = torch.tensor([[entry[0] for entry in row] for row in padded]).T.contiguous()
    weight = torch.tensor([[entry[1] for entry in row] for row in padded], dtype=torch.float32).T.contiguous()
    return Taps(index, weight, bits)


def _fixed_point(images: Tensor, taps: Taps) -> Tensor:
    # Weights are below 2^15, their absolute sum below 2^16: all partial sums are integers below 2^24, exact in float32.
    out = weighted(images, taps)
    return out.add_(2.0 ** (taps.bits - 1)).mul_(2.0**-taps.bits).floor_().clamp_(0, 255).to(torch.uint8)


def _bicubic_taps(source: int, target: int) -> Taps:
    scale = source / target
    stretch = max(scale, 1.0)
    support = 2.0 * stretch
    rows = []
    for out in range(target):
        centre = scale * (out + 0.5)
        first = max(math.floor(centre - support + 0.5), 0)
        last = min(math.floor(centre + support + 0.5), source)
        weights = [_cubic((place - centre + 0.5) / stretch) for place in range(first, last)]
        total = sum(weights)
        rows.append([(first + k, weight / total) for k, weight in enumerate(weights)])
    # As many fraction bits as keep the largest weight inside a signed 16-bit integer.
    largest = max(weight for row in rows for _, weight in row)
    bits = 0
    while bits < 22 and 0.5 + largest * (1 << (bits + 1)) < (1 << 15):
        bits += 1
    fixed = [[(place, float(math.trunc(w * (1 << bits) + math.copysign(0.5, w)))) for place, w in row] for row in rows]
    return pack(fixed, bits)


def _cubic(x: float) -> float:
    """Keys' cubic kernel with a = -0.5."""
    a, x = -0.5, abs(x)
    if x < 1.0:
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    if x < 2.0:
        return (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return 0.0
