"""A run folder as columns: one value a step from `steps.csv`, and what was logged in between from `metrics/`.

Columns are read by Arrow, a million steps in well under a second. A file that a run is writing at this moment, or was
writing when it was killed, ends in half a row, which is left out. Columns and files that a run of another version does
not have are absent, never made up.
"""

import csv
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]

NEEDED = ("step", "loss", "step_s", "data_wait_s", "samples")
# What a record of another version may lack, with the value that stands for it.
DEFAULTS = {"ranks": 1.0, "compile_s": 0.0, "pause_s": 0.0, "warm_up": 0.0}
LOGGED = ("time/first_batch_s", "mem/peak_gib", "mem/peak_rss_gib", "host/cpu_frac", "perf/mfu", "val/loss")
_START = re.compile(r"from_step_(\d+)")


@dataclass(frozen=True, kw_only=True, eq=False)
class RunFiles:
    """What the files of one run say."""

    name: str
    folder: Path
    recipe: dict[str, Any]
    summary: dict[str, Any]
    """Empty while the run is not finished."""
    environment: dict[str, Any]
    steps: dict[str, Column]
    """Column of `steps.csv` -> one value a step, ordered by step, without gaps in time; see `elapsed_s`."""
    logged: dict[str, tuple[Column, Column]]
    """Metric -> (steps, values) of the rows that have it; steps count from 1 as in `steps.csv`."""
    starts: dict[int, float]
    """Steps done before a start of the run -> seconds from that start until its first batch; NaN where unknown."""

    @property
    def elapsed_s(self) -> Column:
        """Seconds from the program's start until each step was done, [steps].

        Start-ups, compilation, checkpoints and validation included as far as the files tell them. Steps that were lost
        with a killed process and trained again are counted once.
        """
        seconds = self.steps["step_s"] + self.steps["compile_s"] + self.steps["pause_s"] + self._start_up_s()
        return np.cumsum(seconds)

    @property
    def device_s(self) -> float:
        """Seconds of all devices together, each from its start to the last step."""
        seconds = np.diff(self.elapsed_s, prepend=0.0)
        return float((seconds * self.steps["ranks"]).sum())

    def timed(self, column: str) -> Column:
        """A column without the warm-up steps; all steps when there are no others."""
        kept = self.steps["warm_up"] == 0
        values = self.steps[column]
        return values[kept] if kept.any() else values

    def _start_up_s(self) -> Column:
        seconds = np.zeros(len(self.steps["step"]))
        for done, first_batch_s in self.starts.items():
            place = int(np.searchsorted(self.steps["step"], done, side="right"))
            if place < len(seconds) and np.isfinite(first_batch_s):
                seconds[place] += first_batch_s
        return seconds


def read_runs(folders: Sequence[Path]) -> list[RunFiles]:
    """All runs, in the order given, under names that differ.

    Raises:
        ValueError: a folder is no run folder, or has no step recorded.
    """
    runs = [read_run(folder) for folder in folders]
    for by in (lambda run: run.folder.name, lambda run: str(run.folder)):
        names = [run.name for run in runs]
        runs = [run if names.count(run.name) == 1 else replace(run, name=by(run)) for run in runs]
    return runs


def read_run(folder: Path) -> RunFiles:
    """One run, finished or not.

    Raises:
        ValueError: it is no run folder, or has no step recorded.
    """
    if not (folder / "steps.csv").is_file():
        raise ValueError(f"{folder} is no run folder: it has no steps.csv; give the folder that `run.dir` named")
    table = _columns(folder / "steps.csv")
    if missing := [name for name in NEEDED if name not in table]:
        raise ValueError(f"{folder / 'steps.csv'} has no column {', '.join(missing)}; has {', '.join(table)}")
    steps = {name: np.nan_to_num(table[name]) if name in DEFAULTS else table[name] for name in table}
    if not len(steps["step"]):
        raise ValueError(
            f"{folder / 'steps.csv'} has no step yet; the first ones are written after one logging interval"
        )
    for name, value in DEFAULTS.items():
        steps.setdefault(name, np.full(len(steps["step"]), value))
    recipe = _json(folder / "recipe.json")
    logged, starts = _logged(folder / "metrics")
    summary = _json(folder / "summary.json")
    if not starts and summary.get("first_batch_s") is not None:
        starts = {0: float(summary["first_batch_s"])}
    return RunFiles(
        name=str(recipe.get("run", {}).get("name") or folder.resolve().name),
        folder=folder,
        recipe=recipe,
        summary=summary,
        environment=_json(folder / "environment.json"),
        steps=steps,
        logged=logged,
        starts=starts,
    )


def _logged(folder: Path) -> tuple[dict[str, tuple[Column, Column]], dict[int, float]]:
    """Logged metrics over all starts. Rows that a later start trained again are those of the later start."""
    found = {
        int(match[1]): path for path in folder.glob("*/metrics.csv") if (match := _START.fullmatch(path.parent.name))
    }
    begins = sorted(found)
    parts: dict[str, list[tuple[Column, Column]]] = {}
    starts = {}
    for place, begin in enumerate(begins):
        table = _columns(found[begin], ("step", *LOGGED))
        if "step" not in table:
            continue
        until = begins[place + 1] if place + 1 < len(begins) else np.inf
        step = table.pop("step") + 1  # Lightning counts from 0
        for name, values in table.items():
            kept = np.isfinite(values) & (step <= until)
            if kept.any():
                parts.setdefault(name, []).append((step[kept], values[kept]))
        first = table.get("time/first_batch_s", np.empty(0))
        first = first[np.isfinite(first)]
        starts[begin] = float(first[0]) if len(first) else float("nan")
    joined = {
        name: (np.concatenate([steps for steps, _ in pieces]), np.concatenate([values for _, values in pieces]))
        for name, pieces in parts.items()
    }
    return joined, starts


def _columns(path: Path, names: Iterable[str] | None = None) -> dict[str, Column]:
    """Columns of a CSV file as float64, NaN where a field is empty; `names` limits what is converted."""
    from pyarrow import BufferReader, float64, memory_map
    from pyarrow import csv as arrow

    whole = memory_map(str(path)).read_buffer() if path.stat().st_size else b""  # a gigabyte in a long run: not copied
    end = len(whole)
    while end and (newline := bytes(whole[max(0, end - 4096) : end]).rfind(b"\n")) < 0:
        end = max(0, end - 4096)
    if not end:
        return {}
    end = max(0, end - 4096) + newline + 1  # a row still being written has no end of line
    whole = whole[:end]
    with path.open(newline="") as file:
        header = next(csv.reader(file))
    wanted = [name for name in header if names is None or name in set(names)]
    if not wanted:
        return {}
    table = arrow.read_csv(
        BufferReader(whole),
        parse_options=arrow.ParseOptions(invalid_row_handler=lambda row: "skip"),
        convert_options=arrow.ConvertOptions(include_columns=wanted, column_types=dict.fromkeys(wanted, float64())),
    )
    return {name: table[name].to_numpy().astype(np.float64) for name in wanted}


def _json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where the file does not exist."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not readable as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no JSON object")
    return values
