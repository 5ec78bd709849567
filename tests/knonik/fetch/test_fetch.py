"""Packets come out as the index describes them, whichever way they were fetched; bounds hold and errors find home."""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import knonik
from knonik.dataset import Dataset
from knonik.fetch import pooled
from knonik.fetch.source import DirectSource, PooledSource, packet_source, predict
from knonik.order.plan import BatchPlan, GopJob, Planner
from knonik.stores.base import ObjectChanged, StoreError

LENGTHS = [7, 12, 5, 9, 12, 8, 11]
Make = Callable[..., Dataset]


@pytest.fixture
def remote(make_set: Callable[..., Path], tmp_path: Path, remote_store: Any) -> Iterator[Make]:
    """Open a generated dataset as if its objects were far away."""
    opened = []

    def make(**options: Any) -> Dataset:
        dataset = knonik.open(make_set(LENGTHS, **options), cache_dir=tmp_path / "cache")
        dataset.store = remote_store(dataset.store.root)
        opened.append(dataset)
        return dataset

    yield make
    for dataset in opened:
        dataset.close()


def plans_of(dataset: Dataset, count: int, batch_size: int = 8) -> list[BatchPlan]:
    planner = Planner(
        dataset,
        batch_size=batch_size,
        seed=3,
        windows={camera: [0] for camera in dataset.cameras},
        edge="repeat",
        cameras=dataset.cameras,
        rank=0,
        world_size=1,
        shuffle=True,
    )
    return [planner.plan(number * planner.global_batch) for number in range(count)]


def units_of(plan: BatchPlan) -> list[tuple[str, int]]:
    return [(job.key, job.group) for job in plan.jobs]


def check(dataset: Dataset, source: Any, job: GopJob) -> None:
    gop = dataset.index.gop(job.key, max(job.numbers)).through(max(job.numbers))
    packets, pts = source.packets(job.key, max(job.numbers))
    with (dataset.store.root / job.key).open("rb") as file:
        for packet, offset, size in zip(packets, gop.offsets.tolist(), gop.sizes.tolist(), strict=True):
            file.seek(offset)
            assert bytes(packet) == file.read(size)
    assert pts == gop.pts.tolist()


def consume(dataset: Dataset, source: Any, plans: Sequence[BatchPlan], threads: int = 2) -> int:
    """Announce as far as the source allows, take packets in order from several threads; the most batches ahead."""
    announced = most = 0
    with ThreadPoolExecutor(threads) as pool:
        for number, plan in enumerate(plans):
            while announced < len(plans) and source.announce(announced, units_of(plans[announced])):
                announced += 1
            assert announced > number, "the first batch that is not done must be taken"
            most = max(most, announced - number)
            list(pool.map(lambda job: check(dataset, source, job), plan.jobs))
            source.done(number)
    return most


def batch_bytes(dataset: Dataset, plan: BatchPlan) -> int:
    return sum(dataset.index.unit_span(job.key, job.group)[1] for job in plan.jobs)


def test_a_local_folder_is_read_when_asked(make_set: Callable[..., Path], tmp_path: Path) -> None:
    with knonik.open(make_set([7, 5]), cache_dir=tmp_path) as dataset:
        source = packet_source(dataset)
        assert isinstance(source, DirectSource)
        key, number = dataset.locate(1, dataset.cameras[0], 3)
        assert source.announce(0, [(key, dataset.index.group(key, number))])
        packets, pts = source.packets(key, number)
        gop = dataset.index.gop(key, number).through(number)
        assert [bytes(packet) for packet in packets] == [bytes(packet) for packet in gop.read(dataset.store)]
        assert pts == gop.pts.tolist()
        source.done(0)
        assert source.gauges()["reads"] == 1
        assert source.gauges()["read_bytes"] == gop.sizes.sum()
        # Read ahead by the thread that needs it, it is not read again; what cannot be read is told by `packets`.
        source.ahead([(key, number), (key, 10**6), ("none.mp4", 0)])
        assert source.packets(key, number) == (packets, pts)
        assert source.gauges()["reads"] == 2
        with pytest.raises(IndexError):
            source.packets(key, 10**6)
        source.ahead([(key, number)])
        source.ahead([])  # nothing is kept for who changes its mind
        source.packets(key, number)
        assert source.gauges()["reads"] == 4
        source.close()


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
@pytest.mark.parametrize("share", [0.0, 0.3, 2.5, 100.0])
@pytest.mark.parametrize("gap", [0, 400, 128 << 10])
def test_gets_are_those_foretold(remote: Make, version: str, share: float, gap: int) -> None:
    """Pools of none, part of a batch, some batches, and everything."""
    dataset = remote(version=version)
    plans = plans_of(dataset, 30)
    ram_bytes = int(share * max(batch_bytes(dataset, plan) for plan in plans))
    source = PooledSource(dataset, ram_bytes=ram_bytes, connections=3, merge_gap_bytes=gap)
    consume(dataset, source, plans, threads=1 if share == 0.3 else 2)
    gauges = source.gauges()
    source.close()
    foretold = predict(dataset, plans, ram_bytes=ram_bytes, merge_gap_bytes=gap)
    assert (foretold.gets, foretold.get_bytes) == (len(dataset.store.ranges), dataset.store.num_bytes)
    assert (gauges["gets"], gauges["get_bytes"]) == (foretold.gets, foretold.get_bytes)
    assert (gauges["done_gets"], gauges["done_get_bytes"]) == (foretold.gets, foretold.get_bytes)
    assert gauges["pool_hits"] == foretold.hits
    assert gauges["failed"] == 0


def test_the_share_of_batches_done_is_foretold_too(remote: Make) -> None:
    dataset = remote()
    plans = plans_of(dataset, 40)
    ram_bytes = 3 * max(batch_bytes(dataset, plan) for plan in plans)
    source = PooledSource(dataset, ram_bytes=ram_bytes, connections=4)
    announced = 0
    for number in range(10):
        while announced < len(plans) and source.announce(announced, units_of(plans[announced])):
            announced += 1
        for job in plans[number].jobs:
            check(dataset, source, job)
        source.done(number)
    foretold = predict(dataset, plans, ram_bytes=ram_bytes, count=10)
    assert source.gauges()["done_gets"] == foretold.gets
    assert source.gauges()["done_get_bytes"] == foretold.get_bytes
    source.close()


@pytest.mark.parametrize("share", [0.4, 1.0, 2.2, 6.0])
def test_memory_stays_within_the_bound_and_fetching_ahead_stops_there(remote: Make, share: float) -> None:
    dataset = remote()
    plans = plans_of(dataset, 60)
    limit = int(share * max(batch_bytes(dataset, plan) for plan in plans))
    source = PooledSource(dataset, ram_bytes=limit, connections=8, merge_gap_bytes=100)
    consume(dataset, source, plans)
    longest = max(length for _, _, length in dataset.store.ranges)
    assert source.gauges()["pool_most_bytes"] <= limit + longest
    assert source.gauges()["pool_bytes"] <= limit
    source.close()
    assert source.gauges()["pool_bytes"] == 0


def test_what_is_ahead_is_fetched_without_being_asked_for(remote: Make) -> None:
    dataset = remote()
    plans = plans_of(dataset, 6)
    source = PooledSource(dataset, ram_bytes=1 << 24, connections=2, merge_gap_bytes=0)
    assert all(source.announce(number, units_of(plan)) for number, plan in enumerate(plans))
    for _ in range(predict(dataset, plans, ram_bytes=1 << 24, merge_gap_bytes=0).gets):
        assert dataset.store.begun.acquire(timeout=60)
    source.close()


def test_an_error_reaches_the_samples_it_belongs_to_and_no_others(remote: Make) -> None:
    """All units share one request, one of them cannot be read."""
    dataset = remote(cameras=1)
    key, first = dataset.locate(0, dataset.cameras[0], 0)
    groups = sorted({dataset.index.group(key, first + row) for row in range(LENGTHS[0])})
    assert len(groups) > 2
    broken, (offset, _) = groups[1], dataset.index.unit_span(key, groups[1])
    dataset.store.broken.add((key, offset))
    source = PooledSource(dataset, ram_bytes=1 << 24, connections=2)
    source.announce(0, [(key, group) for group in groups])
    for row in range(LENGTHS[0]):
        if dataset.index.group(key, first + row) == broken:
            with pytest.raises(OSError, match=f"{key} bytes {offset}-.*out of order"):
                source.packets(key, first + row)
        else:
            source.packets(key, first + row)
    source.done(0)
    dataset.store.broken.clear()
    source.announce(1, [(key, group) for group in groups])
    for row in range(LENGTHS[0]):
        source.packets(key, first + row)
    source.close()


def test_a_changed_object_is_told_as_such(remote: Make) -> None:
    dataset = remote()
    (job, *_) = plans_of(dataset, 1)[0].jobs
    path = dataset.store.root / job.key
    body = path.read_bytes()
    source = PooledSource(dataset, ram_bytes=1 << 24)
    try:
        path.write_bytes(body + b"more")
        source.announce(0, [(job.key, job.group)])
        with pytest.raises(ObjectChanged, match=job.key):
            source.packets(job.key, max(job.numbers))
    finally:
        path.write_bytes(body)
        source.close()


def test_close_ends_waits_and_threads_while_reads_are_under_way(remote: Make, since) -> None:
    watch = since()
    dataset = remote()
    plans = plans_of(dataset, 4)
    source = PooledSource(dataset, ram_bytes=1 << 24, connections=2, merge_gap_bytes=0)
    dataset.store.gate.clear()
    for number, plan in enumerate(plans):
        source.announce(number, units_of(plan))
    last = plans[-1].jobs[-1]
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(source.packets, last.key, max(last.numbers))
        assert dataset.store.begun.acquire(timeout=60)
        closing = pool.submit(source.close)
        with pytest.raises(StoreError, match="closed"):
            waiting.result(timeout=60)
        dataset.store.gate.set()
        closing.result(timeout=60)
    assert len(dataset.store.ranges) <= 4
    assert watch.threads("knonik-fetch") == []
    with pytest.raises(StoreError, match="closed"):
        source.packets(last.key, max(last.numbers))
    with pytest.raises(StoreError, match="closed"):
        source.announce(9, [])
    source.close()


def test_batches_taken_out_of_turn_do_not_wait_for_ever(remote: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool has room for one batch, and it is not done."""
    monkeypatch.setattr(pooled, "_PATIENCE_S", 0.05)
    dataset = remote()
    first, second = plans_of(dataset, 2)
    source = PooledSource(
        dataset, ram_bytes=max(batch_bytes(dataset, plan) for plan in (first, second)), merge_gap_bytes=0
    )
    source.announce(0, units_of(first))
    source.announce(1, units_of(second))
    for job in (*second.jobs, *first.jobs):
        check(dataset, source, job)
    source.done(1)
    source.done(0)
    source.close()


def test_what_nobody_announced_is_read_alone(remote: Make) -> None:
    dataset = remote()
    plan = plans_of(dataset, 1)[0]
    source = PooledSource(dataset, ram_bytes=1 << 24)
    for job in plan.jobs:
        check(dataset, source, job)
    assert source.gauges()["gets"] == len(plan.jobs)
    source.done(7)
    source.close()


def test_numbers_rise_and_what_is_no_video_is_not_fetched(remote: Make) -> None:
    dataset = remote()
    source = PooledSource(dataset, ram_bytes=1 << 24)
    assert source.announce(3, [("data/chunk-000/file-000.parquet", 0)])
    with pytest.raises(ValueError, match="batch 3 was announced after batch 3"):
        source.announce(3, [])
    source.done(3)
    source.close()
    assert not dataset.store.ranges


def test_looking_ahead_ends_somewhere(remote: Make) -> None:
    dataset = remote()
    source = PooledSource(dataset, ram_bytes=1 << 24)
    refused = next(number for number in range(10_000) if not source.announce(number, []))
    assert refused <= 1000
    source.done(0)
    assert source.announce(refused, [])
    source.close()


@pytest.mark.parametrize(("name", "value"), [("ram_bytes", -1), ("connections", 0)])
def test_impossible_settings_are_refused(remote: Make, name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        PooledSource(remote(), **{"ram_bytes": 1 << 20, name: value})


def test_a_full_disk_at_the_start_is_no_disk(
    remote: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    dataset = remote()
    for limit in (None, 64 << 20):
        with monkeypatch.context() as patch:
            patch.setattr("knonik.fetch.disk.os.pwrite", full)
            source = packet_source(dataset, disk_bytes=limit, cache_dir=tmp_path / "full")
        assert source.gauges()["disk_limit_bytes"] == 0
        assert "no disk cache" in caplog.text
        caplog.clear()
        source.close()


def test_a_distant_dataset_gets_a_pool_and_a_disk_cache(remote: Make, tmp_path: Path) -> None:
    dataset = remote()
    source = packet_source(dataset, fill=False)
    gauges = source.gauges()
    assert gauges["pool_limit_bytes"] == 1 << 30
    assert gauges["disk_limit_bytes"] > 0
    assert (tmp_path / "cache" / "packets").is_dir()
    source.close()
    without = packet_source(dataset, disk_bytes=0)
    assert without.gauges()["disk_limit_bytes"] == 0
    without.close()
    with pytest.raises(ValueError, match="1000 bytes"):
        packet_source(dataset, disk_bytes=1000)
