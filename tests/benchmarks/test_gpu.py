"""The benchmark of a step on a GPU, at tiny size on the CPU: what it counts, never what it times."""

import argparse
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/gpu.py"
TINY = ("--size", "tiny", "--device", "cpu")


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_modes_of_gr00t_at_tiny_size(gpu: ModuleType) -> None:
    model = gpu.MODELS["gr00t"]
    arguments = argparse.Namespace(size="tiny", device="cpu", batch=2, steps=1)
    rows = [json.loads(json.dumps(model.run_case(arguments, f"{mode}:off"))) for mode in ("stock", "lean", "bf16")]
    stock, lean, bf16 = rows
    assert stock["loss_first"] == lean["loss_first"] == pytest.approx(bf16["loss_first"], rel=0.05)
    assert stock["loss_last"] == lean["loss_last"] != stock["loss_first"]
    assert stock["step_tflops"] == lean["step_tflops"] == bf16["step_tflops"] > 0
    assert lean["trained"] == bf16["trained"] < stock["trained"] < stock["parameters"]
    assert bf16["static_bytes"] < lean["static_bytes"] < stock["static_bytes"]
    assert stock["static_bytes"] == 4 * stock["parameters"] + 12 * stock["trained"]
    assert all(row["mfu"] is None and row["peak_bytes"] > row["static_bytes"] for row in rows)
    assert len(model.table(rows).splitlines()) == 4


def test_the_ladder_of_cosmos3_at_tiny_size(gpu: ModuleType) -> None:
    """Every case is the same step: the same losses; what ran twice counts for HFU and never for MFU."""
    model = gpu.MODELS["cosmos3"]
    arguments = argparse.Namespace(size="tiny", device="cpu", samples=2, steps=1, layers=2, attention="auto")
    rows = {
        case: json.loads(json.dumps(model.run_case(arguments, case)))
        for case in ("none:off", "full:off", "selective:off", "last-1:off", "every-2:off")
    }
    plain, full = rows["none:off"], rows["full:off"]
    for case, row in rows.items():
        assert (row["loss_first"], row["loss_last"]) == (plain["loss_first"], plain["loss_last"]), case
        assert row["step_tflops"] == plain["step_tflops"] > 0
        assert (row["mfu"], row["hfu"], row["upstream"]) == (None, None, None)
    assert plain["ran_tflops"] == plain["step_tflops"] < plain["upstream_tflops"] < full["upstream_tflops"]
    assert rows["last-1:off"]["ran_tflops"] == rows["every-2:off"]["ran_tflops"]
    assert full["ran_tflops"] > rows["last-1:off"]["ran_tflops"] > plain["ran_tflops"]
    assert rows["selective:off"]["ran_tflops"] == plain["ran_tflops"]
    assert model.table(list(rows.values())).splitlines()[1].split()[0] == "none:off"


def test_released_layers_fit_what_a_card_holds(gpu: ModuleType) -> None:
    """Bytes of a layer: 192,946,432 trained parameters at 18, as many frozen at 2, and what it keeps."""
    model = gpu.MODELS["cosmos3"]
    config = model.network_config("released", None)
    fits = [model.fitting_layers(gigabytes * 1e9, config, 4 * model.TOKENS) for gigabytes in (20, 80, 150, 10_000)]
    assert fits == sorted(fits)
    assert fits[0] >= 1
    assert fits[-1] == 36
    one, two = (model.static_bytes(model.network_config("released", layers)) for layers in (1, 2))
    assert two - one == 192_946_432 * (18 + 2)


@pytest.mark.parametrize(("model", "choice"), [("gr00t", ("--modes", "lean")), ("cosmos3", ("--cases", "full:off"))])
def test_a_case_without_time_left_is_a_row_that_says_so(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, choice: tuple[str, str]
) -> None:
    out = tmp_path / "rows.json"
    gpu.main([model, *TINY, *choice, "--limit-s", "0", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    named = {"gr00t": [{"mode": "lean", "compiled": c} for c in (False, True)], "cosmos3": [{"case": "full:off"}]}
    assert [{key: row[key] for key in named[model][0]} for row in rows] == named[model]
    assert capsys.readouterr().out.count("left out") == len(rows)


@pytest.mark.parametrize(
    "arguments",
    [
        ("gr00t", "--modes", "fp8"),
        ("gr00t", "--compile", "maybe"),
        ("cosmos3", "--cases", "some:on"),
        ("cosmos3", "--cases", "full:perhaps"),
        ("cosmos3", "--cases", "every-x:on"),
    ],
)
def test_unknown_cases_are_named(
    gpu: ModuleType, arguments: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu.main([arguments[0], *TINY, *arguments[1:]])
    assert arguments[2] in capsys.readouterr().err
