"""What the pool of packets keeps: bounds, merging, farthest next use, and decisions that no timing can change."""

import random
from collections.abc import Sequence

import pytest

from knonik.fetch.pool import Decision, Pool
from knonik.fetch.ranges import Piece, Unit, merged

UNIT = 100  # bytes of every unit in an object of the simple kind


def span(key: str, group: int) -> tuple[int, int]:
    """Units follow each other; in objects named "odd..." their lengths differ, in "open..." each overlaps the next."""
    if key.startswith("odd"):
        lengths = [40 + 37 * (number * 7 % 5) for number in range(group + 1)]
        return sum(lengths[:-1]), lengths[-1]
    return group * UNIT, UNIT + (30 if key.startswith("open") else 0)


def piece(unit: Unit) -> Piece:
    offset, length = span(*unit)
    return Piece(key=unit[0], group=unit[1], offset=offset, length=length)


def pool(limit: int, *, gap: int = 0, horizon: int = 8) -> Pool:
    return Pool(limit, merge_gap_bytes=gap, span=span, horizon=horizon)


def run(made: Pool, batches: Sequence[Sequence[Unit]]) -> list[Decision]:
    for number, units in enumerate(batches):
        made.announce(number, [piece(unit) for unit in units])
    decisions = []
    while (decision := made.decide(force=True)) is not None:
        decisions.append(decision)
    return decisions


def fetched(decision: Decision) -> list[Unit]:
    return [each.unit for part in decision.ranges for each in part.pieces]


def random_batches(seed: int, keys: Sequence[str], count: int = 120, size: int = 6) -> list[list[Unit]]:
    draw = random.Random(seed)
    return [[(draw.choice(keys), draw.randrange(30)) for _ in range(size)] for _ in range(count)]


def test_the_unit_needed_last_leaves_first() -> None:
    a, b, c, d = (("x", number) for number in (0, 10, 20, 28))
    decisions = run(pool(3 * UNIT), [[a], [b], [c], [d], [b], [c], [a]])
    assert decisions[3].evicted == (a,)
    assert [len(fetched(decision)) for decision in decisions] == [1, 1, 1, 1, 0, 0, 1]


def test_a_unit_without_known_use_leaves_before_one_that_is_needed_again() -> None:
    a, b, c, d = (("x", number) for number in (0, 10, 20, 28))
    decisions = run(pool(3 * UNIT), [[a], [b], [c], [d], [a], [c]])
    assert decisions[3].evicted == (b,)
    assert not fetched(decisions[4])
    assert not fetched(decisions[5])


def test_only_the_horizon_counts_as_known() -> None:
    a, b, c, d = (("x", number) for number in (0, 10, 20, 28))
    near, far = [[a], [b], [c], [d], [b], [a]], [[a], [b], [c], [d], [c], [c], [b], [a]]
    assert run(pool(3 * UNIT, horizon=2), near)[3].evicted == (a,)
    assert run(pool(3 * UNIT, horizon=2), far)[3].evicted == (a,)  # b and a are as unknown: the longest unused


def test_an_eviction_waits_for_the_plan_and_nothing_else_does() -> None:
    made = pool(3 * UNIT, horizon=2)
    for number in range(4):
        made.announce(number, [piece(("x", 5 * number))])
    assert all(made.decide() is not None for _ in range(3))
    assert made.decide() is None
    made.announce(4, [piece(("x", 0))])
    assert made.decide() is None
    made.announce(5, [])
    decision = made.decide()
    assert decision is not None
    assert decision.evicted == (("x", 5),)


@pytest.mark.parametrize("keys", [("x", "y"), ("odd", "odd2"), ("open", "open2")])
@pytest.mark.parametrize("gap", [0, 250])
@pytest.mark.parametrize("limit", [0, 350, 1000, 2500])
def test_bounds_and_bookkeeping_hold_for_any_plan(keys: tuple[str, ...], gap: int, limit: int) -> None:
    made = pool(limit, gap=gap)
    kept: dict[Unit, int] = {}
    batches = random_batches(3, keys)
    for number, decision in enumerate(run(made, batches)):
        hits = [each.unit for each in decision.hits]
        passed = [each.unit for each in decision.passed]
        assert sorted([*hits, *fetched(decision), *passed]) == sorted(set(batches[number]))
        assert all(unit in kept for unit in hits)
        assert not set(hits) & set(decision.evicted)
        for unit in decision.evicted:
            del kept[unit]
        # room for the bodies while they are fetched, gaps included
        assert sum(kept.values()) + sum(part.cost for part in decision.ranges) <= limit
        for part in decision.ranges:
            for each in (*part.pieces, *part.gaps):
                assert each.unit not in kept
                assert part.offset <= each.offset
                assert each.end <= part.offset + part.length
                kept[each.unit] = each.length
    assert made.used_bytes == sum(kept.values()) <= limit


@pytest.mark.parametrize("seed", range(4))
def test_decisions_do_not_depend_on_when_they_are_asked_for(seed: int) -> None:
    batches = random_batches(seed, ("x", "odd", "open"))
    wanted = run(pool(1500, gap=120), batches)
    made, draw = pool(1500, gap=120), random.Random(100 + seed)
    got: list[Decision] = []
    for number, units in enumerate(batches):
        made.announce(number, [piece(unit) for unit in units])
        while draw.random() < 0.7 and (decision := made.decide()) is not None:
            got.append(decision)
    while (decision := made.decide(force=True)) is not None:
        got.append(decision)
    assert got == wanted


def test_knowing_what_comes_saves_requests() -> None:
    draw = random.Random(5)
    order = [("x", number) for number in range(30)]
    batches = []
    for _ in range(40):  # each epoch everything once, in an order of its own
        draw.shuffle(order)
        batches += [order[begin : begin + 5] for begin in range(0, 30, 5)]

    def requests(horizon: int) -> int:
        return sum(len(fetched(decision)) for decision in run(pool(15 * UNIT, horizon=horizon), batches))

    assert requests(12) < 0.85 * requests(0)


def test_what_was_just_fetched_is_not_evicted_for_the_next() -> None:
    """Otherwise no batch could be fetched before the one in front of it is decoded."""
    draw = random.Random(11)
    batches = [[("x", draw.randrange(40))] for _ in range(200)]
    decisions = run(pool(10 * UNIT, horizon=60), batches)
    for number, decision in enumerate(decisions):
        assert not set(decision.evicted) & {unit for batch in batches[max(0, number - 5) : number] for unit in batch}


def test_a_batch_larger_than_the_pool_is_kept_as_far_as_it_fits() -> None:
    units = [("x", number) for number in range(0, 30, 3)]
    first, second = run(pool(4 * UNIT), [units, units[:2]])
    assert [len(part.pieces) for part in first.ranges] == [1] * 4
    assert len(first.passed) == 6
    assert [each.unit for each in second.hits] == units[:2]


def test_near_ranges_share_a_request_and_whole_units_between_them_stay() -> None:
    first, second = run(pool(100 * UNIT, gap=2 * UNIT), [[("x", 0), ("x", 2), ("x", 6), ("y", 7)], [("x", 1)]])
    assert [(part.key, part.offset, part.length) for part in first.ranges] == [
        ("x", 0, 300),
        ("x", 600, 100),
        ("y", 700, 100),
    ]
    assert [each.unit for each in first.ranges[0].gaps] == [("x", 1)]
    assert not fetched(second)


def test_gaps_do_not_take_the_place_of_others() -> None:
    kept = [("y", number) for number in range(0, 44, 2)]
    _, second = run(pool(24 * UNIT, gap=UNIT), [kept, [("x", 0), ("x", 2)]])
    assert second.ranges[0].length == 3 * UNIT
    assert second.evicted == (("y", 0),)
    assert not second.ranges[0].gaps


def test_merged_ranges_stay_short() -> None:
    parts = merged([piece(("x", number)) for number in range(30)], gap_bytes=0, max_bytes=10 * UNIT)
    assert [part.length for part in parts] == [10 * UNIT] * 3
    assert [each.group for part in parts for each in part.pieces] == list(range(30))


def test_what_could_not_be_fetched_is_fetched_again() -> None:
    made = pool(10 * UNIT)
    for number in range(2):
        made.announce(number, [piece(("x", 0))])
    first = made.decide()
    made.forget(("x", 0))
    made.forget(("x", 0))
    second = made.decide()
    assert first is not None
    assert second is not None
    assert fetched(first) == fetched(second) == [("x", 0)]
    assert made.used_bytes == UNIT


def test_notes_of_the_past_do_not_pile_up() -> None:
    made = pool(50 * UNIT)
    for number in range(5000):
        made.announce(number, [piece(("x", number % 40))])
        assert made.decide() is not None
    assert len(made._farthest) < 2000
    assert len(made._uses) <= 40
    assert len(made._recent.by_batch) <= 40
