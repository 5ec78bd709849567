"""Averages of trained weights: the formula, float32, what is saved, exchanged and given back."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from models.common.ema import Ema, power_exponent, without_averages
from models.common.step_options import EmaConfig


def network() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    return model


def tracked(model: nn.Module, **config: Any) -> Ema:
    ema = Ema(EmaConfig(**config))
    ema.track(model)
    return ema


def walk(model: nn.Module, ema: Ema, steps: int) -> list[torch.Tensor]:
    """Random steps of the last weight; its value after each."""
    seen = []
    for step in range(1, steps + 1):
        with torch.no_grad():
            model[1].weight.add_(torch.randn_like(model[1].weight))
        ema.update(step)
        seen.append(model[1].weight.detach().clone())
    return seen


def test_trained_parameters_alone_are_averaged_in_float32_under_the_networks_names() -> None:
    model = network().to(torch.bfloat16)
    ema = tracked(model)
    assert list(ema.state_dict()) == ["0.bias", "1.weight", "1.bias"]
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in ema.parameters())


def test_constant_average_is_the_recursion_from_the_first_weights() -> None:
    model = network()
    expected = model[1].weight.detach().clone()
    ema = tracked(model, kind="constant", decay=0.9)
    for value in walk(model, ema, 5):
        expected = 0.9 * expected + 0.1 * value
    torch.testing.assert_close(ema.state_dict()["1.weight"], expected)


def test_power_average_forgets_the_beginning_and_has_the_width_asked_for() -> None:
    # 6.94 at 0.1: Karras et al. 2023, table of section 3.2
    assert power_exponent(0.1) == pytest.approx(6.94, abs=0.005)
    ema = Ema(EmaConfig(rate=0.1))
    assert ema.beta(1) == 0.0
    shares, steps = torch.zeros(2001, dtype=torch.float64), 2000  # of every step in the average
    for step in range(1, steps + 1):
        shares *= ema.beta(step)
        shares[step] = 1.0 - ema.beta(step)
    assert float(shares.sum()) == pytest.approx(1.0)
    place = torch.arange(steps + 1) / steps
    mean = (shares * place).sum()
    deviation = ((shares * (place - mean) ** 2).sum()).sqrt()
    assert float(deviation) == pytest.approx(0.1, rel=0.01)


def test_the_first_step_of_a_power_average_is_its_weights() -> None:
    model = network()
    ema = tracked(model, kind="power")
    (first,) = walk(model, ema, 1)
    torch.testing.assert_close(ema.state_dict()["1.weight"], first, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_come_back_bit_for_bit_also_after_an_error(dtype: torch.dtype) -> None:
    model = network().to(dtype)
    ema = tracked(model, kind="constant")
    walk(model, ema, 3)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    averages = {name: value.clone() for name, value in ema.state_dict().items()}

    def look_and_fail() -> None:
        with ema.applied():
            for name, value in averages.items():
                assert torch.equal(model.state_dict()[name], value.to(dtype))
            assert torch.equal(model[0].weight, weights["0.weight"])  # frozen
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        look_and_fail()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, averages[name]) for name, value in ema.state_dict().items())


def test_saved_averages_go_on_and_a_checkpoint_without_them_starts_anew() -> None:
    model, other = network(), network()
    ema, restored = tracked(model), tracked(other)
    walk(model, ema, 2)
    state = {f"network.{k}": v for k, v in model.state_dict().items()}
    restored.load_state_dict(ema.state_dict())
    other.load_state_dict(model.state_dict())
    restored.track(other)  # the trainer may have moved things: what was restored stays
    torch.manual_seed(1)
    walk(model, ema, 2)
    torch.manual_seed(1)
    walk(other, restored, 2)
    assert torch.equal(ema.state_dict()["1.weight"], restored.state_dict()["1.weight"])
    before = {name: value.clone() for name, value in state.items()}
    ema.complete(state)
    assert torch.equal(state["ema.1.weight"], before["network.1.weight"])
    without_averages(state)
    assert state.keys() == before.keys()


def test_values_kept_in_less_than_float32_can_be_given() -> None:
    model = network().to(torch.bfloat16)
    ema = tracked(model, kind="constant", decay=0.5)
    ema.update(1, lambda parameter: torch.full(parameter.shape, 1.0001))
    start = model[1].bias.detach().float()
    torch.testing.assert_close(ema.state_dict()["1.bias"], 0.5 * start + 0.5 * 1.0001, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "linear"}, "kind='linear': one of power, constant"),
        ({"kind": "constant", "rate": 0.1}, "rate is read with kind=power only"),
        ({"decay": 0.9}, "decay is read with kind=constant only"),
        ({"rate": 0.5}, "rate=0.5: a number above 0 and at most 0.288"),
        ({"kind": "constant", "decay": 1.0}, "decay=1.0: a number above 0 and below 1"),
        ({"rate": True}, "rate=True"),
    ],
)
def test_values_that_mean_nothing_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        EmaConfig(**values)


def test_values_are_checked_without_torch() -> None:
    code = "import sys, models.common.step_options; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
