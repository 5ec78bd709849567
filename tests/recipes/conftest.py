"""A tiny checkpoint in the released layout and datasets whose modality.json names what it expects."""

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

_CHECKPOINTS = Path(__file__).resolve().parents[1] / "models" / "gr00t_n17" / "conftest.py"

MODALITY = {
    "state": {"single_arm": {"start": 0, "end": 5}, "gripper": {"start": 5, "end": 6}},
    "action": {"single_arm": {"start": 0, "end": 5}, "gripper": {"start": 5, "end": 6}},
    "video": {
        "front": {"original_key": "observation.images.front"},
        "wrist": {"original_key": "observation.images.wrist"},
    },
    "annotation": {"human.action.task_description": {"original_key": "task_index"}},
}


def _write_dataset(
    folder: Path, *, seed: int = 0, episodes: int = 6, width: int = 6, modality: dict | None = None
) -> Path:
    """A LeRobot dataset of smooth random motion, two cameras of 48x64; `modality` becomes its meta/modality.json."""
    from knonik.write.lerobot import EpisodeData, write_lerobot

    def made() -> Iterator[EpisodeData]:
        rng = np.random.default_rng(seed)
        for number in range(episodes):
            rows = 22 + 3 * (number % 3)
            path = np.cumsum(rng.normal(0, 0.1, (rows + 1, width)), axis=0).astype(np.float32)
            frames = rng.integers(0, 256, (2, 1, 6, 8, 3), np.uint8).repeat(8, 2).repeat(8, 3).repeat(rows, 1)
            yield EpisodeData(
                columns={"observation.state": path[:-1], "action": path[1:]},
                frames={"observation.images.front": frames[0], "observation.images.wrist": frames[1]},
                task=f"Push block {number % 2}, slowly",
            )

    write_lerobot(folder, made(), fps=10, robot_type="none", codec="h264")
    if modality is not None:
        (folder / "meta" / "modality.json").write_text(json.dumps(modality))
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for runs of the Cosmos-3 policy's smoke recipe, with a few of its demonstrations in `data`."""
    from recipes.load import load
    from recipes.stages import make_dataset

    where = tmp_path_factory.mktemp("cosmos3")
    make_dataset(load("cosmos3_policy/smoke", [f"data.uri={where / 'data'}", "data.generate.layouts=4"]))
    return where


@pytest.fixture(scope="session")
def write_dataset() -> Callable[..., Path]:
    """`write_dataset(folder, seed=, episodes=, width=, modality={...})`; see `_write_dataset`."""
    return _write_dataset


@pytest.fixture(scope="session")
def arm_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One dataset for all tests that only read it; it fits the checkpoint's `new_embodiment`."""
    return _write_dataset(tmp_path_factory.mktemp("arm") / "set", modality=MODALITY)


@pytest.fixture(scope="session")
def write_checkpoint() -> Callable[..., Path]:
    """The writer of tiny checkpoints that the model's tests use."""
    spec = importlib.util.spec_from_file_location("gr00t_checkpoints", _CHECKPOINTS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    writer: Callable[..., Path] = module._write
    return writer


@pytest.fixture(scope="session")
def checkpoint(write_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint for all tests that only read it."""
    return write_checkpoint(tmp_path_factory.mktemp("gr00t") / "checkpoint")
