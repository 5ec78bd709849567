"""Windows of 33 frames over short GOPs: every GOP is read and decoded once for a batch, whatever asks for it."""

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import knonik
from knonik.loader import Loader
from knonik.order.plan import Planner
from knonik.video.decode import GopDecoder

LENGTHS = (36, 41, 33)
CAMERA = "observation.images.cam0"
WINDOWS = {CAMERA: range(33), "action": range(32)}


@pytest.fixture
def folder(make_set: Callable[..., Path]) -> Path:
    return make_set(LENGTHS, cameras=1, gop=2, episodes_per_file=2)


def loader(dataset: knonik.Dataset, batch_size: int) -> Loader:
    return Loader(
        dataset, batch_size=batch_size, windows=WINDOWS, edge="inside", decode_threads=1, ring_batches=1, disk_bytes=0
    )


def needed(dataset: knonik.Dataset, batch: knonik.Batch) -> set[tuple[str, int]]:
    """GOPs that the windows of a batch touch."""
    units = set()
    for episode, frame in zip(batch.episode.tolist(), batch.frame.tolist(), strict=True):
        for step in range(33):
            key, number = dataset.locate(episode, CAMERA, frame + step)
            units.add((key, dataset.index.group(key, number)))
    return units


def test_each_gop_of_a_batch_is_decoded_once_and_frames_are_the_stock_ones(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: Counter[int] = Counter()
    decode = GopDecoder.decode

    def counted(self: GopDecoder, codec: Any, packets: Any, pts: Any, *rest: Any, **options: Any) -> Any:
        decoded[pts[0]] += 1
        return decode(self, codec, packets, pts, *rest, **options)

    with knonik.open(folder, cache_dir=tmp_path / "cache") as dataset:
        with loader(dataset, 4) as source:
            assert source.num_anchors == 4 + 9 + 1
            monkeypatch.setattr(GopDecoder, "decode", counted)
            batch = next(source)
        monkeypatch.undo()
        # The ring holds one batch: what was decoded are this one and at most the next.
        planner = Planner(
            dataset, batch_size=4, seed=0, windows=WINDOWS, edge="inside", cameras=[CAMERA], rank=0, world_size=1,
            shuffle=True,
        )  # fmt: skip
        first, second = (
            Counter(int(dataset.gop(job.key, job.numbers[0]).pts[0]) for job in planner.plan(begin).jobs)
            for begin in (0, 4)
        )
        assert all(first[time] <= count <= first[time] + second[time] for time, count in decoded.items())
        assert sum(first.values()) == len(needed(dataset, batch)) < 4 * 17  # windows of an episode share GOPs
        for i, (episode, frame) in enumerate(zip(batch.episode.tolist(), batch.frame.tolist(), strict=True)):
            for step in (0, 1, 16, 32):
                stock = dataset.frame(episode=episode, camera=CAMERA, frame=frame + step)
                np.testing.assert_array_equal(batch.images[CAMERA][i, step].numpy(), stock)


def test_plans_name_each_gop_once_with_all_that_is_wanted_of_it(folder: Path, tmp_path: Path) -> None:
    with knonik.open(folder, cache_dir=tmp_path / "cache") as dataset:
        planner = Planner(
            dataset, batch_size=6, seed=1, windows=WINDOWS, edge="inside", cameras=[CAMERA], rank=0, world_size=1,
            shuffle=True,
        )  # fmt: skip
        for begin in (0, 6, 12, 18):
            plan = planner.plan(begin)
            units = [(job.key, job.group) for job in plan.jobs]
            assert len(units) == len(set(units))
            places = sorted(itertools.chain.from_iterable(job.places for job in plan.jobs))
            assert places == list(range(6 * 33))
            firsts = [job.places[0] for job in plan.jobs]
            assert firsts == sorted(firsts)  # work begins with the first sample
            for job in plan.jobs:
                for place, number in zip(job.places, job.numbers, strict=True):
                    sample, step = divmod(place, 33)
                    row = int(plan.episodes[sample]), CAMERA, int(plan.frames[sample]) + step
                    assert dataset.locate(*row) == (job.key, number)
                    assert dataset.index.group(job.key, number) == job.group


def test_a_distant_window_is_a_few_reads(folder: Path, tmp_path: Path, remote_store: Any) -> None:
    with knonik.open(folder, cache_dir=tmp_path / "cache") as dataset:
        dataset.columns(["observation.state", "action", "task_index"])
        dataset.store = store = remote_store(dataset.store.root)
        with loader(dataset, 4) as source:
            batch = next(source)
            units = needed(dataset, batch)
            videos = [(key, offset) for key, offset, _ in store.ranges if key.endswith(".mp4")]
        assert len(units) >= 17
        assert len(videos) == len(set(videos))  # no byte is asked for twice from the same place
        assert len(videos) <= 4  # two files; neighbouring GOPs come in one read
