"""The index grows with what is asked for; processes share the work; changes, damage and copies are noticed."""

import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import knonik
from knonik.columns.arrays import load_columns
from knonik.index.cache import index_path
from knonik.index.file import decode_index, pack_table, unpack_table
from knonik.index.video_index import VideoIndex, load_index, publish_index, published_key
from knonik.metadata.episodes import CameraTable
from knonik.metadata.lerobot import Metadata, read_metadata
from knonik.mp4.packets import CodecRecord, Mp4Error, PacketTable
from knonik.stores.base import LocalStore, ObjectChanged, ObjectMissing, StoreUnavailable

CAM = "observation.images.cam0"
LENGTHS = (5, 6, 7, 5, 6, 4)


class Watched(LocalStore):
    """Counts reads of video files by key; `hold` lets them wait."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: Counter[str] = Counter()
        self.hold: threading.Event | None = None

    def read_range(self, key: str, offset: int, length: int, *, version: str | None = None) -> bytes:
        if key.endswith(".mp4"):
            self.reads[key] += 1
            if self.hold is not None:
                assert self.hold.wait(60)
        return super().read_range(key, offset, length, version=version)


def _video(root: Path, episode: int) -> Path:
    (path,) = root.rglob(f"{CAM}/episode_{episode:06d}.mp4")
    return path


@pytest.fixture
def root(make_set, tmp_path: Path) -> Path:
    """A set of six video files, one for each episode."""
    return Path(shutil.copytree(make_set(LENGTHS, version="v2.1", cameras=1), tmp_path / "set"))


def _loaded(root: Path, cache: Path, **options: object) -> tuple[VideoIndex, Watched, Metadata]:
    store = Watched(root)
    metadata = read_metadata(store)
    return load_index(store, metadata, cache / metadata.fingerprint, **options), store, metadata


def _all(index: knonik.index.video_index.VideoIndex) -> list[tuple[str, int]]:
    return [index.locate(episode, CAM, frame) for episode, n in enumerate(LENGTHS) for frame in range(n)]


def test_only_what_is_asked_for_is_read(root: Path, tmp_path: Path) -> None:
    index, store, metadata = _loaded(root, tmp_path, background=False)
    assert not store.reads
    assert index.locate(2, CAM, 3)[1] == 3
    assert set(store.reads) == {"videos/chunk-000/observation.images.cam0/episode_000002.mp4"}
    keys, numbers = index.locate_many(np.array([2, 4, 4]), CAM, np.array([6, 0, 5]))
    assert numbers.tolist() == [6, 0, 5]
    assert set(store.reads) == set(keys)
    assert not index.complete
    assert index.off_s(CAM, 5, 0) == 0.0  # asked first of all, before any row of the episode was located
    assert len(store.reads) == 3
    index.close()
    # What was read is kept; the rest is read when it is needed.
    again, store, _ = _loaded(root, tmp_path, background=False)
    assert again.locate(4, CAM, 1)[1] == 1
    assert again.object(keys[0]).pts.tolist() == index.object(keys[0]).pts.tolist()
    assert not store.reads
    assert again.num_far_rows(CAM) == 0  # waits for the others
    assert again.complete
    assert len(store.reads) == 3
    third, store, _ = _loaded(root, tmp_path)
    assert (third.complete, _all(third) == _all(again), bool(store.reads)) == (True, True, False)
    assert metadata.episodes.num_rows == sum(LENGTHS)


def test_nobody_waits_for_the_whole(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, since) -> None:
    """The background stands still, and what is asked for is there nevertheless."""
    watch = since()
    monkeypatch.setattr("knonik.index.video_index._AT_ONCE", 0)
    monkeypatch.setattr("knonik.index.build._CONNECTIONS", 4)  # two of them for the background
    hold = threading.Event()

    class Slow(Watched):
        def read_range(self, key: str, offset: int, length: int, *, version: str | None = None) -> bytes:
            if key.endswith(("000000.mp4", "000001.mp4")):
                assert hold.wait(60)
            return super().read_range(key, offset, length, version=version)

    store = Slow(root)
    metadata = read_metadata(store)
    index = load_index(store, metadata, tmp_path / metadata.fingerprint)
    assert [index.locate(episode, CAM, 0)[1] for episode in (3, 5, 4, 2)] == [0] * 4
    assert not index.complete
    hold.set()
    index.wait()
    assert index.complete
    assert watch.threads("knonik-index") == []
    assert max(store.reads.values()) <= 3
    index.close()


def test_a_process_reads_its_own_needs_while_another_builds(root: Path, tmp_path: Path) -> None:
    builder, _, metadata = _loaded(root, tmp_path, background=False)
    with builder._builder.turn() as turn:
        assert turn
        other, store, _ = _loaded(root, tmp_path, background=False)
        with other._builder.turn() as second:
            assert not second
        assert other.locate(1, CAM, 2)[1] == 2
        assert sum(store.reads.values()) <= 3
        builder.wait()
        other._builder.look()
        assert other.complete
        assert set(store.reads) == {"videos/chunk-000/observation.images.cam0/episode_000001.mp4"}
    assert _all(other) == _all(builder)
    assert index_path(tmp_path / metadata.fingerprint, builder._builder._store.uri, "time").is_file()


def test_two_processes_at_once(root: Path, tmp_path: Path) -> None:
    code = (
        "import sys, knonik, hashlib\n"
        "import knonik.index.video_index as module\n"
        "module._AT_ONCE = 0\n"
        "ds = knonik.open(sys.argv[1], cache_dir=sys.argv[2])\n"
        "first = ds.locate(5, ds.cameras[0], 3)\n"
        "ds.index.wait()\n"
        "print(first, ds.index.complete, hashlib.sha256(ds.index.dump()).hexdigest())\n"
        "ds.close()\n"
    )
    command = [sys.executable, "-c", code, str(root), str(tmp_path / "cache")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) for _ in range(2)]
    answers = [process.communicate(timeout=900)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert answers[0] == answers[1]
    assert "True" in answers[0]
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_changed_objects_are_named_and_read_again(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, _, before = _loaded(root, tmp_path)
    assert first.version("videos/chunk-000/observation.images.cam0/episode_000001.mp4")
    body = _video(root, 3).read_bytes()
    os.utime(_video(root, 3), ns=(1, 1))  # same size, perhaps other bytes
    caplog.clear()
    index, store, metadata = _loaded(root, tmp_path)
    assert metadata.fingerprint == before.fingerprint
    assert "1 video objects have changed since they were indexed and are read again: videos/" in caplog.text
    assert "episode_000003.mp4" in caplog.text
    assert set(store.reads) == {"videos/chunk-000/observation.images.cam0/episode_000003.mp4"}
    assert _all(index) == _all(first)
    # Another size changes the fingerprint; what did not change is taken over all the same.
    _video(root, 3).write_bytes(body + (8).to_bytes(4, "big") + b"free")
    caplog.clear()
    index, store, metadata = _loaded(root, tmp_path)
    assert metadata.fingerprint != before.fingerprint
    assert "1 video objects have changed" in caplog.text
    assert set(store.reads) == {"videos/chunk-000/observation.images.cam0/episode_000003.mp4"}
    assert _all(index) == _all(first)


def test_rows_find_their_frames_again_when_the_data_has_changed(root: Path, tmp_path: Path) -> None:
    (path,) = root.rglob("episode_000001.parquet")
    table = pq.read_table(path)
    place = table.schema.get_field_index("timestamp")
    seen = set()
    for order in (np.arange(6), np.arange(6)[::-1]):
        times = pa.array(order / np.float32(10), table.schema.field(place).type)
        pq.write_table(table.set_column(place, table.schema.field(place), times), path, compression="none")
        os.utime(path, ns=(order[0] + 1,) * 2)
        for _ in range(2):  # matched, and as kept
            index, _, metadata = _loaded(root, tmp_path)
            assert [index.locate(1, CAM, row)[1] for row in range(6)] == order.tolist()
            seen.add(metadata.fingerprint)
    assert len(seen) == 1  # the same size


def test_a_change_while_the_dataset_is_open(root: Path, tmp_path: Path) -> None:
    index, _, _ = _loaded(root, tmp_path, background=False)
    os.utime(_video(root, 1), ns=(5, 5))
    _video(root, 2).unlink()
    # Their samples can be planned; the errors come with the packets.
    for number, error in ((1, ObjectChanged), (2, ObjectMissing)):
        key, frame = index.locate(number, CAM, 3)
        assert (frame, index.group(key, frame), index.unit_span(key, 0)) == (3, 0, (0, 0))
        for _ in range(2):
            with pytest.raises(error, match=rf"episode_00000{number}\.mp4"):
                index.object(key)
        # Frames hold what their functions worked on, such as the pictures of a batch.
        assert index.errors[key].__traceback__ is None
    assert index.locate(0, CAM, 0)[1] == 0
    assert len(index.errors) == 2


def test_a_store_that_does_not_answer_says_nothing_about_its_objects(root: Path, tmp_path: Path) -> None:
    index, store, _ = _loaded(root, tmp_path, background=False)
    read = store.read_range

    def silent(*args: Any, **options: Any) -> bytes:
        raise StoreUnavailable("no answer")

    store.read_range = silent
    with pytest.raises(StoreUnavailable):
        index.locate(1, CAM, 3)
    store.read_range = read
    assert index.locate(1, CAM, 3)[1] == 3
    assert not index.errors


def test_published_index_is_used_by_whoever_has_none(root: Path, tmp_path: Path) -> None:
    with knonik.open(root, cache_dir=tmp_path / "one") as dataset:
        key = publish_index(dataset)
        assert key == published_key(dataset.fingerprint)
        expected = _all(dataset.index)
    assert (root / key).is_file()
    copy = shutil.copytree(root, tmp_path / "copy")  # other versions, same dataset
    for place in (root, copy):
        index, store, metadata = _loaded(place, tmp_path / f"cache-{place.name}")
        assert metadata.fingerprint == dataset.fingerprint  # publishing changes nothing
        assert index.complete
        assert not store.reads
        assert _all(index) == expected
        index.close()
    # The copy's own cache knows the versions there, so a change is noticed.
    os.utime(_video(copy, 0), ns=(1, 1))
    index, store, _ = _loaded(copy, tmp_path / "cache-copy")
    assert set(store.reads) == {"videos/chunk-000/observation.images.cam0/episode_000000.mp4"}
    (root / key).write_bytes((root / key).read_bytes()[:-40])
    index, store, _ = _loaded(root, tmp_path / "third")
    assert index.complete
    assert len(store.reads) == len(LENGTHS)


def test_damaged_files_stand_alone(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    body = _video(root, 2).read_bytes()
    _video(root, 2).write_bytes(body[:-30])
    index, _, _ = _loaded(root, tmp_path)
    key = "videos/chunk-000/observation.images.cam0/episode_000002.mp4"
    assert list(index.errors) == [key]
    assert "episode_000002.mp4" in caplog.text
    keys, numbers = index.locate_many(np.array([1, 2, 3]), CAM, np.array([1, 6, 2]))
    assert (keys[1], numbers.tolist()) == (key, [1, 6, 2])
    assert (index.group(key, 6), index.unit_span(key, 0)) == (0, (0, 0))
    with pytest.raises(Mp4Error, match=r"episode_000002\.mp4: .*truncated"):
        index.object(key)
    with knonik.open(root, cache_dir=tmp_path) as dataset:
        with pytest.raises(ValueError, match=r"1 video objects cannot be used.*episode_000002\.mp4"):
            publish_index(dataset)
        assert list(dataset.index.errors) == [key]  # it is looked at again each time
    # Repaired, it is read.
    _video(root, 2).write_bytes(body)
    index, _, _ = _loaded(root, tmp_path)
    assert (index.errors, len(index.object(key))) == ({}, 7)


def test_rows_by_counting(shared_data: Path, tmp_path: Path) -> None:
    root = shared_data / "gr1_picknplace_v20"
    with (
        knonik.open(root, cache_dir=tmp_path) as by_time,
        knonik.open(root, cache_dir=tmp_path, match="index") as other,
    ):
        (camera,) = by_time.cameras
        lengths = by_time.episodes.length.tolist()
        for match, step in ((by_time, 1), (other, 0)):
            found = [match.locate(e, camera, f)[1] for e, n in enumerate(lengths) for f in (0, 7, n - 1)]
            assert found == [min(f + step, n - 1) for n in lengths for f in (0, 7, n - 1)]
        assert (by_time.index.num_far_rows(camera), other.index.num_far_rows(camera)) == (5, 0)
        key = by_time.locate(0, camera, 0)[0]
        assert (by_time.index.has_far_rows(key), other.index.has_far_rows(key)) == (True, False)
        assert other.frame(episode=0, camera=camera, frame=0).shape == (*by_time.image_shape(camera), 3)
    with pytest.raises(ValueError, match="match='nearest' is not known; allowed: time, index"):
        knonik.open(root, cache_dir=tmp_path, match="nearest")


def test_timestamps_come_with_the_other_columns(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that is still to be made costs no second pass over the data files."""
    passes = []

    def counted(store: object, episodes: object, names: list[str], *rest: object, **more: object) -> object:
        passes.append(list(names))
        return load_columns(store, episodes, names, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("knonik.dataset.load_columns", counted)
    monkeypatch.setattr("knonik.index.build.load_columns", counted)
    with knonik.open(root, cache_dir=tmp_path / "cache", background=False) as dataset:
        dataset.columns(["action", "observation.state"])
        dataset.locate(0, CAM, 0)
    assert passes == [["action", "observation.state", "timestamp"], ["timestamp"]]
    assert dataset.index.complete is False


def test_images_are_found_by_row(root: Path, tmp_path: Path) -> None:
    store = Watched(root)
    metadata = read_metadata(store)
    table = metadata.episodes
    images = CameraTable(keys=table.data_keys, object=table.data_object, start_s=np.zeros(len(table)), kind="image")
    mixed = replace(metadata, episodes=replace(table, cameras={**table.cameras, "pictures": images}))
    index = load_index(store, mixed, tmp_path)
    assert index.locate(2, "pictures", 5) == ("data/chunk-000/episode_000002.parquet", 5)
    keys, numbers = index.locate_many(np.array([0, 1]), "pictures", np.array([4, 3]))
    assert (keys, numbers.tolist()) == (list(table.data_keys[:2]), [4, 3])
    assert [index.group(keys[0], row) for row in (0, 63, 64)] == [0, 0, 1]
    assert (index.off_s("pictures", 0, 1), index.num_far_rows("pictures"), index.has_far_rows(keys[0])) == (0, 0, False)
    assert index.version(keys[0]) == metadata.objects[keys[0]].version != ""
    assert index.locate(2, CAM, 5)[1] == 5
    with pytest.raises(KeyError, match="is no video object"):
        index.object(keys[0])


def test_tables_survive_packing() -> None:
    rng = np.random.default_rng(0)
    codec = CodecRecord(name="h264", extradata=b"ab", width=3, height=4, timescale=90_000)
    for count, high in ((0, 9), (1, 9), (500, 1 << 40), (500, 200)):
        size = rng.integers(1, max(2, min(high, 1 << 31)), count)
        table = PacketTable(
            codec=codec,
            offset=rng.permutation(np.cumsum(size)) + high,
            size=size,
            pts=rng.integers(-high, high, count),
            dts=np.arange(count) * 3003 - 7,
            sync=rng.random(count) < 0.3,
            shown=rng.random(count) < 0.9,
        )
        again = unpack_table(pack_table(table))
        for name in ("offset", "size", "pts", "dts", "sync", "shown"):
            np.testing.assert_array_equal(getattr(again, name), getattr(table, name))
        assert again.codec == codec


def test_bytes_a_frame(shared_data: Path, tmp_path: Path) -> None:
    with knonik.open(shared_data / "g1_inspire_v30", cache_dir=tmp_path) as dataset:
        body = dataset.index.dump()
        assert len(body) < 4 * len(dataset)  # sizes are random and need about two bytes
        assert decode_index(body).fingerprint == dataset.fingerprint
