"""The same recipe on both loaders: two whole runs of the same steps, and a report of them."""

import json
import subprocess
import sys
from pathlib import Path

from callbacks.run_record import RunRecord

ROOT = Path(__file__).resolve().parents[2]


def test_both_loaders_train_the_same_steps(tmp_path: Path) -> None:
    small = ["--steps", "3", "--layouts", "6", "data.batch_size=8", "trainer.log_every_n_steps=3"]
    command = [sys.executable, str(ROOT / "benchmarks" / "runs.py"), str(tmp_path / "both"), *small]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for kind in ("stock", "ours"):
        rows = RunRecord(tmp_path / "both" / kind).rows()
        assert [(row["step"], row["samples"]) for row in rows] == [(1, 8), (2, 8), (3, 8)]
        summary = json.loads((tmp_path / "both" / kind / "summary.json").read_text())
        assert (summary["loader_stages"] == {}) == (kind == "stock"), "whose loader it was"
    page = (tmp_path / "both" / "report.html").read_text()
    assert page.index("stock algorithm") < page.index("knonik")
