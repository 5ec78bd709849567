"""Which calls are replayed as a graph and which run as usual, with a graph that is played back on the CPU."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.common.graphs import CudaCapture, Function, HeadGraphs


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def loss(self, x: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        return (self.layer(x).square() * mask).sum() * scale


class Played:
    """Like a graph: inputs are copied to fixed places, the output and the gradients come from fixed buffers, which the
    next replay overwrites."""

    def __init__(self) -> None:
        self.captures: list[tuple[Any, ...]] = []

    def __call__(self, function: Function, owner: nn.Module, args: tuple[Any, ...]) -> Function:
        self.captures.append(args)
        places = [arg.detach().clone() if isinstance(arg, Tensor) else arg for arg in args]
        output, parameters = torch.zeros(()), list(owner.parameters())
        buffers = [torch.zeros_like(p) for p in parameters]

        class Graph(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *_: Tensor) -> Tensor:
                with torch.enable_grad():
                    ctx.value = function(*places)
                return output.copy_(ctx.value.detach()).detach()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
                for buffer, new in zip(buffers, torch.autograd.grad(ctx.value, parameters, grad), strict=True):
                    buffer.copy_(new)
                return tuple(buffer.detach() for buffer in buffers)

        def replay(*tensors: Tensor) -> Tensor:
            wanted = [place for place in places if isinstance(place, Tensor)]
            for place, tensor in zip(wanted, tensors, strict=True):
                assert place.shape == tensor.shape
                place.copy_(tensor)
            return Graph.apply(*parameters)

        return replay


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=generator), torch.rand(rows, 3, generator=generator)


def test_a_shape_is_captured_when_it_comes_again_and_replayed_from_then_on() -> None:
    head, capture = Head(), Played()
    graphs = HeadGraphs(head.loss, head, capture)
    rows = [2, 5, 2, 2, 5, 7]
    for seed, count in enumerate(rows):
        torch.testing.assert_close(graphs(*batch(count, seed)), head.loss(*batch(count, seed)), rtol=0, atol=0)
    assert [args[0].shape[0] for args in capture.captures] == [2, 5]
    assert (graphs.captured, graphs.replays, graphs.eager) == (2, 3, 3)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_of_a_step_are_those_of_the_plain_calls(micro_batches: int) -> None:
    torch.manual_seed(0)
    head, plain = Head(), Head()
    plain.load_state_dict(head.state_dict())
    graphs = HeadGraphs(head.loss, head, Played(), accumulates=micro_batches > 1)
    for step in range(4):
        for module, call in ((head, graphs), (plain, plain.loss)):
            module.zero_grad(set_to_none=True)
            for turn in range(micro_batches):
                (call(*batch(2 + turn % 2, 10 * step + turn)) / micro_batches).backward()
        for a, b in zip(head.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    assert graphs.replays > 0


def test_a_loss_read_later_is_not_overwritten_by_the_next_replay() -> None:
    head = Head()
    graphs = HeadGraphs(head.loss, head, Played())
    losses = [graphs(*batch(2, seed)).detach() for seed in range(4)]
    assert [float(x) for x in losses] == [float(head.loss(*batch(2, seed)).detach()) for seed in range(4)]


def test_masks_are_data_and_plain_values_and_dtypes_are_part_of_the_shape() -> None:
    head, capture = Head(), Played()
    graphs = HeadGraphs(head.loss, head, capture)
    x, mask = batch(2, 0)
    for _ in range(3):
        graphs(x, mask, 1.0)
        graphs(x, 1.0 - mask, 1.0)
        graphs(x, mask, 2.0)
        graphs(x, mask > 0.5, 1.0)
    assert graphs.captured == 3


def test_what_cannot_be_captured_runs_as_usual_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def fails(*args: Any) -> Function:
        raise RuntimeError("operation not permitted when stream is capturing")

    head = Head()
    graphs = HeadGraphs(head.loss, head, fails)
    with caplog.at_level(logging.WARNING):
        values = [graphs(*batch(2, 0)) for _ in range(4)]
    assert all(torch.equal(value, head.loss(*batch(2, 0))) for value in values)
    assert [record.message for record in caplog.records] == [
        "graphs: a shape runs without one, it cannot be captured: operation not permitted when stream is capturing"
    ]


def test_there_are_no_more_graphs_than_the_limit() -> None:
    head = Head()
    graphs = HeadGraphs(head.loss, head, Played(), limit=2)
    for turn in range(3):
        for rows in (2, 3, 4, 5):
            assert torch.equal(graphs(*batch(rows, turn)), head.loss(*batch(rows, turn)))
    assert (graphs.captured, graphs.replays) == (2, 4)


def test_evaluation_goes_past_the_graphs() -> None:
    head = Head()
    graphs = HeadGraphs(head.loss, head, Played())
    with torch.no_grad():
        [graphs(*batch(2, 0)) for _ in range(3)]
    head.eval()
    [graphs(*batch(2, 0)) for _ in range(3)]
    assert (graphs.captured, graphs.eager) == (0, 0)


def test_an_argument_on_the_host_is_no_graph() -> None:
    head = Head()
    with pytest.raises(ValueError, match="an argument lies on the cpu"):
        CudaCapture()(head.loss, head, batch(2, 0))
