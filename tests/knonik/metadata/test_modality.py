"""GR00T's modality.json: names become slices, cameras and language columns; what it gets wrong is named."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import knonik
from knonik.metadata.lerobot import MetadataError
from knonik.metadata.modality import parse_modality, text_column

FEATURES: dict[str, dict[str, Any]] = {
    "observation.state": {"dtype": "float32", "shape": [6]},
    "eef": {"dtype": "float32", "shape": [2, 3]},
    "action": {"dtype": "float32", "shape": [3]},
    "annotation.human.validity": {"dtype": "int64", "shape": [1]},
}


def _parse(**groups: Any) -> Any:
    return parse_modality(json.dumps(groups).encode(), FEATURES)


def test_the_real_file(shared_data: Path, tmp_path: Path) -> None:
    with knonik.open(shared_data / "gr1_picknplace_v20", cache_dir=tmp_path) as ds:
        found = ds.modality
        assert found is not None
        assert found.state["right_arm"] == slice(22, 29)
        assert found.action["waist"] == slice(41, 44)
        assert found.video == {"ego_view": "observation.images.ego_view"}
        assert found.annotation["human.coarse_action"] == "annotation.human.action.task_description"
        assert found.annotation["human.validity"] == "annotation.human.validity"
        assert set(found.video.values()) <= set(ds.cameras)
        assert ds.column(found.columns["state.right_arm"])[:, found.state["right_arm"]].shape == (2096, 7)


@pytest.mark.parametrize("given", ["annotation.human.action.task_description", "human.coarse_action"])
def test_text_of_another_column(shared_data: Path, tmp_path: Path, given: str) -> None:
    root = shared_data / "gr1_picknplace_v20"
    with knonik.open(root, cache_dir=tmp_path, text_column=given) as ds:
        ids = ds.episodes.ids
        first = np.zeros(len(ids), np.int64)
        values = ds.column("annotation.human.action.task_description")[ds.rows(ids, first), 0]
        assert ds.texts(ids, first) == [ds.tasks[value] for value in values.tolist()]
        assert all(text.startswith("pick") for text in ds.texts(ids, first))
    with knonik.open(root, cache_dir=tmp_path, text_column="annotation.human.validity") as ds:
        assert set(ds.texts(ids, first)) == {"valid"}
    with pytest.raises(KeyError, match=r"text_column='caption' is no column.*annotation\.human\.validity"):
        knonik.open(root, cache_dir=tmp_path, text_column="caption")


def test_forms_seen_in_forks() -> None:
    found = _parse(
        state={"arm": {"start": 0, "end": 6, "rotation_type": "quaternion"}, "eef": {"original_key": "eef"}},
        action={"arm": {"start": 1, "end": 3, "absolute": False}},
        video={"front": {"original_key": "observation.images.front"}, "observation.images.side": {}},
        annotation={"human.validity": {}, "language": {"original_key": "task_index"}, "note": None},
        unknown=[1, 2],
    )
    assert found.state == {"arm": slice(0, 6), "eef": slice(0, 6)}
    assert found.columns == {"state.arm": "observation.state", "state.eef": "eef", "action.arm": "action"}
    assert found.video["observation.images.side"] == "observation.images.side"
    assert found.annotation["language"] == "task_index"
    assert found.details["state"]["arm"]["rotation_type"] == "quaternion"
    assert text_column("language", found, FEATURES) == "task_index"
    assert text_column("human.validity", found, FEATURES) == "annotation.human.validity"
    assert text_column(None, None, {}) == "task_index"
    assert _parse().state == {}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"state": {"arm": {"start": 0, "end": 7}}}, r"state\.arm ends at 7, but column observation\.state has 6"),
        ({"action": {"arm": {"start": 2, "end": 2}}}, r"action\.arm goes from start=2 to end=2"),
        ({"action": {"arm": {"start": "0", "end": 2}}}, r"action\.arm goes from start='0'"),
        ({"state": {"arm": {"start": 1}}}, r"state\.arm goes from start=1 to end=None"),
        ({"state": ["arm"]}, r"state is \['arm'\]"),
        ({"video": {"front": "key"}}, r"video\.front is 'key'"),
        ({"video": {"front": {"original_key": 3}}}, r"video\.front\.original_key is 3"),
    ],
)
def test_what_is_wrong_is_named(groups: Any, message: str) -> None:
    with pytest.raises(MetadataError, match=rf"meta/modality\.json: {message}"):
        _parse(**groups)


def test_a_damaged_file_stops_the_opening(shared_data: Path, tmp_path: Path) -> None:
    root = tmp_path / "set"
    shutil.copytree(shared_data / "g1_inspire_v30", root)
    (root / "meta/modality.json").write_text("{")
    with pytest.raises(MetadataError, match=r"meta/modality\.json: not valid JSON"):
        knonik.open(root, cache_dir=tmp_path / "cache")
