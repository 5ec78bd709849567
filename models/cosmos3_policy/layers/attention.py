"""Attention over packed samples behind one function, with several implementations that give the same result.

Caption tokens attend causally to the tokens of their own caption. Generated tokens attend, without a mask, to the
whole caption and to all generated tokens of their own sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Backend = Literal["sdpa"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Which tokens belong together. `context_lengths` are the caption lengths that generated tokens see, else None."""

    backend: Backend
    lengths: tuple[int, ...]
    context_lengths: tuple[int, ...] | None = None


def plan_attention(
    lengths: tuple[int, ...],
    context_lengths: tuple[int, ...] | None = None,
    *,
    backend: Backend = "sdpa",
    device: torch.device | str = "cpu",
) -> Plan:
    """Prepare attention of tokens of `lengths` [N], which see `context_lengths` more if given, else are causal."""
    return Plan(backend=backend, lengths=lengths, context_lengths=context_lengths)


def attend(
    query: Tensor, key: Tensor, value: Tensor, plan: Plan, context: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """query [Q, heads, d] over key, value [Q, kv_heads, d] -> [Q, heads * d].

    With `context`, keys and values [S, kv_heads, d] of the captions, nothing is masked inside a sample; without it a
    token sees those before it and itself.
    """
    return _sdpa(query, key, value, plan, context).flatten(1)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, plan: Plan, context: tuple[Tensor, Tensor] | None) -> Tensor:
    """Sample by sample: the reference."""
    outputs = []
    start = behind = 0
    for i, length in enumerate(plan.lengths):
        own = slice(start, start + length)
        k, v = key[own], value[own]
        if context is not None:
            assert plan.context_lengths is not None
            seen = slice(behind, behind + plan.context_lengths[i])
            k, v = (torch.cat([c[seen].to(x.dtype), x]) for c, x in zip(context, (k, v), strict=True))
            behind = seen.stop
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query[own], k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=context is None, enable_gqa=True)
        outputs.append(out.squeeze(0).transpose(0, 1))
        start = own.stop
    if start < len(query):  # padding at the end
        outputs.append(torch.zeros_like(query[start:]))
    return torch.cat(outputs)
