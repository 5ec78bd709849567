"""Colour jitter on uint8 levels for a whole batch on its device, one draw per sample replayed on all of its images.

Every operation maps uint8 levels to uint8 levels with the arithmetic of albumentations 1.4 over OpenCV 4 on x86 with
AVX2: brightness and contrast truncate, saturation rounds, and the hue is turned on OpenCV's 180-step circle. Where
those libraries fuse a product and a sum into one rounding, so does this, through float64. Equal to them level by level.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from models.common import draws

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)

_LANES = 32  # columns the reference turns back from HSV at once; what is left at the end of a row is rounded otherwise


class JitterDraws(NamedTuple):
    """factor float32 [B, 4] (brightness, contrast, saturation, hue shift); order int64 [B, 4], operation by slot."""

    factor: Tensor
    order: Tensor


def draw_jitter(seed: int, positions: Tensor, strength: tuple[float, float, float, float]) -> JitterDraws:
    """Factors uniform in [max(0, 1 - s), 1 + s] for brightness, contrast, saturation; hue in [-s, s]; random order."""
    low, high = _ranges(tuple(strength), positions.device)
    u = draws.uniform(seed, "color_jitter.factor", positions, (4,))
    return JitterDraws(low + u * (high - low), draws.permutation(seed, "color_jitter.order", positions, 4))


@functools.lru_cache(maxsize=16)
def _ranges(strength: tuple[float, float, float, float], device: torch.device) -> tuple[Tensor, Tensor]:
    """Lowest and highest factors [4]; kept, because a copy of host values to a device waits for it."""
    low = torch.tensor([max(0.0, 1.0 - value) for value in strength[:3]] + [-strength[3]], device=device)
    high = torch.tensor([1.0 + value for value in strength[:3]] + [strength[3]], device=device)
    return low, high


def color_jitter(images: Tensor, jitter: JitterDraws) -> Tensor:
    """uint8 [B, M, 3, H, W] -> the same shape; the M images of a sample share its factors and order.

    The three blends in front of a sample's hue turn and the three behind it are each done for the whole batch, with
    factor 1 where a sample has none: the order of operations differs between samples without a host decision.
    """
    x = images.to(torch.float32)
    hue_slot = (jitter.order == HUE).long().argmax(dim=1)  # [B]
    slots = torch.arange(4, device=images.device)
    for slot in range(3):
        x = _blend(x, jitter, slot, slots[slot] < hue_slot)
    x = _turn_hue(x, jitter.factor[:, HUE])
    for slot in range(1, 4):
        x = _blend(x, jitter, slot, slots[slot] > hue_slot)
    return x.to(torch.uint8)


def _blend(x: Tensor, jitter: JitterDraws, slot: int, active: Tensor) -> Tensor:
    """factor * x + (1 - factor) * base; the base is 0 (brightness), the mean grey (contrast), the grey (saturation)."""
    operation = torch.where(active, jitter.order[:, slot], HUE)  # [B]; HUE stands for "nothing in this slot"
    factor = jitter.factor.gather(1, operation[:, None])[:, 0]
    factor = torch.where(active, factor, 1.0)[:, None, None, None, None]
    operation = operation[:, None, None, None, None]
    grey = _grey(x)
    # The mean and its weight are float64 in the reference; what is added to a level is float32.
    rest = 1.0 - factor.to(torch.float64)
    mean = (grey.mean(dim=(3, 4), keepdim=True, dtype=torch.float64) * rest).to(torch.float32)
    base = torch.where(operation == CONTRAST, mean, grey * rest.to(torch.float32) * (operation == SATURATION))
    blended = _fused(x, factor, base).clamp_(0, 255).round_()
    return torch.where(operation == SATURATION, blended, (x * factor).add_(base).clamp_(0, 255).floor_())


def _fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32 with one rounding: the product is exact in float64."""
    return (a.to(torch.float64) * b.to(torch.float64)).add_(c).to(torch.float32)


def _grey(x: Tensor) -> Tensor:
    """OpenCV's luma in 15-bit fixed point, [B, M, 3, H, W] -> [B, M, 1, H, W]; all sums are exact in float32."""
    red, green, blue = x.unbind(dim=2)
    return (red * 9798 + green * 19235 + blue * 3735 + 16384).mul_(2.0**-15).floor_().unsqueeze(2)


def _turn_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue by shift [B] (1 = full circle) through OpenCV's 8-bit HSV, where the circle has 180 steps."""
    shift = shift[:, None, None, None]
    red, green, blue = x.unbind(dim=2)
    value = x.amax(dim=2)
    spread = value - x.amin(dim=2)
    # 12-bit reciprocal tables in the reference, and rounding by adding half a unit before the shift.
    saturation = (spread * torch.round(255 * 4096 / value.clamp(min=1)) + 2048).mul_(2.0**-12).floor_()
    sector = torch.where(
        value == red, green - blue, torch.where(value == green, blue - red + 2 * spread, red - green + 4 * spread)
    )
    hue = (sector * torch.round(180 * 4096 / (6 * spread.clamp(min=1))) + 2048).mul_(2.0**-12).floor_()
    hue = torch.where(hue < 0, hue + 180, hue)
    turned = torch.remainder(hue + 180.0 * shift.to(torch.float64), 180.0).floor_().to(torch.float32)
    # Back: channel n of the hexagon is v * (1 - s * clamp(min(k, 4 - k), 0, 1)) with k = (n + h / 30) mod 6, in [0, 1].
    # Sector and fraction stay apart, so the fraction is not rounded again.
    sixth = turned * (6.0 / 180.0)
    sector = sixth.floor()
    fraction = sixth - sector
    saturation, value = saturation * (1.0 / 255.0), value * (1.0 / 255.0)
    channels = []
    for offset in (5.0, 3.0, 1.0):
        k = torch.remainder(sector + offset, 6.0)
        part = torch.minimum(k + fraction, (4.0 - k) - fraction).clamp_(0.0, 1.0)
        channels.append(_fused(-saturation, part, part.new_ones(())).mul_(value))
    out = torch.stack(channels, dim=2).mul_(255.0)
    whole = out.shape[-1] // _LANES * _LANES
    out = torch.cat([out[..., :whole].floor(), out[..., whole:].round()], dim=-1).clamp_(0, 255)
    return torch.where((shift == 0).unsqueeze(2), x, out)
