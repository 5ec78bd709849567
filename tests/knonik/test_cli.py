"""The command line: what it finds, what it prints for people and for programs, and how it ends."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from knonik.cli import main, make_parser
from knonik.dataset import open as open_dataset
from knonik.sizes import format_size, parse_size
from knonik.write.lerobot import EpisodeData, write_lerobot

CAMERA = "observation.images.front"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("cli") / "set")


def written(where: Path, **options: Any) -> Path:
    def episodes():
        rng = np.random.default_rng(0)
        for length in (12, 20):
            rows = rng.normal(size=(length, 3)).astype(np.float32)
            frames = rng.integers(0, 256, (length, 32, 48, 3), np.uint8)
            yield EpisodeData(columns={"observation.state": rows, "action": rows}, frames={CAMERA: frames}, task="wave")

    options = {"codec": "h264", "version": "v2.1", **options}
    return write_lerobot(where, episodes(), fps=10, robot_type="none", **options)


def knonik(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and standard output of one command."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().out


def checked(folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code, out = knonik("check", folder, "--json", "--quiet", "--cache-dir", cache, capsys=capsys)
    return code, json.loads(out)


def rewrite(file: Path, column: str, change: Any) -> None:
    table = pq.read_table(file)
    place = table.schema.get_field_index(column)
    pq.write_table(table.set_column(place, table.schema.field(place), change(table[column])), file)


def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("index", "check", "verify", "peek", "bench"):
        with pytest.raises(SystemExit) as ended:
            make_parser().parse_args([command, "--help"])
        assert ended.value.code == 0
        assert "--json" in capsys.readouterr().out


def test_index_says_what_it_read(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = knonik("index", dataset, "--json", "--columns", "--cache-dir", tmp_path, capsys=capsys)
    result = json.loads(out)
    assert code == 0
    assert (result["episodes"], result["rows"], result["cameras"]) == (2, 32, [CAMERA])
    assert result["gets"] > 0
    assert list(tmp_path.iterdir())
    code, out = knonik("index", dataset, "--cache-dir", tmp_path, capsys=capsys)
    assert code == 0
    assert "2 episodes, 32 rows" in out


def test_a_published_index_is_found_by_those_who_have_none(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(dataset, tmp_path / "copy")
    code, out = knonik("index", copy, "--json", "--publish", "--cache-dir", tmp_path / "a", capsys=capsys)
    published = json.loads(out)
    assert code == 0
    assert published["published"]
    assert list((copy / ".knonik").iterdir())
    code, out = knonik("index", copy, "--json", "--cache-dir", tmp_path / "b", capsys=capsys)
    again = json.loads(out)
    assert again["fingerprint"] == published["fingerprint"]
    assert again["gets"] < published["gets"]


def test_a_sound_dataset_has_no_problems(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, result = checked(dataset, tmp_path, capsys)
    assert code == 0
    assert result["problems"] == []
    assert result["warnings"] == []
    assert result["facts"]["rows"].startswith("32 in 2 episodes")


def test_everything_wrong_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow as pa

    folder = written(tmp_path / "set", gop=60, episodes_per_file=100)
    first = folder / "data/chunk-000/episode_000000.parquet"
    second = folder / "data/chunk-000/episode_000001.parquet"

    def spoilt(values: Any) -> Any:
        rows = [list(row) for row in values.to_pylist()]
        rows[5][1] = float("nan")
        return pa.array(rows, values.type)

    rewrite(first, "action", spoilt)
    rewrite(second, "task_index", lambda values: pa.array([7] * len(values), values.type))
    for file in (first, second):
        rewrite(
            file,
            "timestamp",
            lambda values: pa.array(np.asarray(values.to_numpy(), np.float32) + np.float32(0.1), values.type),
        )
    info = json.loads((folder / "meta/info.json").read_text())
    info["total_frames"] = 33
    info["features"][CAMERA]["info"]["video.codec"] = "av1"
    (folder / "meta/info.json").write_text(json.dumps(info))
    code, result = checked(folder, tmp_path / "cache", capsys)
    problems, warnings = "\n".join(result["problems"]), "\n".join(result["warnings"])
    assert code == 1
    assert "column action: 1 rows are not finite, in episodes 0" in problems
    assert "task_index 7 stand in the rows but not in the table of tasks" in problems
    assert f"{CAMERA}: 2 rows have no frame within 0.0001 s" in problems
    assert len(result["problems"]) == 3
    assert "begin at 0.1 s, not at 0" in warnings
    assert "total_frames is 33, the episode table has 32" in warnings
    assert "20 frames between key frames" in warnings
    assert "meta/info.json says av1, the files hold h264" in warnings
    assert len(result["warnings"]) == 4


def test_a_recording_that_was_cut_off_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "set")
    broken = folder / "data/chunk-000/episode_000001.parquet"
    broken.write_bytes(broken.read_bytes()[:-100])
    code, result = checked(folder, tmp_path / "cache", capsys)
    assert code == 1
    assert "data/chunk-000/episode_000001.parquet: no Parquet footer" in result["problems"][0]
    assert "episodes 1 cannot be read" in result["problems"][0]
    assert len(result["problems"]) == 1
    assert result["facts"]["tasks"]  # of the other episodes
    with open_dataset(folder, cache_dir=tmp_path / "cache", episodes=[0]):
        pass  # the index is there now, so opening stumbles over nothing
    assert checked(folder, tmp_path / "cache", capsys) == (code, result | {"warnings": []})


def test_a_cache_folder_that_cannot_be_written_to_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "set")
    (tmp_path / "file").touch()
    code, out = knonik("bench", folder, "--cache-dir", tmp_path / "file", "--json", capsys=capsys)
    assert code == 2
    assert f"nothing can be kept in {tmp_path / 'file'}" in json.loads(out)["error"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("bench --ram 4QB", "'4QB' is not a size; give bytes, or a number with kB, MB"),
        ("bench --disk=-4", "'-4' is not a size"),
        ("bench --ram 1GB", "--ram: no effect on"),
        ("bench --block-window 10", "--block-window=10 has no effect without --order blocks"),
        ("bench --seconds -3", "--seconds=-3 is not allowed; give more than 0"),
        ("bench --skip -3", "--skip=-3 is not allowed; give 0 or more"),
        ("bench --horizon 0", "--horizon=0 is not allowed; give 1 or more"),
        ("peek --count 100000", "--count=100000 is not allowed; give 1 to 200"),
        ("peek --output sheet.jpg", "--output sheet.jpg is no PNG file"),
        ("peek --output .", "--output . is no PNG file"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), str(dataset), "--cache-dir", str(tmp_path), "--quiet"])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_damaged_video_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "set")
    key = f"videos/chunk-000/{CAMERA}/episode_000001.mp4"
    (folder / key).write_bytes((folder / key).read_bytes()[:200])
    code, out = knonik("index", folder, "--json", "--cache-dir", tmp_path / "a", capsys=capsys)
    assert code == 1
    assert list(json.loads(out)["damaged"]) == [key]
    code, result = checked(folder, tmp_path / "b", capsys)
    assert code == 1
    assert any(key in problem for problem in result["problems"])


def test_no_dataset_is_an_error_for_people_and_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["index", str(tmp_path / "nowhere"), "--json"])
    output = capsys.readouterr()
    assert ended.value.code == 2
    assert json.loads(output.out)["ok"] is False
    assert "nowhere" in output.err


@pytest.mark.parametrize("options", [(), ("--transport", "yuv420p"), ("--order", "blocks", "--block-window", "64")])
def test_bench_counts_what_it_takes(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    fixed = ("--batch-size", "4", "--seconds", "0.1", "--skip", "0", "--threads", "1", "--quiet")
    code, out = knonik("bench", dataset, "--json", "--cache-dir", tmp_path, *fixed, *options, capsys=capsys)
    result = json.loads(out)
    assert code == 0
    assert result["samples"] >= 4
    assert result["samples"] % 4 == 0
    assert result["cpu_ms_per_sample"] > 0
    assert result["peak_rss_bytes"] > 0
    assert set(result["stages"]) >= {"decode", "assemble"}
    code, out = knonik("bench", dataset, "--cache-dir", tmp_path, *fixed, *options, capsys=capsys)
    assert code == 0
    assert "samples/s" in out


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        (4096, 4096),
        ("4GB", 4 * 10**9),
        ("4 GiB", 4 * 2**30),
        ("1.5tb", 15 * 10**11),
        ("64k", 64000),
        ("3B", 3),
    ],
)
def test_sizes_are_read_as_written(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", -1, "4 lots", "1e9", True, "4GBB"])
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


def test_sizes_are_written_short() -> None:
    assert [format_size(size) for size in (0, 999, 4096000000, 2.5e12)] == ["0 B", "999 B", "4.1 GB", "2.5 TB"]
