"""UniPC and its noise levels against Diffusers' scheduler; both solvers against what they must reach."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.cosmos3_policy.sampler import Sampling, told

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden/unipc.json").read_text())
CASES = [pytest.param(case, id=f"{case['grid']}-{case['steps']}-{case['shift']}") for case in GOLDEN["cases"]]


def made_up(x: Tensor, timestep: float) -> Tensor:
    """The velocity of golden/make_unipc.py."""
    clean = torch.tensor(GOLDEN["clean"])
    return x - clean * (1.0 + 0.2 * torch.sin(3.0 * x)) + 0.1 * torch.cos(torch.tensor(timestep / 100.0))


def sampling(case: dict[str, Any], **changes: Any) -> Sampling:
    return Sampling(**{**{name: case[name] for name in ("grid", "steps", "shift")}, **changes})


@pytest.mark.parametrize("case", CASES)
def test_noise_levels_and_timesteps(case: dict[str, Any]) -> None:
    sigmas = sampling(case).sigmas
    assert sigmas == pytest.approx(case["sigmas"], abs=1e-7)
    assert [round(told(sigma) * 1000) for sigma in sigmas[:-1]] == case["timesteps"]


@pytest.mark.parametrize("case", CASES)
def test_unipc_is_that_of_diffusers(case: dict[str, Any]) -> None:
    """Every point at which the network is asked, and the result; the second tensor is solved as the first."""
    asked: list[Tensor] = []

    def velocity(x: list[Tensor], sigma: float) -> list[Tensor]:
        asked.append(x[0])
        return [made_up(value, sigma * 1000) for value in x]

    start = torch.tensor(GOLDEN["start"])
    result = sampling(case).solve(velocity, [start, start.reshape(3, 4).flatten()])
    for ours, theirs in zip([*asked[1:], result[0]], case["states"], strict=True):
        torch.testing.assert_close(ours, torch.tensor(theirs), rtol=1e-5, atol=2e-6)
    assert torch.equal(result[0], result[1])


def test_both_solvers_find_the_flow_and_the_second_order_finds_it_sooner() -> None:
    """dx/dsigma = -sin(x) + 1 / (2 - sigma), against ten thousand small steps."""

    def velocity(x: list[Tensor], sigma: float) -> list[Tensor]:
        return [-torch.sin(value) + 1.0 / (2.0 - sigma) for value in x]

    start = [torch.linspace(-1, 1, 5, dtype=torch.float64)]
    exact = Sampling(solver="euler", steps=10_000, shift=1.0).solve(velocity, start)[0]
    errors = {
        (solver, steps): float(
            (Sampling(solver=solver, steps=steps, shift=1.0).solve(velocity, start)[0] - exact).abs().max()
        )
        for solver in ("unipc", "euler")
        for steps in (10, 20)
    }
    assert errors["euler", 20] < 0.6 * errors["euler", 10] < 0.1
    assert errors["unipc", 20] < 0.5 * errors["unipc", 10]
    assert errors["unipc", 10] < 0.5 * errors["euler", 10]


@pytest.mark.parametrize("solver", ["unipc", "euler"])
def test_what_has_no_velocity_stays(solver: Any) -> None:
    start = torch.tensor([3.0, -2.0, 0.5])
    held = Sampling(solver=solver).solve(lambda x, sigma: [torch.zeros_like(value) for value in x], [start])[0]
    torch.testing.assert_close(held, start, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("solver", ["unipc", "euler"])
def test_a_velocity_that_knows_the_data_reaches_it(solver: Any) -> None:
    data, noise = torch.tensor([0.3, -1.2]), torch.tensor([1.0, 0.4])
    for shift in (1.0, 5.0):
        chosen = Sampling(solver=solver, shift=shift)
        first = chosen.sigmas[0]
        start = (1 - first) * data + first * noise
        found = chosen.solve(lambda x, sigma: [noise - data], [start])[0]
        torch.testing.assert_close(found, data, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_sampled_is_told_together() -> None:
    with pytest.raises(ValueError, match=r"solver='heun'.*steps=0.*shift=-1.*guidance=nan"):
        Sampling(solver="heun", steps=0, shift=-1.0, guidance=math.nan)  # type: ignore[arg-type]
