"""Mixtures: exact shares, each part in its own endless order, and a declared policy for all that differs."""

from pathlib import Path

import numpy as np
import pytest
import torch

import knonik
from knonik.batches.gather import Gather
from knonik.order.mixture import Mixture, Part, Slots, slot_counts
from knonik.order.plan import Planner

CAM0, CAM1 = "observation.images.cam0", "observation.images.cam1"
WINDOWS = {CAM0: [0], CAM1: [0], "observation.state": [0], "action": range(3)}
GOLDEN_PARTS = [0, 1, 0, 0, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 0]
GOLDEN_OWN = [0, 1, 2, 1, 0, 3, 2, 5, 4, 3, 6, 7, 8, 9, 10, 5, 4, 11]


@pytest.fixture
def large(make_set, tmp_path: Path) -> knonik.Dataset:
    return knonik.open(make_set((12, 9, 15)), cache_dir=tmp_path / "large")


@pytest.fixture
def small(make_set, tmp_path: Path) -> knonik.Dataset:
    return knonik.open(make_set((4, 6), cameras=1, fps=5), cache_dir=tmp_path / "small")


def planner(source: object, **options: object) -> Planner:
    defaults = {
        "batch_size": 4,
        "seed": 3,
        "windows": WINDOWS,
        "edge": "repeat",
        "cameras": [CAM0],
        "rank": 0,
        "world_size": 1,
        "shuffle": True,
    }
    return Planner(source, **{**defaults, **options})


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([0.5, 0.25, 0.25], [2, 1, 1]),
        ([3, 1], [3, 1]),
        ([0.333, 0.667], [333, 667]),
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([1], [1]),
    ],
)
def test_round_weights_come_out_exactly(weights: list[float], counts: list[int]) -> None:
    assert slot_counts(weights) == counts


def test_other_weights_are_met_closely_or_refused() -> None:
    weights = np.array([2_255_591, 1_200, 77_123.5])
    counts = np.array(slot_counts(weights.tolist()))
    np.testing.assert_allclose(counts / counts.sum(), weights / weights.sum(), rtol=1e-3)
    with pytest.raises(ValueError, match=r"parts\[1\] is a share of 1.00e-06"):
        slot_counts([1, 1e-6])


@pytest.mark.parametrize("counts", [[1], [2, 1], [5, 3, 1]])
@pytest.mark.parametrize("lanes", [1, 8])
def test_slots_deal_each_part_its_own_positions(counts: list[int], lanes: int) -> None:
    slots = Slots(counts, seed=3, lanes=lanes)
    positions = np.arange(sum(counts) * lanes * 20)
    parts, own = slots.take(positions)
    shuffled = np.random.default_rng(0).permutation(positions)
    assert all(np.array_equal(a, b[shuffled]) for a, b in zip(slots.take(shuffled), (parts, own), strict=True))
    for part, count in enumerate(counts):
        np.testing.assert_array_equal(np.sort(own[parts == part]), np.arange(count * lanes * 20))
        np.testing.assert_array_equal(own[parts == part] % lanes, positions[parts == part] % lanes)
        for lane in range(lanes):
            mine = (parts == part) & (positions % lanes == lane)
            np.testing.assert_array_equal(np.diff(own[mine]), lanes)  # in the part's own order, none left out
            turns = positions[mine] // lanes
            for samples in (1, 2, 7):
                spread = turns[samples - 1 :] - turns[: len(turns) - samples + 1] + 1
                assert spread.max() <= slots.span(part, samples)


def test_slots_are_fixed_for_ever_and_differ_between_blocks() -> None:
    parts, own = Slots([2, 1], seed=5, lanes=2).take(np.arange(18))
    assert parts.tolist() == GOLDEN_PARTS
    assert own.tolist() == GOLDEN_OWN
    order = Slots([2, 1], seed=0).take(np.arange(3000))[0].reshape(-1, 3)
    places = np.argmax(order, axis=1)
    assert np.bincount(places).tolist() == pytest.approx([1000 / 3] * 3, abs=90)  # six deviations


def test_a_mixture_of_one_is_that_dataset(large: knonik.Dataset) -> None:
    alone, mixed = planner(large), planner(Mixture([Part(dataset=large)]))
    assert alone.digest == mixed.digest
    positions = np.arange(200)
    for one, other in zip(alone.samples(positions), mixed.samples(positions), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("order", ["exact", "blocks"])
def test_shares_are_exact_and_each_part_runs_through_its_epochs(
    large: knonik.Dataset, small: knonik.Dataset, order: str
) -> None:
    source = Mixture([Part(dataset=large, weight=3), Part(dataset=small, weight=1)])
    plans = planner(source, order=order, block_window=8, lanes=2)
    parts, episodes, frames = plans.samples(np.arange(36 * 4 * 4))
    for part, (dataset, share) in enumerate(((large, 3), (small, 1))):
        assert (parts.reshape(-1, 8) == part).sum(axis=1).tolist() == [2 * share] * (36 * 2)
        rows = dataset.rows(episodes[parts == part], frames[parts == part])
        total = len(dataset)
        if order == "exact":
            for epoch in range(len(rows) // total):
                np.testing.assert_array_equal(np.sort(rows[epoch * total : epoch * total + total]), np.arange(total))
        counts = np.bincount(rows, minlength=total)
        assert counts.max() - counts.min() <= 2  # lanes may stand a few samples apart
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(parts[:64], parts[64:128])


def test_weights_default_to_the_number_of_anchors(large: knonik.Dataset, small: knonik.Dataset) -> None:
    plans = planner(Mixture([Part(dataset=large), Part(dataset=small)]), edge="inside")
    assert plans.num_anchors == (36 - 3 * 2) + (10 - 2 * 2)
    parts, _, _ = plans.samples(np.arange(36))
    assert np.bincount(parts).tolist() == [30, 6]
    one, two = (Part(dataset=large, weight=weight) for weight in (1, None))
    with pytest.raises(ValueError, match="1 of 2 parts have a weight"):
        Mixture([one, two])
    with pytest.raises(ValueError, match="must be a positive number"):
        Mixture([Part(dataset=large, weight=0)])


def test_parts_of_equal_content_are_ordered_differently(large: knonik.Dataset) -> None:
    parts, episodes, frames = planner(Mixture([Part(dataset=large), Part(dataset=large)])).samples(np.arange(72))
    rows = large.rows(episodes, frames)
    assert (rows[parts == 0] == rows[parts == 1]).sum() < 6  # one is expected


def test_missing_cameras(large: knonik.Dataset, small: knonik.Dataset) -> None:
    parts = [Part(dataset=large), Part(dataset=small)]
    with pytest.raises(ValueError, match=r"parts\[1\].*has no camera \['observation.images.cam1'\]"):
        planner(Mixture(parts), cameras=[CAM0, CAM1])
    plans = planner(Mixture(parts, missing_cameras="black"), cameras=[CAM0, CAM1], batch_size=16)
    plan = plans.plan(0)
    (blank,) = np.nonzero(plan.datasets == 1)
    assert plan.blank.keys() == {CAM1}
    assert plan.blank[CAM1].tolist() == blank.tolist() != []
    filled = {CAM0: [], CAM1: plan.blank[CAM1].tolist()}
    for job in plan.jobs:
        filled[job.camera] += job.places
        assert {int(plan.datasets[place]) for place in job.places} == {job.dataset}
    assert all(sorted(places) == list(range(16)) for places in filled.values())


def test_cameras_under_other_names(large: knonik.Dataset, small: knonik.Dataset) -> None:
    source = Mixture([Part(dataset=large, cameras={"top": CAM1}), Part(dataset=small, cameras={"top": CAM0})])
    assert source.cameras == ["top"]
    assert source.image_shape("top") == (32, 48)
    plan = planner(source, cameras=["top"], windows={"top": [-1, 0]}, batch_size=16).plan(0)
    assert {(job.dataset, job.camera, job.source_camera) for job in plan.jobs} == {(0, "top", CAM1), (1, "top", CAM0)}
    for number, dataset in enumerate((large, small)):
        for job in plan.jobs:
            if job.dataset == number:
                for place, frame in zip(job.places, job.numbers, strict=True):
                    episode, seen = int(plan.episodes[place // 2]), int(plan.seen["top"].reshape(-1)[place])
                    assert dataset.locate(episode, job.source_camera, seen) == (job.key, frame)
    with pytest.raises(ValueError, match=r"parts\[0\].cameras names \['nowhere'\]"):
        Mixture([Part(dataset=large, cameras={"top": "nowhere"})])


def test_pictures_of_other_sizes_are_refused(make_set, large: knonik.Dataset, tmp_path: Path) -> None:
    with knonik.open(make_set((4,), cameras=1, size=(16, 16)), cache_dir=tmp_path / "tiny") as tiny:
        source = Mixture([Part(dataset=large, cameras={CAM0: CAM0}), Part(dataset=tiny)])
        with pytest.raises(ValueError, match=r"parts\[0\] 32x48, parts\[1\] 16x16"):
            source.image_shape(CAM0)


def test_offsets_in_a_common_rate(large: knonik.Dataset, small: knonik.Dataset) -> None:
    source = Mixture([Part(dataset=large), Part(dataset=small)], fps=10)
    assert source.offsets(0, range(-2, 4)) == [-2, -1, 0, 1, 2, 3]
    assert source.offsets(1, range(-2, 4)) == [-1, 0, 0, 1, 1, 2]  # half as many steps, the later one of two
    assert Mixture([Part(dataset=large)], fps=5).offsets(0, [0, 1, 2]) == [0, 2, 4]
    plans = planner(source, edge="inside")  # range(3) reaches 2 steps on at 10 fps, 1 at 5 fps
    assert plans.num_anchors == (36 - 3 * 2) + (10 - 2)


def test_rows_and_texts_come_from_the_right_part(large: knonik.Dataset, small: knonik.Dataset) -> None:
    source = Mixture([Part(dataset=large), Part(dataset=small, columns={"action": "observation.state"})], pad="zero")
    gather = Gather(source, windows=WINDOWS, state=["observation.state"], action=["action"])
    plan = planner(source, batch_size=24).plan(0)
    batch = gather.batch(plan, {})
    assert batch.action["action"].shape == (24, 3, 3)
    assert batch.dataset.tolist() == plan.datasets.tolist()
    assert set(batch.dataset.tolist()) == {0, 1}
    for i, (part, episode, frame) in enumerate(zip(batch.dataset, batch.episode, batch.frame, strict=True)):
        dataset = (large, small)[int(part)]
        last = int(dataset.episodes.length[dataset.episodes.position(int(episode))]) - 1
        steps = [min(int(frame) + k, last) for k in range(3)]
        e = int(episode)
        expected = [[s + 1000 * e, -s, 0] for s in steps] if part == 0 else [[e, s, s / 2] for s in steps]
        assert torch.equal(batch.action["action"][i], torch.tensor(expected, dtype=torch.float32))
        assert batch.action_is_pad[i].tolist() == [int(frame) + k > last for k in range(3)]
        assert batch.text[i] == f"do thing {e % 3} ✓"
    with pytest.raises(ValueError, match=r"column action has \[2, 3\] values in parts 0 to 1; give pad='zero'"):
        Gather(
            Mixture([Part(dataset=large), Part(dataset=small, columns={"action": "observation.state"})]),
            windows=WINDOWS,
            state=[],
            action=["action"],
        )


def test_digests_change_exactly_with_the_order(large: knonik.Dataset, small: knonik.Dataset) -> None:
    def digest(
        *weights: float | None, ranges: dict[int, list[tuple[int, int]]] | None = None, **options: object
    ) -> str:
        first = large if ranges is None else large.subset(ranges=ranges)
        parts = [Part(dataset=first, weight=weights[0]), Part(dataset=small, weight=weights[1])]
        return planner(Mixture(parts), **options).digest

    same = digest(1, 1)
    assert digest(7, 7) == same  # equal shares
    assert digest(1, 1, batch_size=2, rank=1, world_size=2) == same
    assert digest(1, 1, windows={**WINDOWS, "action": range(9)}) == same  # edge repeat takes every step
    assert digest(1, 1, ranges={0: [(0, 12)], 1: [(0, 4), (4, 9)], 2: [(0, 15)]}) == same  # all of it, in pieces
    blocks = {"order": "blocks", "block_window": 8}
    others = [
        digest(1, 2),
        digest(1, 1, edge="inside"),
        digest(1, 1, shuffle=False),
        digest(1, 1, ranges={0: [(0, 11)], 1: [(0, 9)], 2: [(0, 15)]}),
        digest(1, 1, **blocks),
        digest(1, 1, **blocks, lanes=4),
        digest(1, 1, order="blocks", block_window=64),
    ]
    assert len({same, *others}) == 1 + len(others)
    assert digest(1, 1, lanes=4) == same  # lanes are of the blocks


def test_fingerprints_name_parts_weights_and_policy(large: knonik.Dataset, small: knonik.Dataset) -> None:
    one, two = Part(dataset=large, weight=1), Part(dataset=small, weight=1)
    made = [
        Mixture([one, two]),
        Mixture([two, one]),
        Mixture([one, Part(dataset=small, weight=2)]),
        Mixture([one, two], fps=5),
        Mixture([one, two], pad="zero"),
        Mixture([one, two], missing_cameras="black"),
        Mixture([one, Part(dataset=small, weight=1, cameras={CAM1: CAM0})]),
    ]
    assert len({mixture.fingerprint for mixture in made}) == len(made)
    assert Mixture([one, two]).fingerprint == made[0].fingerprint
    for options in ({"pad": "repeat"}, {"missing_cameras": "grey"}, {"fps": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Mixture([one, two], **options)
