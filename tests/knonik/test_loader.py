"""The loader's promises: order, shares, resume, exact content, bounded memory, errors with context, no rest."""

import gc
import itertools
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import knonik
from knonik.loader import Loader, LoaderError
from knonik.order.mixture import Mixture, Part

LENGTHS = (7, 4, 9, 1, 6)  # 27 rows: no batch size below divides it
FRAMES = {"observation.images.cam0": 0, "observation.images.cam1": 1}


@pytest.fixture
def dataset(make_set, tmp_path: Path) -> knonik.Dataset:
    return knonik.open(make_set(LENGTHS), cache_dir=tmp_path / "cache")


def take(loader: Loader, count: int) -> list[knonik.Batch]:
    with loader:
        return list(itertools.islice(loader, count))


def places(batches: list[knonik.Batch]) -> list[tuple[int, int]]:
    return [place for batch in batches for place in zip(batch.episode.tolist(), batch.frame.tolist(), strict=True)]


def assert_equal(left: knonik.Batch, right: knonik.Batch) -> None:
    assert (left.text, left.begin) == (right.text, right.begin)
    for name in ("episode", "frame", "position", "action_is_pad", "dataset"):
        assert torch.equal(getattr(left, name), getattr(right, name)), name
    for name in ("images", "state", "action", "inputs"):
        ours, theirs = getattr(left, name), getattr(right, name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours), name


def test_content_of_a_batch(dataset: knonik.Dataset) -> None:
    windows = {"action": range(4), "observation.state": [-1, 0], "observation.images.cam0": [-2, 0]}
    for batch in take(Loader(dataset, batch_size=5, seed=1, windows=windows), 6):
        assert batch.images["observation.images.cam0"].shape == (5, 2, 32, 48, 3)
        assert batch.images["observation.images.cam1"].shape == (5, 1, 32, 48, 3)
        assert batch.state["observation.state"].shape == (5, 2, 3)
        assert batch.action["action"].shape == (5, 4, 2)
        assert batch.action["action"].dtype == batch.state["observation.state"].dtype == torch.float32
        assert len(batch) == 5
        for i, (episode, frame) in enumerate(places([batch])):
            last = LENGTHS[episode] - 1
            assert batch.text[i] == f"do thing {episode % 3} ✓"
            steps = [min(frame + k, last) for k in range(4)]
            assert batch.action["action"][i].tolist() == [[s + 1000 * episode, -s] for s in steps]
            assert batch.action_is_pad[i].tolist() == [frame + k > last for k in range(4)]
            before = max(frame - 1, 0)
            assert batch.state["observation.state"][i].tolist() == [[episode, s, s / 2] for s in (before, frame)]
            for camera, seen in (("cam0", (max(frame - 2, 0), frame)), ("cam1", (frame,))):
                key = f"observation.images.{camera}"
                for t, shown in enumerate(seen):
                    stock = dataset.frame(episode=episode, camera=key, frame=shown)
                    np.testing.assert_array_equal(batch.images[key][i, t].numpy(), stock)


def test_every_epoch_is_a_permutation_and_batches_straddle(dataset: knonik.Dataset) -> None:
    batches = take(Loader(dataset, batch_size=4, seed=5, cameras=[]), 27)
    everything = {(episode, frame) for episode, length in enumerate(LENGTHS) for frame in range(length)}
    found = places(batches)
    epochs = [found[27 * e : 27 * e + 27] for e in range(4)]
    assert all(len(set(epoch)) == 27 and set(epoch) == everything for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert [p for batch in batches for p in batch.position.tolist()] == list(range(108))
    order = dataset.order(seed=5, epoch=1)
    assert epochs[1] == [order[i] for i in range(27)]


def test_stored_order_without_shuffle(dataset: knonik.Dataset) -> None:
    found = places(take(Loader(dataset, batch_size=9, cameras=[], shuffle=False), 3))
    assert found == [(episode, frame) for episode, length in enumerate(LENGTHS) for frame in range(length)]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_global_order(dataset: knonik.Dataset, world: int) -> None:
    alone = take(Loader(dataset, batch_size=8, seed=2, cameras=["observation.images.cam1"]), 8)
    ranks = [
        take(
            Loader(
                dataset, batch_size=8 // world, seed=2, cameras=["observation.images.cam1"], rank=r, world_size=world
            ),
            8,
        )
        for r in range(world)
    ]
    for step, whole in enumerate(alone):
        for r in range(world):
            part = ranks[r][step]
            assert part.position.tolist() == whole.position[r::world].tolist()
            assert part.begin == whole.begin
            assert places([part]) == places([whole])[r::world]
            assert torch.equal(part.action["action"], whole.action["action"][r::world])
            key = "observation.images.cam1"
            assert torch.equal(part.images[key], whole.images[key][r::world])


def test_edge_inside_takes_only_whole_futures(dataset: knonik.Dataset) -> None:
    loader = Loader(dataset, batch_size=6, edge="inside", windows={"action": range(4)}, cameras=[])
    expected = {(episode, frame) for episode, length in enumerate(LENGTHS) for frame in range(length - 3)}
    assert loader.num_anchors == len(expected) == 14
    batches = take(loader, 7)
    assert set(places(batches)) == expected
    assert not any(batch.action_is_pad.any() for batch in batches)


@pytest.mark.parametrize("epochs", [0, 3])
def test_resume_continues_with_the_next_sample(dataset: knonik.Dataset, epochs: int) -> None:
    rng = np.random.default_rng(epochs)
    reference = take(Loader(dataset, batch_size=4, seed=9), 30)
    for step in rng.integers(epochs * 7, epochs * 7 + 7, 3).tolist():
        with Loader(dataset, batch_size=4, seed=9) as first:
            for _ in range(step):
                next(first)
            state = first.state_dict()
        assert len(json.dumps(state)) < 1024
        assert state["epoch"] * 27 + state["position"] == 4 * step
        with Loader(dataset, batch_size=4, seed=9, decode_threads=2, ring_batches=1) as second:
            next(second)  # loading drops what was made ahead
            second.load_state_dict(state)
            for expected in reference[step : step + 3]:
                assert_equal(next(second), expected)


def test_state_is_that_of_another_world_size(dataset: knonik.Dataset) -> None:
    reference = take(Loader(dataset, batch_size=8, seed=4, cameras=[]), 6)
    with Loader(dataset, batch_size=2, seed=4, cameras=[], rank=3, world_size=4) as one:
        for _ in range(3):
            next(one)
        state = one.state_dict()
    with Loader(dataset, batch_size=4, seed=4, cameras=[], rank=1, world_size=2) as other:
        other.load_state_dict(state)
        assert next(other).position.tolist() == reference[3].position[1::2].tolist()


def test_state_of_something_else_is_refused(dataset: knonik.Dataset, make_set, tmp_path: Path) -> None:
    state = Loader(dataset, batch_size=4, seed=1).state_dict()
    with pytest.raises(ValueError, match="saved seed is 1, this loader has 2"):
        Loader(dataset, batch_size=4, seed=2).load_state_dict(state)
    changed = knonik.open(make_set((7, 4, 9, 1, 5)), cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match="the dataset has changed"):
        Loader(changed, batch_size=4, seed=1).load_state_dict(state)
    fewer = knonik.open(dataset.uri, cache_dir=tmp_path / "cache", episodes=[0, 2])
    with pytest.raises(ValueError, match="give the same episodes"):
        Loader(fewer, batch_size=4, seed=1).load_state_dict(state)
    counted = knonik.open(dataset.uri, cache_dir=tmp_path / "cache", match="index")
    with pytest.raises(ValueError, match="saved match is 'time', this loader has 'index'"):
        Loader(counted, batch_size=4, seed=1).load_state_dict(state)
    other = knonik.open(dataset.uri, cache_dir=tmp_path / "cache", text_column="index")
    with pytest.raises(ValueError, match="saved text_column is 'task_index', this loader has 'index'"):
        Loader(other, batch_size=4, seed=1).load_state_dict(state)
    both = [Mixture([Part(dataset=dataset), Part(dataset=part)]) for part in (dataset, other)]
    state = Loader(both[0], batch_size=4, seed=1).state_dict()
    with pytest.raises(ValueError, match="saved text_column is 'task_index'"):
        Loader(both[1], batch_size=4, seed=1).load_state_dict(state)


def test_manual_acknowledge_counts_what_was_trained(dataset: knonik.Dataset) -> None:
    with Loader(dataset, batch_size=4, seed=1, cameras=[]) as loader:
        loader.manual_acknowledge = True
        first, second, third = (next(loader) for _ in range(3))
        assert loader.state_dict()["position"] == 0
        loader.acknowledge(first.to("cpu"))
        assert loader.state_dict()["position"] == 4
        again = iter(loader)
        assert [next(again).begin for _ in range(3)] == [second.begin, third.begin, 12]
        loader.acknowledge(third)
        assert loader.state_dict()["position"] == 12
        with pytest.raises(ValueError, match="position 4"):
            loader.acknowledge(second)


def test_transform_makes_inputs_outside_the_callers_thread(dataset: knonik.Dataset) -> None:
    threads = set()

    def double(batch: knonik.Batch) -> dict[str, torch.Tensor]:
        threads.add(threading.current_thread().name)
        return {"x": batch.action["action"] * 2}

    (batch,) = take(Loader(dataset, batch_size=4, transform=double), 1)
    assert torch.equal(batch.inputs["x"], batch.action["action"] * 2)
    assert threads == {"knonik-assemble"}


def test_versions_of_a_real_set_give_identical_batches(shared_data: Path, tmp_path: Path) -> None:
    windows = {"action": range(16), "observation.images.cam_high": [-1, 0]}
    options = {"batch_size": 6, "seed": 3, "windows": windows, "decode_threads": 2}
    old, new = (
        take(Loader(knonik.open(shared_data / name, cache_dir=tmp_path), **options), 3)
        for name in ("g1_inspire_v21", "g1_inspire_v30")
    )
    for left, right in zip(old, new, strict=True):
        assert_equal(left, right)
    dataset = knonik.open(shared_data / "g1_inspire_v21", cache_dir=tmp_path)
    episode, frame = places(old)[0]
    stock = dataset.frame(episode=episode, camera="observation.images.cam_high", frame=frame)
    np.testing.assert_array_equal(old[0].images["observation.images.cam_high"][0, 1].numpy(), stock)


def test_a_batch_is_never_written_again(dataset: knonik.Dataset) -> None:
    with Loader(dataset, batch_size=4, ring_batches=1) as loader:
        held = [next(loader) for _ in range(8)]
        copies = [batch.images["observation.images.cam0"].clone() for batch in held]
        for _ in range(8):
            next(loader)
        for batch, copy in zip(held, copies, strict=True):
            assert torch.equal(batch.images["observation.images.cam0"], copy)


def test_the_ring_is_bounded(dataset: knonik.Dataset) -> None:
    made = []
    with Loader(
        dataset, batch_size=4, ring_batches=2, transform=lambda batch: made.append(batch.begin) or {}
    ) as loader:
        next(loader)
        deadline = time.monotonic() + 60
        while loader.stages()["transform"]["items"] < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)  # room for a loader that does not stop
        assert made == [0, 4, 8]
        stages = loader.stages()
    assert stages["decode"]["items"] == 3 * 4 * 2
    assert stages["assemble"]["items"] == stages["transform"]["items"] == 3
    assert stages["assemble"]["blocked_s"] > 0 or stages["decode"]["starved_s"] > 0


def test_a_damaged_file_is_named_with_its_sample(make_set, tmp_path: Path, since) -> None:
    watch = since()
    root = shutil.copytree(make_set((6, 6), version="v2.1", cameras=1), tmp_path / "set")
    dataset = knonik.open(root, cache_dir=tmp_path / "cache")
    (video,) = root.rglob("episode_000001.mp4")
    key = video.relative_to(root).as_posix()
    gop = dataset.gop(key, 4)
    body = bytearray(video.read_bytes())
    begin, length = gop.span()
    body[begin : begin + length] = b"\xff" * length
    video.write_bytes(body)
    with Loader(dataset, batch_size=12, shuffle=False, decode_threads=2) as loader:
        with pytest.raises(LoaderError) as caught:
            next(loader)
        message = str(caught.value)
        assert "episode 1 frame 4" in message
        assert "observation.images.cam0" in message
        assert key in message
        assert caught.value.__cause__ is not None
        with pytest.raises(LoaderError):
            next(loader)
    assert watch.threads("knonik") == []


def test_a_failing_transform_surfaces(dataset: knonik.Dataset) -> None:
    def fail(batch: knonik.Batch) -> dict[str, torch.Tensor]:
        raise ArithmeticError("tokens ran out")

    with Loader(dataset, batch_size=4, transform=fail) as loader, pytest.raises(ArithmeticError, match="tokens"):
        next(loader)


def test_rows_too_far_from_their_frame_are_refused(shared_data: Path, tmp_path: Path) -> None:
    dataset = knonik.open(shared_data / "gr1_picknplace_v20", cache_dir=tmp_path, episodes=[0])
    loader = Loader(dataset, batch_size=1, shuffle=False)
    state = {**loader.state_dict(), "position": len(dataset) - 1}
    with loader:
        loader.load_state_dict(state)
        with pytest.raises(LoaderError, match="off the row's timestamp"):
            next(loader)


def test_nothing_is_left_after_close(make_set, tmp_path: Path, since) -> None:
    dataset = knonik.open(make_set(LENGTHS), cache_dir=tmp_path / "cache")
    dataset.columns(["observation.state", "action", "task_index"])  # the dataset's own, not the loader's
    watch = since()
    loader = Loader(dataset, batch_size=4, decode_threads=3)
    next(loader)
    assert len(watch.threads("knonik")) == 5  # planning, three decoding, assembling
    loader.close()
    loader.close()
    assert watch.threads() == []
    assert watch.files() == []
    with pytest.raises(LoaderError, match="closed"):
        next(loader)


def test_a_forgotten_loader_stops_its_threads(dataset: knonik.Dataset, since) -> None:
    watch = since()
    for _batch in Loader(dataset, batch_size=4):
        break
    gc.collect()
    assert watch.threads("knonik") == []


def test_the_interpreter_ends_with_a_loader_open(dataset: knonik.Dataset, tmp_path: Path) -> None:
    script = """
import sys, knonik
loader = knonik.Loader(knonik.open(sys.argv[1], cache_dir=sys.argv[2]), batch_size=4)
next(loader)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, dataset.uri, str(tmp_path / "cache")],
        timeout=900,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_torch_threads_are_left_alone(dataset: knonik.Dataset) -> None:
    before = torch.get_num_threads(), torch.get_num_interop_threads()
    take(Loader(dataset, batch_size=4, decode_threads=2), 3)
    assert (torch.get_num_threads(), torch.get_num_interop_threads()) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"rank": 2, "world_size": 2}, "rank=2"),
        ({"edge": "drop"}, "edge='drop'"),
        ({"cameras": ["front"]}, "front"),
        ({"windows": {"observation.velocity": [0]}}, "observation.velocity"),
        ({"windows": {"action": []}}, "action"),
        ({"ring_batches": 0}, "ring_batches=0"),
        ({"edge": "inside", "windows": {"action": range(50)}}, "horizon"),
    ],
)
def test_refusals(dataset: knonik.Dataset, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loader(dataset, **{"batch_size": 4, **options})


def test_memory_does_not_grow_over_epochs(make_set, tmp_path: Path) -> None:
    script = """
import sys, knonik
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])
dataset = knonik.open(sys.argv[1], cache_dir=sys.argv[2])
loader = knonik.Loader(dataset, batch_size=8, decode_threads=2, windows={"action": range(8)})
seen, sizes = 0, []
for batch in loader:
    seen += len(batch)
    if seen >= (len(sizes) + 1) * len(dataset):
        sizes.append(resident())
    if len(sizes) == 5:
        break
print(*sizes)
"""
    root = make_set((40,) * 12, size=(64, 64), cameras=2)
    done = subprocess.run(
        [sys.executable, "-c", script, root, tmp_path / "cache"],
        timeout=900,
        capture_output=True,
        check=True,
        text=True,
    )
    sizes = [int(size) for size in done.stdout.split()]
    assert sizes[4] <= sizes[1] * 1.05
