"""Packs cut from the order: within budget and bound, a function of the position, the same for any number of ranks."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from knonik.order.packs import Packs


def cost(positions: np.ndarray) -> np.ndarray:
    """Between 3 and 12, without a pattern."""
    return 3 + (positions * 2654435761 % 1000) * 10 // 1000


def cut(begin: int, count: int, *, budget: int = 40, most: int = 6) -> list[int]:
    return Packs(cost, budget=budget, most=most).cut(begin, count).tolist()


def test_packs_are_greedy_within_budget_and_bound() -> None:
    ends = cut(0, 400)
    full, fullest = 0, 0
    for first, last in itertools.pairwise(ends):
        size, tokens = last - first, int(cost(np.arange(first, last)).sum())
        assert 1 <= size <= 6
        assert tokens <= 40
        if size < 6:  # the next sample would not have fitted
            assert tokens + int(cost(np.array([last]))[0]) > 40
        full += size == 6
        fullest += tokens == 40
    assert 0 < full < 400  # both limits were met
    assert fullest


def test_packs_follow_from_the_position_alone() -> None:
    ends = cut(1000, 60)
    packs = Packs(cost, budget=40, most=6)
    for world_size in (1, 2, 3, 5):  # as many at a time, in order, or anew from any border
        assert [packs.cut(ends[step], world_size).tolist() for step in range(0, 60, world_size)] == [
            ends[step : step + world_size + 1] if step + world_size <= 60 else cut(ends[step], world_size)
            for step in range(0, 60, world_size)
        ]
    assert cut(ends[17], 60 - 17) == ends[17:]


def test_each_sample_is_asked_about_once_and_not_far_ahead() -> None:
    asked: list[int] = []

    def noted(positions: np.ndarray) -> np.ndarray:
        asked.extend(positions.tolist())
        return cost(positions)

    packs = Packs(noted, budget=40, most=6)
    begin = 0
    for _ in range(50):
        begin = int(packs.cut(begin, 4)[-1])
    assert asked == list(range(asked[-1] + 1))
    assert asked[-1] < begin + 64 * 6


def test_a_sample_beyond_the_budget_is_named() -> None:
    packs = Packs(lambda positions: np.where(positions == 5, 41, 10), budget=40, most=8)
    assert packs.cut(0, 1).tolist() == [0, 4]
    with pytest.raises(ValueError, match=r"the sample at position 5 has 41 tokens, more than pack_tokens=40"):
        packs.cut(0, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda count: [0, *[1] * (count - 1)],
        lambda count: [1],
        lambda count: [[1] * count],
        lambda count: [2.7] * count,  # cut to whole numbers they would break the budget
        lambda count: [float("nan")] * count,
        lambda count: ["3"] * count,
        lambda count: None,
    ],
)
def test_costs_that_are_none_are_refused(wrong: Callable[[int], Any]) -> None:
    with pytest.raises(ValueError, match="one whole number above 0 is expected for each"):
        Packs(lambda positions: wrong(len(positions)), budget=40, most=2).cut(0, 1)


@pytest.mark.parametrize(("budget", "most", "said"), [(0, 1, "pack_tokens=0"), (1, 0, "batch_size=0")])
def test_limits_below_one_are_refused(budget: int, most: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Packs(cost, budget=budget, most=most)
