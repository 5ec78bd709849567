"""The ladder of published optimisations of the Cosmos-3 policy, rung by rung: start, step, memory, and the loss beside.

    python benchmarks/cosmos3_ladder.py [RECIPE] [key=value ...] [--ranks N] [--rungs 0 1 2 3 4 5] [--json FILE]

Each rung is a run of its own in fresh processes, `recipes train RECIPE +ladder=RUNG`, to a temporary folder; RECIPE is
`cosmos3_policy/smoke` without one, whose step is a small network's on a CPU. Overrides go to every rung. `start` is the
time from the program's start to the first batch, steps are medians without the first ones, `graphs` are those that
were compiled. Losses are compared step by step with those of the lowest rung: `differs` is the largest relative
difference. What each rung changes stands in `recipes/base/ladder/`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from callbacks.run_record import RunRecord  # noqa: E402

NAMES = (
    "stock start-up and CPU jitter",
    "pruned columns",
    "device jitter",
    "compiled layers",
    "mix-order reduction off",
    "last layers kept",
)


def run(recipe: str, overrides: list[str], rung: int, folder: Path, ranks: int) -> dict[str, Any]:
    """Train one rung; its figures and losses.

    Raises:
        RuntimeError: the run failed; says what it wrote.
    """
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    fixed = [f"run.dir={folder}", "trainer.log_every_n_steps=1", "validation=null"]
    command = [sys.executable, *launch, "-m", "recipes", "train", recipe, *overrides, f"+ladder={rung}", *fixed]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"rung {rung} failed:\n{done.stderr[-4000:]}")
    summary = json.loads((folder / "summary.json").read_text())
    return {**summary, "losses": [row["loss"] for row in RunRecord(folder).rows()]}


def compare(rungs: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each rung, its times as they are and relative to the lowest one's."""
    first = next(iter(rungs.values()))
    rows = []
    for rung, found in rungs.items():
        pairs = zip(found["losses"], first["losses"], strict=True)
        rows.append(
            {
                "rung": rung,
                "what": NAMES[rung],
                "start_s": found["first_batch_s"],
                "step_s": found["step_s_median"],
                "samples_per_s": found["samples_per_s"],
                "faster": found["samples_per_s"] / first["samples_per_s"],
                "data_wait_frac": found["data_wait_frac"],
                "rss_gb": found["peak_rss_gb"],
                "graphs": found.get("compile_graphs", 0),
                "loss_last": found["loss_last"],
                "differs": max(abs(own - other) / abs(other) for own, other in pairs),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [
        f"{'rung':<34}{'start s':>9}{'step s':>9}{'samples/s':>11}{'x':>7}{'data wait':>11}{'RSS GB':>8}{'graphs':>8}"
        f"{'loss':>9}{'differs':>10}"
    ]
    lines += [
        f"{row['rung']} {row['what']:<32}{row['start_s']:>9.2f}{row['step_s']:>9.3f}{row['samples_per_s']:>11.2f}"
        f"{row['faster']:>7.2f}{row['data_wait_frac']:>11.1%}{row['rss_gb']:>8.2f}{row['graphs']:>8}"
        f"{row['loss_last']:>9.4f}{row['differs']:>10.1e}"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="cosmos3_policy/smoke")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--ranks", type=int, default=1, help="processes of this machine")
    parser.add_argument("--rungs", type=int, nargs="+", default=list(range(len(NAMES))), choices=range(len(NAMES)))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ladder-") as folder:
        rungs = {
            rung: run(arguments.recipe, arguments.overrides, rung, Path(folder) / str(rung), arguments.ranks)
            for rung in sorted(arguments.rungs)
        }
    rows = compare(rungs)
    print(table(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
