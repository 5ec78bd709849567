"""Columns of any length as few points, so that a page of a million steps is as small as one of a thousand."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from recipes.report.reading import Column, RunFiles

POINTS = 400
Bounds = NDArray[np.int64]
BINS = 60


@dataclass(frozen=True, kw_only=True, eq=False)
class Line:
    """One run in one plot; x rises."""

    run: int
    """Place of the run on the page, which decides its colour."""
    x: Column
    y: Column
    low: Column | None = None
    high: Column | None = None
    """Least and largest value behind each point, where it stands for several."""
    dots: tuple[Column, Column] | None = None
    """Single measurements beside the line."""
    steps: bool = False
    """Constant from one x to the next, as a histogram is."""


def buckets(length: int, points: int = POINTS) -> Bounds:
    """Bounds of at most `points` equal parts of `length` values, [parts + 1]."""
    return np.unique(np.linspace(0, length, min(length, points) + 1).round().astype(np.int64))


def cumulative_wait(run: RunFiles, index: int) -> Line | None:
    """Data wait up to each step; the last point is the run's total."""
    ends = buckets(len(run.steps["step"]))[1:] - 1
    return Line(run=index, x=run.steps["step"][ends], y=np.cumsum(run.steps["data_wait_s"])[ends])


def loss(run: RunFiles, index: int, *, hours: bool = False) -> Line | None:
    """Mean loss of neighbouring steps, by step or by hours since the program's start, with the held-out loss."""
    step, values = run.steps["step"], run.steps["loss"]
    x = run.elapsed_s / 3600 if hours else step
    bounds = buckets(len(values))
    dots = None
    if (logged := run.logged.get("val/loss")) is not None:
        places = np.searchsorted(step, logged[0]).clip(max=len(step) - 1)
        thin = buckets(len(places), 60)[1:] - 1
        dots = (x[places][thin], logged[1][thin])
    return Line(
        run=index, x=x[bounds[1:] - 1], y=_of_parts(values, bounds, np.nanmean), dots=dots,
        low=_of_parts(values, bounds, np.nanmin), high=_of_parts(values, bounds, np.nanmax),
    )  # fmt: skip


def throughput(run: RunFiles, index: int) -> Line | None:
    """Samples over step time of neighbouring steps."""
    bounds = buckets(len(run.steps["step"]), POINTS // 2)
    samples = np.add.reduceat(run.steps["samples"], bounds[:-1])
    seconds = np.add.reduceat(run.steps["step_s"], bounds[:-1])
    return Line(run=index, x=run.steps["step"][bounds[1:] - 1], y=samples / np.maximum(seconds, 1e-9))


def logged(metric: str) -> Callable[[RunFiles, int], Line | None]:
    """Curve of a logged metric: the largest of neighbouring rows."""

    def curve(run: RunFiles, index: int) -> Line | None:
        if metric not in run.logged:
            return None
        steps, values = run.logged[metric]
        bounds = buckets(len(values))
        return Line(run=index, x=steps[bounds[1:] - 1], y=_of_parts(values, bounds, np.nanmax))

    return curve


def step_times(runs: list[RunFiles]) -> list[Line]:
    """Share of the steps by step time in bins of equal ratio, the same for all runs; warm-up left out."""
    times = [np.maximum(run.timed("step_s"), 1e-6) for run in runs]
    least, most = min(float(t.min()) for t in times), max(float(t.max()) for t in times)
    edges = np.geomspace(least / 1.02, max(most, least * 1.05) * 1.02, BINS + 1)
    lines = []
    for index, values in enumerate(times):
        share = np.histogram(values, edges)[0] / len(values)
        lines.append(Line(run=index, x=edges, y=np.append(share, 0.0), steps=True))
    return lines


def _of_parts(values: Column, bounds: Bounds, function: Callable[[Column], float]) -> Column:
    """`function` of every part; NaN of a part without numbers."""
    if len(bounds) == len(values) + 1:
        return values
    parts = (values[begin:end] for begin, end in pairwise(bounds))
    return np.array([function(part) if np.isfinite(part).any() else np.nan for part in parts])


def finite(line: Line) -> bool:
    """Whether a line has anything to show."""
    return bool(np.isfinite(line.y).any())
