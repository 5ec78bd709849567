"""Marks in the device's stream and the host's files, both made up: what is read from them and when."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from callbacks.device_time import DeviceTime
from callbacks.host import Cores, Host, process_tree, proportional_bytes, resident_bytes
from callbacks.window import Window


class Stream:
    """A device whose clock the test moves."""

    now = 0.0
    marks = 0
    waited = 0


class Event:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        Stream.marks += 1
        self.at = 0.0

    def record(self) -> None:
        self.at = Stream.now

    def synchronize(self) -> None:
        Stream.waited += 1

    def elapsed_time(self, end: "Event") -> float:
        return 1000 * (end.at - self.at)


def test_marks_are_read_after_one_wait_and_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    device_time = DeviceTime(torch.device("cuda", 0))
    for interval in range(3):
        spans = []
        for step in range(5):
            begin = device_time.mark()
            Stream.now += 0.25 * step
            spans += device_time.span(begin)
        assert Stream.waited == interval
        device_time.wait()
        assert device_time.seconds(spans) == pytest.approx(2.5)
        assert Stream.waited == interval + 1
    assert Stream.marks == 10


def test_a_cpu_has_no_clock_of_its_own() -> None:
    device_time = DeviceTime(torch.device("cpu"))
    assert device_time.mark() is None
    assert device_time.span(None) == []
    device_time.wait()
    assert device_time.seconds([]) is None


def ticks(**cores: tuple[int, ...]) -> str:
    return "".join(f"{name} {' '.join(map(str, values))}\n" for name, values in cores.items())


def test_busy_share_is_that_of_the_cores_this_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 2}, raising=False)
    stat = tmp_path / "stat"
    stat.write_text(ticks(cpu=(9,) * 8, cpu0=(0,) * 8, cpu1=(0,) * 8, cpu2=(0,) * 8))
    cores = Cores(proc=tmp_path, cgroup=tmp_path / "none")
    # cpu0: 60 busy of 100, of which 20 were waits for a disk, which are idle; cpu1 is another's; cpu2: 30 of 100
    stat.write_text(
        ticks(cpu=(9,) * 8, cpu0=(40, 0, 20, 20, 20, 0, 0, 0), cpu1=(100,) * 8, cpu2=(10, 5, 5, 70, 0, 5, 5, 0))
    )
    assert cores.busy_frac() == pytest.approx(0.45)
    assert cores.busy_frac() is None, "no time has passed"


def test_under_a_quota_the_share_is_that_of_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 20.0])
    monkeypatch.setattr("callbacks.host.time.perf_counter", lambda: next(clock))
    (tmp_path / "cpu.max").write_text("400000 100000\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 5000000\nuser_usec 1\n")
    cores = Cores(proc=tmp_path, cgroup=tmp_path)
    (tmp_path / "cpu.stat").write_text("usage_usec 35000000\nuser_usec 1\n")
    assert cores.busy_frac() == pytest.approx(30 / 40)


def test_where_nothing_is_told_nothing_is_claimed(tmp_path: Path) -> None:
    assert Cores(proc=tmp_path, cgroup=tmp_path).busy_frac() is None
    assert resident_bytes(1, tmp_path) == proportional_bytes(1, tmp_path) == 0
    assert process_tree(1, tmp_path) == [1]


def test_memory_of_a_process_and_what_it_started(tmp_path: Path) -> None:
    for process, children in ((1, "2 3"), (2, "4"), (3, ""), (4, "")):
        task = tmp_path / str(process) / "task" / str(process)
        task.mkdir(parents=True)
        (task / "children").write_text(children)
        (tmp_path / str(process) / "statm").write_text(f"900 {process} 1 1 0 1 0")
        (tmp_path / str(process) / "smaps_rollup").write_text("0-f rollup\nRss: 9 kB\nPss: 7 kB\nPss_Dirty: 3 kB\n")
    assert sorted(process_tree(1, tmp_path)) == [1, 2, 3, 4]
    assert resident_bytes(3, tmp_path) == 3 * os.sysconf("SC_PAGE_SIZE")
    assert proportional_bytes(2, tmp_path) == 7 * 1024


def test_the_proportional_set_is_read_as_seldom_as_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    now, reads = [0.0], []

    def slow(process: int, *where: Any) -> int:
        reads.append(now[0])
        now[0] += 0.1
        return 2**30

    monkeypatch.setattr("callbacks.host.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("callbacks.host.proportional_bytes", slow)
    monkeypatch.setattr("callbacks.host.process_tree", lambda process: [process])
    host = Host(every_s=0.0)
    seen: list[dict[str, float]] = []
    for _ in range(500):
        seen.append(host.measure(Window([1], [1.0], [1.0], [0.0], [0], [1], [0], 1)))
        now[0] += 1.0
    assert len(reads) == 3  # at the start, and twice in 500 s
    assert sum("mem/pss_gib" in metrics for metrics in seen) == 3
    assert 0.1 * len(reads) <= now[0] / Host.EASE + 0.1
    assert host.summary()["peak_pss_gb"] == pytest.approx(2**30 / 1e9)


def test_figures_of_the_host_stand_until_it_is_time_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("callbacks.host.time.perf_counter", lambda: now[0])
    window, sizes = Window([1], [1.0], [1.0], [0.0], [0], [1], [0], 1), iter([1, 2, 3])
    host = Host(every_s=1.0)
    monkeypatch.setattr("callbacks.host.resident_bytes", lambda process: next(sizes) * 2**30)
    host._tree = [1]
    monkeypatch.setattr(host, "_look_closely", lambda: None)
    seen = []
    for _ in range(4):
        seen.append(host.measure(window)["mem/rss_gib"])
        now[0] += 0.6
    assert seen == [1.0, 1.0, 2.0, 2.0]
