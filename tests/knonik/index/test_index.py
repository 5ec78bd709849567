"""Rows find their frames by counting: drift does not matter, real deviations are reported, caches are checked."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import knonik
from knonik.index.file import decode_index, encode_index
from knonik.index.gop import ObjectIndex
from knonik.index.stock import match_rows, nearest
from knonik.mp4.packets import CodecRecord, PacketTable
from knonik.write.lerobot import EpisodeData, write_lerobot

CAM = "observation.images.cam_high"
TOP = "observation.images.top"
EPISODES, ROWS, FPS = 60, 7, 30


def _encoded_set(root: Path, version: str) -> Path:
    """60 episodes of 7 frames; the brightness of each picture says which row it belongs to."""
    rng = np.random.default_rng(0)
    episodes = []
    for e in range(EPISODES):
        level = (np.arange(ROWS) * 31 + e * 4) % 256
        frames = np.broadcast_to(level[:, None, None, None], (ROWS, 32, 32, 3)).astype(np.uint8)
        columns = {"action": rng.normal(size=(ROWS, 2)).astype(np.float32)}
        episodes.append(EpisodeData(columns=columns, frames={TOP: frames}, task="t"))
    options = {"fps": FPS, "robot_type": "none", "codec": "h264", "gop": 3}
    return write_lerobot(root, episodes, version=version, episodes_per_file=20, **options)


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _encoded_set(tmp_path_factory.mktemp("sets") / "v30", "v3.0")


def _all_locations(ds: knonik.Dataset, camera: str) -> list[tuple[str, int]]:
    return [
        ds.locate(int(e), camera, frame)
        for e, n in zip(ds.episodes.ids, ds.episodes.length, strict=True)
        for frame in range(n)
    ]


def test_frames_of_joined_files_follow_each_other(joined: Path, tmp_path: Path) -> None:
    ds = knonik.open(joined, cache_dir=tmp_path)
    found = _all_locations(ds, TOP)
    assert len({key for key, _ in found}) == 3
    assert [frame for _, frame in found] == list(range(20 * ROWS)) * 3
    episodes, frames = np.repeat(ds.episodes.ids, ROWS), np.tile(np.arange(ROWS), EPISODES)
    keys, numbers = ds.index.locate_many(episodes, TOP, frames)
    assert list(zip(keys, numbers.tolist(), strict=True)) == found


@pytest.mark.parametrize("kind", ["constant 1e-9", "constant 2e-2", "random 1e-9..2e-2", "running sum"])
def test_drift_of_from_timestamp_does_not_matter(joined: Path, tmp_path: Path, kind: str) -> None:
    expected = _all_locations(knonik.open(joined, cache_dir=tmp_path / "one"), TOP)
    copy = tmp_path / "set"
    copy.mkdir()
    for name in ("data", "videos"):
        (copy / name).symlink_to(joined / name)
    (copy / "meta/episodes/chunk-000").mkdir(parents=True)
    for name in ("info.json", "tasks.parquet"):
        (copy / "meta" / name).write_bytes((joined / "meta" / name).read_bytes())
    rng = np.random.default_rng(1)
    drift = {
        "constant 1e-9": np.full(EPISODES, 1e-9),
        "constant 2e-2": np.full(EPISODES, 2e-2),
        "random 1e-9..2e-2": 10 ** rng.uniform(-9, np.log10(2e-2), EPISODES),
        "running sum": np.tile(np.arange(20) * 2e-3, 3),  # more than a frame at the end of a file
    }[kind]
    for path in sorted((joined / "meta/episodes").rglob("*.parquet")):
        table = pq.read_table(path)
        column = f"videos/{TOP}/from_timestamp"
        ids = table.column("episode_index").to_numpy()
        moved = table.column(column).to_numpy() + drift[ids]
        table = table.set_column(table.column_names.index(column), column, [moved])
        pq.write_table(table, copy / path.relative_to(joined))
    ds = knonik.open(copy, cache_dir=tmp_path / "two")
    assert _all_locations(ds, TOP) == expected
    assert ds.index.num_far_rows(TOP) == 0


def test_real_sets_agree_across_versions(shared_data: Path, tmp_path: Path) -> None:
    v21, v30 = (knonik.open(shared_data / f"g1_inspire_{v}", cache_dir=tmp_path) for v in ("v21", "v30"))
    assert [frame for _, frame in _all_locations(v21, CAM)] == [f for n in v21.episodes.length for f in range(n)]
    joined_frames = [frame for _, frame in _all_locations(v30, CAM)]
    assert joined_frames == [*range(776), *range(807), *range(265)]
    for e, frame in ((0, 0), (1, 220), (4, 17), (6, 264)):
        one, other = (ds.gop(*ds.locate(e, CAM, frame)) for ds in (v21, v30))
        assert [bytes(p) for p in one.read(v21.store)] == [bytes(p) for p in other.read(v30.store)]
    assert v21.index.num_far_rows(CAM) == v30.index.num_far_rows(CAM) == 0


def test_rows_that_are_one_frame_late(shared_data: Path, tmp_path: Path) -> None:
    ds = knonik.open(shared_data / "gr1_picknplace_v20", cache_dir=tmp_path)
    (camera,) = ds.cameras
    found = [frame for _, frame in _all_locations(ds, camera)]
    assert found == [min(f + 1, n - 1) for n in ds.episodes.length.tolist() for f in range(n)]
    assert ds.index.num_far_rows(camera) == 5
    assert ds.index.off_s(camera, 0, 415) == pytest.approx(0.05, abs=1e-4)
    assert ds.index.off_s(camera, 0, 414) == 0.0


def test_rule_on_single_objects() -> None:
    times = np.arange(10) / 10
    stamps = np.tile(np.arange(5) / 10, 2)
    length = np.array([5, 5])
    good = match_rows("k", times, np.array([0.0, 0.5]), length, stamps)
    assert good.frames.tolist() == list(range(10))
    assert good.off_s.max() < 1e-6
    # All pts late by 4 ms: same frames, every row reported, whether the file is joined or not.
    late = match_rows("k", times + 0.004, np.array([0.0, 0.5]), length, stamps)
    assert late.frames.tolist() == list(range(10))
    np.testing.assert_allclose(late.off_s, 0.004, atol=1e-6)
    # Fewer rows than frames: nothing can be counted, so the times decide.
    gap = match_rows("k", times, np.array([0.1, 0.6]), np.array([2, 3]), stamps[[0, 1, 0, 1, 2]])
    assert gap.first.tolist() == [1, 6]
    assert gap.frames.tolist() == [1, 2, 6, 7, 8]
    # Variable frame rate: pts are followed, not multiples of 1/fps.
    dropped = np.array([0.0, 0.1, 0.4, 0.5])
    rows = match_rows("k", dropped, np.array([0.0]), np.array([4]), dropped)
    assert rows.frames.tolist() == [0, 1, 2, 3]
    # A late start that metadata and pts agree on is fine.
    assert match_rows("k", times + 0.3, np.array([0.3, 0.8]), length, stamps).off_s.max() < 1e-6
    # Hours into a file float32 timestamps are coarser than the tolerance; the stock comparison still accepts them.
    far = np.arange(5) / 30 + 5000
    assert match_rows("k", far, np.array([0.0]), np.array([5]), far.astype(np.float32).astype(float)).off_s.max() < 1e-4


def test_nearest_takes_the_first_on_a_tie() -> None:
    times = np.array([0.0, 1.0, 2.0])
    assert nearest(times, np.array([-5, 0, 0.5, 0.51, 1.5, 1.75, 9])).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert nearest(np.array([0.25]), np.array([0.0, 7.0])).tolist() == [0, 0]


def _object(pts: list[int], sync: list[int], shown: list[bool] | None = None) -> ObjectIndex:
    count = len(pts)
    codec = CodecRecord(name="mpeg4", extradata=b"", width=2, height=2, timescale=10)
    table = PacketTable(
        codec=codec,
        offset=np.arange(count) * 100,
        size=np.full(count, 60),
        pts=np.array(pts),
        dts=np.arange(count),
        sync=np.isin(np.arange(count), sync),
        shown=np.array(shown or [True] * count),
    )
    return ObjectIndex("o.mp4", table)


def test_gops_with_reordered_frames() -> None:
    # Decode order I0 P3 B1 B2 | I6 B4 B5 (leading pictures of an open GOP) P8 B7.
    index = _object([0, 3, 1, 2, 6, 4, 5, 8, 7], sync=[0, 4])
    first, second = index.gop(5), index.gop(6)
    assert first.frames == range(6)
    assert first.pts.tolist() == [0, 3, 1, 2, 6, 4, 5]
    assert second.frames == range(6, 9)
    assert second.pts.tolist() == [6, 4, 5, 8, 7]
    assert index.gop(1).through(1).pts.tolist() == [0, 3, 1]
    assert index.gop(1).through(0).pts.tolist() == [0]
    assert first.through(3).pts.tolist() == [0, 3, 1, 2]
    assert first.span() == (0, 660)
    body = bytes(range(256)) * 3
    assert [bytes(p) for p in first.through(0).packets(body[:60])] == [body[:60]]
    with pytest.raises(IndexError, match=r"o\.mp4: frame 9 was asked for, the object has 9"):
        index.gop(9)
    with pytest.raises(IndexError, match=r"frame 6 is not in this GOP, which presents frames 0\.\.5"):
        first.pts_of(6)


def test_units_hold_the_packets_of_all_their_frames() -> None:
    index = _object([0, 3, 1, 2, 6, 4, 5, 8, 7], sync=[0, 4])
    # The leading pictures 4 and 5 lie behind the second sync packet, so the two units overlap.
    assert [index.span(g) for g in (0, 1)] == [(0, 660), (400, 460)]
    body = np.random.default_rng(0).integers(0, 256, 900, np.uint8).tobytes()
    for frame in range(9):
        begin, length = index.span(index.gop_number(frame))
        gop = index.gop(frame).through(frame)
        parts, pts = index.cut(frame, body[begin : begin + length], begin)
        assert pts == gop.pts.tolist()
        assert [bytes(part) for part in parts] == [body[o : o + 60] for o in gop.offsets.tolist()]
    assert index.reach(1) == (0, 260)
    with pytest.raises(IndexError, match=r"o\.mp4: frame 5 needs bytes 0-659, given are 0-599"):
        index.cut(5, body[:600], 0)
    with pytest.raises(IndexError, match=r"frame -1 was asked for"):
        index.cut(-1, body, 0)


def test_hidden_packets_are_decoded_but_no_frames() -> None:
    index = _object([-2, -1, 0, 1, 2, 3], sync=[0, 4], shown=[False, False, True, True, True, True])
    assert index.pts.tolist() == [0, 1, 2, 3]
    assert index.gop(0).pts.tolist() == [-2, -1, 0, 1]
    assert index.gop(0).frames == range(2)
    assert index.gop(2).frames == range(2, 4)


def test_cache_is_reused_and_rebuilt(joined: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "knonik")

    def opened() -> tuple[list[tuple[str, int]], str]:
        caplog.clear()
        with knonik.open(joined, cache_dir=tmp_path) as ds:
            return _all_locations(ds, TOP), caplog.text

    expected, text = opened()
    assert "index built" in text
    again, text = opened()
    assert again == expected
    assert "index reused" in text
    (path,) = tmp_path.rglob("index-*.npz")
    whole = path.read_bytes()
    middle = len(whole) // 2
    for damaged in (whole[:-50], b"", whole[:middle] + bytes(64) + whole[middle + 64 :]):
        path.write_bytes(damaged)
        again, text = opened()
        assert again == expected
        assert "damaged or out of date" in text
        assert "index built" in text
    stored = decode_index(path.read_bytes())
    path.write_bytes(encode_index(replace(stored, fingerprint="another")))
    assert "index built" in opened()[1]
    assert not list(tmp_path.rglob("*.tmp"))


def test_cached_index_equals_a_built_one(shared_data: Path, tmp_path: Path) -> None:
    for name in ("g1_inspire_v30", "gr1_picknplace_v20"):
        built = knonik.open(shared_data / name, cache_dir=tmp_path)
        cached = knonik.open(shared_data / name, cache_dir=tmp_path)
        assert cached.index.complete
        (camera,) = built.cameras
        assert _all_locations(built, camera) == _all_locations(cached, camera)
        for key in built.episodes.cameras[camera].keys:
            one, other = built.index.object(key), cached.index.object(key)
            for frame in (0, 1, len(one) // 2, len(one) - 1):
                ours, theirs = one.gop(frame), other.gop(frame)
                for field in ("offsets", "sizes", "pts", "frame_pts", "last_packet"):
                    np.testing.assert_array_equal(getattr(ours, field), getattr(theirs, field))
            np.testing.assert_array_equal(one.pts, other.pts)
            np.testing.assert_array_equal(one.first_frames, other.first_frames)
            assert one.codec == other.codec
        assert built.index.num_far_rows(camera) == cached.index.num_far_rows(camera)


def test_errors_name_what_was_asked(joined: Path, tmp_path: Path) -> None:
    ds = knonik.open(joined, cache_dir=tmp_path)
    with pytest.raises(KeyError, match=rf"camera 'front' is unknown; the dataset has {TOP}"):
        ds.locate(0, "front", 0)
    with pytest.raises(IndexError, match=r"episode 3 has frames 0\.\.6, frame 7 was asked for"):
        ds.locate(3, TOP, 7)
    with pytest.raises(KeyError, match="episode ids 60 are not in use"):
        ds.locate(60, TOP, 0)
    with pytest.raises(KeyError, match="is no video object"):
        ds.gop("videos/none.mp4", 0)
