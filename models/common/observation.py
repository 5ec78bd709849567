"""What a robot shows its policy, in the shape of a batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One moment of B robots in the shape of a batch: images [B, 1, H, W, 3], state [B, 1, D], no actions."""

    images: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    text: Sequence[str]
    position: Tensor
    action: Mapping[str, Tensor] = field(default_factory=dict)
    action_is_pad: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.bool))
    inputs: Mapping[str, Any] = field(default_factory=dict)
