"""Loaders whose batches are packs: content, shares, resume on other numbers of ranks, bounded memory."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import knonik
from knonik.loader import Loader, LoaderError

LENGTHS = (7, 4, 9, 1, 6)
BUDGET, MOST = 30, 5


def tokens(batch: knonik.Batch) -> list[int]:
    """By content alone: 4 to 12."""
    return (4 + (batch.episode * 7 + batch.frame * 5) % 9).tolist()


@pytest.fixture
def dataset(make_set: Any, tmp_path: Path) -> knonik.Dataset:
    return knonik.open(make_set(LENGTHS), cache_dir=tmp_path / "cache")


def loader(dataset: knonik.Dataset, rank: int = 0, world_size: int = 1, **options: Any) -> Loader:
    values = {"batch_size": MOST, "pack_tokens": BUDGET, "pack_cost": tokens, "decode_threads": 1, "seed": 3}
    return Loader(dataset, rank=rank, world_size=world_size, **{**values, **options})


def take(source: Loader, count: int) -> list[knonik.Batch]:
    with source:
        return list(itertools.islice(source, count))


def packs(batches: Sequence[knonik.Batch]) -> list[list[int]]:
    return [batch.position.tolist() for batch in batches]


def test_packs_hold_the_order_in_pieces(dataset: knonik.Dataset) -> None:
    batches = take(loader(dataset), 60)
    assert np.concatenate(packs(batches)).tolist() == list(range(batches[-1].end))
    sizes = {len(batch) for batch in batches}
    assert len(sizes) > 2
    assert max(sizes) <= MOST
    assert all(sum(tokens(batch)) <= BUDGET for batch in batches)
    whole = take(Loader(dataset, batch_size=1, seed=3), batches[-1].end)
    places = [(batch.episode.item(), batch.frame.item()) for batch in whole]
    assert [
        place for batch in batches for place in zip(batch.episode.tolist(), batch.frame.tolist(), strict=True)
    ] == places
    for batch in batches[:10]:
        for i, (episode, frame) in enumerate(zip(batch.episode.tolist(), batch.frame.tolist(), strict=True)):
            for camera, pictures in batch.images.items():
                stock = dataset.frame(episode=episode, camera=camera, frame=frame)
                np.testing.assert_array_equal(pictures[i, 0].numpy(), stock)


def test_ranks_have_a_pack_in_every_step_and_none_is_left_out(dataset: knonik.Dataset) -> None:
    alone = take(loader(dataset), 24)
    for world_size in (2, 3):
        steps = 24 // world_size
        shares = [take(loader(dataset, rank, world_size), steps) for rank in range(world_size)]
        for step in range(steps):
            ours = [share[step] for share in shares]
            assert packs(ours) == packs(alone[step * world_size : (step + 1) * world_size])
            assert {(batch.begin, batch.end) for batch in ours} == {
                (alone[step * world_size].begin, alone[(step + 1) * world_size - 1].end)
            }


def test_a_run_goes_on_with_the_next_sample_on_any_number_of_ranks(dataset: knonik.Dataset) -> None:
    alone = take(loader(dataset), 24)
    with loader(dataset, 1, 2) as first:
        for _ in range(3):
            next(first)
        state = first.state_dict()
    assert state["epoch"] * 27 + state["position"] == alone[5].end
    for rank, world_size in ((0, 1), (1, 2), (2, 3)):
        with loader(dataset, rank, world_size) as later:
            later.load_state_dict(state)
            assert packs([next(later)]) == packs([alone[6 + rank]])


def test_acknowledged_packs_count_and_others_come_again(dataset: knonik.Dataset) -> None:
    with loader(dataset) as source:
        source.manual_acknowledge = True
        first, second = next(source), next(source)
        source.acknowledge(first)
        assert source.state_dict()["position"] == first.end
        assert next(iter(source)).begin == second.begin


def test_memory_is_that_of_the_largest_pack_in_every_turn(dataset: knonik.Dataset) -> None:
    with loader(dataset, ring_batches=2) as source:
        for _ in range(80):
            batch = next(source)
            del batch
        gauges = source.gauges()
    assert gauges["buffers_allocated"] <= 2 * (2 + 3)  # two cameras; ring, one in hand, one let go of, one to spare
    assert gauges["ring_limit_bytes"] == 2 * MOST * 2 * 32 * 48 * 3


def test_a_sample_beyond_the_budget_stops_the_run_and_names_itself(dataset: knonik.Dataset) -> None:
    with (
        loader(dataset, pack_tokens=11) as source,
        pytest.raises((LoaderError, ValueError), match=r"has 12 tokens, more than pack_tokens=11"),
    ):
        list(itertools.islice(source, 27))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pack_cost": None}, "pack_tokens and pack_cost go together"),
        ({"pack_tokens": None}, "pack_tokens and pack_cost go together"),
        ({"order": "blocks"}, "pack_tokens does not go with order='blocks'"),
        ({"ring_bytes": 3 * 2 * 32 * 48 * 3}, "batch_size=5 outruns the prefetch.*holds 3 samples"),
    ],
)
def test_what_does_not_go_together_is_refused(dataset: knonik.Dataset, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        loader(dataset, **options)


def test_costs_see_rows_and_texts_and_no_pictures(dataset: knonik.Dataset) -> None:
    seen: list[knonik.Batch] = []

    def noted(batch: knonik.Batch) -> list[int]:
        seen.append(batch)
        return tokens(batch)

    (batch,) = take(loader(dataset, pack_cost=noted, windows={"action": range(3)}), 1)
    first = seen[0]
    assert first.images == {}
    count = len(batch)
    assert first.text[:count] == batch.text
    assert torch.equal(first.action["action"][:count], batch.action["action"])
    assert torch.equal(first.position[:count], batch.position)
