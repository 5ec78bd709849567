"""Depth maps stored as 12-bit video: from the codes to millimetres, as LeRobot takes them apart."""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from knonik.metadata.episodes import DepthSpec

CODES = 4096  # 12 bit
_MOST_MM = 65535


def millimetres(spec: DepthSpec) -> NDArray[np.uint16]:
    """[4096] depth in millimetres of every code.

    In 32-bit floats and in LeRobot's order of operations: rounded correctly instead, a few codes in a thousand would
    come out one millimetre away from what the stock loader gives.
    """
    low, high = (math.log(m + spec.shift_m) if spec.log else m for m in (spec.min_m, spec.max_m))
    depth = torch.arange(CODES, dtype=torch.float32).mul_((high - low) / (CODES - 1)).add_(low)
    if spec.log:
        depth.exp_().sub_(spec.shift_m)
    depth.clamp_(spec.min_m, spec.max_m).mul_(1000.0).round_().clamp_(0.0, _MOST_MM)
    return depth.numpy().astype(np.uint16)


def codes(depth_mm: NDArray[np.uint16], spec: DepthSpec) -> NDArray[np.uint16]:
    """The nearest code of depths in millimetres, any shape; depths outside the scale take its ends."""
    depth = np.clip(depth_mm.astype(np.float64) / 1000.0, spec.min_m, spec.max_m)
    low, high = spec.min_m, spec.max_m
    if spec.log:
        depth, low, high = np.log(depth + spec.shift_m), math.log(low + spec.shift_m), math.log(high + spec.shift_m)
    share: NDArray[np.float64] = (depth - low) / (high - low)
    return np.rint(share * (CODES - 1)).astype(np.uint16)
