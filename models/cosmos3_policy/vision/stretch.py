"""Bilinear resize of a box to a somewhat larger size, uint8 to float32 levels, with few passes and no matrix product.

Each axis is one `lerp` of two neighbours. Its weights are those of the reference's antialiasing kernel, which for a
growing side has two taps.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate


class Taps(NamedTuple):
    """Output o is bordered[index[o]] * (1 - weight[o]) + bordered[index[o] + 1] * weight[o].

    bordered: the source with its first and last row repeated. period: (outputs, sources) after which the indices, which
    are one apart between, begin anew; or None.
    """

    index: Tensor  # int64 [out]
    weight: Tensor  # float32 [out]
    period: tuple[int, int] | None


class Stretch:
    """Resizes uint8 [3, F, h, w] to float32 [3, F, H, W]; the result is written over by the next call."""

    def __init__(self, frames: int, source: tuple[int, int], target: tuple[int, int], device: torch.device) -> None:
        (height, width), (rows, columns) = source, target
        floats = {"dtype": torch.float32, "device": device}
        self.out = torch.empty(3, frames, rows, columns, **floats)
        self.same = source == target
        if self.same:
            return
        self.planes = torch.empty(3, frames, height, width, dtype=torch.uint8, device=device)
        bordered = torch.empty(3, frames, height + 2, width + 2, **floats)
        across = torch.empty(3, frames, height + 2, columns, **floats)
        self.inside = bordered[:, :, 1:-1, 1:-1]
        # Rows first: the corners come with the columns.
        self.borders = [
            (bordered[:, :, 0], bordered[:, :, 1]),
            (bordered[:, :, -1], bordered[:, :, -2]),
            (bordered[..., 0], bordered[..., 1]),
            (bordered[..., -1], bordered[..., -2]),
        ]
        self.passes = [
            _Pass(bordered, taps_on(device, width, columns), 3, across),
            _Pass(across, taps_on(device, height, rows), 2, self.out),
        ]

    def __call__(self, planes: Tensor) -> Tensor:
        if self.same:
            return self.out.copy_(planes)
        # Bytes are taken apart into planes much faster than floats.
        self.inside.copy_(self.planes.copy_(planes))
        for border, edge in self.borders:
            border.copy_(edge)
        for stretch in self.passes:
            stretch()
        return self.out


class _Pass:
    """One axis, from one contiguous buffer to another."""

    def __init__(self, source: Tensor, taps: Taps, dim: int, out: Tensor) -> None:
        self.source, self.taps, self.dim, self.out = source, taps, dim, out
        weight_shape = [1, 1, 1, 1]
        weight_shape[dim] = -1
        self.views: tuple[Tensor, Tensor] | None = None
        if taps.period is not None:
            # Within a period neighbouring outputs have neighbouring sources: a view whose periods overlap is both.
            outputs, sources = taps.period
            periods = out.shape[dim] // outputs
            size = [*out.shape[:dim], periods, outputs, *out.shape[dim + 1 :]]
            step = source.stride(dim)
            stride = [*source.stride()[:dim], sources * step, step, *source.stride()[dim + 1 :]]
            self.views = (source.as_strided(size, stride, 0), source.as_strided(size, stride, step))
            weight_shape[dim : dim + 1] = [periods, outputs]
            self.out = out.view(size)
        self.weight = taps.weight.view(weight_shape)

    def __call__(self) -> None:
        if self.views is not None:
            first, second = self.views
        else:
            first = self.source.index_select(self.dim, self.taps.index)
            second = self.source.index_select(self.dim, self.taps.index + 1)
        torch.lerp(first, second, self.weight, out=self.out)


@functools.lru_cache(maxsize=64)
def taps_on(device: torch.device, source: int, target: int) -> Taps:
    """Two taps per output for a side that grows from `source` to `target`, on `device`."""
    taps = _taps(source, target)
    return Taps(taps.index.to(device), taps.weight.to(device), taps.period)


def _taps(source: int, target: int) -> Taps:
    """Read off the antialiasing kernel itself, applied to the unit vectors: its float32 weights differ from exact ones
    by 1e-5, which would show in one of a hundred pixels beside a sharp edge."""
    unit = torch.eye(source).unsqueeze(0).unsqueeze(0)
    weights = interpolate(unit, size=(source, target), mode="bilinear", antialias=True)[0, 0]
    used = weights > 0
    if int(used.sum(0).max()) > 2:
        raise ValueError(f"a side of {source} pixels cannot be stretched to {target}: it gets shorter")
    # In the bordered source, the pair whose second row is the last tap begins where the last tap was.
    last = source - 1 - used.flip(0).to(torch.uint8).argmax(0)
    weight = weights.gather(0, last.unsqueeze(0))[0]
    # The last row alone is also the pair of itself and the border behind it, which is how a period ends.
    behind = (last == source - 1) & (used.sum(0) == 1)
    index, weight = torch.where(behind, source, last), torch.where(behind, 0.0, weight)
    common = math.gcd(source, target)
    outputs, sources = target // common, source // common
    regular = torch.arange(outputs) + torch.arange(0, source, sources)[:, None]
    periodic = sources == outputs - 1 and torch.equal(index, regular.flatten())
    return Taps(index, weight, (outputs, sources) if periodic else None)
