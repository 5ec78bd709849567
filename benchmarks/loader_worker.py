"""One loader in a process of its own; `loaders.py` starts it and tells it when to work.

Reads one JSON command a line and answers each with one JSON line:

    {"do": "run", "seconds": 5, "samples": 0}   batches as fast as they come, for so long and at least so many samples
    {"do": "skip", "samples": 2456}          the same, not measured
    {"do": "pace", "period_s": 0.1, "steps": 3000}   a step that takes `period_s` after every batch
    {"do": "settle", "timeout_s": 60}        work until what goes on in the background is done
    {"do": "foretold", "batches": 20}        requests made for so many batches, beside those its plan foretold
"""

import importlib
import json
import os
import sys
import time
from typing import Any, Protocol


class Source(Protocol):
    """What a module named in the specification gives from `open_source(spec)`."""

    def take(self) -> int:
        """Wait for the next batch and let go of the last one; its number of samples."""

    def settled(self) -> bool:
        """Nothing is going on in the background that will end by itself."""

    def gauges(self) -> dict[str, float]:
        """Anything the loader counts."""

    def close(self) -> None: ...


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library that prints must not speak to the observer
    module = importlib.import_module(spec["module"])
    begin = time.perf_counter()
    module.imports(spec)
    imports_s = time.perf_counter() - begin
    import loader_measure as measure

    open_s = time.perf_counter()
    source: Source = module.open_source(spec)
    open_s = time.perf_counter() - open_s
    samples = source.take()
    ready = {
        "imports_s": imports_s,
        "open_s": open_s,
        "first_batch_s": measure.age_s() - imports_s,
        "batch": samples,
    }
    _send(channel, ready)
    for line in sys.stdin:
        command = json.loads(line)
        _send(channel, _COMMANDS[command.pop("do")](source, **command))
    source.close()


def run(source: Source, seconds: float, samples: int = 0, settle: int = 4) -> dict[str, Any]:
    """Full speed; `settle` batches first, so that what was made ahead while nobody asked does not count."""
    import loader_measure as measure

    for _ in range(settle):
        source.take()
    pid, taken, longest = os.getpid(), 0, 0.0
    before = source.gauges()
    busy, cpu, begin = measure.machine_busy_s(), measure.cpu_s(pid), time.perf_counter()
    while time.perf_counter() - begin < seconds or taken < samples:
        asked = time.perf_counter()
        taken += source.take()
        longest = max(longest, time.perf_counter() - asked)
    wall_s, cpu = time.perf_counter() - begin, measure.cpu_s(pid) - cpu
    others = measure.machine_busy_s() - busy - cpu
    return {
        "samples": taken,
        "wall_s": wall_s,
        "cpu_s": cpu,
        "longest_s": longest,
        "others_cores": max(0.0, others / wall_s),
        "counted": {key: value - before.get(key, 0.0) for key, value in source.gauges().items()},
        "gauges": source.gauges(),
    }


def skip(source: Source, samples: int) -> dict[str, Any]:
    left = samples
    while left > 0:
        left -= source.take()
    return {"gauges": source.gauges()}


def settle(source: Source, timeout_s: float) -> dict[str, Any]:
    begin = time.perf_counter()
    while not source.settled() and time.perf_counter() - begin < timeout_s:
        source.take()
    return {"settled": source.settled(), "seconds": time.perf_counter() - begin, "gauges": source.gauges()}


def pace(source: Source, period_s: float, steps: int) -> dict[str, Any]:
    """A consumer whose own step takes `period_s`, as a GPU's does: the waits for its batches.

    For every wait of more than 2 ms it is noted whether the machine had kept this process' threads from running for at
    least as long during the steps in which that batch was made.
    """
    import loader_measure as measure

    source.take()  # the first batch is not part of it
    waits: list[float] = []
    delays = [measure.run_delay_s()] * 4
    first_delay = delays[0]
    withheld = 0
    busy, cpu, begin = measure.machine_busy_s(), measure.cpu_s(os.getpid()), time.perf_counter()
    for _ in range(steps):
        time.sleep(period_s)
        asked = time.perf_counter()
        source.take()
        waits.append(time.perf_counter() - asked)
        delays = [*delays[1:], measure.run_delay_s()]
        withheld += waits[-1] > 0.002 and delays[-1] - delays[0] >= waits[-1]
    total_s, cpu = time.perf_counter() - begin, measure.cpu_s(os.getpid()) - cpu
    others = measure.machine_busy_s() - busy - cpu
    ordered = sorted(waits)
    return {
        "steps": steps,
        "p50_s": ordered[len(ordered) // 2],
        "p99_s": ordered[min(len(ordered) - 1, -(-99 * len(ordered) // 100) - 1)],
        "max_s": ordered[-1],
        "over_1s": sum(wait > 1 for wait in waits),
        "over_2ms": sum(wait > 0.002 for wait in waits),
        "over_2ms_withheld": withheld,
        "total_wait_s": sum(waits),
        "wait_share": sum(waits) / total_s,
        "others_cores": max(0.0, others / total_s),
        "run_delay_share": (delays[-1] - first_delay) / total_s,
    }


def foretold(source: Any, batches: int) -> dict[str, Any]:
    return dict(source.foretold(batches))


_COMMANDS = {"run": run, "skip": skip, "settle": settle, "pace": pace, "foretold": foretold}


def _send(channel: Any, answer: dict[str, Any]) -> None:
    channel.write(json.dumps(answer) + "\n")
    channel.flush()


if __name__ == "__main__":
    main()
