"""The tabletop: its physics and expert fit together, it looks as described, and every draw repeats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

import knonik
from models.common.optim import OptimizerConfig, ScheduleConfig
from recipes.tabletop.closed_loop import evaluate
from recipes.tabletop.demos import demonstration_episodes, generate_demonstrations
from recipes.tabletop.expert import demonstrate, expert_action
from recipes.tabletop.grounding import GroundingDataset, GroundingModule, GroundingSettings, grounding_batch
from recipes.tabletop.render import CAMERAS, IMAGE_SIZE, render
from recipes.tabletop.world import COLOURS, Scene, TabletopWorld, arrangement_is_held_out, draw_layouts, instruction

TOP, WRIST, SIDE = CAMERAS
PURE = {"red": (240, 20, 20), "green": (20, 220, 30), "blue": (30, 40, 245)}


def scene_with(gripper: tuple[float, float, float], red: tuple[float, float], blue: tuple[float, float]) -> Scene:
    return Scene(
        gripper=np.array([gripper]),
        opening=np.ones(1),
        blocks=np.array([[[*red, 0.0], [*blue, 0.0]]]),
        colours=np.array([[0, 2]]),
    )


def centroid(frame: np.ndarray, colour: str) -> tuple[float, float]:
    rows, columns = np.nonzero((frame == np.array(PURE[colour])).all(axis=-1))
    assert len(rows), f"no {colour} pixel"
    return float(rows.mean()) + 0.5, float(columns.mean()) + 0.5


class ColourExpert:
    """The scripted expert, but with eyes: finds the named block in the top view, knows the gripper from the state."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[float, float]] = {}

    def __call__(
        self, images: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray], text: Sequence[str]
    ) -> dict[str, np.ndarray]:
        frames, robot = images[TOP], state["observation.state"]
        goal = np.zeros((len(text), 2, 3))
        for row, sentence in enumerate(text):
            r, c = centroid(frames[row], sentence.split()[3])
            goal[row, 0, :2] = (c - 32) * 2.1 / 64, (32 - r) * 2.1 / 64
        scene = Scene(gripper=robot[:, :3], opening=robot[:, 6], blocks=goal, colours=np.zeros((len(text), 2), int))
        held = np.where(robot[:, 6] < 0.55, 0, -1)
        return {"action": expert_action(scene, held, np.zeros(len(text), int))[:, None]}


def test_expert_succeeds_on_every_layout_for_both_blocks_in_the_stated_lengths() -> None:
    layouts = draw_layouts(0, "train", range(200))
    pairs = layouts.take(np.repeat(np.arange(200), 2))
    done = demonstrate(pairs, np.tile([0, 1], 200), seed=0)
    assert all(demonstration.succeeded for demonstration in done)
    lengths = np.array([len(demonstration.state) for demonstration in done])
    assert lengths.min() >= 7
    assert lengths.max() <= 45
    assert 18 <= np.median(lengths) <= 25
    assert all(demonstration.action.shape == (n, 7) for demonstration, n in zip(done, lengths, strict=True))


def test_recorded_actions_are_the_clean_ones() -> None:
    layouts = draw_layouts(4, "train", range(5))
    target = np.array([0, 1, 0, 1, 0])
    for demonstration, which in zip(demonstrate(layouts, target, seed=4), target, strict=True):
        scene = demonstration.scene
        approach = demonstration.action[:, 6] > 0.5
        count = len(scene)
        clean = expert_action(scene, np.full(count, -1), np.full(count, which))
        np.testing.assert_allclose(demonstration.action[approach], clean[approach], atol=1e-6)
        moved = np.diff(demonstration.state[:, :2], axis=0)
        assert np.abs(moved - demonstration.action[:-1, :2]).max() > 1e-3  # the executed ones were disturbed


def test_grasp_needs_a_low_closed_gripper_near_the_block() -> None:
    layouts = draw_layouts(0, "train", range(1))
    rows = np.array([0])
    for height, offset, grasps in ((0.05, 0.0, True), (0.3, 0.0, False), (0.05, 0.2, False), (0.05, 0.15, True)):
        world = TabletopWorld(layouts)
        direction = -np.sign(world.blocks[0, 0, 0])  # inward, so that the table edge plays no part
        world.gripper[0] = [world.blocks[0, 0, 0] + direction * offset, world.blocks[0, 0, 1], height]
        world.step(np.zeros((1, 7)), rows)
        assert world.held[0] == (0 if grasps else -1)
        if grasps:
            for _ in range(3):
                world.step(np.array([[0, 0, 0.09, 0, 0, 0, 0]]), rows)
            assert world.lifted[0] == 0
            np.testing.assert_array_equal(world.blocks[0, 0], world.gripper[0])
            world.step(np.array([[0, 0, 0, 0, 0, 0, 1.0]]), rows)
            world.step(np.array([[0, 0, 0, 0, 0, 0, 1.0]]), rows)
            assert world.held[0] == -1
            assert world.blocks[0, 0, 2] == 0.0


def test_only_the_rows_given_move() -> None:
    world = TabletopWorld(draw_layouts(0, "train", range(3)))
    before = world.gripper.copy()
    world.step(np.full((1, 7), 0.05), np.array([1]))
    assert (world.gripper[[0, 2]] == before[[0, 2]]).all()
    assert (world.gripper[1] != before[1]).all()


def test_world_refuses_actions_that_are_not_numbers() -> None:
    world = TabletopWorld(draw_layouts(0, "train", range(1)))
    with pytest.raises(ValueError, match="NaN"):
        world.step(np.full((1, 7), np.nan), np.array([0]))


def test_layouts_are_a_function_of_seed_split_and_index() -> None:
    some = draw_layouts(3, "train", [7, 2, 9])
    many = draw_layouts(3, "train", range(12))
    np.testing.assert_array_equal(some.blocks, many.blocks[[7, 2, 9]])
    np.testing.assert_array_equal(some.gripper, many.gripper[[7, 2, 9]])
    assert (draw_layouts(4, "train", [7]).blocks != some.blocks[:1]).any()
    assert (some.colours[:, 0] != some.colours[:, 1]).all()


def test_no_training_layout_is_in_the_held_out_part_whatever_the_seed() -> None:
    for seed in range(3):
        assert all(arrangement_is_held_out(blocks) for blocks in draw_layouts(seed, "held_out", range(100)).blocks)
        for split in ("train", "grounding"):
            assert not any(arrangement_is_held_out(blocks) for blocks in draw_layouts(seed, split, range(100)).blocks)
    # The order of the two blocks does not matter: the same arrangement with the colours exchanged is on the same side.
    blocks = draw_layouts(0, "held_out", range(20)).blocks
    assert all(arrangement_is_held_out(pair[::-1]) for pair in blocks)


def test_colours_are_where_the_blocks_are() -> None:
    scene = scene_with((0.1, 0.5, 0.5), red=(-0.5, 0.25), blue=(0.6, -0.6))
    frames = render(scene)
    assert all(frames[camera].shape == (1, IMAGE_SIZE, IMAGE_SIZE, 3) for camera in CAMERAS)
    scale = 64 / 2.1
    for colour, (x, y) in (("red", (-0.5, 0.25)), ("blue", (0.6, -0.6))):
        row, column = centroid(frames[TOP][0], colour)
        assert abs(row - (32 - y * scale)) < 1
        assert abs(column - (32 + x * scale)) < 1
    row, column = centroid(frames[WRIST][0], "red")
    assert abs(row - (32 - (0.25 - 0.5) * 64 / 1.7)) < 1
    assert abs(column - (32 + (-0.5 - 0.1) * 64 / 1.7)) < 1
    red, blue = (centroid(frames[SIDE][0], colour) for colour in ("red", "blue"))
    assert red[0] < blue[0]  # farther away is higher in the picture
    assert red[1] < 32 < blue[1]
    assert (frames[TOP] == 128).all(axis=-1).mean() > 0.8


def test_wrist_camera_moves_with_the_gripper_and_magnifies_when_low() -> None:
    high = render(scene_with((-0.5, 0.25, 0.7), red=(-0.5, 0.25), blue=(0.6, -0.6)))[WRIST][0]
    low = render(scene_with((-0.5, 0.25, 0.05), red=(-0.5, 0.25), blue=(0.6, -0.6)))[WRIST][0]
    for frame in (high, low):
        assert np.abs(np.array(centroid(frame, "red")) - 32).max() < 1
    assert (low == PURE["red"]).all(-1).sum() > 1.5 * (high == PURE["red"]).all(-1).sum()


def test_rendering_repeats_and_does_not_depend_on_the_batch() -> None:
    world = TabletopWorld(draw_layouts(0, "train", range(6)))
    together = render(world.scene(np.arange(6)))
    for camera in CAMERAS:
        alone = np.concatenate([render(world.scene(np.array([row])), [camera])[camera] for row in range(6)])
        np.testing.assert_array_equal(together[camera], alone)
    with pytest.raises(ValueError, match="unknown cameras"):
        render(world.scene(np.arange(1)), ["front"])


def test_dataset_is_a_function_of_the_seed_and_reads_back(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    for name in ("a", "b"):
        made = generate_demonstrations(
            tmp_path / name, layouts=3, seed=5, episodes_per_file=4, progress=lambda *at: calls.append(at)
        )
        assert made == 6
    assert calls[:6] == [(done, 6) for done in range(1, 7)]
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a" / "data").rglob("*.parquet"))
    assert len(files) == 2
    for file in files:
        assert pq.read_table(tmp_path / "a" / file).equals(pq.read_table(tmp_path / "b" / file))

    episodes = list(demonstration_episodes(layouts=3, seed=5))
    texts = [episode.task for episode in episodes]
    for first in range(0, 6, 2):  # a pair starts alike and differs in the sentence
        assert texts[first] != texts[first + 1]
        np.testing.assert_array_equal(
            episodes[first].columns["observation.state"][0], episodes[first + 1].columns["observation.state"][0]
        )
    dataset = knonik.open(str(tmp_path / "a"), cache_dir=tmp_path / "cache")
    assert len(dataset.episodes) == 6
    assert dataset.fps == 5
    assert sorted(dataset.cameras) == sorted(CAMERAS)
    assert set(dataset.tasks.values()) == set(texts)
    assert len(dataset) == sum(episode.length for episode in episodes)
    for camera in CAMERAS:
        stored = dataset.frame(episode=4, camera=camera, frame=6)
        rendered = episodes[4].frames[camera][6]
        assert np.abs(stored.astype(int) - rendered.astype(int)).mean() < 4.0


def test_an_oracle_succeeds_and_follows_a_swapped_instruction() -> None:
    told = evaluate(ColourExpert(), layouts=60, seed=0, execute_steps=1)
    assert told.success_rate >= 0.97
    assert told.followed_text_rate == told.success_rate
    swapped = evaluate(ColourExpert(), layouts=60, seed=0, execute_steps=1, swap_instruction=True)
    assert swapped.success_rate == 0.0
    assert swapped.wrong_block_rate == swapped.followed_text_rate >= 0.97
    assert told.mean_steps < 30


def test_splitting_the_evaluation_changes_nothing_for_a_policy_without_noise() -> None:
    whole = evaluate(ColourExpert(), layouts=10, seed=1, execute_steps=1)
    parts = evaluate(ColourExpert(), layouts=10, seed=1, execute_steps=1, batch=4)
    assert whole == parts


def test_a_random_policy_fails() -> None:
    rng = np.random.default_rng(0)

    def policy(images: Any, state: Any, text: Sequence[str]) -> dict[str, np.ndarray]:
        return {"action": rng.uniform(-0.09, 0.09, (len(text), 8, 7)) + np.array([0, 0, 0, 0, 0, 0, 0.5])}

    result = evaluate(policy, layouts=60, seed=0, cameras=CAMERAS[:2])
    assert result.success_rate <= 0.05
    assert result.episodes == 60


def test_evaluation_names_a_horizon_that_is_too_short() -> None:
    with pytest.raises(ValueError, match="execute_steps"):
        evaluate(lambda images, state, text: {"action": np.zeros((len(text), 1, 7))}, layouts=2, execute_steps=2)


@dataclass
class WordProcessor:
    """The two methods the grounding stage needs, with colour words as the only tokens."""

    words: list[str] = field(default_factory=lambda: ["<image>", *COLOURS])

    def prepare(self, batch: Any) -> dict[str, Tensor]:
        ids = [[0, self.words.index(text.split()[3])] for text in batch.text]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.ones(len(ids), 2, dtype=torch.bool)}

    def to_network(self, batch: Any, augment: bool) -> dict[str, Tensor]:
        pixels = torch.cat([image[:, 0, ::8, ::8].float() / 127.5 - 1 for image in batch.images.values()], dim=1)
        return {**batch.inputs, "pixel_values": pixels, "image_grid_thw": torch.ones(1, 3)}


@dataclass
class Features:
    features: Tensor
    attention_mask: Tensor
    image_mask: Tensor


class WordBackbone(nn.Module):
    """Mixes a picture summary into every token."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.picture = nn.Embedding(4, 16), nn.LazyLinear(16)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor, grid: Tensor) -> Features:
        seen = self.picture(pixel_values.flatten(1))[:, None]
        return Features(self.words(input_ids) * seen + seen, attention_mask, input_ids == 0)


def grounding_settings(*, seed: int, steps: int, layouts: int, warmup: int) -> GroundingSettings:
    return GroundingSettings(
        seed=seed,
        layouts_per_batch=layouts,
        optimizer=OptimizerConfig(lr=2e-3, weight_decay=1e-4),
        schedule=ScheduleConfig(max_steps=steps, warmup_steps=warmup),
    )


def test_grounding_items_are_a_function_of_the_index() -> None:
    settings = grounding_settings(seed=3, steps=4, layouts=5, warmup=1)
    one, other = (GroundingDataset(WordProcessor(), settings, cameras=CAMERAS[:2], horizon=8) for _ in range(2))
    last = other[3]
    first = [one[index] for index in range(4)]
    assert first[3].keys() == last.keys()
    assert all(torch.equal(first[3][key], last[key]) for key in last)
    assert not torch.equal(first[0]["grounding_target"], first[1]["grounding_target"])
    assert [len(item["grounding_target"]) for item in first] == [10] * 4
    with pytest.raises(IndexError):
        one[4]


def test_grounding_target_is_the_named_block() -> None:
    batch = grounding_batch(2, seed=0, layouts=8, cameras=[TOP], horizon=8)
    for row, text in enumerate(batch.text):
        r, c = centroid(batch.images[TOP][row, 0].numpy(), text.split()[3])
        dx, dy, x, y = batch.target[row].tolist()
        assert abs(c - (32 + x * 64 / 2.1)) < 2
        assert abs(r - (32 - y * 64 / 2.1)) < 2
        gripper = batch.state["observation.state"][row, 0]
        assert abs(gripper[0].item() + dx - x) < 1e-5
        assert abs(gripper[1].item() + dy - y) < 1e-5


def test_grounding_trains_the_backbone_and_repeats() -> None:
    settings = grounding_settings(seed=1, steps=8, layouts=8, warmup=2)
    losses = []
    for _ in range(2):
        dataset = GroundingDataset(WordProcessor(), settings, cameras=[TOP], horizon=8)
        torch.manual_seed(11)
        module = GroundingModule(WordBackbone(), width=16, settings=settings)
        module(dataset[0])
        setup = module.configure_optimizers()
        optimizer, schedule = setup["optimizer"], setup["lr_scheduler"]["scheduler"]
        assert optimizer.param_groups[0]["lr"] == 0.0  # warm-up starts from 0
        before = module.backbone.words.weight.detach().clone()
        run = []
        for index in range(8):
            item = dataset[index]
            loss = nn.functional.mse_loss(module(item), item["grounding_target"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            run.append(loss.item())
        assert not torch.equal(before, module.backbone.words.weight)
        losses.append(run)
    assert losses[0] == losses[1]
    assert instruction([0, 2]) == ["pick up the red block", "pick up the blue block"]
