"""The jitter's table has both ways beside each other, and its count of differences is within what is promised."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import jitter


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = jitter.main(
        ["--sizes", "64x36", "--frames", "2", "--rounds", "2", "--clips", "3", "--json", str(tmp_path / "rows.json")]
    )
    assert json.loads((tmp_path / "rows.json").read_text()) == rows
    assert [row.get("what") for row in rows] == ["jitter", "picture", None]
    assert rows[0]["pixels"] == 3 * 2 * 64 * 36
    assert rows[2]["largest"] <= 1
    assert rows[2]["share"] < 1e-3
    assert "64x36: 3 clips differ by at most" in capsys.readouterr().out


def test_a_line_has_ratios_and_nanoseconds() -> None:
    row = {"size": "64x36", "what": "jitter", "pixels": 10_000_000, "seconds": {"ours": 0.1, "frames": 0.8}}
    assert jitter.line(row).split() == ["64x36", "jitter", "0.100", "0.800", "8.0", "-", "-", "10.0"]
    row["seconds"]["torchvision"] = 1.2
    assert jitter.line(row).split()[5:7] == ["1.200", "12.0"]
