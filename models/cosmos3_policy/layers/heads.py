"""How noise levels and actions become tokens, and tokens actions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

SINUSOID = 256


class TimeEmbedder(nn.Module):
    """Noise level in 0..1 -> token offset; sinusoid, linear, SiLU, linear, all in float32 whatever the weights are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(SINUSOID, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, level: Tensor) -> Tensor:
        """[N] -> float32 [N, width]."""
        half = SINUSOID // 2
        # Cosines first; periods from 2 pi to nearly 2 pi 10^4.
        exponents = torch.arange(half, device=level.device, dtype=torch.float32) * (-math.log(1e4) / half)
        angles = level.float().unsqueeze(-1) * exponents.exp()
        with torch.autocast(level.device.type, enabled=False):
            x = torch.cat([angles.cos(), angles.sin()], dim=-1)
            for linear in (self.linear_1, self.linear_2):
                x = nn.functional.linear(x, linear.weight.float(), linear.bias.float())
                x = nn.functional.silu(x) if linear is self.linear_1 else x
        return x


class DomainLinear(nn.Module):
    """y = x @ W[domain] + b[domain]; row d of the tables is W[d] as [in, out] in one line, and b[d]."""

    def __init__(self, domains: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.fc = nn.Embedding(domains, in_features * out_features)
        self.bias = nn.Embedding(domains, out_features)

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None = None) -> None:
        """A fresh head: truncated normal of standard deviation 1 / sqrt(in), cut at three of them; no bias."""
        std = self.in_features**-0.5
        nn.init.trunc_normal_(self.fc.weight, std=std, a=-3 * std, b=3 * std, generator=generator)
        self.bias.weight.zero_()

    def forward(self, x: Tensor, domain: int | Tensor) -> Tensor:
        """x [N, R, in] -> [N, R, out]; one domain for all, or int64 [N] on the device, whose values are not read."""
        x = x.to(self.fc.weight.dtype)
        shape = (self.in_features, self.out_features)
        if isinstance(domain, int):
            return x @ self.fc.weight[domain].view(shape) + self.bias.weight[domain]
        weight: Tensor = self.fc(domain).unflatten(-1, shape)
        return torch.bmm(x, weight) + self.bias(domain).unsqueeze(1)
