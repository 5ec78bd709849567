"""The order of blocks: coverage, locality, one rank a GOP, and every GOP in one run."""

import itertools
from pathlib import Path

import numpy as np
import pytest

import knonik
from knonik.order.anchors import Anchors
from knonik.order.blocks import BlockOrder, gop_runs, longest_window
from knonik.order.mixing import measure_mixing
from knonik.order.plan import BatchPlan, Planner

GOLDEN = [22, 6, 23, 2, 19, 0, 21, 7, 20, 5, 18, 3, 11, 15, 12, 14, 10, 4, 13, 1, 9, 17, 8, 16]
CAM0, CAM1 = "observation.images.cam0", "observation.images.cam1"


class Camera:
    kind = "video"


class FakeIndex:
    """Every episode is an object of its own; GOPs of one camera have equal lengths."""

    def __init__(self, gops: dict[str, int]) -> None:
        self._gops = gops
        self.first_frames = np.zeros(0, np.int64)

    def locate_many(self, episodes, camera, frames):
        return [f"{camera} {episode}" for episode in episodes.tolist()], frames

    def usable(self, key: str) -> bool:
        return True

    def object(self, key: str) -> "FakeIndex":
        made = FakeIndex(self._gops)
        made.first_frames = np.arange(0, 10_000, self._gops[key.split()[0]])
        return made


class FakeSet:
    """What `gop_runs` asks of a dataset."""

    def __init__(self, length: int, gops: dict[str, int]) -> None:
        self._length, self.index, self.episodes = length, FakeIndex(gops), self
        self.cameras = {camera: Camera() for camera in gops}

    def window(self, episodes, frames, offsets):
        return np.clip(frames[:, None] + np.array(offsets), 0, self._length - 1), None


def runs(length: int, gops: dict[str, int], *, offsets: list[int], longest: int, episodes: int = 3) -> list[int]:
    anchors = Anchors(
        ids=np.arange(episodes), starts=np.zeros(episodes, np.int64), counts=np.full(episodes, length, np.int64)
    )
    found = gop_runs(FakeSet(length, gops), anchors, dict.fromkeys(gops, offsets), longest)
    assert found.sum() == episodes * length
    return found.tolist()


@pytest.mark.parametrize("lengths", [[3] * 10, [250] * 12 + [7] * 5, [1] * 100, [1000]])
@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_every_epoch_takes_every_anchor_once(lengths: list[int], lanes: int) -> None:
    total = sum(lengths)
    epochs = []
    for epoch in range(3):
        order = BlockOrder(np.array(lengths), seed=1, epoch=epoch, window=20, lanes=lanes, begin=epoch * total)
        epochs.append(order.take(np.arange(total)))
        np.testing.assert_array_equal(np.sort(epochs[-1]), np.arange(total))
        some = np.array([total - 1, 0, total // 2])
        np.testing.assert_array_equal(order.take(some), epochs[-1][some])
    assert not np.array_equal(epochs[0], epochs[1])


def test_values_are_fixed_for_ever() -> None:
    # A saved run must continue in the same order with a later release.
    order = BlockOrder(np.array([5, 3, 8, 2, 6]), seed=4, epoch=2, window=6, lanes=2, begin=48)
    assert order.take(np.arange(24)).tolist() == GOLDEN


def test_windows_hold_whole_runs_and_reach_the_size_asked_for() -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 400)
    order = BlockOrder(lengths, seed=3, epoch=0, window=50, lanes=4)
    sizes = [np.diff(order.window_bounds(lane)) for lane in range(4)]
    assert all(size[:-1].min() >= 50 and size.max() <= longest_window(lengths, 50) for size in sizes)
    assert sum(size.sum() for size in sizes) == lengths.sum()
    total = int(lengths.sum())
    run_of = np.repeat(np.arange(len(lengths)), lengths)[order.take(np.arange(total))]
    lane_of = np.arange(total) % 4
    lanes_of_run = [set(lane_of[run_of == run]) for run in range(len(lengths))]
    assert sum(len(lanes) - 1 for lanes in lanes_of_run) <= 3  # the borders of the lanes' shares
    for lane in range(4):
        met = run_of[lane_of == lane]
        spread = [np.ptp(np.flatnonzero(met == run)) for run in set(met.tolist())]
        assert max(spread) < longest_window(lengths, 50)


def test_samples_of_a_window_are_well_mixed() -> None:
    # Ten runs a window: neighbours in a lane are of the same run about every tenth time, as in a random order.
    order = BlockOrder(np.full(2000, 10), seed=0, epoch=0, window=100, lanes=1)
    met = order.take(np.arange(20_000)) // 10
    assert np.mean(met[1:] == met[:-1]) == pytest.approx(9 / 99, abs=0.01)


def test_runs_are_gops_when_cameras_agree() -> None:
    assert runs(10, {"a": 4}, offsets=[0], longest=100) == [4, 4, 2] * 3
    assert runs(10, {"a": 4, "b": 2}, offsets=[0], longest=100) == [4, 4, 2] * 3


def test_a_run_holds_all_gops_that_overlap() -> None:
    # Boundaries at 4, 8, 12, ... and 6, 12, ...: only those they share part two runs.
    assert runs(20, {"a": 4, "b": 6}, offsets=[0], longest=100) == [12, 8] * 3
    # A window reaches back over every boundary inside the episode.
    assert runs(10, {"a": 4}, offsets=[-1, 0], longest=100) == [10] * 3


def test_a_run_that_is_too_long_is_cut_between_the_longest_gops() -> None:
    assert runs(20, {"a": 4, "b": 6}, offsets=[-1, 0], longest=100) == [20] * 3
    cut = runs(20, {"a": 4, "b": 6}, offsets=[-1, 0], longest=12)
    assert cut == [12, 8] * 3
    assert runs(20, {"a": 20}, offsets=[0], longest=5) == [20] * 3  # one GOP is never cut


@pytest.mark.parametrize(
    ("length", "gop", "offsets", "longest", "decodings"),
    [
        (40, 10, [0, 3], 100, 4),  # reaches into the next GOP: alone beyond the border, or from both of its sides
        (40, 10, list(range(-4, 1)), 100, 4),
        (500, 250, list(range(9)), 300, 3),  # cut once, where windows begin to reach into the second GOP
        (100, 2, list(range(33)), 1000, 50),  # over many GOPs: the border between two anchors parts none of their own
        (100, 2, list(range(33)), 25, 98),  # four pieces: the 16 GOPs ahead of a cut are needed behind it too
    ],
)
def test_windows_longer_than_a_gop_keep_its_samples_in_one_run(
    length: int, gop: int, offsets: list[int], longest: int, decodings: int
) -> None:
    """The GOPs that runs need, each counted for every run that needs it."""
    lengths = runs(length, {"a": gop}, offsets=offsets, longest=longest, episodes=1)
    starts = np.cumsum([0, *lengths])
    frames = np.clip(np.arange(length)[:, None] + np.array(offsets), 0, length - 1)
    needed = [np.unique(frames[begin:stop] // gop) for begin, stop in itertools.pairwise(starts)]
    assert sum(map(len, needed)) == decodings


def planner(dataset: knonik.Dataset, **options: object) -> Planner:
    defaults = {
        "batch_size": 8,
        "seed": 1,
        "windows": {CAM0: [0], CAM1: [0]},
        "edge": "repeat",
        "cameras": [CAM0, CAM1],
        "rank": 0,
        "world_size": 1,
        "shuffle": True,
        "order": "blocks",
        "block_window": 24,
        "lanes": 4,
    }
    return Planner(dataset, **{**defaults, **options})


@pytest.fixture
def dataset(make_set, tmp_path: Path) -> knonik.Dataset:
    folder = make_set((30, 11, 25, 8, 17, 29), size=(32, 32), gop=10)
    return knonik.open(folder, cache_dir=tmp_path)


def decodings(mine: Planner, batches: int) -> tuple[dict[tuple[str, int], int], int]:
    """What a reader does that looks `reuse_batches` ahead and keeps pictures until their sample: how often it decodes
    each GOP, and the most samples that wait at any time."""
    needs = [
        {(job.key, job.group): len(job.places) for job in plan.jobs if job.camera == CAM0}
        for plan in plans_of(mine, batches)
    ]
    times: dict[tuple[str, int], int] = {}
    held: dict[int, dict[tuple[str, int], int]] = {}
    covered: dict[tuple[str, int], int] = {}
    most = 0
    for number, units in enumerate(needs):
        held.pop(number, None)
        for unit in units:
            if covered.get(unit, -1) < number:
                times[unit] = times.get(unit, 0) + 1
                ahead = range(number + 1, min(number + mine.reuse_batches, batches))
                covered[unit] = number + mine.reuse_batches - 1
                for later in ahead:
                    if unit in needs[later]:
                        held.setdefault(later, {})[unit] = needs[later][unit]
        most = max(most, sum(sum(units.values()) for units in held.values()))
    return times, most


def plans_of(mine: Planner, batches: int) -> list[BatchPlan]:
    return [mine.plan(number * mine.global_batch) for number in range(batches)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_gop_is_decoded_once_an_epoch_and_by_one_rank(dataset: knonik.Dataset, world: int) -> None:
    assert len(dataset) == 120
    total: dict[tuple[str, int], int] = {}
    for rank in range(world):
        mine = planner(dataset, rank=rank, world_size=world, batch_size=4)
        assert mine.num_anchors % mine.global_batch in (0, 8)
        times, most = decodings(mine, 120 // mine.global_batch)
        assert most <= mine.held_samples
        for unit, count in times.items():
            total[unit] = total.get(unit, 0) + count
    # The borders between the shares of 4 lanes cut at most 3 GOPs.
    assert sum(total.values()) <= len(total) + 3


def test_each_gop_of_long_windows_is_decoded_once_but_at_cuts(dataset: knonik.Dataset) -> None:
    windows = {camera: range(5) for camera in (CAM0, CAM1)}
    mine = planner(dataset, windows=windows, lanes=1, block_window=60)
    times, most = decodings(mine, 120 // mine.global_batch)
    assert set(times.values()) == {1}  # no episode is longer than a window
    assert most <= mine.held_samples * 5


def test_blocks_do_not_depend_on_the_world_size(dataset: knonik.Dataset) -> None:
    whole = planner(dataset, batch_size=16).samples(np.arange(240))
    for world in (2, 8, 3):
        for rank in range(world):
            mine = planner(dataset, rank=rank, world_size=world, batch_size=2)
            for begin in range(0, 240 - mine.global_batch, mine.global_batch):
                plan = mine.plan(begin)
                np.testing.assert_array_equal(plan.episodes, whole[1][plan.positions])
                np.testing.assert_array_equal(plan.frames, whole[2][plan.positions])


def test_what_is_held_stays_bounded_over_epochs_and_in_mixtures(dataset: knonik.Dataset) -> None:
    small = dataset.subset(episodes=[3])  # an epoch of eight samples: GOPs come again within the look ahead
    mixture = knonik.Mixture([knonik.Part(dataset=dataset, weight=3), knonik.Part(dataset=small, weight=1)])
    for source, world, size in itertools.product((dataset, mixture), (1, 2), (16, 48)):
        mine = planner(source, rank=world - 1, world_size=world, batch_size=4, block_window=size)
        times, most = decodings(mine, 5 * 120 // mine.global_batch)
        assert 0 < most <= mine.held_samples
        assert len(times) > 5


def test_mixing_is_reported_as_seen(dataset: knonik.Dataset) -> None:
    exact = measure_mixing(planner(dataset, order="exact", batch_size=16))
    assert exact.distance == pytest.approx(exact.distance_random, rel=0.15)
    assert exact.episodes_per_batch == pytest.approx(exact.episodes_per_batch_random, rel=0.1)
    assert (exact.held_samples, exact.reuse_batches) == (0, 1)
    narrow = measure_mixing(planner(dataset, batch_size=16, lanes=2, block_window=4))
    assert narrow.distance < 0.5 * exact.distance
    assert narrow.episodes_per_batch < 0.8 * exact.episodes_per_batch
    assert (narrow.held_samples, narrow.reuse_batches) == (32, 3)  # 21 samples touch at most three batches of 16
    stored = measure_mixing(planner(dataset, order="exact", shuffle=False))
    assert stored.distance == 1


def test_blocks_say_at_the_start_what_they_are(dataset: knonik.Dataset, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="knonik"):
        planner(dataset, world_size=3)
    assert "order blocks with block_window=24:" in caplog.text
    assert "episodes in a batch" in caplog.text
    assert "3 ranks do not divide lanes=4" in caplog.text


def test_stored_order_and_blocks_exclude_each_other(dataset: knonik.Dataset) -> None:
    with pytest.raises(ValueError, match="needs shuffle=True"):
        planner(dataset, shuffle=False)
    with pytest.raises(ValueError, match="block_window=0 is not allowed"):
        planner(dataset, block_window=0)
