"""Runs whose loss of time is made up: the cause is named, with its share and the stage or the rank behind it."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks.data_wait import DataWait
from callbacks.host import Cores, Host
from callbacks.memory import Memory
from callbacks.mfu import Mfu
from callbacks.rank_times import RankTimes, slowest
from callbacks.run_record import RunRecord
from callbacks.throughput import Throughput
from callbacks.verdict import CAUSES, Verdict
from callbacks.window import Window, joined

STEPS = 10


def window(
    step_s: float = 0.1,
    waits: tuple[float, ...] = (0.0,),
    peers: tuple[float, ...] | None = None,
    idle_s: float = math.nan,
    **columns: Any,
) -> Window:
    """Ten equal steps; `waits` and `peers` are each rank's wait for its loader and for the others."""
    ranks = len(waits)
    return Window(
        index=list(range(1, STEPS + 1)),
        loss=[1.0] * STEPS,
        step_s=[step_s] * STEPS,
        wait_s=[max(waits)] * STEPS,
        slowest_rank=[waits.index(max(waits))] * STEPS,
        samples=[8 * ranks] * STEPS,
        flops=[ranks * 10**12] * STEPS,
        world_size=ranks,
        device_idle_s=[idle_s] * STEPS,
        waits_of_ranks=[list(waits)] * STEPS,
        peer_waits_of_ranks=[list(peers or (0.0,) * ranks)] * STEPS,
        steps_of_ranks=[[step_s] * ranks] * STEPS,
        **columns,
    )


def meters(
    tmp_path: Path, stages: Any = dict, busy: float | None = None, peak: float | None = None, free: float | None = None
) -> Verdict:
    host = Host(Cores(proc=tmp_path, cgroup=tmp_path))
    if busy is not None:
        host._share_s, host._seconds = busy, 1.0
    memory = Memory(torch.device("cpu"))
    if free is not None:
        memory.free_frac = free
        memory.device = torch.device("meta")
    mfu = Mfu(torch.device("cpu"), "bf16-mixed", peak_override=peak)
    return Verdict(RankTimes(), mfu, host, memory, stages)


def judged(verdict: Verdict, seen: Window) -> tuple[str, float]:
    verdict.ranks.measure(seen)
    verdict.mfu.measure(seen)
    metrics = verdict.measure(seen)
    summary = verdict.summary()
    assert CAUSES[int(metrics["perf/limit"])] == verdict.cause == summary["limited_by"]
    assert metrics["perf/limit_frac"] == pytest.approx(summary["limited_by_frac"])
    assert summary["verdict"] == verdict.line()
    return str(summary["limited_by"]), float(summary["limited_by_frac"])


def test_a_loader_that_is_waited_for(tmp_path: Path) -> None:
    verdict = meters(tmp_path)
    assert judged(verdict, window(waits=(0.04,))) == ("data", pytest.approx(0.4))
    assert "waits 40.0 ms" in verdict.line()


def test_a_wait_that_the_device_does_not_feel_is_no_limit(tmp_path: Path) -> None:
    assert judged(meters(tmp_path), window(waits=(0.04,), idle_s=0.001)) == ("compute", pytest.approx(0.99))
    assert judged(meters(tmp_path), window(waits=(0.04,), idle_s=0.03)) == ("data", pytest.approx(0.3))


def test_the_loader_of_one_rank(tmp_path: Path) -> None:
    verdict = meters(tmp_path)
    assert judged(verdict, window(waits=(0.0, 0.04), peers=(0.04, 0.0)))[0] == "data"
    assert "on rank 1 alone" in verdict.line()


@pytest.mark.parametrize(
    ("stages", "busy", "advice"),
    [
        ({"fetch": 9.0, "decode": 1.0, "starved": 0.0}, 0.5, "data.cache.disk"),
        ({"fetch": 0.1, "decode": 9.0, "starved": 0.5}, 0.5, "data.decode_threads"),
        ({"fetch": 0.1, "decode": 9.0, "starved": 0.5}, 0.95, "data.cache.decoded"),
        ({"fetch": 0.1, "decode": 1.0, "starved": 9.0, "transform": 8.0}, 0.5, "to the device"),
        ({"fetch": 0.1, "decode": 1.0, "starved": 9.0, "transform": 0.1}, 0.5, "data.ring_batches"),
        ({}, 0.99, "all cores are busy"),
        ({}, None, "more workers"),
    ],
)
def test_the_stage_that_holds_the_loader_up(
    tmp_path: Path, stages: dict[str, float], busy: float | None, advice: str
) -> None:
    read = {
        "fetch": {"busy_s": stages.get("fetch", 0.0)},
        "decode": {"busy_s": stages.get("decode", 0.0), "starved_s": stages.get("starved", 0.0)},
        "transform": {"busy_s": stages.get("transform", 0.0)},
    }
    verdict = meters(tmp_path, lambda: read if stages else {}, busy)
    assert judged(verdict, window(waits=(0.04,)))[0] == "data"
    assert advice in verdict.line()


def test_a_rank_that_computes_slowly(tmp_path: Path) -> None:
    verdict = meters(tmp_path)
    seen = window(waits=(0.001,) * 4, peers=(0.031, 0.03, 0.001, 0.029))
    assert judged(verdict, seen) == ("slow_rank", pytest.approx(0.29))  # above the lower median
    assert "29.0 ms a step for rank 2" in verdict.line()
    metrics = RankTimes().measure(seen)
    assert metrics["time/slowest_rank"] == 2
    assert metrics["time/slowest_rank_extra_s"] == pytest.approx(0.029)
    assert metrics["time/peer_wait_s"] == pytest.approx(0.001)


def test_an_exchange_that_all_ranks_wait_for(tmp_path: Path) -> None:
    verdict = meters(tmp_path)
    assert judged(verdict, window(waits=(0.0, 0.0), peers=(0.03, 0.03))) == ("communication", pytest.approx(0.3))
    assert "accumulate_grad_batches" in verdict.line()


def test_pauses_between_steps(tmp_path: Path) -> None:
    verdict = meters(tmp_path)
    assert judged(verdict, window(pause_s=[1.0] + [0.0] * (STEPS - 1))) == ("pauses", pytest.approx(0.5))
    assert "checkpoint.every_n_steps" in verdict.line()


@pytest.mark.parametrize(
    ("peak", "free", "recompute", "advice"),
    [
        (20.0, 0.3, 0.0, "more devices"),
        (100.0, 0.3, 0.0, "compile.scope"),
        (100.0, 0.6, 0.0, "data.batch_size"),
        (100.0, 0.3, 0.3, "checkpointing.mode: auto"),
        (None, 0.3, 0.0, "10.0 TFLOP/s"),
        (None, None, 0.0, "a GPU is what helps"),
    ],
)
def test_what_helps_when_nothing_is_lost(
    tmp_path: Path, peak: float | None, free: float | None, recompute: float, advice: str
) -> None:
    verdict = meters(tmp_path, peak=peak, free=free)
    seen = window(recompute_flops=[int(recompute * 10**12)] * STEPS)
    assert judged(verdict, seen) == ("compute", pytest.approx(1.0))
    assert advice in verdict.line()


def test_warm_up_is_in_no_verdict_and_in_no_rate(tmp_path: Path) -> None:
    seen = window()
    slow = Window(
        index=[0], loss=[1.0], step_s=[60.0], wait_s=[50.0], slowest_rank=[0], samples=[8], flops=[10**12],
        world_size=1, warm_up=[True], compile_s=[30.0], waits_of_ranks=[[50.0]], peer_waits_of_ranks=[[0.0]],
        steps_of_ranks=[[60.0]],
    )  # fmt: skip
    both = joined([slow, seen])
    assert judged(meters(tmp_path), both)[0] == "compute"
    throughput, mfu, waits = Throughput(0), Mfu(torch.device("cpu"), "bf16-mixed", peak_override=100.0), DataWait()
    metrics = {**throughput.measure(both), **mfu.measure(both), **waits.measure(both)}
    assert metrics["throughput/samples_per_s"] == pytest.approx(80.0)
    assert metrics["time/step_s"] == pytest.approx(0.1)
    assert metrics["time/compile_s"] == 30.0
    assert metrics["perf/mfu"] == pytest.approx(0.1)
    assert metrics["time/data_wait_max_s"] == 50.0
    figures = throughput.summary()
    assert figures["samples_seen"] == 88
    assert figures["samples_per_s"] == pytest.approx(80.0)
    assert figures["warm_up_s"] == 60.0
    record = RunRecord(tmp_path)
    record.resume_at(0)
    record.append(both)
    again, mfu_again = Throughput(0), Mfu(torch.device("cpu"), "bf16-mixed", peak_override=100.0)
    again.restore(record.rows())
    mfu_again.restore(record.rows())
    assert again.summary() == figures
    assert mfu_again.summary() == mfu.summary()


def test_hfu_counts_what_is_computed_again() -> None:
    mfu = Mfu(torch.device("cpu"), "bf16-mixed", peak_override=100.0)
    metrics = mfu.measure(window(recompute_flops=[25 * 10**10] * STEPS))
    assert metrics["perf/mfu"] == pytest.approx(0.1)
    assert metrics["perf/hfu"] == pytest.approx(0.125)
    assert mfu.summary()["hfu"] == pytest.approx(0.125)


def test_an_unknown_peak_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    mfu = Mfu(torch.device("cpu"), "bf16-mixed")
    with caplog.at_level(logging.INFO, "callbacks.mfu"):
        for _ in range(3):
            assert {"perf/mfu", "perf/hfu"}.isdisjoint(mfu.measure(window()))
    assert [record.message for record in caplog.records] == [f"no MFU: {mfu.reason}"]


@pytest.mark.parametrize(
    ("own", "named"), [([1.0], None), ([1.0, 1.0], None), ([1.0, 1.01], None), ([1.0, 1.1], 1), ([2.0, 1.0, 1.0], 0)]
)
def test_ranks_alike_are_not_blamed(own: list[float], named: int | None) -> None:
    behind = slowest(own, step_s=1.0)
    assert (None if behind is None else behind.rank) == named


def test_a_record_of_an_earlier_version_can_be_continued(tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text(
        "step,loss,step_s,data_wait_s,slowest_rank,samples,flops,ranks\n1,0.5,0.1,0.0,0,8,10,1\n"
    )
    record = RunRecord(tmp_path)
    assert record.rows()[0]["warm_up"] == 0
    record.resume_at(1)
    record.append(window())
    assert len(record.rows()) == 1 + STEPS
