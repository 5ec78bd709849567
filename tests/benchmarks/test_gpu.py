"""The benchmark of a step on a GPU, at tiny size on the CPU: what it counts, never what it times."""

import argparse
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/gpu.py"
TINY = ("gr00t", "--size", "tiny", "--device", "cpu")


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_modes_at_tiny_size(gpu: ModuleType) -> None:
    arguments = argparse.Namespace(size="tiny", device="cpu", batch=2, steps=1)
    rows = [json.loads(json.dumps(gpu.run_case(arguments, mode, False))) for mode in ("stock", "lean", "bf16")]
    stock, lean, bf16 = rows
    assert stock["loss_first"] == lean["loss_first"] == pytest.approx(bf16["loss_first"], rel=0.05)
    assert stock["loss_last"] == lean["loss_last"] != stock["loss_first"]
    assert stock["step_tflops"] == lean["step_tflops"] == bf16["step_tflops"] > 0
    assert lean["trained"] == bf16["trained"] < stock["trained"] < stock["parameters"]
    assert bf16["static_bytes"] < lean["static_bytes"] < stock["static_bytes"]
    assert stock["static_bytes"] == 4 * stock["parameters"] + 12 * stock["trained"]
    assert all(row["mfu"] is None and row["peak_bytes"] > row["static_bytes"] for row in rows)
    assert len(gpu.table(rows).splitlines()) == 4


def test_a_case_without_time_left_is_a_row_that_says_so(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    gpu.main([*TINY, "--modes", "lean", "--limit-s", "0", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["mode"], row["compiled"]) for row in rows] == [("lean", False), ("lean", True)]
    assert capsys.readouterr().out.count("left out") == 2


@pytest.mark.parametrize("arguments", [("--modes", "fp8"), ("--compile", "maybe")])
def test_unknown_cases_are_named(
    gpu: ModuleType, arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu.main([*TINY, *arguments])
    assert arguments[1] in capsys.readouterr().err
