"""The rows of the comparison: what was measured in each run, in one place, for the page, Markdown and JSON alike."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from recipes.load import flatten
from recipes.report.reading import Column, RunFiles

GIB = 2**30
LONG_WAIT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the runs are compared at, the same for all."""

    steps: int
    loss: float | None
    """None where no run has a finite loss."""
    loss_window: int
    """Steps whose mean is taken for "the loss" of a step."""
    price: float | None
    """Of one device for one hour, in whatever currency."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    key: str
    label: str
    form: Callable[[float], str]
    better: Literal["more", "less"] | None = None
    """Which is better, where the ratio to the first run says something."""
    help: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All figures of all runs; a figure that is not known is None."""

    options: Options
    rows: tuple[Row, ...]
    """Those that at least one run has a figure for."""
    figures: tuple[dict[str, float | None], ...]
    """By run, key of a row -> value in seconds, samples, bytes or shares."""
    differences: tuple[tuple[str, tuple[Any, ...]], ...]
    """Recipe keys whose values differ, with the value of each run."""
    notes: tuple[str, ...]
    """What a reader must know before comparing."""


def seconds(value: float) -> str:
    """A time in the unit it is read in."""
    if value < 1:
        return f"{value * 1000:.3g} ms" if value else "0 s"
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (math.inf, 3600, "h")):
        if value < limit:
            return f"{value / size:.3g} {unit}" if value / size < 1000 else f"{value / size:,.0f} {unit}"
    return f"{value:g} s"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _rate(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{value:.3g} %" if (value := value * 100) < 10 else f"{value:.1f} %"


def _gigabytes(value: float) -> str:
    return f"{value / 1e9:.2f} GB"


def _loss(value: float) -> str:
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 else f"{value:.3e}"


def compare(
    runs: Sequence[RunFiles], *, steps: int | None = None, loss: float | None = None, price: float | None = None
) -> Comparison:
    """Put runs side by side.

    Args:
        steps: N of "time to N steps"; the last step that all runs have reached without it.
        loss: the loss to reach; the lowest that all runs have reached at their end without it.
        price: of one device for one hour.
    """
    last = min(int(run.steps["step"][-1]) for run in runs)
    window = max(1, min(100, min(len(run.steps["step"]) for run in runs) // 20))
    if loss is None:
        ends = [float(np.mean(run.steps["loss"][-window:])) for run in runs]
        loss = max(ends) if all(map(math.isfinite, ends)) else None
    options = Options(steps=steps or last, loss=loss, loss_window=window, price=price)
    figures = tuple(_figures(run, options) for run in runs)
    rows = tuple(row for row in _rows(options) if any(values[row.key] is not None for values in figures))
    return Comparison(
        options=options, rows=rows, figures=figures, differences=_differences(runs), notes=tuple(_notes(runs))
    )


def _rows(options: Options) -> tuple[Row, ...]:
    def row(key: str, label: str, form: Callable[[float], str], better: Any, text: str) -> Row:
        return Row(key=key, label=label, form=form, better=better, help=text)

    loss = "" if options.loss is None else f" {_loss(options.loss)}"
    window = "that step" if options.loss_window == 1 else f"the {options.loss_window} steps up to there"
    return (
        row("steps", "steps", _count, None, "optimizer steps recorded"),
        row("samples_seen", "samples", _count, None, "of all ranks"),
        row("ranks", "ranks", _count, None, "processes, one for each device, at the last step"),
        row("samples_per_s", "throughput, samples/s", _rate, "more", "samples over step time; no warm-up steps"),
        row("time_to_steps_s", f"time to {options.steps:,} steps", seconds, "less", "from the program's start"),
        row("first_step_s", "program start to first step", seconds, "less", "until the first step was done"),
        row("first_batch_s", "first batch on every rank", seconds, "less", "from the program's start"),
        row("time_to_loss_s", f"time to loss{loss}", seconds, "less", f"from the program's start; mean of {window}"),
        row("loss_last", "loss at the end", _loss, None, "mean of the last 5 % of the steps"),
        row("val_loss_best", "held-out loss, lowest", _loss, None, "loss on held-out episodes"),
        row("data_wait_s", "data wait, total", seconds, "less", "steps waited for the loader, slowest rank in each"),
        row("data_wait_frac", "data wait, share", _percent, None, "of the step time"),
        row("data_wait_max_s", "data wait, longest", seconds, "less", "of one step"),
        row("data_wait_p99_s", "data wait, p99", seconds, "less", "99 of 100 steps waited at most so long"),
        row("data_waits_over_1s", "data waits over 1 s", _count, None, "steps"),
        row("device_idle_s", "device idle for data", seconds, "less", "devices had nothing to do while waiting"),
        row("step_s_p50", "step, p50", seconds, "less", "median; no warm-up steps"),
        row("step_s_p99", "step, p99", seconds, "less", "99 of 100 steps took at most so long; no warm-up steps"),
        row("compile_s", "compilation", seconds, "less", "outside of the step times"),
        row("mfu", "MFU", _percent, None, "model FLOPs over the devices' dense peak"),
        row("hfu", "HFU", _percent, None, "the same with recomputation"),
        row("host_cpu_frac", "host CPU", _percent, None, "mean share of all cores of rank 0's host"),
        row("peak_device_bytes", "device memory, peak", _gigabytes, None, "of PyTorch's allocator, rank 0"),
        row("peak_rss_bytes", "host memory, peak", _gigabytes, None, "resident, rank 0's process"),
        row("device_hours", "device hours", lambda value: f"{value:.4g}", "less", "ranks times time, with start-up"),
        row("cost", f"cost at {options.price or 0:g} a device hour", lambda value: f"{value:,.2f}", "less",
            "device hours times the price given"),
    )  # fmt: skip


def quantile(values: Column, q: float) -> float:
    """Smallest value that a share `q` of all values does not exceed, as in the run's own summary."""
    place = max(0, math.ceil(len(values) * q) - 1)
    return float(np.partition(values, place)[place])


def _figures(run: RunFiles, options: Options) -> dict[str, float | None]:
    """Figures of one run, from the columns; what only the program could see, from its summary."""
    elapsed, waits, step_s = run.elapsed_s, run.steps["data_wait_s"], run.timed("step_s")
    known = run.summary
    first_batch_s = run.starts.get(0, math.nan)
    reached = int(np.searchsorted(run.steps["step"], options.steps))
    last = max(1, len(elapsed) // 20)
    figures: dict[str, Any] = {
        "steps": run.steps["step"][-1],
        "samples_seen": run.steps["samples"].sum(),
        "ranks": run.steps["ranks"][-1],
        "samples_per_s": run.timed("samples").sum() / max(step_s.sum(), 1e-9),
        "time_to_steps_s": elapsed[reached] if reached < len(elapsed) else None,
        "first_batch_s": first_batch_s,
        "first_step_s": elapsed[0] if math.isfinite(first_batch_s) else None,
        "time_to_loss_s": _time_to_loss(run, elapsed, options),
        "loss_last": run.steps["loss"][-last:].mean(),
        "val_loss_best": run.logged["val/loss"][1].min() if "val/loss" in run.logged else known.get("val_loss_best"),
        "data_wait_s": waits.sum(),
        "data_wait_frac": waits.sum() / max(run.steps["step_s"].sum(), 1e-9),
        "data_wait_max_s": waits.max(),
        "data_wait_p99_s": quantile(waits, 0.99),
        "data_waits_over_1s": (waits > LONG_WAIT_S).sum(),
        "device_idle_s": known.get("device_idle_s"),
        "step_s_p50": float(np.median(step_s)),
        "step_s_p99": quantile(step_s, 0.99),
        "compile_s": run.steps["compile_s"].sum() or None,
        "mfu": known.get("mfu"),
        "hfu": known.get("hfu"),
        "host_cpu_frac": _logged(run, "host/cpu_frac", np.mean),
        "peak_device_bytes": _peak(run, "peak_device_gb", "mem/peak_gib"),
        "peak_rss_bytes": _peak(run, "peak_rss_gb", "mem/peak_rss_gib"),
        "device_hours": run.device_s / 3600,
        "cost": run.device_s / 3600 * options.price if options.price is not None else None,
    }
    plain = {key: None if value is None else float(value) for key, value in figures.items()}
    return {key: value if value is not None and math.isfinite(value) else None for key, value in plain.items()}


def _time_to_loss(run: RunFiles, elapsed: Column, options: Options) -> float | None:
    """Seconds until the mean loss of the last steps was first as low as asked for; None where it never was."""
    window, losses = options.loss_window, run.steps["loss"]
    if options.loss is None or len(losses) < window:
        return None
    # summed anew in each window: a loss that is not a number must not spoil all steps behind it
    means = np.lib.stride_tricks.sliding_window_view(losses, window).mean(axis=1)
    low = np.flatnonzero(means <= options.loss * (1 + 1e-12) if options.loss > 0 else means <= options.loss)
    return float(elapsed[low[0] + window - 1]) if len(low) else None


def _logged(run: RunFiles, metric: str, function: Callable[[Column], Any]) -> float | None:
    return float(function(run.logged[metric][1])) if metric in run.logged else None


def _peak(run: RunFiles, figure: str, metric: str) -> float | None:
    """Bytes; the run's own summary where it is finished, else what it logged last."""
    if run.summary.get(figure) is not None:
        return float(run.summary[figure]) * 1e9
    peak = _logged(run, metric, np.max)
    return None if peak is None else peak * GIB


def _differences(runs: Sequence[RunFiles]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Keys of the recipes whose values are not the same everywhere; where a run lies and its name left out."""
    flat = [flatten(run.recipe) for run in runs]
    keys = sorted(set().union(*flat) - {"run.dir", "run.name"})
    rows = ((key, tuple(values.get(key) for values in flat)) for key in keys)
    return tuple((key, values) for key, values in rows if any(value != values[0] for value in values[1:]))


def _notes(runs: Sequence[RunFiles]) -> list[str]:
    notes = []
    for run in runs:
        if not run.summary:
            notes.append(
                f"{run.name} has no summary: it is not finished, or was stopped. Its figures are those so far."
            )
        if run.summary.get("verdict"):
            notes.append(f"{run.name}: {run.summary['verdict']}")
        if len(run.starts) > 1:
            notes.append(f"{run.name} was started {len(run.starts)} times; each start-up is counted in its times.")
    if len({run.steps["step"][-1] for run in runs}) > 1:
        notes.append(
            "The runs are of different lengths: total waits, device hours and cost are those of all their steps."
        )
    prints = {run.environment.get("fingerprint") for run in runs} - {None}
    if len(prints) > 1:
        notes.append("The runs read different data: the fingerprints of their datasets differ.")
    means = {float(np.median(run.steps["samples"])) for run in runs}
    if len(means) > 1:
        notes.append("The runs take different numbers of samples a step: compare samples, not steps.")
    return notes
