"""The same comparison for a README, an issue or a program."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from recipes.report.figures import Comparison
from recipes.report.reading import RunFiles


def markdown(runs: Sequence[RunFiles], comparison: Comparison) -> str:
    """The table, what differs between the recipes, and the notes, as Markdown."""
    names = [_safe(run.name) for run in runs]
    lines = [_line(["", *names]), _line(["---", *["---:"] * len(runs)])]
    for row in comparison.rows:
        shown = ("–" if (value := figures[row.key]) is None else row.form(value) for figures in comparison.figures)
        lines.append(_line([row.label, *shown]))
    if comparison.differences:
        lines += ["", _line(["differs", *names]), _line(["---"] * (len(runs) + 1))]
        for key, values in comparison.differences:
            lines.append(_line([f"`{key}`", *(f"`{_safe(json.dumps(value))}`" for value in values)]))
    lines += ["", *(f"- {_safe(note)}" for note in comparison.notes)] if comparison.notes else []
    return "\n".join(lines) + "\n"


def as_json(runs: Sequence[RunFiles], comparison: Comparison) -> str:
    """All figures unrounded: seconds, samples, bytes, shares of 1; null where a figure is not known."""
    values = {
        "options": asdict(comparison.options),
        "runs": [
            {"name": run.name, "folder": str(run.folder), "figures": figures}
            for run, figures in zip(runs, comparison.figures, strict=True)
        ],
        "meaning": {row.key: f"{row.label}: {row.help}" for row in comparison.rows},
        "differences": {key: list(of_runs) for key, of_runs in comparison.differences},
        "notes": list(comparison.notes),
    }
    return json.dumps(values, indent=2) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _safe(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
