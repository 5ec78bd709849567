"""The contact sheet shows the samples asked for, and the reason where there is no picture."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import knonik
from knonik.cli import make_parser
from knonik.commands import peek as command
from knonik.peek import Sample, contact_sheet, random_samples


def test_pictures_stand_in_the_sheet(make_set: Any, tmp_path: Path) -> None:
    """At the sheet's own height a picture is not resized, so its pixels must be found again."""
    with knonik.open(make_set([5], size=(220, 300)), cache_dir=tmp_path) as dataset:
        sheet = contact_sheet(dataset, [Sample(episode=0, frame=3)])
        for camera in dataset.cameras:
            picture = dataset.frame(episode=0, camera=camera, frame=3)
            strip = sheet.reshape(len(sheet), -1)
            row = picture[110].tobytes()
            assert any(row in line.tobytes() for line in strip), camera
        other = contact_sheet(dataset, [Sample(episode=0, frame=2)], cameras=dataset.cameras[:1])
        assert dataset.frame(episode=0, camera=dataset.cameras[1], frame=2)[110].tobytes() not in other.tobytes()


def test_draws_are_seeded_and_distinct(make_set: Any, tmp_path: Path) -> None:
    with knonik.open(make_set([5, 4, 6]), cache_dir=tmp_path, episodes=[0, 2]) as dataset:
        drawn = random_samples(dataset, 6, seed=1)
        assert drawn == random_samples(dataset, 6, seed=1)
        assert drawn != random_samples(dataset, 6, seed=2)
        everything = random_samples(dataset, 100)
        assert everything == [Sample(episode=e, frame=f) for e, n in ((0, 5), (2, 6)) for f in range(n)]


def test_a_refused_row_gets_a_block_with_the_reason(shared_data: Path, tmp_path: Path) -> None:
    with knonik.open(shared_data / "gr1_picknplace_v20", cache_dir=tmp_path, episodes=[0]) as dataset:
        sheet = contact_sheet(dataset, [Sample(episode=0, frame=415)], columns=["action"])
    warning = np.all(sheet == (0xCF, 0x22, 0x2E), axis=-1)
    assert warning.sum() > 100


def test_unknown_names(make_set: Any, tmp_path: Path) -> None:
    with knonik.open(make_set([5]), cache_dir=tmp_path) as dataset:
        with pytest.raises(KeyError, match="wrist"):
            contact_sheet(dataset, [Sample(episode=0, frame=0)], cameras=["wrist"])
        with pytest.raises(KeyError, match="torque"):
            contact_sheet(dataset, [Sample(episode=0, frame=0)], columns=["torque"])
        with pytest.raises(KeyError, match=r"frames 0\.\.4, frame 5"):
            contact_sheet(dataset, [Sample(episode=0, frame=5)])


def test_command_writes_the_file_and_says_what_is_on_it(make_set: Any, tmp_path: Path) -> None:
    target = tmp_path / "sheet.png"
    arguments = ["peek", str(make_set([5, 4, 6])), "--cache-dir", str(tmp_path / "cache"), "--output", str(target)]
    result = command.run(make_parser().parse_args([*arguments, "--samples", "1:2", "0:0"]))
    assert json.loads(json.dumps(result)) == result
    assert result["samples"] == [{"episode": 1, "frame": 2}, {"episode": 0, "frame": 0}]
    with Image.open(target) as image:
        assert image.size == (result["width"], result["height"])
    assert "1:2, 0:0" in command.text(result)
    assert len(command.run(make_parser().parse_args([*arguments, "--count", "3"]))["samples"]) == 3
    with pytest.raises(ValueError, match="'7' is not EPISODE:FRAME"):
        command.run(make_parser().parse_args([*arguments, "--samples", "7"]))
