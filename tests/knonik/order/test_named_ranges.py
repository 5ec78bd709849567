"""A filter that names episodes by words becomes ranges by id, and the loader reads only what it keeps."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import knonik
from knonik.cli import make_parser
from knonik.commands import ranges as command
from knonik.order.named_ranges import DROID_KEY

LENGTHS = (20, 12, 30)
NAMES = ("AUTOLab/success/2023-07-07/Fri_Jul__7_09:42:23_2023", "CLVR/success/b", "IPRL/success/c")
KEPT = {NAMES[0]: [[2, 9], [11, 25]], NAMES[1]: [[0, 4]], "another/lab": [[0, 10]]}


@pytest.fixture
def named(make_set: Callable[..., Path], tmp_path: Path) -> Path:
    """A set whose episode list has names."""
    folder = tmp_path / "set"
    shutil.copytree(make_set(LENGTHS, cameras=1), folder)
    for path in sorted(folder.glob("meta/episodes/**/*.parquet")):
        table = pq.read_table(path)
        names = [NAMES[i] for i in table.column("episode_index").to_pylist()]
        pq.write_table(table.append_column("episode_id", pa.array(names)), path)
    return folder


def run(folder: Path, tmp_path: Path, *options: str, kept: Any = None) -> dict[str, Any]:
    source = tmp_path / "keep.json"
    if kept is None:
        kept = {DROID_KEY.format(name): pairs for name, pairs in KEPT.items()}
    source.write_text(json.dumps(kept))
    arguments = ["ranges", str(folder), str(source), "--output", str(tmp_path / "out.json"), *options]
    return command.run(make_parser().parse_args([*arguments, "--cache-dir", str(tmp_path / "cache")]))


def test_anchors_lie_in_the_ranges_that_are_kept(named: Path, tmp_path: Path) -> None:
    result = run(named, tmp_path)
    assert json.loads((tmp_path / "out.json").read_text()) == {"0": [[2, 9], [11, 20]], "1": [[0, 4]]}
    assert (result["episodes"], result["of_episodes"]) == (2, 3)
    assert (result["anchors"], result["of_anchors"]) == (7 + 9 + 4, 62)
    with knonik.open(named, cache_dir=tmp_path / "cache", ranges=tmp_path / "out.json") as dataset:
        assert len(dataset.anchors()) == 20
    assert command.text(result).endswith("2 of 3 episodes, 20 of 62 anchors (32.26 %)")


def test_names_of_older_datasets_stand_in_lines(make_set: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "set"
    shutil.copytree(make_set(LENGTHS, cameras=1, version="v2.1"), folder)
    listed = folder / "meta/episodes.jsonl"
    lines = [json.loads(line) for line in listed.read_text().splitlines()]
    listed.write_text("".join(json.dumps({**line, "uuid": NAMES[line["episode_index"]]}) + "\n" for line in lines))
    assert run(folder, tmp_path, "--column", "uuid")["anchors"] == 20


def test_whole_windows_may_be_asked_to_lie_there(named: Path, tmp_path: Path) -> None:
    result = run(named, tmp_path, "--horizon", "4")
    # Frames a to a + 4 of every anchor a; the range of 4 frames has no room for 5.
    assert json.loads((tmp_path / "out.json").read_text()) == {"0": [[2, 5], [11, 16]]}
    assert (result["anchors"], result["of_anchors"]) == (8, 16 + 8 + 26)
    with knonik.open(named, cache_dir=tmp_path / "cache", ranges=tmp_path / "out.json") as dataset:
        assert len(dataset.anchors(5)) == 8


def test_a_window_may_cross_from_one_range_into_the_next(named: Path, tmp_path: Path) -> None:
    kept = {DROID_KEY.format(NAMES[0]): [[6, 9], [0, 4], [3, 6]], DROID_KEY.format(NAMES[1]): [[2, 8], [4, 11]]}
    run(named, tmp_path, "--horizon", "4", kept=kept)
    # By the frames themselves: those a to a + 4 of every anchor a, and nothing else, decide.
    for episode, pairs in ((0, kept[DROID_KEY.format(NAMES[0])]), (1, kept[DROID_KEY.format(NAMES[1])])):
        frames = {frame for start, stop in pairs for frame in range(start, stop)}
        anchors = [a for a in range(LENGTHS[episode]) if frames.issuperset(range(a, a + 5))]
        written = json.loads((tmp_path / "out.json").read_text())[str(episode)]
        assert [a for start, stop in written for a in range(start, stop)] == anchors
        assert anchors


def test_a_filter_that_keeps_nothing_is_told_so(named: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"keeps no anchor: of the 2 episodes it names.*none has 19 frames in a row"):
        run(named, tmp_path, "--horizon", "18")
    assert not (tmp_path / "out.json").exists()


def test_episodes_without_a_name_are_left_out(named: Path, tmp_path: Path) -> None:
    for path in sorted(named.glob("meta/episodes/**/*.parquet")):
        table = pq.read_table(path)
        names = [NAMES[0] if i == 0 else None for i in table.column("episode_index").to_pylist()]
        place = table.column_names.index("episode_id")
        pq.write_table(table.set_column(place, "episode_id", pa.array(names, pa.string())), path)
    assert run(named, tmp_path)["anchors"] == 16


def test_other_names_and_columns_are_said(named: Path, tmp_path: Path) -> None:
    assert run(named, tmp_path, "--key", "{0}", kept=KEPT)["anchors"] == 20
    with pytest.raises(ValueError, match=r"names none of the 3 episodes.*'AUTOLab/success.*Say with --key"):
        run(named, tmp_path, kept=KEPT)
    for wrong in ("{1}", "{a", "all"):
        with pytest.raises(ValueError, match=r"is one name for all episodes; put \{0\} where"):
            run(named, tmp_path, "--key", wrong, kept=KEPT)
    assert run(named, tmp_path, "--key", "{{0}", kept={"{" + NAMES[1]: [[0, 4]]})["anchors"] == 4
    with pytest.raises(ValueError, match=r"column uuid is missing; it has .*episode_id"):
        run(named, tmp_path, "--column", "uuid")


@pytest.mark.parametrize("wrong", [[1], {"a": 3}, {"a": [[1, 2, 3]]}, {"a": [[9, 2]]}, {"a": [[1.5, 4]]}])
def test_files_of_another_form_are_refused(named: Path, tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"keep\.json: expected names, each with a list of \[start, stop\] frames"):
        run(named, tmp_path, kept=wrong)
