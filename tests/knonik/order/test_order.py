"""The sample order is a permutation of every epoch, a pure function, and as well mixed as a random one."""

import numpy as np
import pytest

from knonik.metadata.episodes import EpisodeTable
from knonik.order.anchors import AnchorOrder, Permutation
from knonik.order.select import find_anchors
from knonik.order.windows import window_frames

IDS = np.array([3, 10, 11, 40])
LENGTHS = np.array([5, 1, 7, 4])
GOLDEN = [32, 150, 883, 478]


def table() -> EpisodeTable:
    nothing = np.zeros(len(IDS), np.int64)
    first = np.cumsum(LENGTHS) - LENGTHS
    return EpisodeTable(
        ids=IDS,
        length=LENGTHS,
        first_row=first,
        data_keys=("rows",),
        data_object=nothing,
        data_row=first,
        tasks=((),) * len(IDS),
        cameras={},
    )


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 64, 65, 1000, 4097, 100_003])
def test_every_epoch_is_a_permutation(n: int) -> None:
    for epoch in range(3):
        values = Permutation(n, seed=5, epoch=epoch).take(np.arange(n))
        np.testing.assert_array_equal(np.sort(values), np.arange(n))


@pytest.mark.parametrize("n", [1, 3, 1000, 2_255_591, 2**40 + 17])
def test_one_position_equals_the_array_form(n: int) -> None:
    permutation = Permutation(n, seed=1, epoch=9)
    positions = np.unique(np.linspace(0, n - 1, 200).astype(np.int64))
    assert [permutation[int(i)] for i in positions] == permutation.take(positions).tolist()
    assert permutation.take(positions.reshape(-1, 1)).shape == (len(positions), 1)


def test_values_are_fixed_for_ever() -> None:
    # A saved run must continue in the same order with a later release.
    assert Permutation(1000, seed=0, epoch=0).take([0, 1, 2, 999]).tolist() == GOLDEN
    assert len(Permutation(1000, 0)) == 1000


@pytest.mark.parametrize("n", [50_000, 65_536, 131_072, 1_000_003])
def test_neighbours_are_as_far_apart_as_in_a_random_permutation(n: int) -> None:
    distances = [np.abs(np.diff(Permutation(n, seed, 0).take(np.arange(n)))).mean() for seed in range(2)]
    assert np.mean(distances) == pytest.approx(n / 3, rel=0.02)


def test_small_sets_are_uniform_over_seeds() -> None:
    # Every value lands on every position about equally often: chi-square with 49 degrees of freedom, 5 sigma.
    counts = np.zeros((8, 8))
    draws = 2000
    for seed in range(draws):
        counts[np.arange(8), Permutation(8, seed).take(np.arange(8))] += 1
    chi2 = ((counts - draws / 8) ** 2 / (draws / 8)).sum()
    assert abs(chi2 - 49) < 5 * np.sqrt(2 * 49)


def test_seeds_and_epochs_give_unrelated_orders() -> None:
    orders = [Permutation(10_000, seed, epoch).take(np.arange(10_000)) for seed in (0, 1, -1) for epoch in (0, 1)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).sum() < 12  # about one common place is expected


def test_positions_outside_are_refused() -> None:
    permutation = Permutation(10, 0)
    assert permutation[-1] == permutation[9]
    for bad in (10, -11):
        with pytest.raises(IndexError, match="outside a permutation of 10"):
            permutation[bad]
    with pytest.raises(IndexError, match="not all inside"):
        permutation.take([0, 10])
    with pytest.raises(ValueError, match="of 0 items"):
        Permutation(0, 0)


@pytest.mark.parametrize(("horizon", "left"), [(1, [5, 1, 7, 4]), (3, [3, 0, 5, 2]), (5, [1, 0, 3, 0])])
@pytest.mark.parametrize("shuffle", [True, False])
def test_anchors_cover_exactly_the_allowed_rows(horizon: int, left: list[int], shuffle: bool) -> None:
    order = AnchorOrder(find_anchors(table(), None, horizon), seed=2, epoch=1, shuffle=shuffle)
    expected = [(int(e), f) for e, n in zip(IDS, left, strict=True) for f in range(n)]
    assert len(order) == len(expected)
    anchors = [order[i] for i in range(len(order))]
    assert (anchors == expected) if not shuffle else (sorted(anchors) == expected)
    episodes, frames = order.take(np.arange(len(order)))
    assert list(zip(episodes.tolist(), frames.tolist(), strict=True)) == anchors


def test_no_anchor_is_an_error_that_says_why() -> None:
    with pytest.raises(ValueError, match="longest has 7 rows, horizon is 8"):
        find_anchors(table(), None, horizon=8)


def test_windows_repeat_the_edge_and_mark_it() -> None:
    frames, is_pad = window_frames(np.array([0, 3]), np.array([5, 4]), [-1, 0, 1, 2])
    assert frames.tolist() == [[0, 0, 1, 2], [2, 3, 3, 3]]
    assert is_pad.tolist() == [[True, False, False, False], [False, False, True, True]]
