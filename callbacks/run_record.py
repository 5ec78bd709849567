"""The run's own memory: one row per step on disk, the environment it ran in, and the summary at the end.

Rows are appended as they are measured, so a killed run loses at most one logging interval. A run that continues from
a checkpoint first drops the rows after it: those steps are trained again.
"""

import csv
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, TextIO

import torch

from callbacks.window import Window

COLUMNS = ("step", "loss", "step_s", "data_wait_s", "slowest_rank", "samples", "flops", "ranks")
# Records of earlier versions lack these columns; this is read instead.
MORE_COLUMNS = {"device_idle_s": math.nan, "recompute_flops": 0.0, "compile_s": 0.0, "pause_s": 0.0, "warm_up": 0.0}
PACKAGES = ("torch", "lightning", "transformers", "numpy", "pyarrow", "av", "omegaconf", "wandb", "safetensors")


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one step: readers see the old content or the new, also after a crash or on a full disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class RunRecord:
    """`steps.csv`, `environment.json` and `summary.json` of a run folder; only rank 0 writes.

    Args:
        folder: the run folder, existing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps_file = folder / "steps.csv"
        self._open: TextIO | None = None  # opening it costs three times what a write does

    def resume_at(self, step: int) -> None:
        """Keep the rows up to and including `step`; a last row cut short by a crash is dropped too."""
        kept = [row for row in self.rows() if row["step"] <= step]
        names = (*COLUMNS, *MORE_COLUMNS)
        lines = [",".join(names)] + [",".join(_text(row[name]) for name in names) for row in kept]
        self._close()
        write_atomically(self.steps_file, "\n".join(lines) + "\n")

    def append(self, window: Window) -> None:
        """Write one row per step of the window."""
        columns = (
            window.index,
            window.loss,
            window.step_s,
            window.wait_s,
            window.slowest_rank,
            window.samples,
            window.flops,
            [window.world_size] * len(window),
            *([+value for value in getattr(window, name)] for name in MORE_COLUMNS),  # plus makes a number of a bool
        )
        lines = [",".join(map(repr, row)) for row in zip(*columns, strict=True)]
        if self._open is None:
            self._open = self.steps_file.open("a")
            weakref.finalize(self, self._open.close)
        self._open.write("\n".join(lines) + "\n")
        self._open.flush()

    def _close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def rows(self) -> list[dict[str, float]]:
        """All complete rows, in order."""
        if not self.steps_file.exists():
            return []
        with self.steps_file.open(newline="") as file:
            raw = list(csv.DictReader(file))
        rows = []
        for values in raw:
            try:
                more = {name: float(values[name]) for name in MORE_COLUMNS if name in values}
                rows.append({name: float(values[name]) for name in COLUMNS} | MORE_COLUMNS | more)
            except (TypeError, ValueError, KeyError):
                break  # the row being written when the run was killed
        return rows

    def write_environment(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Write versions, hardware and code state, and give them; no environment variables: they may hold secrets."""
        values = {
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "packages": {name: _version(name) for name in PACKAGES},
            "git": _git_state(),
            **extra,
        }
        write_atomically(self.folder / "environment.json", json.dumps(values, indent=2) + "\n")
        return values

    def losses(self) -> dict[str, float]:
        """Mean loss of the first and of the last 5 % of the steps, at least one step each."""
        losses = [row["loss"] for row in self.rows()]
        if not losses:
            return {}
        share = max(1, len(losses) // 20)
        return {"loss_first": sum(losses[:share]) / share, "loss_last": sum(losses[-share:]) / share}

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write `summary.json`; its `steps` say how far the run came."""
        write_atomically(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")


def _text(value: float | int) -> str:
    return repr(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(float(value))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Commit of the code that runs and whether it was changed; None outside a checkout."""
    where = Path(__file__).parent
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=where, capture_output=True, text=True, check=True)
        status = subprocess.run(["git", "status", "--porcelain"], cwd=where, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": commit.stdout.strip(), "modified": bool(status.stdout.strip())}
