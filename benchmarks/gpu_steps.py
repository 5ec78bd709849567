"""What the benchmarks of a training step on a GPU share: timing, memory, a process for each case, the table."""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def timed(step: Callable[[], Tensor], count: int, device: torch.device) -> tuple[float, list[Tensor]]:
    """Seconds of `count` steps between two waits for the device, and their losses."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    wait()
    begin = time.perf_counter()
    losses = [step() for _ in range(count)]
    wait()
    return time.perf_counter() - begin, losses


def peak_bytes(device: torch.device) -> int:
    """The allocator's peak on a GPU, the process's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True, kw_only=True)
class Case:
    """One process. row: what names it in the table. options: of the model's command, beside the common ones."""

    name: str
    row: dict[str, Any]
    options: dict[str, Any]


def in_processes(
    script: Path, arguments: argparse.Namespace, cases: Sequence[Case], table: Callable[[list[dict[str, Any]]], str]
) -> list[dict[str, Any]]:
    """Rows of all cases, each in a process of its own, as long as `--limit-s` lasts; shown on stderr as they come."""
    began, rows = time.monotonic(), []
    for case in cases:
        row = dict(case.row)
        left = arguments.limit_s - (time.monotonic() - began)
        options = {**case.options, "device": arguments.device, "steps": arguments.steps, "case": case.name}
        command = [sys.executable, str(script), arguments.model]
        command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=max(left, 0.01), check=True)
            row = json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            row["left_out"] = f"left out: more than the {arguments.limit_s} s of --limit-s"
        except subprocess.CalledProcessError as error:
            row["left_out"] = f"failed with exit code {error.returncode}; its message stands above"
        rows.append(row)
        print(table(rows).splitlines()[-1], file=sys.stderr, flush=True)
    return rows


def lines(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under their heads; a row may end early with a remark."""
    whole = [heads, *(row for row in rows if len(row) == len(heads))]
    widths = [max(len(row[place]) for row in whole) for place in range(len(heads))]
    cut = [row if len(row) == len(heads) else row[:-1] for row in [heads, *rows]]
    remarks = ["" if len(row) == len(heads) else "  " + row[-1] for row in [heads, *rows]]
    return "\n".join(
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=False)) + remark
        for row, remark in zip(cut, remarks, strict=True)
    )
