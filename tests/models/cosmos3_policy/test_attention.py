"""All implementations of attention give what a dense mask gives, over packs of different lengths and with padding."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask

from models.cosmos3_policy.layers.attention import attend
from models.cosmos3_policy.layers.attention_plan import Plan, plan_attention

HEADS, KV_HEADS, DIM = 4, 2, 16
CASES = {
    "one": ((5,), (3,)),
    "equal": ((6, 6, 6), (3, 5, 1)),
    "unequal": ((7, 1, 12), (2, 9, 4)),
    "blocks": ((150, 130, 300, 20), (200, 3, 140, 60)),
}
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
# FlexAttention is slow without a GPU: one case is enough, which crosses its blocks in every way.
CHOICES = [(backend, case) for backend in ("sdpa", "padded", "varlen") for case in CASES] + [("flex", "blocks")]


@pytest.fixture(autouse=True)
def varlen_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel runs on GPUs in half precision; what it is documented to do stands in for it here."""

    def varlen_attn(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_starts: Tensor,
        key_starts: Tensor,
        longest_query: int,
        longest_key: int,
        *,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> Tensor:
        assert query_starts.dtype == key_starts.dtype == torch.int32
        assert enable_gqa
        assert (query_starts.diff() <= longest_query).all()
        assert (key_starts.diff() <= longest_key).all()
        result = torch.full_like(q, float("nan"))
        for (a, b), (c, d) in zip(
            itertools.pairwise(query_starts.tolist()), itertools.pairwise(key_starts.tolist()), strict=True
        ):
            mask = torch.ones(b - a, d - c, dtype=torch.bool)
            if window_size == (-1, 0):
                mask = mask.tril(d - c - (b - a))
            result[a:b] = dense(q[a:b], k[c:d], v[c:d], mask)
        return result

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)


def dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention over a mask [Q, K], written out."""
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / DIM**0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def numbers(lengths: tuple[int, ...], rows: int, padding: int) -> Tensor:
    """Sample of each row."""
    found = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return torch.cat([found, torch.full((rows - len(found),), padding)])


def tokens(rows: int, heads: int, seed: int) -> Tensor:
    return torch.randn(rows, heads, DIM, generator=torch.Generator().manual_seed(seed), requires_grad=True)


@pytest.mark.parametrize(("padding", "multiple"), [(0, 1), (5, 8)])
@pytest.mark.parametrize(("backend", "lengths"), CHOICES)
def test_generated_tokens_see_their_whole_sample(lengths: str, padding: int, multiple: int, backend: Any) -> None:
    own, texts = CASES[lengths]
    rows = sum(texts) + padding
    plan = plan_attention(own, texts, context_rows=rows, backend=backend, multiple=multiple)
    query, key, value = (tokens(sum(own), heads, i) for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    # What padding holds must not matter.
    context = tuple(x.detach() for x in (tokens(rows, KV_HEADS, 3), tokens(rows, KV_HEADS, 4)))
    owner = numbers(own, sum(own), -1)
    mask = owner[:, None] == torch.cat([numbers(texts, rows, -2), owner])
    expected = dense(query, torch.cat([context[0], key]), torch.cat([context[1], value]), mask).flatten(1)
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5))
    if backend == "flex":  # no backward pass on CPUs
        found = attend(query.detach(), key.detach(), value.detach(), plan, context)
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-5)
        return
    found = attend(query, key, value, plan, context)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    gradients = torch.autograd.grad(found, (query, key, value), cotangent)
    for a, b in zip(gradients, torch.autograd.grad(expected, (query, key, value), cotangent), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("padding", "multiple"), [(0, 1), (5, 8)])
@pytest.mark.parametrize(("backend", "lengths"), CHOICES)
def test_captions_are_causal(lengths: str, padding: int, multiple: int, backend: Any) -> None:
    texts = CASES[lengths][1]
    rows = sum(texts) + padding
    plan = plan_attention(texts, rows=rows, backend=backend, multiple=multiple)
    query, key, value = (tokens(rows, heads, i).detach() for i, heads in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    owner = numbers(texts, rows, len(texts))
    mask = (owner[:, None] == owner) & torch.ones(rows, rows, dtype=torch.bool).tril()
    expected = dense(query, key, value, mask).flatten(1)
    found = attend(query, key, value, plan)
    assert found.isfinite().all()
    torch.testing.assert_close(found[: sum(texts)], expected[: sum(texts)], rtol=0, atol=1e-5)


def test_the_varlen_kernel_takes_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real operation and its gradient on tensors without values: names, types and shapes of its arguments."""
    monkeypatch.undo()
    with FakeTensorMode(allow_non_fake_inputs=True):
        query, key, value = (
            torch.empty(12, heads, DIM, dtype=torch.bfloat16, requires_grad=True)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        context = (torch.empty(9, KV_HEADS, DIM), torch.empty(9, KV_HEADS, DIM))
        plan = plan_attention((7, 5), (3, 4), context_rows=9, backend="varlen", multiple=8)
        found = attend(query, key, value, plan, context)
        assert found.shape == (12, HEADS * DIM)
        assert found.dtype == torch.bfloat16
        found.sum().backward()
        assert key.grad is not None
        assert key.grad.shape == key.shape
        captions = plan_attention((3, 4), rows=12, backend="varlen", multiple=8)
        assert attend(query, key, value, captions).shape == (12, HEADS * DIM)


@pytest.mark.parametrize(("own", "texts"), [(CASES["blocks"]), ((1024, 1024), (128, 128)), ((256, 300), None)])
def test_blocks_of_flex_are_those_the_library_finds(own: Any, texts: Any) -> None:
    """It looks at every pair, which at released sizes is more than memory holds."""
    mask = plan_attention(own, texts, backend="flex").block_mask
    assert mask is not None
    rows, columns = mask.seq_lengths
    expected = create_block_mask(mask.mask_mod, None, None, rows, columns, device="cpu")
    assert torch.equal(mask.to_dense(), expected.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mask, name), getattr(expected, name)), name


def test_flex_skips_blocks_between_samples() -> None:
    """Two samples of eight blocks each: half of the pairs are never looked at, and the others need no mask."""
    mask = plan_attention((1024, 1024), (128, 128), backend="flex").block_mask
    assert mask is not None
    assert int(mask.kv_num_blocks.sum()) == 0
    assert int(mask.full_kv_num_blocks.sum()) == 2 * 8 * (8 + 1)


@pytest.mark.parametrize("backend", ["padded", "varlen"])
def test_rounded_plans_of_other_lengths_have_equal_shapes(backend: Any) -> None:
    """What a compiled layer sees of a pack: tensors of the same shapes, and equal numbers."""

    def seen(plan: Plan) -> list[Any]:
        rows = [r for pair in (plan.queries, plan.keys) if pair is not None for r in (pair.index, pair.place)]
        tensors = [*rows, plan.mask, plan.query_starts, plan.key_starts]
        shapes = [None if t is None else t.shape for t in tensors]
        return [*shapes, plan.padded_queries, plan.padded_keys, plan.longest_query, plan.longest_key]

    plans = [
        plan_attention((40, 40), texts, context_rows=64, backend=backend, multiple=64)
        for texts in ((10, 12), (20, 3), (24, 24))
    ]
    assert seen(plans[0]) == seen(plans[1]) == seen(plans[2])
