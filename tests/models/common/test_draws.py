"""Draws depend on (seed, stream, position, draw) and on nothing else."""

import pytest
import torch

from models.common import draws

UNIFORM_GOLDEN = [12590278, 2198293, 13625311]
NORMAL_GOLDEN = [1.2876276, -0.705881, -1.7487831]


@pytest.mark.parametrize("name", ["normal", "uniform", "beta", "permutation"])
def test_a_sample_draws_the_same_in_any_batch_and_on_any_rank(name: str) -> None:
    call = {
        "normal": lambda p: draws.normal(3, "noise", p, (5, 7)),
        "uniform": lambda p: draws.uniform(3, "crop", p, (2,)),
        "beta": lambda p: draws.beta(3, "time", p, alpha=1.5),
        "permutation": lambda p: draws.permutation(3, "order", p, 4),
    }[name]
    whole = call(torch.arange(1000, 1064))
    for rank, world in [(0, 1), (1, 3), (5, 8)]:
        positions = torch.arange(1000, 1064)[rank::world]
        assert torch.equal(call(positions), whole[rank::world])
    for index in (0, 17, 63):
        assert torch.equal(call([1000 + index]), whole[index : index + 1])
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(call(torch.arange(1000, 1064)[shuffled]), whole[shuffled])


def test_seed_stream_position_and_draw_all_matter() -> None:
    base = draws.normal(0, "noise", [5], (16,))
    for other in (
        draws.normal(1, "noise", [5], (16,)),
        draws.normal(0, "nois", [5], (16,)),
        draws.normal(0, "noise", [6], (16,)),
        draws.normal(0, "noise", [5], (16,), draw=1),
    ):
        assert not torch.isin(other, base).any()


def test_draws_do_not_touch_torch_generators() -> None:
    before = torch.get_rng_state()
    draws.normal(0, "noise", [1], (3,))
    assert torch.equal(before, torch.get_rng_state())


def test_values_are_fixed_for_ever() -> None:
    """A changed mixer would silently change every resumed run."""
    assert draws.uniform(0, "s", [0, 1, 2**40]).mul(2**24).long().tolist() == UNIFORM_GOLDEN
    torch.testing.assert_close(draws.normal(0, "s", [7], (3,))[0], torch.tensor(NORMAL_GOLDEN), rtol=0, atol=1e-6)


def test_distributions() -> None:
    x = draws.normal(1, "noise", torch.arange(400), (500,)).double()
    n = x.numel()
    # Five standard errors of mean, variance and fourth moment, and of the correlation of neighbours both ways.
    assert abs(x.mean()) < 5 / n**0.5
    assert abs(x.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs(x.pow(4).mean() - 3) < 5 * (96 / n) ** 0.5
    assert abs((x[1:] * x[:-1]).mean()) < 5 / n**0.5
    assert abs((x[:, 1:] * x[:, :-1]).mean()) < 5 / n**0.5
    u = draws.uniform(1, "u", torch.arange(100_000))
    assert 0 <= u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    counts = torch.histc(u, 20, 0, 1)
    assert ((counts - 5000).abs() < 5 * 5000**0.5).all()
    t = draws.beta(1, "t", torch.arange(100_000), alpha=1.5)
    assert abs(t.double().mean() - 0.6) < 5 * 0.262 / 100_000**0.5
    assert abs((t < 0.5).double().mean() - 0.5**1.5) < 5 * 0.48 / 100_000**0.5


def test_permutations_are_permutations_and_all_occur() -> None:
    orders = draws.permutation(0, "order", torch.arange(2000), 4)
    assert torch.equal(orders.sort(dim=1).values, torch.arange(4).expand(2000, 4))
    assert len(torch.unique(orders, dim=0)) == 24


def test_beta_rejects_a_bad_alpha() -> None:
    with pytest.raises(ValueError, match="noise_beta_alpha"):
        draws.beta(0, "t", [0], alpha=0.0)
