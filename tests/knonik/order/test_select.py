"""Which steps are anchors: ranges of frames, episode subsets and a split that stays when episodes are added."""

import json
from pathlib import Path

import numpy as np
import pytest

import knonik
from knonik.metadata.episodes import EpisodeTable
from knonik.order.plan import Planner
from knonik.order.select import find_anchors, read_ranges, split_episodes

LENGTHS = (12, 9, 1, 15)
RANGES = {0: [(2, 5), (9, 12)], 3: [(0, 4)]}
SPLIT = ([1, 2], [0, 40])


@pytest.fixture
def dataset(make_set, tmp_path: Path) -> knonik.Dataset:
    return knonik.open(make_set(LENGTHS, cameras=0), cache_dir=tmp_path / "cache")


def table(ids: list[int], length: int = 10) -> EpisodeTable:
    first = np.arange(len(ids)) * length
    return EpisodeTable(
        ids=np.array(ids),
        length=np.full(len(ids), length),
        first_row=first,
        data_keys=("rows",),
        data_object=np.zeros(len(ids), np.int64),
        data_row=first,
        tasks=((),) * len(ids),
        cameras={},
    )


def anchors(dataset: knonik.Dataset, horizon: int = 1) -> list[tuple[int, int]]:
    found = dataset.anchors(horizon)
    ids, frames = found.take(np.arange(len(found)))
    return list(zip(ids.tolist(), frames.tolist(), strict=True))


def test_ranges_choose_anchors_and_leave_windows_alone(dataset: knonik.Dataset) -> None:
    view = dataset.subset(ranges=RANGES)
    expected = [(0, 2), (0, 3), (0, 4), (0, 9), (0, 10), (0, 11), (3, 0), (3, 1), (3, 2), (3, 3)]
    assert anchors(view) == expected
    order = view.order(seed=1, epoch=0)
    assert sorted(order[i] for i in range(len(order))) == expected
    frames, is_pad = view.window(np.array([0]), np.array([4]), range(3))
    assert (frames.tolist(), is_pad.any()) == ([[4, 5, 6]], False)
    assert len(view) == len(dataset)  # rows stay: statistics are of whole episodes


def test_inside_keeps_the_end_of_the_episode_and_not_of_the_range(dataset: knonik.Dataset) -> None:
    # Horizon 3 takes the last two steps of the episode of 12 rows; the range that ends at 5 loses nothing.
    assert anchors(dataset.subset(ranges=RANGES), horizon=3) == [
        (0, 2), (0, 3), (0, 4), (0, 9), (3, 0), (3, 1), (3, 2), (3, 3),
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"no anchor steps: 4 episodes, .* horizon is 8, ranges name 1 episodes"):
        dataset.subset(ranges={0: [(9, 12)]}).anchors(horizon=8)


def test_ranges_are_merged_and_read_from_json(dataset: knonik.Dataset, make_set, tmp_path: Path) -> None:
    file = tmp_path / "keep.json"
    file.write_text(json.dumps({"3": [[4, 6], [0, 2], [1, 4]], "1": [[8, 9]], "2": []}))
    with knonik.open(make_set(LENGTHS, cameras=0), cache_dir=tmp_path / "other", ranges=file) as opened:
        assert anchors(opened) == [(1, 8), *((3, frame) for frame in range(6))]
        found = opened.anchors()
        assert (found.ids.tolist(), found.starts.tolist(), found.counts.tolist()) == ([1, 3], [8, 0], [1, 6])
    assert read_ranges(file, dataset.episodes) == {1: [(8, 9)], 2: [], 3: [(0, 6)]}


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('{"0": [[0, 13]]}', ValueError, r"episode 0 has the range \[0, 13\); allowed is .*<= 12"),
        ('{"0": [[5, 5]]}', ValueError, r"\[5, 5\)"),
        ('{"0": [[-1, 5]]}', ValueError, r"\[-1, 5\)"),
        ('{"7": [[0, 1]]}', KeyError, "episode ids 7 are not in use"),
        ('{"a": [[0, 1]]}', ValueError, "expected episode ids"),
        ('{"0": [0, 1]}', ValueError, "expected episode ids"),
        ('{"0": [[0.5, 2]]}', ValueError, r"expected episode ids.*\(0\.5 is no whole number\)"),
        ('{"0": [[0, Infinity]]}', ValueError, "inf is no whole number"),
        ("[]", ValueError, "holds list"),
        ("{", ValueError, "not valid JSON"),
    ],
)
def test_wrong_ranges_are_named(
    dataset: knonik.Dataset, tmp_path: Path, text: str, error: type[Exception], message: str
) -> None:
    file = tmp_path / "keep.json"
    file.write_text(text)
    with pytest.raises(error, match=message):
        dataset.subset(ranges=file)


def test_views_share_and_narrow(dataset: knonik.Dataset) -> None:
    first = dataset.subset(episodes=[0, 3])
    assert anchors(first.subset(ranges={0: [(0, 2)], 1: [(0, 1)], 3: [(5, 6)]})) == [(0, 0), (0, 1), (3, 5)]
    narrowed = first.subset(ranges={0: [(0, 6)], 3: [(5, 6)]}).subset(ranges={0: [(4, 9)]})
    assert anchors(narrowed) == [(0, 4), (0, 5)]
    with pytest.raises(KeyError, match="episode ids 1 are not in use"):
        first.subset(episodes=[1])
    assert len(dataset.episodes) == 4
    narrowed.close()
    assert dataset.column("action").shape == (37, 2)  # the store is still open
    assert first.store is dataset.store
    assert first.index is dataset.index


def test_split_parts_the_episodes(dataset: knonik.Dataset) -> None:
    training, held_out = dataset.split(validation=0.5, seed=1)
    assert sorted([*training.episodes.ids.tolist(), *held_out.episodes.ids.tolist()]) == [0, 1, 2, 3]
    assert len(training) + len(held_out) == len(dataset)
    assert not set(training.episodes.ids.tolist()) & set(held_out.episodes.ids.tolist())


def test_a_split_stays_when_episodes_come_and_go() -> None:
    ids = list(range(0, 3000, 3))
    training, held_out = split_episodes(table(ids), 0.1, seed=4)
    more, more_held_out = split_episodes(table([*ids, *range(5001, 8000)]), 0.1, seed=4)
    assert set(held_out) <= set(more_held_out)
    assert set(training) <= set(more)
    fewer, _ = split_episodes(table(ids[::2]), 0.1, seed=4)
    assert set(fewer) <= set(training)
    assert set(held_out) < set(split_episodes(table(ids), 0.2, seed=4)[1])  # a greater share only adds
    assert 70 < len(held_out) < 130  # three deviations around 100
    other = split_episodes(table(ids), 0.1, seed=5)[1]
    assert len(set(other) & set(held_out)) < 30  # ten are expected
    assert split_episodes(table([0, 1, 2, 40]), 0.5, seed=0) == SPLIT


def test_a_split_with_an_empty_side_names_a_share_that_works() -> None:
    ids = table([0, 1, 2, 3])
    with pytest.raises(ValueError, match="holds out none of 4 episodes") as caught:
        split_episodes(ids, 0.0001)
    share = float(str(caught.value).rsplit(" ", 1)[1])
    assert len(split_episodes(ids, share)[1]) == 1
    with pytest.raises(ValueError, match="leaves none of 4 episodes") as caught:
        split_episodes(ids, 0.9999)
    share = float(str(caught.value).rsplit(" ", 1)[1])
    assert len(split_episodes(ids, share)[0]) >= 1
    with pytest.raises(ValueError, match="1 episodes cannot be split"):
        split_episodes(table([5]), 0.5)
    with pytest.raises(ValueError, match="between 0 and 1"):
        split_episodes(ids, 1.0)


def test_anchors_are_found_in_large_sets_at_once() -> None:
    # As many episodes as DROID; nothing is made per frame.
    large = table(list(range(76_000)), length=240)
    assert len(find_anchors(large, None, horizon=16)) == 76_000 * 225
    some = read_ranges({episode: [(0, 10), (50, 200)] for episode in range(0, 76_000, 2)}, large)
    assert len(find_anchors(large, some)) == 38_000 * 160


def test_digest_follows_the_anchors(dataset: knonik.Dataset) -> None:
    def digest(view: knonik.Dataset, **windows: list[int]) -> str:
        return Planner(
            view, batch_size=2, seed=0, windows=windows, edge="inside", cameras=[], rank=0, world_size=1, shuffle=True
        ).digest

    whole = digest(dataset)
    assert digest(dataset.subset(ranges={i: [(0, n)] for i, n in enumerate(LENGTHS)})) == whole
    assert digest(dataset.subset(episodes=[3, 1, 2, 0])) == whole
    assert digest(dataset, action=[-3, 0]) == whole
    # Episode 2 has no anchor at this horizon either way.
    assert digest(dataset.subset(episodes=[0, 1, 3]), action=[1]) == digest(dataset, action=[1]) != whole
    assert digest(dataset.subset(episodes=[0, 1, 3])) != whole
    assert digest(dataset.subset(ranges={i: [(0, min(n, 14))] for i, n in enumerate(LENGTHS)})) != whole
