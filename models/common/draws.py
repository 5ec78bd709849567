"""Random draws as functions of (seed, stream, position, draw): no generator state to save or to keep in step.

A draw is a hash, not the next value of a stream: the same sample gets the same crop, noise and time whichever batch,
rank or world size it lands in, and after a resume. Everything is computed on the device of `positions` in float64 and
rounded to float32 once, so vector width, batch size and device do not show in the result (two libraries' float64
logarithms differ by units in the last place, which survive the rounding about once in 10^8 values).
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Multipliers and shifts of the splitmix64 finaliser (Steele, Lea, Flood 2014), as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def stream_key(seed: int, stream: str, *extra: int) -> int:
    """64-bit key of one named stream under one seed; `extra` integers (draw, step, rank) separate sub-streams."""
    text = "\x1f".join([str(int(seed)), stream, *(str(int(value)) for value in extra)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def normal(seed: int, stream: str, positions: Tensor | Sequence[int], shape: Sequence[int], *, draw: int = 0) -> Tensor:
    """Standard normal float32 [B, *shape] for int64 `positions` [B], by Box and Muller's transform."""
    count = math.prod(shape)
    pairs = (count + 1) // 2
    bits = _bits(seed, stream, positions, pairs, draw)
    # One 64-bit word makes one pair: the upper half the radius (kept off 0 for the logarithm), the lower one the angle.
    radius = (_shift_right(bits, 32).to(torch.float64) + 0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
    angle = (bits & 0xFFFFFFFF).to(torch.float64).mul_(2.0 * math.pi * 2.0**-32)
    out = torch.cat([angle.cos().mul_(radius), angle.sin_().mul_(radius)], dim=1)
    return out[:, :count].to(torch.float32).reshape(-1, *shape)


def uniform(
    seed: int, stream: str, positions: Tensor | Sequence[int], shape: Sequence[int] = (), *, draw: int = 0
) -> Tensor:
    """Uniform float32 [B, *shape] on [0, 1), in steps of 2^-24 (so 1 is never returned)."""
    bits = _bits(seed, stream, positions, math.prod(shape), draw)
    return _shift_right(bits, 40).to(torch.float32).mul_(2.0**-24).reshape(-1, *shape)


def beta(
    seed: int, stream: str, positions: Tensor | Sequence[int], shape: Sequence[int] = (), *, alpha: float, draw: int = 0
) -> Tensor:
    """Beta(alpha, 1) float32 [B, *shape]: its distribution function is x^alpha, so u^(1/alpha) of a uniform u."""
    if alpha <= 0:
        raise ValueError(f"alpha is {alpha}; a Beta distribution needs alpha > 0 (noise_beta_alpha)")
    bits = _bits(seed, stream, positions, math.prod(shape), draw)
    u = (_shift_right(bits, 11).to(torch.float64) + 0.5).mul_(2.0**-53)
    return u.pow_(1.0 / alpha).to(torch.float32).reshape(-1, *shape)


def permutation(seed: int, stream: str, positions: Tensor | Sequence[int], size: int, *, draw: int = 0) -> Tensor:
    """One permutation of 0..size-1 per position, int64 [B, size]."""
    return _bits(seed, stream, positions, size, draw).argsort(dim=1)


def _bits(seed: int, stream: str, positions: Tensor | Sequence[int], count: int, draw: int) -> Tensor:
    """64 hashed bits per (position, element), int64 [B, count]."""
    position = torch.as_tensor(positions, dtype=torch.int64).reshape(-1)
    key = stream_key(seed, stream, draw)
    lane = torch.arange(1, count + 1, dtype=torch.int64, device=position.device).mul_(_signed(_GOLDEN))
    # The position goes through the mixer before the lanes are added, so neighbouring positions share no lane values.
    base = _mix(position * _signed(_GOLDEN) + _signed(key))
    return _mix(base[:, None] + lane[None, :])


def _mix(x: Tensor) -> Tensor:
    """The splitmix64 finaliser, in place on int64 with wrap-around."""
    x ^= _shift_right(x, 30)
    x *= _signed(_MIX_1)
    x ^= _shift_right(x, 27)
    x *= _signed(_MIX_2)
    x ^= _shift_right(x, 31)
    return x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch shifts int64 arithmetically, so the copied sign bits are masked off."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
