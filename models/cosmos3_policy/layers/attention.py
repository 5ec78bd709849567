"""Attention over packed samples behind one function, with several implementations that give the same result.

Caption tokens attend causally to the tokens of their own caption. Generated tokens attend, without a mask, to the
whole caption and to all generated tokens of their own sample.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from models.cosmos3_policy.layers.attention_plan import Plan, Rows

Context = tuple[Tensor, Tensor]
"""Keys and values [S, kv_heads, d] of all captions of a pack."""


def attend(query: Tensor, key: Tensor, value: Tensor, plan: Plan, context: Context | None = None) -> Tensor:
    """query [Q, heads, d] over key, value [Q, kv_heads, d] -> [Q, heads * d].

    With the captions' `context` nothing is masked inside a sample; without it a token sees those before it and itself.
    Rows that belong to no sample come back with values that mean nothing.
    """
    if context is not None:
        context = (context[0].to(key.dtype), context[1].to(value.dtype))
    return _BACKENDS[plan.backend](query, key, value, plan, context).flatten(1)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, plan: Plan, context: Context | None) -> Tensor:
    """Sample by sample: the reference."""
    queries, keys, values = (_samples(x, plan.lengths) for x in (query, key, value))
    if context is not None:
        assert plan.context_lengths is not None
        seen = [_samples(x, plan.context_lengths) for x in context]
        keys, values = (
            [torch.cat(pair) for pair in zip(*both, strict=True)] for both in ((seen[0], keys), (seen[1], values))
        )
    outputs = []
    for triple in zip(queries, keys, values, strict=True):
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in triple)
        out = scaled_dot_product_attention(q, k, v, is_causal=context is None, enable_gqa=True)
        outputs.append(out.squeeze(0).transpose(0, 1))
    padding = len(query) - sum(plan.lengths)
    if padding:
        outputs.append(query.new_zeros(padding, *query.shape[1:]))
    return torch.cat(outputs)


def _padded(query: Tensor, key: Tensor, value: Tensor, plan: Plan, context: Context | None) -> Tensor:
    """All samples in one call of padded ones, whose shapes do not tell the lengths."""
    assert plan.keys is not None
    k, v = (_take(x, plan.keys).unflatten(0, (-1, plan.padded_keys)) for x in _with_context(key, value, context))
    # Whatever padding of the queries gets is left behind, and so has no gradient.
    q = query if plan.queries is None else query.index_select(0, plan.queries.index)
    q = q.unflatten(0, (-1, plan.padded_queries))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=plan.mask, is_causal=context is None, enable_gqa=True)
    out = out.transpose(1, 2).flatten(0, 1)
    return out if plan.queries is None else out.index_select(0, plan.queries.place)


def _varlen(query: Tensor, key: Tensor, value: Tensor, plan: Plan, context: Context | None) -> Tensor:
    """FlashAttention over samples of different lengths; half precision on CUDA devices."""
    from torch.nn.attention.varlen import varlen_attn

    if context is not None:
        assert plan.keys is not None
        rows = plan.keys
        key, value = (_take(x, rows) for x in _with_context(key, value, context))
    window = (-1, 0) if context is None else (-1, -1)
    return varlen_attn(
        query,
        key,
        value,
        plan.query_starts,
        plan.key_starts,
        plan.longest_query,
        plan.longest_key,
        window_size=window,
        enable_gqa=True,
    )


def _flex(query: Tensor, key: Tensor, value: Tensor, plan: Plan, context: Context | None) -> Tensor:
    """FlexAttention, which skips the blocks of the mask that hold no pair of one sample. No backward pass on CPUs."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, *_with_context(key, value, context)))
    out = _flex_attention(query.device.type)(q, k, v, block_mask=plan.block_mask, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


@functools.cache
def _flex_attention(device: str) -> Callable[..., Any]:
    """Uncompiled, it holds the whole matrix of scores: on a GPU it is only run compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if device == "cuda" else flex_attention


_BACKENDS: dict[str, Callable[[Tensor, Tensor, Tensor, Plan, Context | None], Tensor]] = {
    "sdpa": _sdpa,
    "padded": _padded,
    "varlen": _varlen,
    "flex": _flex,
}


def _samples(x: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
    return x[: sum(lengths)].split(lengths)


def _with_context(key: Tensor, value: Tensor, context: Context | None) -> tuple[Tensor, Tensor]:
    """Keys and values of the captions before those of the generated tokens, [S + Q, kv_heads, d]."""
    return (key, value) if context is None else (torch.cat([context[0], key]), torch.cat([context[1], value]))


def _take(x: Tensor, rows: Rows) -> Tensor:
    return _Take.apply(x, rows.index, rows.place)


class _Take(torch.autograd.Function):
    """Rows of a tensor, each at most once; the gradient is gathered as well, where indexing would add with atomics.

    Only the last rows, as many as `place` has, need a gradient: those before them are the frozen captions'.
    """

    @staticmethod
    def forward(source: Tensor, index: Tensor, place: Tensor) -> Tensor:
        return source.index_select(0, index)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])
        ctx.frozen = len(inputs[0]) - len(inputs[2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        own = gradients[0].index_select(0, place)
        return torch.cat([own.new_zeros(ctx.frozen, *own.shape[1:]), own]), None, None
