"""State, action, mask and decoded actions against the released processor's own code, over all its modes.

The golden files say what was computed and how; `golden/make_state_action.py` made them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.inputs.modality import Modalities
from models.gr00t_n17.inputs.modality_sources import resolve
from models.gr00t_n17.inputs.normalize import FIELDS, Statistics
from models.gr00t_n17.inputs.processor import Processor, ProcessorConfig
from models.gr00t_n17.inputs.relative_actions import relative_statistics
from models.gr00t_n17.inputs.text import WordTokenizer

GOLDEN = Path(__file__).parent / "golden" / "state_action.json"
FILE = json.loads(GOLDEN.read_text())
CASES: dict[str, Any] = FILE["cases"]
ROWS, WIDTH = 16, 28
CONFIG = GR00TN17Config.tiny(max_state_dim=WIDTH, max_action_dim=WIDTH, action_horizon=ROWS, max_num_embodiments=32)
TEXT = "pick it up"
TOKENIZER = WordTokenizer.from_texts([TEXT], backbone=CONFIG.backbone)
POSES = [
    name
    for name, said in CASES.items()
    if any((group["type"], group["rep"]) == ("EEF", "RELATIVE") for group in said["action"].values())
]


@pytest.fixture(scope="module")
def arrays() -> Mapping[str, np.ndarray]:
    with np.load(GOLDEN.with_suffix(".npz")) as file:
        return dict(file)


def sections(said: dict[str, Any]) -> dict[str, dict[str, dict[str, int]]]:
    """modality.json of a case, whose groups follow each other in one column."""
    out: dict[str, dict[str, dict[str, int]]] = {}
    for section, dims in (("state", said["state"]), ("action", {k: g["dim"] for k, g in said["action"].items()})):
        start, out[section] = 0, {}
        for name, dim in dims.items():
            out[section][name] = {"start": start, "end": start + dim}
            start += dim
    return out


def modalities(said: dict[str, Any]) -> Modalities:
    """By the checkpoint's modality config, joined with the dataset's modality.json and its columns."""
    modality = sections(said)
    width = {section: max(part["end"] for part in groups.values()) for section, groups in modality.items()}
    return resolve(
        cameras=["observation.images.front"],
        state={"observation.state": width["state"]},
        action={"action": width["action"]},
        horizon=None,
        modality=modality,
        checkpoint=said["modality_config"],
    )


def processor(said: dict[str, Any], parts: Modalities | None = None) -> Processor:
    settings = ProcessorConfig(
        shortest_image_edge=None, crop_fraction=None, min_pixels=1024, tokenizer="words", **said["settings"]
    )
    return Processor(
        CONFIG,
        settings,
        statistics=Statistics.from_dict(said["statistics"]),
        modalities=parts or modalities(said),
        embodiment=said["tag"],
        tokenizer=TOKENIZER,
    )


def batch(name: str, arrays: Mapping[str, np.ndarray]) -> SimpleNamespace:
    """All samples of a case, as the data layer hands them over: whole columns."""
    rows = arrays[f"{name}/anchors"]
    steps = rows[:, None] + np.arange(CASES[name]["horizon"])
    return SimpleNamespace(
        images={"observation.images.front": torch.zeros(len(rows), 1, 32, 32, 3, dtype=torch.uint8)},
        state={"observation.state": torch.from_numpy(arrays[f"{name}/observation.state"][rows[:, None]])},
        action={"action": torch.from_numpy(arrays[f"{name}/action_column"][steps])},
        action_is_pad=torch.zeros(len(rows), steps.shape[1], dtype=torch.bool),
        text=[TEXT] * len(rows),
        position=torch.arange(len(rows)),
        inputs={},
    )


def test_the_golden_file_holds_all_modes() -> None:
    assert len(CASES) >= 20
    assert len({said["tag"] for said in CASES.values()}) >= 4
    used = {(g["rep"], g["type"], g["format"]) for said in CASES.values() for g in said["action"].values()}
    assert len(used) >= 6


def test_two_hundred_samples_are_compared(arrays: Mapping[str, np.ndarray]) -> None:
    assert sum(len(arrays[f"{name}/anchors"]) for name in CASES) >= 200


@pytest.mark.parametrize("name", [name for name in CASES if name not in POSES])
def test_vectors_are_the_references_bit_for_bit(name: str, arrays: Mapping[str, np.ndarray]) -> None:
    out = processor(CASES[name]).prepare(batch(name, arrays))
    if "sin_cos" in name:  # numpy's float32 sine differs in its last bit between versions and processors
        np.testing.assert_allclose(out["state"], arrays[f"{name}/state"], rtol=0, atol=1.2e-7)
    else:
        np.testing.assert_array_equal(out["state"], arrays[f"{name}/state"])
    np.testing.assert_array_equal(out["action"], arrays[f"{name}/action"])
    np.testing.assert_array_equal(out["action_mask"], arrays[f"{name}/mask"])
    assert out["embodiment_id"].unique().tolist() == [CASES[name]["slot"]]


@pytest.mark.parametrize("name", POSES)
def test_relative_poses_are_the_references_to_the_last_bits(name: str, arrays: Mapping[str, np.ndarray]) -> None:
    """The nearest rotation goes through LAPACK on both sides; its last float64 bits may turn a float32 rounding."""
    out = processor(CASES[name]).prepare(batch(name, arrays))
    np.testing.assert_array_equal(out["state"], arrays[f"{name}/state"])
    np.testing.assert_array_equal(out["action_mask"], arrays[f"{name}/mask"])
    expected = arrays[f"{name}/action"]
    np.testing.assert_allclose(out["action"], expected, rtol=0, atol=2e-6)
    assert (out["action"].numpy() == expected).mean() > 0.98  # all of them where the golden file was made


@pytest.mark.parametrize("name", list(CASES))
def test_predictions_are_decoded_as_the_reference_does(name: str, arrays: Mapping[str, np.ndarray]) -> None:
    part = processor(CASES[name])
    state = batch(name, arrays).state
    out = part.decode_actions(torch.from_numpy(arrays[f"{name}/predicted"]), state=state)
    assert list(out) == list(CASES[name]["action"])
    for key, values in out.items():
        expected = arrays[f"{name}/decoded/{key}"]
        assert values.dtype == np.float32
        if name in POSES and CASES[name]["action"][key]["type"] == "EEF":
            np.testing.assert_allclose(values, expected, rtol=0, atol=2e-6)
        else:
            np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("name", [name for name, said in CASES.items() if "relative_action" in said["statistics"]])
def test_relative_statistics_are_the_references(name: str, arrays: Mapping[str, np.ndarray]) -> None:
    said, parts = CASES[name], modalities(CASES[name])
    length = np.asarray(FILE["lengths"])
    for group in parts.relative:
        found = relative_statistics(
            arrays[f"{name}/observation.state"],
            arrays[f"{name}/action_column"],
            first_row=np.cumsum(length) - length,
            length=length,
            group=group,
            reference=parts.state_group(group.reference),
            deltas=parts.action_deltas,
        )
        expected = {k: np.asarray(v) for k, v in said["statistics"]["relative_action"][group.name].items()}
        for field in FIELDS:
            exact = field in ("min", "max") and group.type == "NON_EEF"
            np.testing.assert_allclose(found[field], expected[field], rtol=0, atol=0 if exact else 2e-6)
