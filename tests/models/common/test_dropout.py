"""Dropout on a CPU: its law, its gradient, and that one stream serves eager, compiled and recomputed code."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from models.common.dropout import Dropout, draw_mask, twice


@pytest.mark.parametrize("p", [0.1, 0.2, 0.5, 0.999])
def test_elements_are_dropped_with_the_probability_and_the_rest_keeps_the_mean(p: float) -> None:
    torch.manual_seed(0)
    count = 2_000_003  # not a multiple of the four elements of a draw
    mask = draw_mask(torch.empty(count), p)
    dropped = (mask == 0).double().mean().item()
    assert dropped == pytest.approx(p, abs=4 * (p * (1 - p) / count) ** 0.5 + 2**-16)
    assert mask.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)], rel=2**-16 / (1 - p))
    # Elements that come from one draw are no more alike than others.
    lanes = mask[: count // 4 * 4].view(-1, 4).sign().T.double()
    assert (torch.corrcoef(lanes) - torch.eye(4)).abs().max() < 0.01


def test_two_in_a_row_have_the_law_of_one() -> None:
    torch.manual_seed(0)
    square = torch.empty(1000, 1000, dtype=torch.float64)
    both = draw_mask(square, 0.2) * draw_mask(square, 0.2)
    once = draw_mask(square, twice(0.2))
    assert (both == 0).double().mean().item() == pytest.approx((once == 0).double().mean().item(), abs=2e-3)
    assert both.max().item() == pytest.approx(once.max().item(), rel=1e-4)


def test_no_probability_that_pytorch_allows_fails() -> None:
    x = torch.ones(3, 5)
    assert torch.equal(Dropout(0.0)(x), x)
    assert torch.equal(Dropout(0.2).eval()(x), x)
    assert Dropout(1.0)(x).isfinite().all()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("way", ["compiled", "recomputed", "both"])
def test_gradients_are_those_of_the_mask_that_acted(way: str) -> None:
    dropout = Dropout(0.3)

    def compute(x: Tensor) -> Tensor:
        return (dropout(F.gelu(x)) * 2).sin()

    run = compute
    if way != "compiled":
        run = lambda x: checkpoint(compute, x, use_reentrant=False)  # noqa: E731
    if way != "recomputed":
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    results = []
    for function in (compute, run):
        x = torch.linspace(-2, 2, 301, requires_grad=True)
        torch.manual_seed(7)
        y = function(x)
        y.sum().backward()
        results.append((y.detach(), x.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_bfloat16_is_dropped_as_float32_is() -> None:
    torch.manual_seed(3)
    wide = draw_mask(torch.empty(64, 33), 0.2)
    torch.manual_seed(3)
    narrow = draw_mask(torch.empty(64, 33, dtype=torch.bfloat16), 0.2)
    assert torch.equal(narrow == 0, wide == 0)
