"""The report says what the run's files say, in one small file that loads nothing."""

import csv
import json
import math
import re
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from callbacks.data_wait import Tail
from callbacks.run_record import RunRecord
from callbacks.window import Window
from recipes import launch
from recipes.report import curves
from recipes.report.figures import compare, seconds
from recipes.report.page import page
from recipes.report.reading import read_run, read_runs
from recipes.report.style import DARK, DASHES, LIGHT
from recipes.report.svg import STYLES
from recipes.report.text import as_json, markdown

Write = Callable[..., Path]


def _write(folder: Path, steps: int = 200, *, seed: int = 0, recipe: dict[str, Any] | None = None) -> Path:
    """A finished run of two ranks, its record written by the program's own hand; the wait of step 50 is 2 s."""
    rng = np.random.default_rng(seed)
    wait = rng.uniform(0, 1e-3, steps)
    wait[49 % steps] = 2.0
    step_s = rng.uniform(0.1, 0.2, steps) + wait
    losses = np.exp(-np.arange(steps) / steps * 3) * rng.uniform(0.9, 1.1, steps)
    folder.mkdir(parents=True)
    record = RunRecord(folder)
    record.resume_at(0)
    record.append(
        Window(
            index=list(range(1, steps + 1)),
            loss=losses.tolist(),
            step_s=step_s.tolist(),
            wait_s=wait.tolist(),
            slowest_rank=[1] * steps,
            samples=[16] * steps,
            flops=[0] * steps,
            world_size=2,
        )
    )
    record.write_summary({"steps": steps, "mfu": 0.4, "peak_rss_gb": 1.5, "verdict": "the device limits this run"})
    values = {"run": {"name": folder.name, "dir": str(folder)}, "seed": seed, "data": {"uri": "/data"}}
    (folder / "recipe.json").write_text(json.dumps(values | (recipe or {})))
    _log(folder, 0, range(0, steps, 10), first_batch_s=7.0)
    return folder


def _log(folder: Path, start: int, steps: range, first_batch_s: float) -> None:
    file = folder / "metrics" / f"from_step_{start:08d}" / "metrics.csv"
    file.parent.mkdir(parents=True)
    rows = [f"{step},{first_batch_s},{0.5 + step / 1000},{start + 1}," for step in steps]
    rows.append(f"{steps[-1]},,,,0.25")  # held-out loss, in a row of its own
    file.write_text("\n".join(["step,time/first_batch_s,host/cpu_frac,mem/peak_gib,val/loss", *rows]) + "\n")


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [_write(tmp_path / "ours"), _write(tmp_path / "stock", 120, seed=1, recipe={"data": {"uri": "/copy"}})]


def test_figures_are_those_of_the_files(runs: list[Path]) -> None:
    found = compare(read_runs(runs), steps=100, price=3.0)
    for folder, figures in zip(runs, found.figures, strict=True):
        rows = RunRecord(folder).rows()
        step_s, waits = [row["step_s"] for row in rows], [row["data_wait_s"] for row in rows]
        tail_of_waits, tail_of_steps = Tail(), Tail()
        tail_of_waits.add(waits)
        tail_of_steps.add(step_s)
        expected = {
            "steps": len(rows),
            "samples_seen": 16 * len(rows),
            "ranks": 2,
            "samples_per_s": 16 * len(rows) / sum(step_s),
            "time_to_steps_s": 7 + sum(step_s[:100]),
            "first_batch_s": 7,
            "first_step_s": 7 + step_s[0],
            "data_wait_s": sum(waits),
            "data_wait_frac": sum(waits) / sum(step_s),
            "data_wait_max_s": 2.0,
            "data_wait_p99_s": tail_of_waits.quantile(0.99),
            "data_waits_over_1s": 1,
            "step_s_p50": statistics.median(step_s),
            "step_s_p99": tail_of_steps.quantile(0.99),
            "mfu": 0.4,
            "peak_rss_bytes": 1.5e9,
            "val_loss_best": 0.25,
            "device_hours": 2 * (7 + sum(step_s)) / 3600,
            "cost": 3 * 2 * (7 + sum(step_s)) / 3600,
        }
        assert {key: figures[key] for key in expected} == pytest.approx(expected)


def test_the_loss_to_reach_is_one_that_all_reach_and_is_timed_at_its_step(runs: list[Path]) -> None:
    read = read_runs(runs)
    found = compare(read)
    assert found.options.loss_window == 6
    assert all(figures["time_to_loss_s"] is not None for figures in found.figures)
    for run, figures in zip(read, compare(read, loss=0.5).figures, strict=True):
        losses = run.steps["loss"]
        first = next(n for n in range(6, len(losses) + 1) if statistics.fmean(losses[n - 6 : n]) <= 0.5)
        assert figures["time_to_loss_s"] == pytest.approx(7 + run.steps["step_s"][:first].sum())
    assert compare(read, loss=-1.0).figures[0]["time_to_loss_s"] is None


def test_page_and_texts_show_the_same_figures(runs: list[Path]) -> None:
    read = read_runs(runs)
    found = compare(read, price=2.0)
    html, table, values = page(read, found), markdown(read, found), json.loads(as_json(read, found))
    for index, figures in enumerate(found.figures):
        assert values["runs"][index]["figures"] == figures
        for row in found.rows:
            value = figures[row.key]
            if value is not None:
                assert f'data-key="{row.key}" data-value="{value!r}">{row.form(value)}' in html
                line = next(line for line in table.splitlines() if line.startswith(f"| {row.label} |"))
                assert line.split(" | ")[index + 1].rstrip(" |") == row.form(value)
    assert values["differences"] == {"data.uri": ["/data", "/copy"], "seed": [0, 1]}
    assert "the device limits this run" in html


class Tags(HTMLParser):
    """Names of all tags, and what their attributes point at."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.targets: set[str | None] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.targets |= {value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")}


def test_the_page_loads_nothing_and_takes_nothing_from_a_run_for_markup(tmp_path: Path) -> None:
    bad = '<script src="https://x.invalid/a.js"></script>'
    folder = _write(tmp_path / "run", recipe={"run": {"name": bad}, "note": bad})
    read = read_runs([folder, _write(tmp_path / "two")])
    html = page(read, compare(read))
    found = Tags()
    found.feed(html)
    assert found.tags.isdisjoint({"script", "img", "iframe", "object", "image", "use"})
    assert found.targets == {"data:,"}
    assert "url(" not in html
    assert "@import" not in html
    assert "default-src 'none'" in html
    pictures = re.findall(r'<svg class="plot".*?</svg>', html, re.DOTALL)
    assert len(pictures) >= 6
    for picture in pictures:
        ElementTree.fromstring(picture)  # well-formed


def test_a_run_that_was_started_again_counts_each_start_and_each_step_once(tmp_path: Path) -> None:
    folder = _write(tmp_path / "run", 60)
    _log(folder, 40, range(40, 60, 10), first_batch_s=5.0)  # the first start had logged up to step 60 before it died
    run = read_run(folder)
    elapsed = run.elapsed_s
    step_s = run.steps["step_s"]
    assert elapsed[39] == pytest.approx(7 + step_s[:40].sum())
    assert elapsed[40] == pytest.approx(7 + 5 + step_s[:41].sum())
    steps, values = run.logged["mem/peak_gib"]
    assert steps.tolist() == [1, 11, 21, 31, 41, 51]
    assert values.tolist() == [1, 1, 1, 1, 41, 41]
    assert "started 2 times" in " ".join(compare([run]).notes)


def test_warm_up_is_no_step_time_and_pauses_are_time(tmp_path: Path) -> None:
    folder = _write(tmp_path / "run", 4)
    (folder / "steps.csv").write_text(
        "step,loss,step_s,data_wait_s,samples,ranks,compile_s,pause_s,warm_up\n"
        "1,1,5,0,8,1,60,0,1\n2,1,1,0,8,1,0,0,0\n3,1,1,0,8,1,0,30,0\n"
    )
    figures = compare(read_runs([folder])).figures[0]
    assert figures["samples_per_s"] == 8
    assert figures["step_s_p99"] == 1
    assert figures["first_step_s"] == 7 + 60 + 5
    assert figures["time_to_steps_s"] == 7 + 60 + 5 + 1 + 31
    assert figures["compile_s"] == 60


def test_an_unfinished_run_is_reported_as_far_as_it_is_recorded(tmp_path: Path) -> None:
    folder = _write(tmp_path / "run", 30)
    (folder / "summary.json").unlink()
    whole = (folder / "steps.csv").read_text()
    (folder / "steps.csv").write_text(whole + "31,0.5,0.1")  # the row being written
    run = read_run(folder)
    assert len(run.steps["step"]) == 30
    found = compare([run])
    assert "not finished" in found.notes[0]
    assert found.figures[0]["mfu"] is None
    assert "mfu" not in {row.key for row in found.rows}


def test_losses_that_are_no_numbers_spoil_neither_page_nor_table(tmp_path: Path) -> None:
    folder = _write(tmp_path / "run", 50)
    lines = (folder / "steps.csv").read_text().splitlines()
    for place, value in ((10, ""), (20, "inf"), (21, "nan")):
        cells = lines[place].split(",")
        lines[place] = ",".join([cells[0], value, *cells[2:]])
    (folder / "steps.csv").write_text("\n".join(lines) + "\n")
    read = read_runs([folder])
    found = compare(read)
    html = page(read, found)
    assert found.figures[0]["time_to_loss_s"] is not None
    assert not re.search(r'd="[^"]*(nan|inf)', html)
    json.loads(as_json(read, found))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_runs_of_very_few_steps_have_a_page(steps: int, tmp_path: Path) -> None:
    read = read_runs([_write(tmp_path / "run", steps)])
    assert "nan" not in "".join(re.findall(r' d="([^"]*)"', page(read, compare(read))))


def test_size_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    folder, steps = _write(tmp_path / "run", 100), 100_000
    rows = np.random.default_rng(0).uniform(0.1, 1, (steps, 3))
    with (folder / "steps.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss", "step_s", "data_wait_s", "samples"])
        writer.writerows([n + 1, *row, 8] for n, row in enumerate(rows.tolist()))
    run = read_run(folder)
    assert len(run.steps["step"]) == steps
    line = curves.cumulative_wait(run, 0)
    assert line is not None
    assert len(line.x) <= curves.POINTS
    assert line.y[-1] == pytest.approx(rows[:, 2].sum())
    assert len(page([run], compare([run]))) < 150_000


def test_a_long_wait_shows_as_one_jump(runs: list[Path]) -> None:
    line = curves.cumulative_wait(read_run(runs[0]), 0)
    assert line is not None
    jumps = np.diff(line.y)
    assert line.x[1 + int(jumps.argmax())] == 50
    assert jumps.max() == pytest.approx(2.0)


def test_colours_can_be_told_from_their_background() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    assert len(DASHES) == len(set(DASHES)) == STYLES
    for colours in (LIGHT, DARK):
        for back in ("back", "panel"):
            assert min(contrast(colours[f"c{n}"], colours[back]) for n in range(STYLES)) >= 3
            assert min(contrast(colours[name], colours[back]) for name in ("text", "muted")) >= 4.5


def test_times_are_shown_in_the_unit_they_are_read_in() -> None:
    shown = [seconds(value) for value in (0, 0.0011, 0.48, 37.2, 307, 5.4 * 3600, math.pi * 1e7)]
    assert shown == ["0 s", "1.1 ms", "480 ms", "37.2 s", "5.12 min", "5.4 h", "8,727 h"]


def test_the_command_writes_a_page_or_prints_a_table(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            launch.main(["report", *arguments])
        return stopped.value.code, *capsys.readouterr()

    folders = [str(folder) for folder in runs]
    assert call(*folders) == (0, f"{runs[0] / 'report.html'}\n", "")
    assert (runs[0] / "report.html").read_text().startswith("<!doctype html>")
    assert call(*folders, "--format", "markdown")[1].startswith("|  | ours | stock |")
    assert json.loads(call(*folders, "--format", "json", "--price", "2")[1])["options"]["price"] == 2
    code, _, error = call(str(runs[0].parent))
    assert code == 2
    assert "no run folder" in error


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    same = {"run": {"name": "same"}}
    folders = [_write(tmp_path / name, 5, recipe=same) for name in ("a/x", "b/x", "c/y")]
    assert [run.name for run in read_runs(folders)] == [str(folders[0]), str(folders[1]), "y"]
