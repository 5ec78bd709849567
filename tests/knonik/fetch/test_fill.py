"""The disk cache fills in the background, in order of need, once for all processes, within its bound; then no GETs."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import knonik
from knonik.dataset import Dataset
from knonik.fetch.disk import DiskCache
from knonik.fetch.fill import Fill, Residency
from knonik.fetch.source import PooledSource
from knonik.stores.base import ObjectChanged, StoreUnavailable

EXTENT = 1000
SIZES = {"a": 3500, "b": 1000, "c": 10}
NUM_EXTENTS = 6
LENGTHS = [7, 12, 5, 9]


@pytest.fixture
def store(tmp_path: Path, remote_store: Any) -> Any:
    for key, size in SIZES.items():
        path = tmp_path / "set" / key
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes((number * 7 + size) % 256 for number in range(size)))
    return remote_store(tmp_path / "set")


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[DiskCache]:
    made = DiskCache(tmp_path / "packets", 1 << 20, namespace="one", extent_bytes=EXTENT)
    yield made
    made.close()


class Filling:
    """A fill, and a wait for its end."""

    def __init__(self, store: Any, cache: DiskCache, threads: int = 1) -> None:
        self.ended = threading.Event()
        self.objects = store.objects("")
        self.residency = Residency(cache, self.objects)
        self.fill = Fill(store, self.residency, lock=cache.folder / "fill.lock", threads=threads, on_end=self.ended.set)

    def wait(self) -> None:
        assert self.ended.wait(60)
        self.fill.close()


def test_every_byte_arrives_once_and_a_later_run_finds_it(store: Any, cache: DiskCache) -> None:
    filling = Filling(store, cache, threads=3)
    filling.wait()
    assert len(store.ranges) == NUM_EXTENTS
    for key, info in store.objects("").items():
        assert cache.read(key, info.version, info.size, 0, info.size) == store.read(key)
        assert filling.residency.holds(key, 0, info.size)
    gauges = filling.fill.gauges()
    assert gauges["fill_done_bytes"] == gauges["fill_total_bytes"] == sum(SIZES.values())
    assert gauges["fill_gets"] == NUM_EXTENTS
    assert not gauges["fill_active"]
    Filling(store, cache).wait()
    assert len(store.ranges) == NUM_EXTENTS


def test_what_is_needed_comes_first(store: Any, cache: DiskCache) -> None:
    store.gate.clear()
    filling = Filling(store, cache)
    assert store.begun.acquire(timeout=60)  # the first extent is under way
    filling.fill.want("b", 0, 10)
    filling.fill.want("a", 2900, 200)  # straddles two extents
    store.gate.set()
    filling.wait()
    assert [(key, offset) for key, offset, _ in store.ranges[1:]] == [
        ("b", 0),
        ("a", 2000),
        ("a", 3000),
        ("a", 1000),
        ("c", 0),
    ]


def test_a_range_is_there_only_with_all_its_extents(store: Any, cache: DiskCache) -> None:
    (info,) = [info for key, info in store.objects("").items() if key == "a"]
    residency = Residency(cache, {"a": info})
    assert not residency.holds("a", 0, 1)
    cache.put("a", info.version, info.size, 1000, store.read("a")[1000:2000])
    residency.look("a")
    assert residency.holds("a", 1000, 1000)
    assert not residency.holds("a", 1000, 1001)
    assert not residency.holds("a", 999, 2)
    assert not residency.complete()
    assert residency.incomplete() == ["a"]
    assert residency.bytes_there() == 1000
    residency.lost("a", 1500, 10)
    assert not residency.holds("a", 1000, 1)


def test_it_stops_at_the_bound(store: Any, tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "small", 3100, namespace="one", extent_bytes=EXTENT)
    filling = Filling(store, cache, threads=2)
    filling.wait()
    assert cache.used_bytes() <= 3100
    assert filling.fill.gauges()["fill_done_bytes"] == cache.used_bytes() >= 2100
    cache.close()


def test_one_fills_and_the_others_use_what_it_brings(store: Any, cache: DiskCache) -> None:
    store.gate.clear()
    first = Filling(store, cache)
    assert store.begun.acquire(timeout=60)
    second = Filling(store, cache)
    store.gate.set()
    first.wait()
    second.wait()
    assert len(store.ranges) == NUM_EXTENTS
    assert second.residency.complete()


def test_another_goes_on_where_one_has_ended(store: Any, cache: DiskCache) -> None:
    store.gate.clear()
    first = Filling(store, cache)
    assert store.begun.acquire(timeout=60)
    second = Filling(store, cache)
    closing = threading.Thread(target=first.fill.close)
    closing.start()
    assert first.fill._closing.wait(60)
    store.gate.set()
    closing.join(60)
    second.wait()
    assert len(store.ranges) == NUM_EXTENTS
    assert second.residency.complete()


def test_what_cannot_be_read_is_left_out(store: Any, cache: DiskCache, caplog: pytest.LogCaptureFixture) -> None:
    store.broken.add(("a", 1500))
    filling = Filling(store, cache)
    filling.wait()
    assert filling.residency.missing("a") == [("a", 1)]
    assert filling.residency.incomplete() == ["a"]
    assert "left out of the disk cache: cannot read a bytes 1000-1999" in caplog.text


def test_an_extent_has_its_turn_again_when_the_store_did_not_answer(store: Any, cache: DiskCache) -> None:
    store.broken.add(("a", 0))

    def back_from_now_on(text: str) -> StoreUnavailable:
        store.broken.clear()
        return StoreUnavailable(text)

    store.error = back_from_now_on
    filling = Filling(store, cache)
    filling.wait()
    assert filling.residency.complete()
    assert len(store.ranges) == NUM_EXTENTS + 1


def test_a_late_look_forgets_no_extent_that_has_arrived(store: Any, cache: DiskCache) -> None:
    residency = Residency(cache, store.objects(""))
    missing = cache.missing

    def slow(key: str, version: str, size: int) -> list[tuple[int, int]]:
        found = missing(key, version, size)
        cache.missing = missing  # type: ignore[method-assign]
        residency.look(key)  # another thread is faster, and one of the extents arrives
        residency.arrived((key, 1))
        return found

    cache.missing = slow  # type: ignore[method-assign]
    residency.look("a")
    assert residency.holds("a", EXTENT, EXTENT)


def test_a_disk_that_fails_ends_the_fill(
    store: Any, cache: DiskCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> bool:
        raise OSError("the disk is broken")

    monkeypatch.setattr(cache, "put", fail)
    filling = Filling(store, cache)
    filling.wait()
    assert len(store.ranges) == 1
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"the disk cache in {cache.folder} takes no more: the disk is broken"
    ]


def test_an_object_that_changed_is_left_out_whole(store: Any, cache: DiskCache) -> None:
    store.error = ObjectChanged
    store.broken.add(("a", 0))
    filling = Filling(store, cache)
    filling.wait()
    assert filling.residency.incomplete() == ["a"]
    assert [key for key, _, _ in store.ranges] == ["a", "b", "c"]


def test_only_one_reads_on_while_batches_need_the_connections(store: Any, cache: DiskCache) -> None:
    store.gate.clear()
    filling = Filling(store, cache, threads=3)
    for _ in range(3):
        assert store.begun.acquire(timeout=60)
    filling.fill.hold_back(True)
    store.gate.set()
    filling.wait()
    assert filling.residency.complete()
    assert len(set(store.readers[:3])) == 3
    assert len(set(store.readers[3:])) == 1


def test_closing_ends_the_threads_also_those_held_back(store: Any, cache: DiskCache, since) -> None:
    watch = since()
    store.gate.clear()
    filling = Filling(store, cache, threads=3)
    for _ in range(3):
        assert store.begun.acquire(timeout=60)
    filling.fill.hold_back(True)
    closing = threading.Thread(target=filling.fill.close)
    closing.start()
    assert filling.fill._closing.wait(60)
    filling.fill.hold_back(True)
    store.gate.set()
    closing.join(60)
    assert not closing.is_alive()
    assert len(store.ranges) == 3
    assert watch.threads("knonik-fill") == []


@pytest.fixture
def remote(make_set: Callable[..., Path], tmp_path: Path, remote_store: Any) -> Iterator[Dataset]:
    with knonik.open(make_set(LENGTHS), cache_dir=tmp_path / "cache") as dataset:
        dataset.store = remote_store(dataset.store.root)
        yield dataset


def pass_over(dataset: Dataset, source: PooledSource, begin: int) -> int:
    """Every row of every camera, each a batch; the number of the next batch."""
    direct = dataset.index
    for camera in dataset.cameras:
        for episode in dataset.episodes.ids.tolist():
            for frame in range(LENGTHS[episode]):
                key, number = dataset.locate(episode, camera, frame)
                assert source.announce(begin, [(key, direct.group(key, number))])
                packets, _ = source.packets(key, number)
                gop = direct.gop(key, number).through(number)
                body = (dataset.store.root / key).read_bytes()
                assert [bytes(packet) for packet in packets] == [
                    body[offset : offset + size]
                    for offset, size in zip(gop.offsets.tolist(), gop.sizes.tolist(), strict=True)
                ]
                source.done(begin)
                begin += 1
    return begin


def disk_of(dataset: Dataset, tmp_path: Path, limit: int = 1 << 24) -> DiskCache:
    return DiskCache(tmp_path / "packets", limit, namespace=dataset.fingerprint, extent_bytes=EXTENT)


def video_bytes(dataset: Dataset) -> int:
    keys = {key for table in dataset.episodes.cameras.values() for key in table.keys}
    return sum(dataset.objects[key].size for key in keys)


@pytest.mark.parametrize("ram_bytes", [0, 20_000])
def test_after_the_fill_there_are_no_gets(remote: Dataset, tmp_path: Path, ram_bytes: int) -> None:
    source = PooledSource(remote, ram_bytes=ram_bytes, disk=disk_of(remote, tmp_path), connections=4)
    number = pass_over(remote, source, 0)
    assert source._fill is not None
    source._fill._leader.join(60)
    filled = len(remote.store.ranges)
    number = pass_over(remote, source, number)
    pass_over(remote, source, number)
    gauges = source.gauges()
    source.close()
    assert len(remote.store.ranges) == filled == gauges["gets"]
    assert gauges["get_bytes"] == remote.store.num_bytes
    assert gauges["fill_done_bytes"] == gauges["disk_bytes"] == video_bytes(remote)
    again = PooledSource(remote, ram_bytes=ram_bytes, disk=disk_of(remote, tmp_path), connections=4)
    pass_over(remote, again, 0)
    again.close()
    assert len(remote.store.ranges) == filled


def test_ranks_share_the_fill(remote: Dataset, tmp_path: Path) -> None:
    ranks = [PooledSource(remote, ram_bytes=0, disk=disk_of(remote, tmp_path), connections=2) for _ in range(2)]
    for rank in ranks:
        assert rank._fill is not None
        rank._fill._leader.join(60)
    extents = sum(-(-remote.objects[key].size // EXTENT) for key in {key for key, _, _ in remote.store.ranges})
    assert len(remote.store.ranges) == extents
    for rank in ranks:
        pass_over(remote, rank, 0)
        rank.close()
    assert len(remote.store.ranges) == extents


def test_a_disk_too_small_for_all_helps_as_far_as_it_goes(remote: Dataset, tmp_path: Path) -> None:
    limit = video_bytes(remote) // 2
    source = PooledSource(remote, ram_bytes=0, disk=disk_of(remote, tmp_path, limit), connections=4)
    number = pass_over(remote, source, 0)
    assert source._fill is not None
    source._fill._leader.join(60)
    before = source.gauges()
    pass_over(remote, source, number)
    after = source.gauges()
    source.close()
    assert after["disk_bytes"] <= limit
    assert after["disk_hits"] > before["disk_hits"]
    assert after["gets"] > before["gets"]
    assert after["fill_gets"] == before["fill_gets"]


def test_an_emptied_cache_costs_gets_and_nothing_else(remote: Dataset, tmp_path: Path) -> None:
    source = PooledSource(remote, ram_bytes=1 << 20, disk=disk_of(remote, tmp_path), connections=4)
    assert source._fill is not None
    source._fill._leader.join(60)
    number = pass_over(remote, source, 0)
    filled = len(remote.store.ranges)
    for path in (tmp_path / "packets").rglob("*"):
        if path.name.isdigit():
            path.unlink()
    pass_over(remote, source, number)
    source.close()
    assert len(remote.store.ranges) > filled


def test_only_cameras_in_use_are_filled_in(remote: Dataset, tmp_path: Path) -> None:
    camera = remote.cameras[0]
    source = PooledSource(remote, ram_bytes=0, disk=disk_of(remote, tmp_path), cameras=[camera])
    assert source._fill is not None
    source._fill._leader.join(60)
    source.close()
    assert {key for key, _, _ in remote.store.ranges} == set(remote.episodes.cameras[camera].keys)
