"""What the loader can be asked for beyond the exact order of rgb frames: equal batches, less work, stated bounds."""

import itertools
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import knonik
from knonik.loader import Loader, LoaderError
from knonik.order.mixture import Mixture, Part
from knonik.video.colour import Planes
from knonik.video.decode import GopDecoder

LENGTHS = (30, 22, 26, 18)
CAMERAS = ["observation.images.cam0", "observation.images.cam1"]


class Halved:
    """A prefix that keeps every second pixel."""

    key = "halved"

    def shape(self, height: int, width: int) -> tuple[int, int]:
        return height // 2, width // 2

    def __call__(self, frames: torch.Tensor) -> torch.Tensor:
        return frames[:, ::2, ::2].contiguous()


@pytest.fixture
def dataset(make_set, tmp_path: Path) -> knonik.Dataset:
    return knonik.open(make_set(LENGTHS, gop=12), cache_dir=tmp_path / "cache")


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Frames fed to a decoder for each GOP decoded."""
    calls: list[int] = []
    start = GopDecoder.start

    def counted(self: GopDecoder, codec: Any, packets: Sequence[Any], *args: Any, **options: Any) -> Any:
        calls.append(len(packets))
        return start(self, codec, packets, *args, **options)

    monkeypatch.setattr(GopDecoder, "start", counted)
    return calls


def take(loader: Loader, count: int) -> list[knonik.Batch]:
    with loader:
        return list(itertools.islice(loader, count))


def assert_stock(dataset: knonik.Dataset, batch: knonik.Batch, step: slice = slice(None)) -> None:
    for camera, images in batch.images.items():
        for index, (episode, frame) in enumerate(zip(batch.episode.tolist(), batch.frame.tolist(), strict=True)):
            stock = dataset.frame(episode=episode, camera=camera, frame=frame)
            np.testing.assert_array_equal(images[index, 0].numpy(), stock[step, step])


def test_blocks_decode_each_gop_once_an_epoch(dataset: knonik.Dataset, decoded: list[int]) -> None:
    loader = Loader(
        dataset, batch_size=8, seed=3, order="blocks", block_window=24, lanes=2, decode_threads=2, ring_batches=2
    )
    with loader:
        batches = list(itertools.islice(loader, 12))  # 96 samples: the epoch
        gauges = loader.gauges()
    assert len({place for b in batches for place in zip(b.episode.tolist(), b.frame.tolist(), strict=True)}) == 96
    gops = 2 * sum(-(-length // 12) for length in LENGTHS)
    ahead = gauges["hold_decodes"] - gops  # of the next epoch, for batches in the ring
    assert 0 <= ahead <= gops
    bytes_each = 32 * 48 * 3
    assert 0 < gauges["hold_peak_bytes"] <= 2 * bytes_each * (loader._planner.held_samples + 3 * 8)
    decoded.clear()
    for batch in batches:
        assert_stock(dataset, batch)


def test_a_hold_that_is_too_small_is_refused(dataset: knonik.Dataset) -> None:
    with pytest.raises(ValueError, match="block_window=48 the pictures of"):
        Loader(dataset, batch_size=8, order="blocks", block_window=48, lanes=2, hold_bytes=1000)


def test_planes_become_the_same_rgb(dataset: knonik.Dataset) -> None:
    plain = take(Loader(dataset, batch_size=6, seed=1), 3)
    planes = take(Loader(dataset, batch_size=6, seed=1, transport="yuv420p"), 3)
    for left, right in zip(plain, planes, strict=True):
        assert all(isinstance(images, Planes) for images in right.images.values())
        assert sum(images.data.numel() for images in right.images.values()) * 2 == sum(
            images.numel() for images in left.images.values()
        )
        converted = right.rgb()
        assert all(torch.equal(left.images[camera], converted.images[camera]) for camera in CAMERAS)


def test_a_camera_that_a_part_lacks_is_black_in_any_transport(make_set, tmp_path: Path, dataset: Any) -> None:
    with knonik.open(make_set((9, 7), cameras=1), cache_dir=tmp_path / "one") as one:
        mixture = Mixture([Part(dataset=dataset, weight=1), Part(dataset=one, weight=1)], missing_cameras="black")
        options: dict[str, Any] = {"batch_size": 6, "seed": 1, "windows": {CAMERAS[1]: range(2)}}
        plain = take(Loader(mixture, **options), 3)
        planes = take(Loader(mixture, transport="yuv420p", **options), 3)
    for left, right in zip(plain, planes, strict=True):
        lacking = left.dataset == 1
        assert 0 < lacking.sum() < 6
        assert not left.images[CAMERAS[1]][lacking].any()
        assert isinstance(right.images[CAMERAS[1]], Planes)
        for camera in CAMERAS:
            assert torch.equal(left.images[camera], right.rgb().images[camera])


def test_kept_pictures_are_equal_and_decoded_once(dataset: knonik.Dataset, decoded: list[int]) -> None:
    room = len(dataset) * 2 * 16 * 24 * 3
    options: dict[str, Any] = {"batch_size": 8, "seed": 2, "prefix": Halved(), "cameras": CAMERAS, "decode_threads": 2}
    plain = take(Loader(dataset, **options), 12)
    decoded.clear()
    with Loader(dataset, decoded_bytes=room, **options) as loader:
        first = list(itertools.islice(loader, 24))
        gauges = loader.gauges()
    assert gauges["decoded_bytes"] == room
    assert len(decoded) < 2 * 96  # GOPs serve frames of later batches too
    decoded.clear()
    again = take(Loader(dataset, decoded_bytes=room, **options), 12)
    assert decoded == []
    for left, kept, warm in zip(plain, first, again, strict=False):
        assert_stock(dataset, left, slice(None, None, 2))
        for camera in CAMERAS:
            assert torch.equal(left.images[camera], kept.images[camera])
            assert torch.equal(left.images[camera], warm.images[camera])


def test_room_for_kept_pictures_is_checked(dataset: knonik.Dataset) -> None:
    needed = len(dataset) * 2 * 32 * 48 * 3
    with pytest.raises(ValueError, match=f"need {needed} bytes"):
        Loader(dataset, batch_size=4, decoded_bytes=needed - 1)
    with pytest.raises(ValueError, match="yuv420p"):
        Loader(dataset, batch_size=4, transport="yuv420p", prefix=Halved())


@pytest.fixture
def damaged(make_set, tmp_path: Path) -> tuple[knonik.Dataset, set[tuple[int, int]]]:
    """A dataset with one broken GOP, and the (episode, frame) it held."""
    root = Path(shutil.copytree(make_set((12, 12), version="v2.1", cameras=2, gop=4), tmp_path / "set"))
    with knonik.open(root, cache_dir=tmp_path / "sound") as sound:
        key, _ = sound.locate(1, CAMERAS[0], 4)
        begin, length = sound.gop(key, 4).span()
    body = bytearray((root / key).read_bytes())
    body[begin : begin + length] = b"\xff" * length
    (root / key).write_bytes(body)
    return knonik.open(root, cache_dir=tmp_path / "cache"), {(1, frame) for frame in range(4, 8)}


@pytest.mark.parametrize("order", ["exact", "blocks"])
def test_bad_samples_are_replaced_counted_and_listed(
    damaged: tuple[knonik.Dataset, set[tuple[int, int]]], order: str
) -> None:
    dataset, broken = damaged
    options: dict[str, Any] = {"batch_size": 6, "seed": 1, "order": order, "block_window": 12, "lanes": 2}
    with Loader(dataset, on_bad_sample="skip", max_bad_share=0.2, **options) as loader:
        batches = list(itertools.islice(loader, 4))
        bad = loader.bad_samples
        assert loader.gauges()["bad_samples"] >= 4
    assert {(sample.episode, sample.frame) for sample in bad} == broken
    assert all("cam0" in sample.reason and "frame" in sample.reason for sample in bad)
    seen = Counter(place for b in batches for place in zip(b.episode.tolist(), b.frame.tolist(), strict=True))
    assert not broken & seen.keys()
    assert [p for b in batches for p in b.position.tolist()] == list(range(24))
    for batch in batches:
        assert_stock(dataset, batch)  # pictures, rows and names of the sample that took the place
        assert batch.action["action"][:, 0, 0].tolist() == (1000 * batch.episode + batch.frame).tolist()


def test_packs_go_without_bad_samples(damaged: tuple[knonik.Dataset, set[tuple[int, int]]]) -> None:
    """A neighbour in the place of a short one would not fit into the budget."""
    dataset, broken = damaged

    def tokens(batch: knonik.Batch) -> list[int]:
        bad = (batch.episode == 1) & (batch.frame >= 4) & (batch.frame < 8)
        return (10 - 9 * bad.to(int)).tolist()

    options: dict[str, Any] = {"pack_tokens": 31, "pack_cost": tokens, "windows": {CAMERAS[1]: range(2)}}
    with Loader(dataset, batch_size=6, seed=1, on_bad_sample="skip", max_bad_share=0.2, **options) as loader:
        batches = []
        while not batches or batches[-1].end < 48:
            batches.append(next(loader))
        assert loader.gauges()["bad_samples_replaced"] >= 8
    assert max(sum(tokens(batch)) for batch in batches) <= 31
    kept = [
        (p, e, f)
        for b in batches
        for p, e, f in zip(b.position.tolist(), b.episode.tolist(), b.frame.tolist(), strict=True)
    ]
    assert {(e, f) for _, e, f in kept} == {(e, f) for e in (0, 1) for f in range(12)} - broken
    whole = take(Loader(dataset, batch_size=1, seed=1, cameras=[]), batches[-1].end)
    places = [(b.begin, b.episode.item(), b.frame.item()) for b in whole]
    assert kept == [place for place in places if place[1:] not in broken]
    for batch in batches:
        assert len(batch.images[CAMERAS[1]]) == len(batch) == len(batch.action["action"])
        for i, (episode, frame) in enumerate(zip(batch.episode.tolist(), batch.frame.tolist(), strict=True)):
            for camera, step in ((CAMERAS[0], 0), (CAMERAS[1], 0), (CAMERAS[1], 1)):
                stock = dataset.frame(episode=episode, camera=camera, frame=min(frame + step, 11))
                np.testing.assert_array_equal(batch.images[camera][i, step].numpy(), stock)


def test_too_many_bad_samples_are_raised(damaged: tuple[knonik.Dataset, set[tuple[int, int]]]) -> None:
    dataset, _ = damaged
    loader = Loader(dataset, batch_size=6, on_bad_sample="skip", max_bad_share=0.1)
    with loader, pytest.raises(LoaderError, match="episode 1 frame") as caught:
        list(itertools.islice(loader, 4))
    assert "max_bad_share=0.1" in caught.value.__notes__[0]


@pytest.mark.parametrize("order", ["exact", "blocks"])
def test_a_video_without_readable_header_is_a_bad_sample(make_set, tmp_path: Path, order: str) -> None:
    root = Path(shutil.copytree(make_set((6, 12, 12), version="v2.1", cameras=1, gop=4), tmp_path / "set"))
    with knonik.open(root, cache_dir=tmp_path / "cache", background=False) as dataset:
        next(root.rglob("episode_000000.mp4")).unlink()
        options: dict[str, Any] = {"batch_size": 6, "seed": 1, "order": order, "block_window": 12, "lanes": 2}
        with Loader(dataset, on_bad_sample="skip", max_bad_share=0.3, **options) as loader:
            batches = list(itertools.islice(loader, 5))
            bad = loader.bad_samples
        assert {(sample.episode, sample.frame) for sample in bad} == {(0, frame) for frame in range(6)}
        assert all("episode_000000.mp4" in sample.reason for sample in bad)
        for batch in batches:
            assert_stock(dataset, batch)
        with Loader(dataset, **options) as loader, pytest.raises(LoaderError, match="cannot read episode 0 frame"):
            list(itertools.islice(loader, 5))


def test_parts_share_the_bound_of_the_disk(make_set, tmp_path: Path, remote_store) -> None:
    sets = [knonik.open(make_set(lengths), cache_dir=tmp_path / "cache") for lengths in ((9, 7), (8, 6))]
    for dataset in sets:
        dataset.store = remote_store(dataset.store.root)
    with Loader(Mixture([Part(dataset=each) for each in sets]), batch_size=4, disk_bytes=40 << 20) as loader:
        next(loader)
        gauges = loader.gauges()
    assert gauges["disk_limit_bytes"] == 40 << 20
    assert gauges["pool_limit_bytes"] == 1 << 30


def test_a_mixture_fills_missing_cameras_with_black(make_set, dataset: knonik.Dataset, tmp_path: Path) -> None:
    other = knonik.open(make_set((9, 7), cameras=1), cache_dir=tmp_path / "cache")
    source = Mixture([Part(dataset=dataset), Part(dataset=other, weight=None)], missing_cameras="black")
    parts = {0: dataset, 1: other}
    for batch in take(Loader(source, batch_size=8, seed=4, decode_threads=2), 8):
        for index, (part, episode, frame) in enumerate(
            zip(batch.dataset.tolist(), batch.episode.tolist(), batch.frame.tolist(), strict=True)
        ):
            for camera in CAMERAS:
                shown = batch.images[camera][index, 0].numpy()
                if camera in parts[part].cameras:
                    stock = parts[part].frame(episode=episode, camera=camera, frame=frame)
                    np.testing.assert_array_equal(shown, stock)
                else:
                    assert not shown.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "sorted"}, "order='sorted'"),
        ({"transport": "nv12"}, "transport='nv12'"),
        ({"on_bad_sample": "zero"}, "on_bad_sample='zero'"),
        ({"max_bad_share": 2}, "max_bad_share=2"),
        ({"ram_bytes": -1}, "ram_bytes=-1"),
        ({"connections": 0}, "connections=0"),
    ],
)
def test_refusals(dataset: knonik.Dataset, options: Mapping[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loader(dataset, **{"batch_size": 4, **options})


def test_a_loader_that_cannot_start_leaves_no_threads(
    make_set, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote_store, since
) -> None:
    watch = since()
    root = make_set((8, 6), cameras=1)
    dataset = knonik.open(root, cache_dir=tmp_path / "cache")
    dataset.store = remote_store(root)

    def full(*args: Any, **options: Any) -> Any:
        raise OSError(28, "no space left")

    monkeypatch.setattr("knonik.batches.parts.open_decoded", full)
    with Loader(dataset, batch_size=4, decoded_bytes=1 << 30, disk_bytes=0) as loader:
        with pytest.raises(OSError, match="no space left"):
            next(loader)
        assert watch.threads("knonik-fetch") == []
