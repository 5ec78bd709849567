"""Relative statistics of a dataset: the values, what they are kept by, and the same from S3."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import knonik
from knonik.write.lerobot import EpisodeData, write_lerobot
from models.gr00t_n17.inputs.modality import Modalities
from models.gr00t_n17.inputs.modality_sources import resolve
from recipes.families.gr00t_n17.statistics import relative_statistics

LENGTHS, HORIZON = (12, 4, 15), 5


def modalities(horizon: int = HORIZON) -> Modalities:
    return resolve(
        cameras=["observation.images.front"],
        state={"observation.state": 4},
        action={"action": 3},
        horizon=horizon,
        modality={"state": {"arm": {"start": 1, "end": 3}}, "action": {"arm": {"start": 0, "end": 2}}},
        groups={"action": {"arm": {"rep": "RELATIVE"}}},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    made = [
        EpisodeData(
            columns={
                "observation.state": rng.normal(size=(rows, 4)).astype(np.float32),
                "action": rng.normal(size=(rows, 3)).astype(np.float32),
            },
            frames={"observation.images.front": np.zeros((rows, 16, 16, 3), np.uint8)},
            task="go",
        )
        for rows in LENGTHS
    ]
    place = tmp_path_factory.mktemp("relative") / "set"
    return write_lerobot(
        place, iter(made), version="v3.0", fps=10, robot_type="none", codec="h264", episodes_per_file=2
    )


def windows(dataset: knonik.Dataset, deltas: list[int]) -> np.ndarray:
    """Differences [windows, horizon, 2], one by one."""
    state, action, found = dataset.column("observation.state"), dataset.column("action"), []
    for first, length in zip(dataset.episodes.first_row, dataset.episodes.length, strict=True):
        for anchor in range(first, first + length - deltas[-1]):
            found.append([action[anchor + delta, 0:2] - state[anchor, 1:3] for delta in deltas])
    return np.array(found, np.float32)


def test_every_full_chunk_counts(folder: Path, tmp_path: Path) -> None:
    with knonik.open(str(folder), cache_dir=tmp_path) as dataset:
        found = relative_statistics(dataset, modalities())
        expected = windows(dataset, list(range(HORIZON)))
        assert list(found) == ["arm"]
        assert expected.shape == ((12 - 4) + 0 + (15 - 4), HORIZON, 2)
        for name, reduced in (("min", expected.min(axis=0)), ("max", expected.max(axis=0))):
            np.testing.assert_array_equal(found["arm"][name], reduced)
        np.testing.assert_allclose(found["arm"]["std"], expected.std(axis=0), rtol=1e-6)
        np.testing.assert_allclose(found["arm"]["q99"], np.quantile(expected, 0.99, axis=0), rtol=1e-6)


def test_they_are_kept_by_what_they_depend_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with knonik.open(str(folder), cache_dir=tmp_path) as dataset:
        first = relative_statistics(dataset, modalities())
        other = relative_statistics(dataset.subset([0]), modalities())
        assert not np.array_equal(first["arm"]["min"], other["arm"]["min"])
        assert relative_statistics(dataset, modalities(3))["arm"]["min"].shape == (3, 2)
        kept = sorted(tmp_path.rglob("relative-*.json"))
        assert len(kept) == 3
        monkeypatch.setattr("recipes.families.gr00t_n17.statistics._computed", lambda *_: pytest.fail("computed again"))
        again = relative_statistics(dataset, modalities())
        np.testing.assert_array_equal(again["arm"]["q01"], first["arm"]["q01"])
        monkeypatch.undo()
        for file in kept:
            file.write_text(json.dumps({"min": []})[:-3])
        with caplog.at_level(logging.WARNING):
            np.testing.assert_array_equal(relative_statistics(dataset, modalities())["arm"]["max"], first["arm"]["max"])
        assert "damaged" in caplog.text


def test_steps_are_those_of_the_mixtures_rate(folder: Path, tmp_path: Path) -> None:
    with knonik.open(str(folder), cache_dir=tmp_path) as dataset:
        found = relative_statistics(dataset, modalities(), fps=5)
        expected = windows(dataset, [0, 2, 4, 6, 8])
        np.testing.assert_array_equal(found["arm"]["max"], expected.max(axis=0))


def test_no_episode_of_a_chunks_length_is_told(folder: Path, tmp_path: Path) -> None:
    with (
        knonik.open(str(folder), cache_dir=tmp_path) as dataset,
        pytest.raises(ValueError, match=r"no episode has 16 steps.*lower data.horizon"),
    ):
        relative_statistics(dataset, modalities(16))


def test_from_s3_they_are_the_same(
    folder: Path, tmp_path: Path, new_bucket: Callable[[dict[str, bytes]], tuple[str, Any]]
) -> None:
    files = [file for file in folder.rglob("*") if file.is_file()]
    bucket, _ = new_bucket({f"set/{file.relative_to(folder).as_posix()}": file.read_bytes() for file in files})
    with (
        knonik.open(str(folder), cache_dir=tmp_path / "local") as local,
        knonik.open(f"s3://{bucket}/set", cache_dir=tmp_path / "remote") as remote,
    ):
        expected, found = relative_statistics(local, modalities()), relative_statistics(remote, modalities())
    for name, values in expected["arm"].items():
        np.testing.assert_array_equal(found["arm"][name], values)
