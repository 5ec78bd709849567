"""Rotary positions on three axes, in float32: near position 15,000 bfloat16 knows multiples of 64 only."""

import torch
from torch import Tensor

from models.cosmos3_policy.packed import to_device


def rotary_table(positions: Tensor, head_dim: int, theta: float, axes: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Cosine and sine, float32 [S, 1, head_dim] each, of positions float32 [3, S] (time, row, column).

    The axes share the frequencies slot by slot: time, row, column, time ... until rows and columns have used up theirs
    (`axes` holds the slots of each); time has the rest. Both halves of a head turn by the same angle.
    """
    # The host computes the frequencies: they are the same on every device.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (theta**exponents)
    slots = [i % 3 if i < 3 * axes[i % 3] else 0 for i in range(head_dim // 2)]
    chosen = torch.stack([positions[axis] for axis in slots], dim=-1)
    angles = chosen * to_device(frequencies, positions.device)
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn x [S, heads, head_dim] by the table's angles, in float32; the dtype stays."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x * cos + turned * sin).to(x.dtype)
