"""Loaders in processes of their own that take turns, and the loopback object store some of them read from."""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loader_measure import PeakPss, forget_pages

HERE = Path(__file__).resolve().parent
_FORETOLD_BATCHES = 12


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One loader to measure; `spec` is what `loader_worker.py` is given."""

    loader: str
    variant: str
    spec: dict[str, Any]
    folder: Path
    python: str = sys.executable
    server: "Server | None" = None
    warm_samples: int = 0
    turn_samples: int = 0  # where work comes in units so large that a few seconds say nothing: one turn, of so many
    paced: bool = False

    @property
    def indexed(self) -> bool:
        """Whether it keeps an index, so that a start with and one without can be told apart."""
        return self.spec["module"] == "loader_knonik"


class WorkerFailed(RuntimeError):
    """A loader's process has ended; its own message stands above on standard error."""


class Worker:
    """A running `loader_worker.py`; stopped by signal while it is not its turn."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        remote = entry.server.environment() if entry.server is not None else {}
        paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [entry.python, str(HERE / "loader_worker.py"), json.dumps(entry.spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **remote},
        )
        self._pss, self._peak = PeakPss(self._process.pid), 0.0
        self.ready = self._answer()

    def tell(self, what: str, **values: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **values}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def pause(self) -> None:
        self._pss.watching = False
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        if not self.alive:
            raise WorkerFailed(f"{self.entry.loader} on {self.entry.variant} has ended; it gets no row")
        self._pss.watching = True
        os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> float:
        """End the process and its children; the largest PSS seen, GB."""
        if self._process.returncode is not None:
            return self._peak
        self._peak = self._pss.stop()
        self.resume()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.kill()
        return self._peak

    def kill(self) -> None:
        """End it at once, if it still runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise WorkerFailed(f"{self.entry.loader} on {self.entry.variant} ended with {code}; it gets no row")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Server:
    """`s3_server.py` over the benchmark's folder, with latency and one link."""

    def __init__(self, process: "subprocess.Popen[str]", port: int) -> None:
        self._process, self._port = process, port

    @classmethod
    def start(cls, args: argparse.Namespace) -> "Server | None":
        """Start it and wait for its port; None where the script is not there."""
        script = HERE / "s3_server.py"
        options = ["--latency-ms", str(args.latency_ms), "--gbit", str(args.gbit), "--port", "0"]
        process = subprocess.Popen(
            [sys.executable, str(script), str(args.data), *options], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        digits = "".join(c if c.isdigit() else " " for c in line).split()
        if not digits:
            raise RuntimeError(f"{script.name} did not start: it ended with {process.wait()}")
        return cls(process, int(digits[-1]))

    def uri(self, key: str) -> str:
        return f"s3://bench/{key}"

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def stats(self) -> dict[str, float]:
        """Requests and bytes since the start."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/stats") as answer:
            found: dict[str, float] = json.load(answer)
            return found

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


def measure_together(entries: list[Entry], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per entry; entries on the same data take turns."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.variant.split()[0], []).append(entry)
    return [row for group in groups.values() for row in _measure(group, args)]


def _measure(entries: list[Entry], args: argparse.Namespace) -> list[dict[str, Any]]:
    workers: list[Worker] = []
    rows: list[dict[str, Any]] = []
    try:
        for entry in entries:
            try:
                workers.append(_start(entry, row := {"loader": entry.loader, "variant": entry.variant}))
            except WorkerFailed as error:
                print(error, file=sys.stderr)
                continue
            rows.append(row)
            _say(entry, row)
        turns: list[list[dict[str, Any]]] = [[] for _ in workers]
        for number in range(args.rounds):
            # The one that follows a heavy neighbour is not always the same.
            for place in _rotated(len(workers), number):
                if number and workers[place].entry.turn_samples:
                    continue
                try:
                    turns[place].append(_turn(workers[place], args.seconds))
                except WorkerFailed as error:
                    print(error, file=sys.stderr)
        for worker, row, found in zip(workers, rows, turns, strict=True):
            if not worker.alive:
                continue
            row |= _summary(found)
            row["peak_pss_gb"] = worker.close()
            _say(worker.entry, row)
    finally:
        for worker in workers:
            worker.kill()
    for entry, row in zip([worker.entry for worker in workers], rows, strict=True):
        if "samples_per_s" not in row:
            continue
        try:
            if entry.server is not None:
                row["foretold"] = _foretold(entry)
            if entry.paced and args.paced_steps:
                row["paced"] = _paced(entry, args)
                _say(entry, row)
        except WorkerFailed as error:
            print(error, file=sys.stderr)
    return [row for row in rows if "samples_per_s" in row]


def _start(entry: Entry, row: dict[str, Any]) -> Worker:
    """A worker that has shown its first batch and is warm, paused; its start-up figures go into `row`."""
    if entry.indexed:
        row["first_batch_no_index_s"] = _first_batch_alone(entry)
    forget_pages(entry.folder)
    worker = Worker(entry)
    try:
        row |= {"first_batch_s": worker.ready["first_batch_s"], "imports_s": worker.ready["imports_s"]}
        if entry.server is not None:
            row["fill"] = worker.tell("settle", timeout_s=120)
        if entry.warm_samples:
            worker.tell("skip", samples=entry.warm_samples)
        worker.pause()
    except BaseException:
        worker.kill()
        raise
    return worker


def _first_batch_alone(entry: Entry) -> float:
    """First batch of a start that finds no index; leaves one behind, and nothing of the frames."""
    options = {**entry.spec["options"], **({"disk_bytes": 0} if entry.server is not None else {})}
    if "decoded_bytes" in options:
        options["decoded_bytes"] = 0
        options.pop("prefix_edge", None)
    forget_pages(entry.folder)
    worker = Worker(replace(entry, spec={**entry.spec, "options": options}))
    first_batch_s = float(worker.ready["first_batch_s"])
    worker.close()
    return first_batch_s


def _turn(worker: Worker, seconds: float) -> dict[str, Any]:
    server = worker.entry.server
    worker.resume()
    before = server.stats() if server is not None else {}
    found = worker.tell("run", seconds=seconds, samples=worker.entry.turn_samples)
    if server is not None:
        found["server"] = {key: value - before.get(key, 0) for key, value in server.stats().items()}
    worker.pause()
    return found


def _summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    rates = [turn["samples"] / turn["wall_s"] for turn in turns]
    last = turns[-1]
    found = {
        "samples_per_s": statistics.median(rates),
        "samples_per_s_turns": rates,
        "cpu_ms_per_sample": 1e3 * sum(turn["cpu_s"] for turn in turns) / sum(turn["samples"] for turn in turns),
        "longest_wait_s": max(turn["longest_s"] for turn in turns),
        "others_cores": statistics.median(turn["others_cores"] for turn in turns),
        "gauges": last["gauges"],
    }
    if "server" in last:
        found["server_steady"] = {key: sum(turn["server"][key] for turn in turns) for key in last["server"]}
    return found


def _paced(entry: Entry, args: argparse.Namespace) -> dict[str, Any]:
    batch = 8
    worker = Worker(replace(entry, spec={**entry.spec, "batch": batch}))
    try:
        if entry.server is not None:
            worker.tell("settle", timeout_s=120)
        # Its own rate first: small batches cost a little more than the large ones of the table.
        found = worker.tell("run", seconds=args.seconds)
        rate = found["samples"] / found["wall_s"]
        return {"rate": rate, **worker.tell("pace", period_s=batch / (args.pace * rate), steps=args.paced_steps)}
    finally:
        worker.close()


def _foretold(entry: Entry) -> dict[str, Any]:
    """Requests of a run without disk cache, beside the prediction; once with room for all, once with evictions."""
    found = {}
    for name, ram_bytes in (("ram_1_gib", 1 << 30), ("ram_16_mib", 16 << 20)):
        options = {**entry.spec["options"], "disk_bytes": 0, "ram_bytes": ram_bytes}
        worker = Worker(replace(entry, spec={**entry.spec, "options": options}))
        try:
            found[name] = worker.tell("foretold", batches=_FORETOLD_BATCHES)
        finally:
            worker.close()
        print(f"{entry.loader} {name}: {found[name]}", file=sys.stderr, flush=True)
    equal = all((f["gets"], f["get_bytes"]) == (f["predicted_gets"], f["predicted_get_bytes"]) for f in found.values())
    return {**found, "equal": equal}


def _rotated(count: int, by: int) -> list[int]:
    return [(place + by) % count for place in range(count)]


def _say(entry: Entry, row: dict[str, Any]) -> None:
    brief = {key: round(value, 3) for key, value in row.items() if isinstance(value, float)}
    print(f"{entry.loader} {entry.variant}: {brief}", file=sys.stderr, flush=True)
