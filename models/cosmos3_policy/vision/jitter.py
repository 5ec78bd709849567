"""Colour jitter of whole clips in float32 levels: one order and four factors per sample, every frame its own grey mean.

The operations are those of torchvision's v2 ColorJitter on float images. Order of the draws: permutation, brightness,
contrast, saturation, hue. Here pixels are levels in [0, 255] instead of [0, 1] (no operation depends on the scale), and
a clip is processed in place, in blocks of pixels that stay in a CPU's cache, by few passes:

* brightness, contrast and saturation blend with 0, with the frame's mean grey, with the grey; the clamp that follows is
  left out where a factor of at most 1 cannot leave the range;
* the turn of the hue needs neither hue nor saturation: each channel is a line in the three old ones and in the highest
  and lowest of them, held between those two (see `_turn_hue`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from models.common import draws

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
GREY = (0.2989, 0.587, 0.114)
"""Shares of red, green and blue in torchvision's grey; they sum to 0.9999."""

TOP = 255.0
SCRATCH_PLANES = 6


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """What one sample draws, on the host. order: the four operations as they follow; hue in turns, in [-0.5, 0.5]."""

    order: tuple[int, int, int, int]
    brightness: float
    contrast: float
    saturation: float
    hue: float


def draw_jitter(
    seed: int, positions: Sequence[int] | Tensor, strength: tuple[float, float, float, float]
) -> list[Jitter]:
    """One jitter per position, a function of (seed, position).

    Factors are uniform in [max(0, 1 - s), 1 + s] for brightness, contrast and saturation, the hue in [-s, s].
    `positions` lie on the host.
    """
    order = draws.permutation(seed, "augment.order", positions, 4).tolist()
    shares = draws.uniform(seed, "augment.factor", positions, (4,)).tolist()
    low = [max(0.0, 1.0 - value) for value in strength[:3]] + [-strength[3]]
    high = [1.0 + value for value in strength[:3]] + [strength[3]]
    out = []
    for sequence, share in zip(order, shares, strict=True):
        b, c, s, h = (a + u * (z - a) for a, u, z in zip(low, share, high, strict=True))
        first, second, third, fourth = sequence
        out.append(Jitter(order=(first, second, third, fourth), brightness=b, contrast=c, saturation=s, hue=h))
    return out


class _Planes(NamedTuple):
    """Scratch for one shape of block: three of [F, n], and one of [3, F, n]."""

    low: Tensor
    high: Tensor
    total: Tensor
    line: Tensor


class JitterWork:
    """Scratch for blocks of at most `pixels` pixels of each of `frames` frames.

    Numbers that meet tensors are tensors here: a Python number is made one, and converted, at each call.
    """

    def __init__(self, frames: int, pixels: int, device: torch.device) -> None:
        self.pixels = pixels
        self.one = torch.ones((), dtype=torch.float32, device=device)
        self._scratch = torch.empty(SCRATCH_PLANES * frames * pixels, dtype=torch.float32, device=device)
        self._planes: dict[tuple[int, ...], _Planes] = {}
        self._numbers: dict[float, Tensor] = {}

    def planes(self, x: Tensor) -> _Planes:
        """Scratch for a block [3, F, n]."""
        shape = tuple(x.shape[1:])
        if shape not in self._planes:
            count = shape[0] * shape[1]
            scratch = self._scratch[: SCRATCH_PLANES * count].view(SCRATCH_PLANES, *shape)
            self._planes[shape] = _Planes(*scratch[:3].unbind(0), scratch[3:])
        return self._planes[shape]

    def number(self, value: float) -> Tensor:
        """`value` without dimensions, on the device; the last few are kept."""
        if value not in self._numbers:
            if len(self._numbers) > 8:
                self._numbers.clear()
            self._numbers[value] = self.one * value
        return self._numbers[value]


def jitter_(levels: Tensor, jitter: Jitter, work: JitterWork) -> Tensor:
    """Change float32 levels [3, F, P] of F frames with P pixels in place and return them."""
    size = work.pixels
    before = jitter.order.index(CONTRAST)
    # The mean needs the whole frame: all that comes before it is done to all blocks first.
    for operations in (jitter.order[:before], jitter.order[before:]):
        if not operations:
            continue
        base = _contrast_base(levels, jitter.contrast) if operations[0] == CONTRAST else None
        for start in range(0, levels.shape[2], size):
            block = levels[:, :, start : start + size]
            for operation in operations:
                _apply(block, operation, jitter, base, work)
    return levels


def _apply(x: Tensor, operation: int, jitter: Jitter, base: Tensor | None, work: JitterWork) -> None:
    if operation == BRIGHTNESS:
        x.mul_(work.number(jitter.brightness))
        if jitter.brightness > 1.0:
            x.clamp_max_(TOP)
    elif operation == CONTRAST:
        assert base is not None
        torch.add(base, x, alpha=jitter.contrast, out=x)
        if jitter.contrast > 1.0:
            x.clamp_(0.0, TOP)
    elif operation == SATURATION:
        torch.lerp(_grey(x, work), x, jitter.saturation, out=x)
        if jitter.saturation > 1.0:
            x.clamp_(0.0, TOP)
    else:
        _turn_hue(x, jitter.hue, work)


def _grey(x: Tensor, work: JitterWork) -> Tensor:
    """[3, F, n] -> [F, n]."""
    out = work.planes(x).total
    torch.mul(x[0], work.number(GREY[0]), out=out)
    return out.add_(x[1], alpha=GREY[1]).add_(x[2], alpha=GREY[2])


def _contrast_base(levels: Tensor, factor: float) -> Tensor:
    """(1 - factor) * mean grey of each frame, [F, 1]; the mean of a sum is the sum of the means."""
    red, green, blue = levels.mean(dim=2).unbind(0)
    return (red * GREY[0]).add_(green, alpha=GREY[1]).add_(blue, alpha=GREY[2]).mul_(1.0 - factor).unsqueeze(1)


def _turn_hue(x: Tensor, shift: float, work: JitterWork) -> None:
    """Turn the hue of [3, F, n] in place; value and saturation stay.

    Whole thirds of a turn exchange channels. For the rest, t sixths of a turn from red towards green, 0 <= t <= 1, the
    new red is r - g - (1 - 2 * t) * b + (1 - t) * (high + low), held between low and high; green and blue follow in
    turn, and the other way round green and blue change places. On the edges of the hexagon of hues where blue is the
    lowest or the highest, this line is the flank of the HSV cone's trapezoid, moved by t; on the two where blue lies
    between, the line has left the range, at the end at which the trapezoid is flat.
    """
    thirds = round(3.0 * shift)
    if thirds:
        x.copy_(x.roll(thirds, dims=0))
    rest = 6.0 * shift - 2.0 * thirds
    t = min(abs(rest), 1.0)
    low, high, total, line = work.planes(x)
    torch.amin(x, dim=0, out=low)
    torch.amax(x, dim=0, out=high)
    torch.add(low, high, out=total)
    if rest >= 0:
        torch.sub(x[:2], x[1:], out=line[:2])
        torch.sub(x[2], x[0], out=line[2])
        line[0].add_(x[2], alpha=2.0 * t - 1.0)
        line[1:].add_(x[:2], alpha=2.0 * t - 1.0)
    else:
        torch.sub(x[1:], x[:2], out=line[1:])
        torch.sub(x[0], x[2], out=line[0])
        line[:2].add_(x[1:], alpha=2.0 * t - 1.0)
        line[2].add_(x[0], alpha=2.0 * t - 1.0)
    line.add_(total, alpha=1.0 - t)
    torch.clamp(line, low, high, out=x)
