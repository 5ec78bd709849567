"""Meters on windows whose figures can be worked out by hand."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from callbacks.data_wait import DataWait, Tail
from callbacks.mfu import Mfu
from callbacks.progress import duration
from callbacks.run_record import RunRecord
from callbacks.throughput import Throughput
from callbacks.window import Window


def window(first: int = 1, waits: tuple[float, ...] = (0.1, 0.0, 2.0, 0.1), world_size: int = 2) -> Window:
    count = len(waits)
    return Window(
        index=list(range(first, first + count)),
        loss=[1.0 / (first + i) for i in range(count)],
        step_s=[1.0, 1.0, 3.0, 1.0][:count],
        wait_s=list(waits),
        slowest_rank=[1, 0, 1, 0][:count],
        samples=[64] * count,
        flops=[6 * 10**12] * count,
        world_size=world_size,
    )


def test_data_wait_tail_share_and_blame() -> None:
    meter = DataWait()
    metrics = meter.measure(window())
    assert metrics["time/data_wait_frac"] == pytest.approx(2.2 / 6.0)
    assert metrics["time/data_wait_s"] == pytest.approx(0.55)
    assert metrics["time/data_wait_p50_s"] == 0.1
    assert metrics["time/data_wait_p99_s"] == metrics["time/data_wait_max_s"] == 2.0
    assert metrics["time/data_waits_over_1s"] == 1
    assert metrics["time/data_wait_slowest_rank"] == 1
    meter.measure(window(first=5, waits=(0.0, 0.0, 0.0, 0.0)))
    assert meter.summary()["data_wait_frac"] == pytest.approx(2.2 / 12.0)


def test_nobody_is_blamed_without_a_wait() -> None:
    assert "time/data_wait_slowest_rank" not in DataWait().measure(window(waits=(0.0, 0.0001)))


def tail(values: Iterable[float]) -> Tail:
    found = Tail()
    found.add(values)
    return found


def test_quantile_is_a_measured_value() -> None:
    values = tail(float(i) for i in range(1, 101))
    assert values.quantile(0.99) == 99.0
    assert values.quantile(0.5) == 50.0
    assert values.quantile(1.0) == 100.0
    assert tail([3.0]).quantile(0.99) == 3.0
    assert tail([]).quantile(0.5) == 0.0


def test_a_tail_is_that_of_all_values_in_whatever_order_they_came() -> None:
    values = np.random.default_rng(0).exponential(size=1000).round(2).tolist()
    one, other = tail(values), tail(values[:300])
    other.restore(values[300:900])
    other.add(values[900:])
    ordered = sorted(values)
    for found in (one, other):
        assert len(found) == 1000
        assert [found.quantile(q) for q in (0.001, 0.5, 0.99)] == [ordered[0], ordered[499], ordered[989]]
        assert found.above(1.0) == sum(value > 1.0 for value in values)
        assert found.total == pytest.approx(sum(values))


def test_throughput_counts_all_ranks() -> None:
    meter = Throughput(samples_per_epoch=512)
    metrics = meter.measure(window())
    assert metrics["throughput/samples_per_s"] == pytest.approx(256 / 6)
    assert metrics["throughput/samples_per_s_per_gpu"] == pytest.approx(128 / 6)
    assert metrics["data/epoch"] == 0.5
    assert meter.summary()["step_s_median"] == 1.0


def test_mfu_is_flops_over_peak_and_device_time() -> None:
    meter = Mfu(torch.device("cpu"), "bf16-mixed", peak_override=4.0)
    metrics = meter.measure(window())
    assert metrics["perf/tflops_per_gpu"] == pytest.approx(24 / 12)
    assert metrics["perf/mfu"] == pytest.approx(0.5)
    assert meter.summary()["mfu"] == pytest.approx(0.5)


def test_no_mfu_without_a_peak_but_a_reason() -> None:
    meter = Mfu(torch.device("cpu"), "32-true")
    assert "perf/mfu" not in meter.measure(window())
    summary = meter.summary()
    assert summary["mfu"] is None
    assert "metrics.peak_tflops" in str(summary["mfu_reason"])


def test_record_survives_a_cut_row_and_drops_steps_after_the_checkpoint(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    record.resume_at(0)
    record.append(window())
    record.append(window(first=5))
    with record.steps_file.open("a") as file:
        file.write("9,0.1,1.0")  # killed while writing
    assert [row["step"] for row in record.rows()] == [1, 2, 3, 4, 5, 6, 7, 8]
    record.resume_at(6)
    assert [row["step"] for row in record.rows()] == [1, 2, 3, 4, 5, 6]
    assert record.losses() == {"loss_first": 1.0, "loss_last": pytest.approx(1 / 6)}


def test_loss_is_stored_exactly(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    record.resume_at(0)
    record.append(window())
    assert [row["loss"] for row in record.rows()] == window().loss


def test_environment_holds_no_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-to-be-written")
    RunRecord(tmp_path).write_environment({"fingerprint": "abc"})
    text = (tmp_path / "environment.json").read_text()
    assert "not-to-be-written" not in text
    assert json.loads(text)["fingerprint"] == "abc"


def test_durations() -> None:
    assert [duration(s) for s in (5, 75, 4000)] == ["0:05", "1:15", "1:06:40"]
