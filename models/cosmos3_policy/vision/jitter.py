"""Colour jitter of whole clips in float32 levels: one order and four factors per sample, every frame its own grey mean.

The operations are those of torchvision's v2 ColorJitter on float images. Order of the draws: permutation, brightness,
contrast, saturation, hue. Here pixels are levels in [0, 255] instead of [0, 1] (no operation depends on the scale), and
a clip is processed in place, in blocks of pixels that stay in a CPU's cache, by few passes:

* brightness, contrast and saturation blend with 0, with the frame's mean grey, with the grey; the clamp that follows is
  left out where a factor of at most 1 cannot leave the range;
* the turn of the hue needs no sector and no case. With low and c the smallest channel and the spread, and the red and
  the difference of green and blue as shares of the spread, the hue seen from cyan has a closed form (see `_turn_hue`),
  and each channel is low + c * a trapezoid of the turned hue.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.common import draws

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
GREY = (0.2989, 0.587, 0.114)
"""Shares of red, green and blue in torchvision's grey; they sum to 0.9999."""

TOP = 255.0
SCRATCH_PLANES = 5
_TINY = 1e-6  # spread of a grey pixel, whose hue does not matter


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


def jitter_(levels: Tensor, jitter: Jitter, scratch: Tensor) -> Tensor:
    """Change float32 levels [3, F, P] of F frames with P pixels in place and return them.

    scratch: float32 [SCRATCH_PLANES, F, n]; n is the number of pixels of a frame that are processed at a time.
    """
    size = scratch.shape[2]
    before = jitter.order.index(CONTRAST)
    # The mean needs the whole frame: all that comes before it is done to all blocks first.
    for operations in (jitter.order[:before], jitter.order[before:]):
        if not operations:
            continue
        base = _contrast_base(levels, jitter.contrast) if operations[0] == CONTRAST else None
        for start in range(0, levels.shape[2], size):
            block = levels[:, :, start : start + size]
            for operation in operations:
                _apply(block, operation, jitter, base, scratch[:, :, : block.shape[2]])
    return levels


def _apply(x: Tensor, operation: int, jitter: Jitter, base: Tensor | None, scratch: Tensor) -> None:
    if operation == BRIGHTNESS:
        x.mul_(jitter.brightness)
        if jitter.brightness > 1.0:
            x.clamp_max_(TOP)
    elif operation == CONTRAST:
        assert base is not None
        torch.add(base, x, alpha=jitter.contrast, out=x)
        if jitter.contrast > 1.0:
            x.clamp_(0.0, TOP)
    elif operation == SATURATION:
        torch.lerp(_grey(x, scratch[0]), x, jitter.saturation, out=x)
        if jitter.saturation > 1.0:
            x.clamp_(0.0, TOP)
    else:
        _turn_hue(x, jitter.hue, scratch)


def _grey(x: Tensor, out: Tensor) -> Tensor:
    """[3, F, n] -> [F, n]."""
    torch.mul(x[0], GREY[0], out=out)
    return out.add_(x[1], alpha=GREY[1]).add_(x[2], alpha=GREY[2])


def _contrast_base(levels: Tensor, factor: float) -> Tensor:
    """(1 - factor) * mean grey of each frame, [F, 1]; the mean of a sum is the sum of the means."""
    red, green, blue = levels.mean(dim=2).unbind(0)
    return (red * GREY[0]).add_(green, alpha=GREY[1]).add_(blue, alpha=GREY[2]).mul_(1.0 - factor).unsqueeze(1)


def _turn_hue(x: Tensor, shift: float, scratch: Tensor) -> None:
    """Turn the hue of [3, F, n] in place; value and saturation stay.

    In sixths of a turn from red, with r = red's share of the spread and d = (green - blue) / spread, the hue is
    3 - (d + r * (sign(d) * 3 - 2 * d)): d alone where red is lowest, 1 + r or 3 - |d| away from cyan where d is at its
    end or red is highest. What is kept is its distance from cyan, in turns.
    """
    red, green, blue = x[0], x[1], x[2]
    low, spread, a, b, z = scratch
    torch.minimum(red, green, out=low)
    torch.minimum(low, blue, out=low)
    torch.maximum(red, green, out=spread)
    torch.maximum(spread, blue, out=spread).sub_(low)
    torch.clamp(spread, min=_TINY, out=a).reciprocal_()
    torch.sub(green, blue, out=b).mul_(a)
    torch.sub(red, low, out=z).mul_(a)
    torch.copysign(a.fill_(0.5), b, out=a).add_(b, alpha=-1 / 3)
    z.mul_(a).add_(b, alpha=1 / 6).sub_(shift)
    z.sub_(torch.round(z, out=a))  # back to half a turn either way
    _trapezoid(z, low, spread, torch.abs(z, out=a).mul_(6.0).sub_(1.0), out=red)
    _trapezoid(z, low, spread, torch.sub(z, 1 / 6, out=a).abs_().mul_(-6.0).add_(2.0), out=green)
    _trapezoid(z, low, spread, torch.add(z, 1 / 6, out=a).abs_().mul_(-6.0).add_(2.0), out=blue)


def _trapezoid(z: Tensor, low: Tensor, spread: Tensor, ramp: Tensor, out: Tensor) -> None:
    torch.addcmul(low, spread, ramp.clamp_(0.0, 1.0), out=out)
