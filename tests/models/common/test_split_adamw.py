"""The split optimiser against AdamW on float32 parameters: equal to the last bit, saved and resumed."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.common.optim import OptimizerConfig, adamw, build_optimizer
from models.common.split_adamw import SplitAdamW, join, split

OPTIONS: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def bits(patterns: list[int]) -> Tensor:
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


def test_a_float32_is_its_nearest_bfloat16_and_a_remainder() -> None:
    g = torch.Generator().manual_seed(0)
    drawn = torch.randint(-(2**31), 2**31, (200_000,), generator=g).to(torch.int32).view(torch.float32)
    edges = bits([0, 0x80000000, 1, 0x8000, 0x7FFF, 0x3F808000, 0x3F818000, 0xBF808000, 0x3F80FFFF, 0x007FFFFF])
    value = torch.cat([drawn[drawn.isfinite()], edges])
    high, low = torch.empty_like(value, dtype=torch.bfloat16), torch.empty_like(value, dtype=torch.int16)
    split(value, high, low)
    assert torch.equal(join(high, low).view(torch.int32), value.view(torch.int32))
    tie = (value.view(torch.int32) & 0xFFFF) == 0x8000
    assert 0 < tie.sum() < 100
    assert torch.equal(high[~tie].view(torch.int16), value[~tie].bfloat16().view(torch.int16))
    assert (high[tie].float().abs() > value[tie].abs()).all()


def make_parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(1)
    shapes = [(7, 33), (5,), (64, 3, 2), ()]
    return [nn.Parameter(torch.randn(shape, generator=g).bfloat16().to(dtype)) for shape in shapes]


def gradients(step: int, like: list[nn.Parameter]) -> list[Tensor]:
    g = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=g).bfloat16() * 10.0 ** (step % 3 - 1) for p in like]


def advance(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        optimizer.param_groups[0]["lr"] = 3e-3 / (1 + step % 5)
        for parameter, gradient in zip(parameters, gradients(step, parameters), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("chunk", [1, 1 << 25])
def test_float32_values_equal_adamw_bit_for_bit(fused: bool, chunk: int) -> None:
    wide, narrow = make_parameters(torch.float32), make_parameters(torch.bfloat16)
    reference, ours = adamw(wide, fused=fused, **OPTIONS), SplitAdamW(narrow, fused=fused, chunk=chunk, **OPTIONS)
    advance(reference, wide, range(40))
    advance(ours, narrow, range(40))
    for expected, parameter in zip(wide, narrow, strict=True):
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(ours.master(parameter), expected)
        assert (parameter.float() - expected).abs().max() <= (expected.bfloat16().float() - expected).abs().max()
    # Small steps would be lost on bfloat16 alone.
    plain = make_parameters(torch.bfloat16)
    advance(torch.optim.AdamW(plain, **OPTIONS), plain, range(40))
    assert any(not torch.equal(p, q) for p, q in zip(plain, narrow, strict=True))


def test_float32_parameters_among_them_are_plain_adamw() -> None:
    wide = make_parameters(torch.float32)
    mixed = [nn.Parameter(p.detach().to(torch.bfloat16 if p.ndim > 1 else p.dtype).clone()) for p in wide]
    reference, ours = adamw(wide, fused=True, **OPTIONS), SplitAdamW(mixed, **OPTIONS)
    advance(reference, wide, range(5))
    advance(ours, mixed, range(5))
    for expected, parameter in zip(wide, mixed, strict=True):
        assert torch.equal(ours.master(parameter), expected)
        assert ("low" in ours.state[parameter]) == (parameter.dtype == torch.bfloat16)


def test_state_is_saved_and_resumed_exactly() -> None:
    whole = make_parameters(torch.bfloat16)
    advance(SplitAdamW(whole, **OPTIONS), whole, range(12))
    first = make_parameters(torch.bfloat16)
    optimizer = SplitAdamW(first, **OPTIONS)
    advance(optimizer, first, range(6))
    per_parameter = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values() if t.ndim)
    assert per_parameter == 10 * sum(p.numel() for p in first if p.ndim)  # two float32 moments and 16 bits
    file = io.BytesIO()
    torch.save({"weights": [p.detach() for p in first], "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = [nn.Parameter(weight) for weight in saved["weights"]]
    resumed = SplitAdamW(second, **{**OPTIONS, "lr": 1.0})
    resumed.load_state_dict(copy.deepcopy(saved["optimizer"]))
    advance(resumed, second, range(6, 12))
    assert all(torch.equal(p, q) for p, q in zip(whole, second, strict=True))
    state = next(iter(resumed.state.values()))
    assert [state[key].dtype for key in ("exp_avg", "exp_avg_sq", "low")] == [torch.float32, torch.float32, torch.int16]


def test_another_mode_s_state_is_refused() -> None:
    wide, narrow = make_parameters(torch.float32), make_parameters(torch.bfloat16)
    reference = SplitAdamW(wide, **OPTIONS)
    advance(reference, wide, range(1))
    with pytest.raises(ValueError, match="another precision mode"):
        SplitAdamW(narrow, **OPTIONS).load_state_dict(reference.state_dict())
    with pytest.raises(ValueError, match="float16"):
        SplitAdamW([nn.Parameter(torch.zeros(2, dtype=torch.float16))])


def test_the_builder_splits_where_a_trained_parameter_is_bfloat16() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    assert type(build_optimizer(module, OptimizerConfig())) is torch.optim.AdamW
    module[0].to(torch.bfloat16).requires_grad_(False)
    assert type(build_optimizer(module, OptimizerConfig())) is torch.optim.AdamW
    module[2].to(torch.bfloat16)
    optimizer = build_optimizer(module, OptimizerConfig(lr=2e-4, weight_decay=0.3))
    assert isinstance(optimizer, SplitAdamW)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert optimizer.param_groups[0]["lr"] == 2e-4
