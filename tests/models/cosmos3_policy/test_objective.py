"""The objective against its formulas in float64, written down again here; noise levels against their distribution."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.cosmos3_policy.objective import SHIFTS, ObjectiveConfig, losses, noised, sigma_of, sigmas
from models.cosmos3_policy.packed import Velocity

N, C, T, H, W, ROWS, WIDTH, RAW = 3, 4, 3, 5, 6, 9, 8, 5


def make_flow(position: Tensor | None = None, **changes: Any) -> Any:
    position = torch.arange(N) + 40 if position is None else position
    some = len(position)
    g = torch.Generator().manual_seed(1)
    latents = torch.randn(N, C, T, H, W, generator=g)[:some]
    action = torch.randn(N, ROWS, WIDTH, generator=g)[:some]
    action[..., RAW:] = 0
    arguments: dict[str, Any] = {
        "seed": 7, "position": position, "shift": 5.0, "action_dim": RAW, "text_ids": torch.arange(2 * some),
        "text_lengths": (2,) * some, "domain": 1, "fps": 15.0,
    }  # fmt: skip
    return noised(latents, action, **{**arguments, **changes}), latents, action


def test_loss_is_that_of_a_reference_in_float64() -> None:
    flow, latents, action = make_flow()
    g = torch.Generator().manual_seed(2)
    velocity = Velocity(
        vision=torch.randn(N, C, T, H, W, generator=g), action=torch.randn(N, ROWS, WIDTH, generator=g)
    )  # whatever stands at clean positions and in padded channels must not count
    vision, rows = losses(velocity, flow)
    for i in range(N):
        # noise from what the network is given: x = s e + (1 - s) d
        s = float(flow.packed.sigma[i])
        error = 0.0
        for t in range(1, T):
            x, d = flow.packed.latents[i, :, t].double().numpy(), latents[i, :, t].double().numpy()
            v = (x - (1 - s) * d) / s - d
            error += float(((velocity.vision[i, :, t].double().numpy() - v) ** 2).sum())
        assert float(vision[i]) == pytest.approx(
            error / (C * T * H * W), rel=2e-6
        )  # the clean frame in the denominator
        error = 0.0
        for r in range(1, ROWS):
            x, d = flow.packed.action[i, r, :RAW].double().numpy(), action[i, r, :RAW].double().numpy()
            v = (x - (1 - s) * d) / s - d
            error += float(((velocity.action[i, r, :RAW].double().numpy() - v) ** 2).sum())
        assert float(rows[i]) == pytest.approx(error / (ROWS * RAW), rel=2e-6)


def test_a_perfect_velocity_costs_nothing_and_clean_parts_are_given_as_they_are() -> None:
    flow, latents, action = make_flow()
    vision, rows = losses(Velocity(vision=flow.vision_target.clone(), action=flow.action_target.clone()), flow)
    assert vision.tolist() == rows.tolist() == [0.0] * N
    packed = flow.packed
    assert torch.equal(packed.latents[:, :, 0], latents[:, :, 0])
    assert torch.equal(packed.action[:, 0], action[:, 0])
    assert packed.vision_noisy.tolist() == [[False] + [True] * (T - 1)] * N
    assert packed.action_noisy.tolist() == [[False] + [True] * (ROWS - 1)] * N
    assert packed.action_start == (0,) * N  # the state row is the clock's zero
    assert bool((packed.action[..., RAW:] == 0).all())


def test_video_and_actions_share_their_level_and_it_spans_noise_to_data() -> None:
    flow, latents, action = make_flow()
    s = flow.packed.sigma.double()
    for x, data, target in (
        (flow.packed.latents[:, :, 1:], latents[:, :, 1:], flow.vision_target[:, :, 1:]),
        (flow.packed.action[:, 1:, :RAW], action[:, 1:, :RAW], flow.action_target[:, 1:, :RAW]),
    ):
        level = s.view(-1, *[1] * (x.ndim - 1))
        noise = target.double() + data.double()
        torch.testing.assert_close(x.double(), level * noise + (1 - level) * data.double(), rtol=1e-5, atol=1e-6)
        assert abs(float(noise.mean())) < 0.15
        assert float(noise.std()) == pytest.approx(1.0, abs=0.15)


def test_draws_belong_to_the_sample_not_to_its_place_in_the_pack() -> None:
    whole, _, _ = make_flow()
    other, _, _ = make_flow(torch.tensor([41, 40]))
    assert torch.equal(other.packed.sigma, whole.packed.sigma[[1, 0]])
    one, _, _ = make_flow(torch.tensor([40]))
    assert torch.equal(one.packed.latents[0], whole.packed.latents[0])
    assert torch.equal(one.packed.action[0], whole.packed.action[0])
    reseeded, _, _ = make_flow(seed=8)
    assert not bool((reseeded.packed.sigma == whole.packed.sigma).any())
    wider, _, _ = make_flow(action_dim=RAW + 1)
    assert torch.equal(wider.packed.sigma, whole.packed.sigma)


def reference_sigma(u: float, shift: float) -> float:
    t = 1 - u - 1.29 * (math.cos(math.pi * u / 2) ** 2 - 1 + u)
    return shift * t / (1 + (shift - 1) * t)


@pytest.mark.parametrize("shift", [*SHIFTS.values(), 1.0])
def test_levels_have_the_quantiles_and_moments_of_their_formula(shift: float) -> None:
    count = 200_000
    drawn = sigmas(3, torch.arange(count), shift).double().numpy()
    # the level falls with u, so its quantile q is the level at 1 - q
    for q in (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99):
        share = float((drawn <= reference_sigma(1 - q, shift)).mean())
        assert share == pytest.approx(q, abs=4 * math.sqrt(q * (1 - q) / count))
    middles = np.array([reference_sigma((k + 0.5) / 20_000, shift) for k in range(20_000)])
    assert float(drawn.mean()) == pytest.approx(middles.mean(), abs=4 * middles.std() / math.sqrt(count))
    assert float(drawn.std()) == pytest.approx(middles.std(), rel=0.01)
    assert drawn.min() > 0.0
    assert drawn.max() <= 1.0


def test_level_runs_from_noise_to_data_and_falls_all_the_way() -> None:
    u = torch.linspace(0, 1, 10_001, dtype=torch.float64)
    for shift in SHIFTS.values():
        level = sigma_of(u, shift)
        assert float(level[0]) == 1.0
        assert float(level[-1]) == pytest.approx(0.0, abs=1e-15)
        assert bool((level.diff() < 0).all())
    assert float(sigma_of(torch.tensor(0.5, dtype=torch.float64), 5.0)) == pytest.approx(5 * 0.5 / 3)


def test_values_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"objective\.shift=0"):
        ObjectiveConfig(shift=0)
    with pytest.raises(ValueError, match=r"vision_weight=0\.0, action_weight=0\.0"):
        ObjectiveConfig(vision_weight=0.0, action_weight=0.0)
