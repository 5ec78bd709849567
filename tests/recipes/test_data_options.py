"""Choices of the data section that must not change what the network sees, and those that choose what it sees."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.build import build_processor, loader_options
from recipes.check import checked
from recipes.schema import Recipe
from recipes.sources import open_all, training_part


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from knonik.write.lerobot import EpisodeData, write_lerobot

    def episodes():
        rng = np.random.default_rng(3)
        for number in range(6):
            rows = rng.normal(size=(18, 7)).astype(np.float32)
            frames = rng.integers(0, 256, (18, 96, 128, 3), np.uint8)
            yield EpisodeData(
                columns={"observation.state": rows, "action": rows},
                frames={"observation.images.front": frames},
                task=f"wave {number}",
            )

    where = tmp_path_factory.mktemp("options") / "set"
    return write_lerobot(where, episodes(), fps=10, robot_type="none", codec="h264")


def recipe(dataset: Path, tmp_path: Path, *overrides: str) -> Recipe:
    fixed = (f"data.uri={dataset}", "model.size=tiny", f"run.dir={tmp_path / 'run'}", f"data.cache.dir={tmp_path}")
    small = ("data.horizon=8", "data.global_batch_size=null", "data.batch_size=8")
    return checked("gr00t_n17/finetune", [*fixed, *small, *overrides])


def seen(recipe: Recipe, batches: int = 3) -> list[dict[str, torch.Tensor]]:
    """The network's inputs of the first batches, as the data module makes them."""
    import knonik

    with open_all(recipe)[0] as whole:
        data = training_part(recipe, whole)
        processor = build_processor(recipe, [data])
        options = loader_options(recipe, processor)
        windows = {"action": range(recipe.data.horizon)}
        with knonik.Loader(
            data,
            batch_size=8,
            seed=recipe.seed,
            windows=windows,
            edge="inside",
            transform=processor.prepare,
            decode_threads=1,
            **options,
        ) as loader:
            return [processor.to_network(next(loader).rgb(), augment=True) for _ in range(batches)]


@pytest.mark.parametrize("override", ["data.transport=yuv420p", "data.cache.decoded=20MB", "data.ring_batches=1"])
def test_how_frames_come_does_not_change_them(dataset: Path, tmp_path: Path, override: str) -> None:
    wanted = seen(recipe(dataset, tmp_path))
    for _ in range(2):  # the second time a cache of decoded frames is warm
        found = seen(recipe(dataset, tmp_path, override))
        for one, other in zip(wanted, found, strict=True):
            assert one.keys() == other.keys()
            for name in ("pixel_values", "image_grid_thw", "input_ids", "state", "action"):
                assert torch.equal(one[name], other[name]), name


def test_blocks_are_another_order_of_the_same_samples(dataset: Path, tmp_path: Path) -> None:
    anchors = 6 * (18 - 8 + 1)
    for order in ("exact", "blocks"):
        inputs = seen(recipe(dataset, tmp_path, f"data.order={order}", "model.processor.state_dropout_prob=0"), 8)
        states = torch.cat([batch["state"].flatten(1) for batch in inputs])
        assert len(torch.unique(states, dim=0)) == min(64, anchors)


def test_held_out_episodes_and_frames_are_not_trained(dataset: Path, tmp_path: Path) -> None:
    ranges = tmp_path / "ranges.json"
    ranges.write_text(json.dumps({"1": [[2, 4]], "4": [[0, 1]]}))
    chosen = recipe(dataset, tmp_path, f"data.ranges={ranges}")
    with open_all(chosen)[0] as data:
        assert len(data.anchors(8)) == 3
    chosen = recipe(dataset, tmp_path, "data.validation=0.4")
    with open_all(chosen)[0] as whole:
        training = training_part(chosen, whole)
        assert 0 < len(training.episodes) < 6
        assert training.episodes.ids.tolist() == whole.split(0.4, 0)[0].episodes.ids.tolist()
