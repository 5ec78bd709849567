"""The loader over a dataset that is far away: the same batches within every bound, errors that name the sample."""

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import knonik
from knonik.batches.pipeline import Pipeline
from knonik.loader import Loader, LoaderError
from knonik.stores.base import StoreUnavailable

LENGTHS = (14, 9, 12)
Remote = Callable[..., tuple[knonik.Dataset, Any]]


@pytest.fixture
def remote(make_set: Callable[..., Path], tmp_path: Path, remote_store: Any) -> Iterator[Remote]:
    """Open a generated set as if its objects were far away: (dataset, its store)."""
    opened = []

    def make(**options: Any) -> tuple[knonik.Dataset, Any]:
        dataset = knonik.open(make_set(LENGTHS, **options), cache_dir=tmp_path / "cache")
        dataset.columns(["observation.state", "action", "task_index"])
        dataset.store = remote_store(dataset.store.root)
        opened.append(dataset)
        return dataset, dataset.store

    yield make
    for dataset in opened:
        dataset.close()


@pytest.mark.parametrize(
    "options",
    [
        {"ram_bytes": 1 << 20, "disk_bytes": 0},
        {"ram_bytes": 3000, "disk_bytes": 0},
        {"ram_bytes": 0, "disk_bytes": 0},
        {"ram_bytes": 32 << 20, "disk_bytes": 64 << 20},
        {"ram_bytes": 3000, "disk_bytes": 0, "order": "blocks", "block_window": 12, "lanes": 2},
    ],
    ids=["pool", "small pool", "no pool", "disk", "blocks"],
)
def test_batches_are_those_of_the_local_set(
    remote: Remote, make_set: Callable[..., Path], tmp_path: Path, options: dict[str, Any], since
) -> None:
    watch = since()
    far, store = remote(gop=4)
    near = knonik.open(make_set(LENGTHS, gop=4), cache_dir=tmp_path / "cache")
    order = {key: options[key] for key in ("order", "block_window", "lanes") if key in options}
    with (
        Loader(near, batch_size=5, seed=6, **order) as ours,
        Loader(far, batch_size=5, seed=6, decode_threads=2, ring_batches=2, connections=4, **options) as theirs,
    ):
        for left, right in itertools.islice(zip(ours, theirs, strict=False), 14):  # two epochs
            assert left.position.tolist() == right.position.tolist()
            assert all(torch.equal(left.images[camera], right.images[camera]) for camera in left.images)
        gauges = theirs.gauges()
    documented = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()
    assert [name for name in gauges if f"`loader/{name}`" not in documented] == []
    assert store.ranges
    assert gauges["out_of_turn"] == 0  # nobody waited for bytes that had no room
    assert gauges["ring_bytes"] <= gauges["ring_limit_bytes"] == 2 * 5 * 2 * 32 * 48 * 3
    longest = max(length for _, _, length in store.ranges)
    assert gauges["pool_bytes"] <= options["ram_bytes"] + longest
    assert gauges["disk_bytes"] <= options["disk_bytes"]
    assert watch.threads("knonik") == []


def test_bytes_that_cannot_be_had_are_named_with_their_sample(remote: Remote) -> None:
    dataset, store = remote(cameras=1, gop=4)
    key, number = dataset.locate(1, "observation.images.cam0", 5)
    store.broken.add((key, dataset.gop(key, number).span()[0]))
    with Loader(dataset, batch_size=35, shuffle=False, disk_bytes=0) as loader:
        with pytest.raises(LoaderError) as caught:
            next(loader)
        assert "episode 1 frame" in str(caught.value)
        assert key in str(caught.value)
        assert "out of order" in str(caught.value)
    with Loader(dataset, batch_size=35, disk_bytes=0, on_bad_sample="skip", max_bad_share=0.2) as loader:
        assert len(next(loader)) == 35
        bad = {(sample.episode, sample.frame) for sample in loader.bad_samples}
    assert (1, 5) in bad
    assert len(bad) <= 4  # the frames of one GOP


def test_a_store_that_does_not_answer_makes_no_sample_bad(remote: Remote) -> None:
    dataset, store = remote(cameras=1, gop=4)
    key, number = dataset.locate(1, "observation.images.cam0", 5)
    store.broken.add((key, dataset.gop(key, number).span()[0]))
    store.error = StoreUnavailable
    with Loader(dataset, batch_size=35, disk_bytes=0, on_bad_sample="skip", max_bad_share=0.2) as loader:
        with pytest.raises(LoaderError, match="out of order"):
            next(loader)
        assert not loader.bad_samples


@pytest.mark.parametrize("late", [False, True], ids=["", "before the consumer has gone on"])
def test_a_loader_closed_by_its_own_transform_ends(remote: Remote, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    dataset, _ = remote()
    before, closed = set(threading.enumerate()), threading.Event()
    loader: Loader

    def give_up(batch: knonik.Batch) -> dict[str, torch.Tensor]:
        loader.close()
        closed.set()
        return {}

    def start(pipeline: Pipeline, start: Callable[[Pipeline], None] = Pipeline.start) -> None:
        start(pipeline)
        assert not late or closed.wait(60)

    monkeypatch.setattr(Pipeline, "start", start)
    loader = Loader(dataset, batch_size=4, disk_bytes=0, transform=give_up)
    with pytest.raises(LoaderError, match="closed"):
        next(loader), next(loader)
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("knonik"):
            thread.join(timeout=60)
            assert not thread.is_alive(), thread.name
