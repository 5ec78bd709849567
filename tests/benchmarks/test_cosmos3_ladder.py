"""The ladder's table: times relative to the lowest rung, the largest difference of a loss, a name for every rung."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks")]

import cosmos3_ladder  # noqa: E402


def figures(samples_per_s: float, losses: list[float]) -> dict[str, object]:
    return {
        "first_batch_s": 1.0,
        "step_s_median": 0.1,
        "samples_per_s": samples_per_s,
        "data_wait_frac": 0.0,
        "peak_rss_gb": 1.0,
        "loss_last": losses[-1],
        "losses": losses,
    }


def test_rungs_are_held_to_the_lowest() -> None:
    rows = cosmos3_ladder.compare({1: figures(2.0, [4.0, 2.0]), 2: figures(3.0, [4.0, 1.9])})
    assert [row["faster"] for row in rows] == [1.0, 1.5]
    assert [row["differs"] for row in rows] == pytest.approx([0.0, 0.05])
    text = cosmos3_ladder.table(rows).splitlines()
    assert len(text) == 3
    assert len({len(line) for line in text}) == 1
    assert "pruned columns" in text[1]


def test_a_rung_with_other_steps_is_no_comparison() -> None:
    with pytest.raises(ValueError, match="zip"):
        cosmos3_ladder.compare({0: figures(1.0, [1.0, 2.0]), 1: figures(1.0, [1.0])})


def test_every_rung_has_a_name() -> None:
    files = sorted(path.stem for path in (ROOT / "recipes" / "base" / "ladder").glob("*.yaml"))
    assert files == [str(rung) for rung in range(len(cosmos3_ladder.NAMES))]
