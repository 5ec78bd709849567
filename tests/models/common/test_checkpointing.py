"""Recomputing blocks: equal results, less kept, the choice within a budget, and mistakes that are named."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from models.common.block_memory import BlockUse, peak, plan_kept
from models.common.block_options import CheckpointingConfig
from models.common.checkpointing import apply, plans_of


class Block(nn.Module):
    def __init__(self, width: int, inner: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(x) + shift).sin()))


class Model(nn.Module):
    """Blocks of three widths in two parts."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.ModuleList(Block(16, 128, dropout) for _ in range(3))
        self.second = nn.ModuleList(Block(16, inner, dropout) for inner in (32, 64, 64))

    def forward(self, x: Tensor) -> Tensor:
        shift = torch.linspace(0, 1, len(x))[:, None].requires_grad_()
        for block in (*self.first, *self.second):
            x = block(x, shift=shift)
        return x.mean()  # keeps nothing itself

    def parts(self) -> dict[str, list[nn.Module]]:
        return {"first": list(self.first), "second": list(self.second)}


def x() -> Tensor:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(1))


def step(model: Model) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    torch.manual_seed(7)
    loss = model(x())
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def kept_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """What autograd keeps at the end of a forward pass, weights excluded, by storage."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    assert loss.requires_grad
    return sum(kept.values())


MODES: list[dict[str, Any]] = [
    {"mode": "full"},
    {"mode": "selective"},
    {"mode": "selective", "save": ["aten.addmm"]},
    {"mode": "layers", "last_k": 2},
    {"mode": "layers", "every_k": 2, "parts": ["second"]},
    {"mode": "layers", "layers": [0, -1]},
    {"mode": "auto", "memory_gb": 60e-6},
]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("values", MODES, ids=lambda v: " ".join(map(str, v.values())))
def test_steps_are_bit_equal_and_names_stay(values: dict[str, Any], dropout: float) -> None:
    plain, model = Model(dropout), Model(dropout)
    names = list(model.state_dict())
    apply(model.parts(), CheckpointingConfig(**values))
    assert list(model.state_dict()) == names
    for _ in range(3):  # auto measures in the first
        (loss, gradients), (expected, others) = step(model), step(plain)
        assert torch.equal(loss, expected)
        assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
    assert not any(plan.pending for plan in plans_of(model))
    twin = copy.deepcopy(model)
    assert torch.equal(step(twin)[0], step(model)[0])


def test_which_blocks_recompute() -> None:
    expected: list[tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = [
        ({"last_k": 2}, {"first": (1, 2), "second": (1, 2)}),
        ({"every_k": 2, "parts": ["first"]}, {"first": (0, 2)}),
        ({"layers": [0, -1]}, {"first": (0, 2), "second": (0, 2)}),
    ]
    for values, recomputed in expected:
        report = apply(Model().parts(), CheckpointingConfig(mode="layers", **values))
        assert report.recomputed == recomputed
    assert "first 0-2 of 3" in apply(Model().parts(), CheckpointingConfig(mode="full")).summary()
    assert apply(Model().parts(), CheckpointingConfig()).recomputed == {}


def test_kept_bytes_fall_with_k_and_are_those_reported() -> None:
    measured = []
    for k in (None, 1, 2, 3):
        model = Model()
        config = CheckpointingConfig() if k is None else CheckpointingConfig(mode="layers", last_k=k)
        report = apply(model.parts(), config, example=lambda model=model: model(x()))
        measured.append(kept_bytes(model, lambda model=model: model(x())))
        if k is not None:
            assert report.saved_bytes == pytest.approx(measured[-1], rel=0.02)
    assert all(more > 1.2 * less for more, less in itertools.pairwise(measured))


@pytest.fixture(scope="module")
def need() -> dict[frozenset[tuple[str, int]], int]:
    """Bytes that every set of recomputing blocks leaves kept, each measured by itself."""
    names = [(part, i) for part, list_ in Model().parts().items() for i in range(len(list_))]
    found = {}
    for bits in range(2 ** len(names)):
        recomputed = [key for place, key in enumerate(names) if not bits >> place & 1]
        model = Model()
        for part, list_ in model.parts().items():
            if chosen := [i for other, i in recomputed if other == part]:
                apply({part: list_}, CheckpointingConfig(mode="layers", layers=chosen))
        found[frozenset(recomputed)] = kept_bytes(model, lambda model=model: model(x()))
    return found


@pytest.mark.parametrize("share", [0.15, 0.5, 0.8, 1.01])
def test_auto_keeps_the_largest_set_that_fits(share: float, need: dict[frozenset[tuple[str, int]], int]) -> None:
    budget = share * need[frozenset()]
    model = Model()
    report = apply(model.parts(), CheckpointingConfig(mode="auto", memory_gb=budget / 1e9))
    step(model)
    recomputed = frozenset((part, i) for part, indices in report.recomputed.items() for i in indices)
    assert report.saved_bytes == pytest.approx(need[recomputed], rel=0.1)
    assert kept_bytes(model, lambda: model(x())) == need[recomputed]
    assert report.peak_bytes is not None
    assert report.peak_bytes <= budget or len(recomputed) == 6
    fewest = min((len(blocks) for blocks, size in need.items() if size <= budget), default=6)
    # What holds the most is the end of the forward pass or, for the smallest sets, one recomputation.
    assert len(recomputed) == fewest or report.peak_bytes > report.saved_bytes


def test_a_budget_that_nothing_meets_recomputes_all_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    report = apply(model.parts(), CheckpointingConfig(mode="auto", memory_gb=1e-9), example=lambda: model(x()))
    assert report.recomputed == {"first": (0, 1, 2), "second": (0, 1, 2)}
    assert "all blocks recompute and still need" in caplog.text


def test_recomputation_counts_towards_the_peak() -> None:
    uses = {i: BlockUse(inner_bytes=10, inputs={i: 1}, recompute_flops=0) for i in range(4)}
    assert peak(uses, frozenset()) == (44, 44)
    assert peak(uses, frozenset({0, 1})) == (24, 24)  # while an early one recomputes, the later ones hold nothing
    assert peak(uses, frozenset({2, 3})) == (24, 34)
    assert plan_kept(uses, 24) == {2, 3}
    assert plan_kept(uses, 23) == {3}
    assert plan_kept(uses, 13) == frozenset()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("values", [{"mode": "full"}, {"mode": "layers", "last_k": 1}], ids=str)
def test_extra_flops_are_those_the_counter_sees(values: dict[str, Any], dropout: float) -> None:
    counts = []
    for config in (CheckpointingConfig(), CheckpointingConfig(**values)):
        model = Model(dropout)
        report = apply(model.parts(), config, example=lambda model=model: model(x()))
        with FlopCounterMode(display=False) as counter:
            step(model)
        counts.append(counter.get_total_flops())
    assert report.extra_flops == counts[1] - counts[0] > 0


def test_nothing_recomputes_without_gradients() -> None:
    model = Model()
    apply(model.parts(), CheckpointingConfig(mode="auto", memory_gb=1.0))
    with torch.no_grad():
        model(x())
    assert plans_of(model)[0].pending  # a validation pass before the training measures nothing


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "full", "parts": ["third"]}, "third has no blocks that run with gradients.*first, second"),
        ({"mode": "layers", "last_k": 4}, "last_k=4 is more than the blocks there are: first 3, second 3"),
        ({"mode": "layers", "layers": [1, 3]}, "first has blocks 0 to 2 and no 3"),
        ({"mode": "selective", "save": ["aten.mm", "aten.matrix"]}, "aten.matrix matches no operation of PyTorch"),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply(Model().parts(), CheckpointingConfig(**values))


def test_a_pattern_that_no_block_runs_is_an_error() -> None:
    config = CheckpointingConfig(mode="selective", save=["aten.addmm", "aten._scaled_dot_product_*"])
    model = Model()
    with pytest.raises(ValueError, match=r"_scaled_dot_product_\* matched no operation.*they ran .*aten.addmm"):
        apply(model.parts(), config, example=lambda: model(x()))
    model = Model()
    apply(model.parts(), config)
    with pytest.raises(ValueError, match="matched no operation"):
        step(model)


def test_applying_twice_is_refused() -> None:
    model = Model()
    apply(model.parts(), CheckpointingConfig(mode="full"))
    with pytest.raises(ValueError, match="recomputes already"):
        apply(model.parts(), CheckpointingConfig(mode="full"))
