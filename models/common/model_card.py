"""README.md of an exported checkpoint: facts of the run, nothing else."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# key of summary.json, label, format
_FIGURES = (
    ("samples_seen", "samples seen", "{:,}"),
    ("loss_first", "training loss, first 5 % of steps", "{:.4f}"),
    ("loss_last", "training loss, last 5 % of steps", "{:.4f}"),
    ("val_loss", "validation loss", "{:.4f}"),
    ("val_action_mse", "open-loop action error on held-out episodes, mean square", "{:.4g}"),
    ("val_action_mae", "open-loop action error on held-out episodes, mean absolute", "{:.4g}"),
    ("success_rate", "success, held-out layouts", "{:.1%}"),
    ("success_rate_untrained", "success before training", "{:.1%}"),
    ("success_rate_swapped", "success with the instruction swapped", "{:.1%}"),
)


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a card says of a run, whatever the model.

    base: hub id or address of the checkpoint the training started from; None for random weights. steps: optimizer
    steps. fingerprint: of the training data. changes: recipe keys that differ from their defaults. summary: figures of
    the finished run, under the names of its summary.json.
    """

    name: str
    dtype: str
    steps: int
    base: str | None = None
    data: str | None = None
    fingerprint: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)


def card(facts: RunFacts, *, library: str, tags: Sequence[str], about: str, rows: Mapping[str, str]) -> str:
    """The card as Markdown with the header fields the hub knows.

    Args:
        library, tags: for the header.
        about: what the folder holds, one paragraph.
        rows: more lines of the table of facts, by label.
    """
    header = ["---", f"library_name: {library}", "pipeline_tag: robotics", "tags:", *(f"- {tag}" for tag in tags)]
    hub_id = facts.base is not None and not facts.base.startswith((".", "/", "~", "s3:")) and facts.base.count("/") == 1
    if hub_id:
        header += [f"base_model: {facts.base}"]
    table: list[tuple[str, str | None]] = [
        ("started from", facts.base or "random weights"),
        ("optimizer steps", f"{facts.steps:,}"),
        ("dataset", facts.data),
        ("data fingerprint", facts.fingerprint),
        *rows.items(),
        ("weights stored as", facts.dtype),
    ]
    table += [(label, form.format(facts.summary[key])) for key, label, form in _FIGURES if _number(facts.summary, key)]
    lines = [*header, "---", "", f"# {facts.name}", "", about, "", "| | |", "|---|---|"]
    lines += [*(f"| {label} | {value} |" for label, value in table if value is not None), ""]
    if facts.changes:
        lines += ["## What the recipe sets", "", "| key | value |", "|---|---|"]
        lines += [f"| `{key}` | `{_plain(value)}` |" for key, value in facts.changes.items()]
        lines += [""]
    lines += [
        "## Licence",
        "",
        "Weights that were trained from another checkpoint stay under the licence of that checkpoint"
        + (f", {facts.base}" if facts.base else "")
        + ". Read it before you use or pass on these.",
        "",
    ]
    return "\n".join(lines)


def _number(values: Mapping[str, Any], key: str) -> bool:
    return isinstance(values.get(key), int | float)


def _plain(value: object) -> str:
    """One line that does not end a table cell."""
    return json.dumps(value, ensure_ascii=False).replace("|", "\\|")
