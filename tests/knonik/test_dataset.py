"""Acceptance of the read path: every frame of the real sets equals the stock rule applied with a container reader."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq
import pytest

import knonik
from knonik.index.gop import ObjectIndex
from knonik.mp4.packets import read_packets
from knonik.stores.base import open_store
from knonik.video.decode import GopDecoder
from knonik.write.lerobot import EpisodeData, write_lerobot

CAM = "observation.images.cam_high"
TOP = "observation.images.top"


def _episodes() -> list[EpisodeData]:
    """Three episodes of 8 small pictures."""
    rng = np.random.default_rng(0)
    return [
        EpisodeData(
            columns={"action": rng.normal(size=(8, 2)).astype(np.float32)},
            frames={TOP: rng.integers(0, 256, (8, 32, 48, 3), np.uint8)},
            task=f"task {e % 2}",
        )
        for e in range(3)
    ]


def _container_frames(path: Path) -> Any:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        for frame in container.decode(stream):
            yield float(frame.pts * stream.time_base), frame


def _presentation_times(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        return np.array(sorted(float(p.pts * stream.time_base) for p in container.demux(stream) if p.size))


def _stock_rows(root: Path) -> dict[str, list[tuple[int, int, float]]]:
    """Video path -> (episode, row, query time), from the raw files and nothing of ours."""
    rows: dict[str, list[tuple[int, int, float]]] = {}
    if (root / "meta/episodes").is_dir():
        episodes = pq.read_table(root / "meta/episodes").to_pylist()
        data = pq.read_table(root / "data", columns=["timestamp", "episode_index"])
        stamps, owner = data.column("timestamp").to_numpy(), data.column("episode_index").to_numpy()
        for e in episodes:
            place = f"chunk-{e[f'videos/{CAM}/chunk_index']:03d}/file-{e[f'videos/{CAM}/file_index']:03d}.mp4"
            start = e[f"videos/{CAM}/from_timestamp"]
            times = stamps[owner == e["episode_index"]]
            listed = rows.setdefault(f"videos/{CAM}/{place}", [])
            listed += [(e["episode_index"], row, start + float(t)) for row, t in enumerate(times)]
        return rows
    for path in sorted((root / "data").rglob("*.parquet")):
        times = pq.read_table(path, columns=["timestamp"]).column("timestamp").to_numpy()
        (video,) = root.glob(f"videos/chunk-000/*/{path.stem}.mp4")
        listed = [(int(path.stem[-6:]), row, float(t)) for row, t in enumerate(times)]
        rows[video.relative_to(root).as_posix()] = listed
    return rows


@pytest.mark.parametrize("name", ["g1_inspire_v21", "g1_inspire_v30"])
def test_every_row_gives_the_stock_frame(shared_data: Path, tmp_path: Path, name: str) -> None:
    root = shared_data / name
    compared = 0
    with knonik.open(root, cache_dir=tmp_path) as ds:
        assert ds.image_shape(CAM) == (480, 640)
        for video, rows in _stock_rows(root).items():
            times = _presentation_times(root / video)
            owners: dict[int, list[tuple[int, int]]] = {}
            for episode, row, query in rows:
                frame = int(np.argmin(np.abs(times - query)))
                assert abs(times[frame] - query) <= 1e-4
                owners.setdefault(frame, []).append((episode, row))
            for number, (time, picture) in enumerate(_container_frames(root / video)):
                assert time == times[number]
                expected = picture.to_ndarray(format="rgb24")
                for episode, row in owners.get(number, ()):
                    got = ds.frame(episode=episode, camera=CAM, frame=row)
                    assert np.array_equal(got, expected), f"{video}: episode {episode} row {row}"
                    compared += 1
        assert compared == len(ds) == 1848


def test_long_gops_with_b_frames(shared_data: Path, tmp_path: Path) -> None:
    # GOP 250: whole GOPs are decoded once, the rows are compared by frame number, and a few through frame().
    root = shared_data / "gr1_picknplace_v20"
    ds = knonik.open(root, cache_dir=tmp_path)
    (camera,) = ds.cameras
    decoder = GopDecoder()
    for video, rows in _stock_rows(root).items():
        times = _presentation_times(root / video)
        for episode, row, query in rows:
            assert ds.locate(episode, camera, row) == (video, int(np.argmin(np.abs(times - query))))
        container = _container_frames(root / video)
        done = 0
        while done < len(times):
            gop = ds.gop(video, done)
            out = [np.empty((256, 256, 3), np.uint8) for _ in gop.frames]
            decoder.decode(gop.codec, gop.read(ds.store), gop.pts.tolist(), gop.frame_pts.tolist(), out)
            for picture in out:
                assert np.array_equal(picture, next(container)[1].to_ndarray(format="rgb24"))
            if done == 0:
                np.testing.assert_array_equal(ds.frame(episode=rows[0][0], camera=camera, frame=4), out[5])
            done = gop.frames.stop
    with pytest.raises(ValueError, match=r"episode 0, camera .*ego_view, frame 415: .* 0\.0499\d* s away.* 5 rows"):
        ds.frame(episode=0, camera=camera, frame=415)
    ds.close()


def test_labelled_frames_in_any_order(shared_data: Path) -> None:
    store = open_store(shared_data / "labeled_frames_av1")
    key = "videos/labeled_frames.mp4"
    index = ObjectIndex(key, read_packets(store, key))
    expected = [
        frame.to_ndarray(format="rgb24") for _, frame in _container_frames(shared_data / "labeled_frames_av1" / key)
    ]
    assert len(index) == len(expected) == 40
    decoder = GopDecoder()
    for frame in np.random.default_rng(0).permutation(40).tolist():
        gop = index.gop(frame).through(frame)
        out = np.empty_like(expected[0])
        decoder.decode(gop.codec, gop.read(store), gop.pts.tolist(), [gop.pts_of(frame)], [out])
        np.testing.assert_array_equal(out, expected[frame])


def test_facts_about_a_dataset(shared_data: Path, tmp_path: Path) -> None:
    with knonik.open(f"file://{shared_data}/g1_inspire_v30", cache_dir=tmp_path) as ds:
        assert (ds.version, ds.fps, len(ds), len(ds.episodes)) == ("v3.0", 30.0, 1848, 7)
        assert ds.cameras == [CAM]
        assert ds.features["action"]["shape"] == [26]
        assert ds.tasks == {0: "Pick up the yellow bottle on the table."}
        assert len(ds.fingerprint) == 64
        assert ds.texts(np.array([6]), np.array([264])) == ["Pick up the yellow bottle on the table."]
        anchors = {ds.order(seed=0, epoch=2)[i] for i in range(1848)}
        assert len(anchors) == 1848
        assert len(ds.order(seed=0, epoch=0, horizon=8)) == 1848 - 7 * 7


def test_episode_subset_keeps_ids(shared_data: Path, tmp_path: Path) -> None:
    root = shared_data / "g1_inspire_v30"
    whole = knonik.open(root, cache_dir=tmp_path)
    part = knonik.open(root, cache_dir=tmp_path, episodes=[5, 2])
    assert part.episodes.ids.tolist() == [2, 5]
    assert len(part) == 277 + 260
    assert part.fingerprint == whole.fingerprint
    ids, frames = np.array([5, 2]), np.array([259, 0])
    for ds in (whole, part):
        actions = ds.column("action")[ds.rows(ids, frames)]
        raw = pq.read_table(root / "data", columns=["action", "episode_index"])
        owner = raw.column("episode_index").to_numpy()
        values = np.array(raw.column("action").to_pylist(), np.float32)
        np.testing.assert_array_equal(actions, [values[owner == 5][259], values[owner == 2][0]])
    assert part.locate(5, CAM, 259) == whole.locate(5, CAM, 259)
    assert {part.order(seed=0, epoch=0)[i][0] for i in range(len(part))} == {2, 5}
    window, is_pad = part.window(ids, frames, range(3))
    assert window.tolist() == [[259, 259, 259], [0, 1, 2]]
    assert is_pad.tolist() == [[False, True, True], [False, False, False]]
    assert part.rows(ids, window)[1].tolist() == [499, 500, 501]
    for call in (lambda: part.frame(episode=0, camera=CAM, frame=0), lambda: part.rows(np.array([0]), np.array([0]))):
        with pytest.raises(KeyError, match="episode ids 0 are not in use; the 2 in use run from 2 to 5"):
            call()
    with pytest.raises(KeyError, match="episode ids 7, 8 are not in use"):
        knonik.open(root, cache_dir=tmp_path, episodes=[1, 7, 8])


def test_statistics_of_the_episodes_in_use(shared_data: Path, tmp_path: Path) -> None:
    for episodes, rows in ((None, slice(0, 1848)), ([1], slice(278, 499))):
        for _ in range(2):  # computed, then from the cache
            ds = knonik.open(shared_data / "g1_inspire_v30", cache_dir=tmp_path, episodes=episodes)
            values = np.asarray(ds.column("action"))[rows]
            found = ds.statistics("action")
            assert {array.dtype for array in found.values()} == {np.dtype(np.float64)}
            assert {array.shape for array in found.values()} == {(26,)}
            np.testing.assert_array_equal(found["min"], values.min(0))
            np.testing.assert_array_equal(found["max"], values.max(0))
            np.testing.assert_allclose(found["mean"], values.astype(np.float64).mean(0), rtol=1e-12)
            np.testing.assert_allclose(found["std"], values.astype(np.float64).std(0), rtol=1e-12)
            np.testing.assert_allclose(found["q01"], np.quantile(values, 0.01, axis=0), rtol=1e-6)
            np.testing.assert_allclose(found["q99"], np.quantile(values, 0.99, axis=0), rtol=1e-6)
    files = list(tmp_path.rglob("statistics-*.json"))
    assert len(files) == 2
    files[0].write_text("{")
    for episodes in (None, [1]):
        knonik.open(shared_data / "g1_inspire_v30", cache_dir=tmp_path, episodes=episodes).statistics("action")
    assert files[0].read_text() != "{"


def test_s3_gives_the_same_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("moto")
    import boto3
    from moto.server import ThreadedMotoServer

    root = write_lerobot(tmp_path / "set", _episodes(), fps=10, robot_type="none", codec="h264", episodes_per_file=2)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
        for name, value in (("ACCESS_KEY_ID", "test"), ("SECRET_ACCESS_KEY", "test"), ("DEFAULT_REGION", "us-east-1")):
            monkeypatch.setenv(f"AWS_{name}", value)
        client = boto3.session.Session().client("s3")
        client.create_bucket(Bucket="whole-set")  # moto keeps buckets for the whole process
        for path in root.rglob("*"):
            if path.is_file():
                client.upload_file(str(path), "whole-set", f"sets/one/{path.relative_to(root)}")
        client.close()
        local = knonik.open(root, cache_dir=tmp_path / "a")
        with knonik.open("s3://whole-set/sets/one", cache_dir=tmp_path / "b") as remote:
            assert remote.fingerprint == local.fingerprint
            np.testing.assert_array_equal(remote.column("action"), local.column("action"))
            for episode, frame in ((0, 0), (1, 5), (2, 7), (2, 3)):
                one, other = (ds.frame(episode=episode, camera=TOP, frame=frame) for ds in (local, remote))
                np.testing.assert_array_equal(one, other)
    finally:
        server.stop()


def test_damaged_video_is_named(tmp_path: Path) -> None:
    root = write_lerobot(tmp_path / "set", _episodes(), fps=10, robot_type="none", codec="h264", version="v2.1")
    ds = knonik.open(root, cache_dir=tmp_path / "cache")
    key, number = ds.locate(1, TOP, 4)
    start, length = ds.gop(key, number).span()
    body = bytearray((root / key).read_bytes())
    body[start : start + length] = bytes(length)
    (root / key).write_bytes(body)
    with pytest.raises(RuntimeError, match=rf"episode 1, camera {TOP}, frame 4 \(frame 4 of .*episode_000001\.mp4\): "):
        ds.frame(episode=1, camera=TOP, frame=4)
    (root / key).write_bytes(body[:start])
    with pytest.raises(OSError, match=r"short read of .*episode_000001\.mp4 bytes"):
        ds.frame(episode=1, camera=TOP, frame=4)


def test_missing_places_say_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no LeRobot dataset at .*/nowhere: looked for meta/info\.json"):
        knonik.open(tmp_path / "nowhere", cache_dir=tmp_path)


def test_cache_folder_comes_from_the_environment(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KNONIK_CACHE", str(tmp_path / "own"))
    ds = knonik.open(shared_data / "gr1_picknplace_v20")
    assert list((tmp_path / "own" / ds.fingerprint).glob("index-*.npz"))
    monkeypatch.delenv("KNONIK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    ds = knonik.open(shared_data / "gr1_picknplace_v20")
    assert list((tmp_path / "xdg" / "knonik" / ds.fingerprint).glob("index-*.npz"))


def test_reading_an_index_imports_no_heavy_library(shared_data: Path, tmp_path: Path) -> None:
    code = (
        "import sys, knonik; ds = knonik.open(sys.argv[1], cache_dir=sys.argv[2]); ds.locate(0, ds.cameras[0], 0); "
        "print([name for name in ('torch', 'av', 'boto3', 'lightning', 'pandas') if name in sys.modules])"
    )
    root = shared_data / "g1_inspire_v30"
    command = [sys.executable, "-c", code, str(root), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
    assert result.stdout.strip() == "[]"


def test_a_broken_data_file_leaves_the_other_episodes_usable(tmp_path: Path) -> None:
    root = write_lerobot(tmp_path / "set", _episodes(), fps=10, robot_type="none", codec="h264", version="v2.1")
    with knonik.open(root, cache_dir=tmp_path / "whole") as dataset:
        expected = [dataset.frame(episode=2, camera=TOP, frame=i) for i in range(8)]
        action = np.array(dataset.column("action")[16:])
    path = root / "data/chunk-000/episode_000001.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    damaged = r"episode_000001\.parquet: .*footer.*episode 1"
    with knonik.open(root, cache_dir=tmp_path / "cache") as dataset:
        with pytest.raises(ValueError, match=damaged):
            dataset.column("action")
        with pytest.raises(ValueError, match=r"episode 1, .*frame 3: the row has no timestamp"):
            dataset.frame(episode=1, camera=TOP, frame=3)
        others = dataset.subset([0, 2])
        np.testing.assert_array_equal(others.column("action")[16:], action)
        assert np.isfinite(others.statistics("action")["mean"]).all()
        np.testing.assert_array_equal([others.frame(episode=2, camera=TOP, frame=i) for i in range(8)], expected)
        with pytest.raises(ValueError, match=damaged):  # what the part has read is no way around it
            dataset.column("action")
    with (
        knonik.open(root, cache_dir=tmp_path / "cache", episodes=[0, 2]) as dataset,
        knonik.Loader(dataset, batch_size=4, seed=0, state=[], action=["action"]) as loader,
    ):
        assert {int(e) for _ in range(8) for e in next(loader).episode} == {0, 2}
