"""The start-up comparison reads the same rows both ways, and extrapolates as it says."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def startup(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import startup

    return startup


def test_both_ways_read_all_rows_and_are_told_side_by_side(startup: Any, tmp_path: Path) -> None:
    rows = startup.generate(tmp_path / "set", 3 * startup.EPISODE_ROWS)
    assert rows == 3 * 265
    full = startup.measure("full", tmp_path / "set", [str(rows)])
    ours = startup.measure("knonik", tmp_path / "set", [str(tmp_path / "cache")] * 2)
    assert (full["rows"], full["processes"]) == (rows, 1)
    assert (ours["rows"], ours["processes"]) == (rows, 2)
    said = startup.report(full, ours)
    assert "published 2220 s, 1734 GB" in said
    assert "published 89 times and 97 %" in said


def test_memory_of_a_process_counts_for_every_rank_and_shared_memory_once(startup: Any) -> None:
    full = {"rows": 100_000, "processes": 1, "seconds": 10.0, "pss_bytes": 10**9}
    ours = {"rows": 2_000_000, "processes": 8, "seconds": 5.0, "pss_bytes": 10**9}
    assert startup.at_scale(full, per_rank=True) == pytest.approx({"droid_s": 1800, "droid_gb": 1440})
    assert startup.at_scale(ours, per_rank=False) == pytest.approx({"droid_s": 45, "droid_gb": 9})
