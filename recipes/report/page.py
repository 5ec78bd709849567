"""The page: one HTML file that needs no network, no script and no other file."""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from recipes.report import curves
from recipes.report.figures import Comparison, Row
from recipes.report.reading import RunFiles
from recipes.report.style import sheet
from recipes.report.svg import STYLES, Axes, plot

# Nothing may be loaded, whatever a run's files hold.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_DEVICE_GIB, _HOST_GIB = curves.logged("mem/peak_gib"), curves.logged("mem/peak_rss_gib")


def page(runs: Sequence[RunFiles], comparison: Comparison) -> str:
    """The report of all runs."""
    names = ", ".join(run.name for run in runs)
    title = f"Run report: {names}"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>",
            f"<style>{sheet()}</style></head><body>",
            f"<h1>{escape('Run report' if len(runs) == 1 else 'Runs side by side')}</h1>",
            '<p class="muted">Times are those of the host clock on the slowest rank. Step times leave out compilation, '
            "checkpoints and validation; times from the program's start contain them where the run recorded them. "
            + ("× is what a figure is of the first run's.</p>" if len(runs) > 1 else "</p>"),
            _notes(comparison),
            "<h2>Comparison</h2>",
            _table(runs, comparison),
            "<h2>Curves</h2>",
            _legend(runs),
            _plots(list(runs)),
            _differences(runs, comparison),
            _environments(runs),
            "</body></html>\n",
        ]
    )


def _notes(comparison: Comparison) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in comparison.notes)
    return f'<ul class="notes">{items}</ul>' if items else ""


def _table(runs: Sequence[RunFiles], comparison: Comparison) -> str:
    lines = [_head(["", *(_named(index, run.name) for index, run in enumerate(runs))])]
    for row in comparison.rows:
        values = [figures[row.key] for figures in comparison.figures]
        cells = "".join(_cell(row, value, values[0], index) for index, value in enumerate(values))
        lines.append(f'<tr><th scope="row">{escape(row.label)}<small>{escape(row.help)}</small></th>{cells}</tr>')
    return _scrolled("Comparison", lines)


def _cell(row: Row, value: float | None, first: float | None, index: int) -> str:
    """A figure and, from the second run on, what it is of the first run's."""
    if value is None:
        return f'<td class="n muted">–{"<span class=ratio></span>" if index else ""}</td>'
    ratio = '<span class="ratio"></span>' if index else ""
    if index and row.better is not None and first and value:
        ratio = f'<span class="ratio">× {value / first:.3g}</span>'
    return f'<td class="n" data-key="{row.key}" data-value="{value!r}">{escape(row.form(value))}{ratio}</td>'


def _legend(runs: Sequence[RunFiles]) -> str:
    return f'<div class="legend">{"".join(_named(index, run.name) for index, run in enumerate(runs))}</div>'


def _named(index: int, name: str) -> str:
    """A run's name behind a piece of its line."""
    line = f'<path class="line s{index % STYLES}" d="M2 5H32"/>'
    return f'<span><svg class="key" viewBox="0 0 34 10" aria-hidden="true">{line}</svg>{escape(name)}</span>'


def _plots(runs: list[RunFiles]) -> str:
    def lines(curve: Any, **options: Any) -> list[curves.Line]:
        found = [curve(run, index, **options) for index, run in enumerate(runs)]
        return [line for line in found if line is not None]

    mean = "Mean of neighbouring steps; the band is their least and largest. Dots: held-out loss."
    pictures: list[tuple[list[curves.Line], Axes, str]] = [
        (lines(curves.cumulative_wait), Axes(title="Data wait so far", x="step", y="seconds"),
         "All time that steps have waited for the loader. Flat is good; a jump is one long wait."),
        (lines(curves.throughput), Axes(title="Throughput", x="step", y="samples/s"),
         "Samples over step time of neighbouring steps."),
        (lines(curves.loss), Axes(title="Loss by step", x="step", y="loss", from_zero=False), mean),
        (lines(curves.loss, hours=True),
         Axes(title="Loss by time", x="hours since the program's start", y="loss", from_zero=False),
         "The same by time, start-up included."),
        (curves.step_times(runs),
         Axes(title="Step times", x="seconds", y="share of steps", log_x=True, percent=True),
         "Bins of equal ratio, the same for all runs; no warm-up steps."),
        (lines(_DEVICE_GIB), Axes(title="Device memory", x="step", y="GiB"), "Peak of PyTorch's allocator, rank 0."),
        (lines(_HOST_GIB), Axes(title="Host memory", x="step", y="GiB"), "Peak of rank 0's process."),
        (lines(curves.logged("host/cpu_frac")), Axes(title="Host CPU", x="step", y="of all cores", percent=True),
         "Share of the cores of rank 0's host that was busy."),
        (lines(curves.logged("perf/mfu")), Axes(title="MFU", x="step", y="of the peak", percent=True),
         "Model FLOPs over the dense peak of the devices."),
    ]  # fmt: skip
    figures = [
        f"<figure><h3>{escape(axes.title)}</h3>{plot(drawn, axes)}<figcaption>{escape(text)}</figcaption></figure>"
        for drawn, axes, text in pictures
        if any(curves.finite(line) for line in drawn)
    ]
    return f'<div class="plots">{"".join(figures)}</div>'


def _differences(runs: Sequence[RunFiles], comparison: Comparison) -> str:
    """Keys in which the recipes differ."""
    if len(runs) == 1:
        return ""
    if not comparison.differences:
        return "<h2>Recipes</h2><p>The recipes are the same.</p>"
    lines = [_head(["key", *(_named(index, run.name) for index, run in enumerate(runs))], "v")]
    for key, values in comparison.differences:
        cells = "".join(f'<td class="v"><code>{escape(json.dumps(value))}</code></td>' for value in values)
        lines.append(f'<tr><th scope="row"><code>{escape(key)}</code></th>{cells}</tr>')
    return "<h2>Where the recipes differ</h2>" + _scrolled("Where the recipes differ", lines)


def _environments(runs: Sequence[RunFiles]) -> str:
    """What each run ran on."""
    rows: dict[str, list[str]] = {}
    for index, run in enumerate(runs):
        for key, value in _environment(run).items():
            rows.setdefault(key, [""] * len(runs))[index] = value
    lines = [_head(["", *(_named(index, run.name) for index, run in enumerate(runs))], "v")]
    for key, values in rows.items():
        cells = "".join(f'<td class="v">{escape(value) or "–"}</td>' for value in values)
        lines.append(f'<tr><th scope="row">{escape(key)}</th>{cells}</tr>')
    return "<h2>Where they ran</h2>" + _scrolled("Where they ran", lines)


def _environment(run: RunFiles) -> dict[str, str]:
    known, rows = run.environment, {"folder": str(run.folder)}
    for key in ("device", "cpus", "world_size", "platform", "python", "fingerprint"):
        if known.get(key) is not None:
            rows[key.replace("_", " ")] = str(known[key])
    if packages := {name: version for name, version in known.get("packages", {}).items() if version}:
        rows["packages"] = ", ".join(f"{name} {version}" for name, version in packages.items())
    if git := known.get("git"):
        rows["code"] = f"{git['commit'][:12]}{', changed since' if git.get('modified') else ''}"
    return rows


def _head(cells: Sequence[str], kind: str = "n") -> str:
    first, *others = cells
    return f'<thead><tr><th scope="col">{first}</th>' + "".join(
        f'<th scope="col" class="{kind}">{cell}</th>' for cell in others
    ) + "</tr></thead><tbody>"  # fmt: skip


def _scrolled(label: str, lines: Sequence[str]) -> str:
    """A table that scrolls by itself where it is wider than the screen, by keyboard too."""
    table = "\n".join(["<table>", *lines, "</tbody></table>"])
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}">{table}</div>'
