"""A run stopped anywhere on four ranks goes on, on any number of them, with the samples and draws it would have had."""

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import knonik
from knonik.loader import Loader
from models.common import draws

SEED = 11
GLOBAL_BATCH = 8
STEPS = 40  # of the uninterrupted run: many epochs of each source
AFTER = 5  # steps compared after a stop
LENGTHS = (14, 9, 3, 11)  # 37 rows: no batch size divides them
CAM0 = "observation.images.cam0"

Source = knonik.Dataset | knonik.Mixture
Sample = tuple[Any, ...]


@pytest.fixture
def opened(make_set, tmp_path: Path) -> Iterator[Callable[..., knonik.Dataset]]:
    with ExitStack() as stack:

        def make(name: str, lengths: tuple[int, ...], **options: Any) -> knonik.Dataset:
            folder = make_set(lengths, cameras=1, **options)
            return stack.enter_context(knonik.open(folder, cache_dir=tmp_path / name))

        yield make


def make_case(kind: str, opened: Callable[..., knonik.Dataset]) -> tuple[Source, dict[str, Any]]:
    """A source and the loader options that go with it."""
    one = opened("one", LENGTHS, gop=5)
    if kind == "ranges":
        return one.subset(ranges={0: [(0, 5), (9, 14)], 1: [(2, 9)], 3: [(10, 11)]}), {}
    if kind == "exact":
        return one, {"edge": "inside"}
    blocks = {"order": "blocks", "block_window": 12, "lanes": 8}
    if kind == "blocks":
        return one, blocks
    two = opened("two", (4, 7), gop=3, fps=5)
    mixture = knonik.Mixture([knonik.Part(dataset=one, weight=0.7), knonik.Part(dataset=two, weight=0.3)], fps=10)
    return mixture, blocks if kind == "mixture of blocks" else {}


def draw(batch: knonik.Batch) -> dict[str, torch.Tensor]:
    return {"noise": draws.normal(SEED, "test", batch.position, (2,))}


def loaders(source: Source, world: int, stack: ExitStack, **options: Any) -> list[Loader]:
    """The loaders of all ranks of a run."""
    defaults = {
        "cameras": [],
        "windows": {"action": range(3)},
        "transform": draw,
        "decode_threads": 1,
        "ring_batches": 2,  # what is made ahead is dropped at every stop
    }
    return [
        stack.enter_context(
            Loader(
                source,
                batch_size=GLOBAL_BATCH // world,
                seed=SEED,
                rank=rank,
                world_size=world,
                **{**defaults, **options},
            )
        )
        for rank in range(world)
    ]


def step(ranks: list[Loader]) -> list[Sample]:
    """The samples of one step over all ranks, by position, with everything that belongs to each."""
    samples: list[Sample] = []
    for batch in (next(rank) for rank in ranks):
        for i in range(len(batch)):
            values = [batch.dataset, batch.episode, batch.frame, *batch.state.values(), *batch.action.values()]
            values += [batch.action_is_pad, *batch.inputs.values(), *batch.images.values()]
            samples.append((int(batch.position[i]), batch.text[i], *(value[i].numpy().tobytes() for value in values)))
    return sorted(samples)


@pytest.mark.parametrize(
    ("kind", "every"), [("exact", 1), ("mixture", 1), ("ranges", 3), ("blocks", 3), ("mixture of blocks", 3)]
)
def test_stop_on_four_ranks_and_go_on_with_others(opened: Callable[..., knonik.Dataset], kind: str, every: int) -> None:
    """`every`: 1 = each stop goes on with each number of ranks, 3 = with one of them."""
    source, options = make_case(kind, opened)
    stops = np.random.default_rng(0).choice(np.arange(1, STEPS - AFTER), 20, replace=False).tolist()
    with ExitStack() as stack:
        alone = loaders(source, 1, stack, **options)
        whole = list(itertools.chain.from_iterable(step(alone) for _ in range(STEPS)))
        assert [sample[0] for sample in whole] == list(range(STEPS * GLOBAL_BATCH))
        assert len({sample[-1] for sample in whole}) == len(whole)  # no draw comes twice

        four, saved = loaders(source, 4, stack, **options), {}
        for number in range(STEPS):
            if number in stops:
                states = [json.dumps(rank.state_dict()) for rank in four]
                assert len(set(states)) == 1
                assert len(states[0]) < 1024
                saved[number] = states[0]
            assert step(four) == whole[number * GLOBAL_BATCH : (number + 1) * GLOBAL_BATCH]

        for turn, world in enumerate((1, 2, 8)):
            ranks = loaders(source, world, stack, **options)
            for number, state in list(saved.items())[turn % every :: every]:
                for rank in ranks:
                    rank.load_state_dict(json.loads(state))
                found = list(itertools.chain.from_iterable(step(ranks) for _ in range(AFTER)))
                assert found == whole[number * GLOBAL_BATCH : (number + AFTER) * GLOBAL_BATCH], (world, number)


@pytest.mark.parametrize("order", ["exact", "blocks"])
def test_pictures_are_those_of_the_uninterrupted_run(opened: Callable[..., knonik.Dataset], order: str) -> None:
    one, two = opened("one", LENGTHS, gop=5), opened("two", (4, 7), gop=3)
    source = knonik.Mixture([knonik.Part(dataset=one), knonik.Part(dataset=two)])
    options = {"cameras": [CAM0], "order": order, "block_window": 8, "lanes": 4}
    with ExitStack() as stack:
        alone = loaders(source, 1, stack, **options)
        whole = [step(alone) for _ in range(12)]
        for sample in itertools.chain.from_iterable(whole[::4]):
            part, episode, frame = (int(np.frombuffer(value, np.int64)[0]) for value in sample[2:5])
            stock = (one, two)[part].frame(episode=episode, camera=CAM0, frame=frame)
            assert sample[-1] == stock.tobytes()
        for world, number in ((2, 3), (4, 5)):
            ranks = loaders(source, world, stack, **options)
            state = {
                **alone[0].state_dict(),
                **dict(zip(("epoch", "position"), divmod(number * GLOBAL_BATCH, 48), strict=True)),
            }
            for rank in ranks:
                rank.load_state_dict(state)
            assert [step(ranks) for _ in range(4)] == whole[number : number + 4]


def test_a_state_of_another_order_is_refused(opened: Callable[..., knonik.Dataset]) -> None:
    one, two = opened("one", LENGTHS, gop=5), opened("two", (4, 7), gop=3)

    def mixture(*weights: float) -> knonik.Mixture:
        return knonik.Mixture(
            [knonik.Part(dataset=part, weight=weight) for part, weight in zip((one, two), weights, strict=True)]
        )

    blocks = {"order": "blocks", "block_window": 12}
    with ExitStack() as stack:
        state = loaders(mixture(3, 1), 1, stack, **blocks)[0].state_dict()
        for source, options, named in (
            (mixture(1, 1), blocks, "fingerprint"),
            (one, blocks, "fingerprint"),
            (mixture(3, 1), {}, "order"),
            (mixture(3, 1), {**blocks, "block_window": 64}, "order"),
        ):
            with pytest.raises(ValueError, match=f"saved {named} is"):
                loaders(source, 1, stack, **options)[0].load_state_dict(state)
        loaders(mixture(3, 1), 2, stack, **blocks)[1].load_state_dict(state)
