"""What the comparison of loaders counts, and that no row is left out without a word."""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

BURNT_S = 0.4
# A process whose child burns CPU time and is waited for, and which then lives on.
PARENT = f"""
import subprocess, sys
burn = "import time\\nwhile time.process_time() < {BURNT_S}: pass"
subprocess.run([sys.executable, "-c", burn], check=True)
print("done", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))


@pytest.mark.usefixtures("benchmarks")
@pytest.mark.parametrize("depth", [1, 2])
def test_cpu_time_of_ended_processes_counts_at_every_level(depth: int) -> None:
    import loader_measure

    code = PARENT
    if depth == 2:
        code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {PARENT!r}], check=True)"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    assert loader_measure.cpu_s(process.pid) >= BURNT_S
    process.communicate()


class Uneven:
    """A loader whose every tenth batch is late."""

    def __init__(self) -> None:
        self._taken = 0

    def take(self) -> int:
        self._taken += 1
        if self._taken % 10 == 0:
            time.sleep(0.02)
        return 1


@pytest.mark.usefixtures("benchmarks")
def test_a_paced_run_reports_every_wait_and_the_machine() -> None:
    import loader_worker

    found = loader_worker.pace(Uneven(), period_s=0.0, steps=50)
    assert found["steps"] == 50
    assert found["p99_s"] == found["max_s"] >= 0.02
    assert found["over_2ms"] >= 5
    assert found["total_wait_s"] >= 5 * 0.02
    assert 0 < found["wait_share"] <= 1
    assert found["run_delay_share"] >= 0


@pytest.mark.usefixtures("benchmarks")
def test_loaders_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import loader_copies
    import loaders

    everything: dict[str, Any] = {
        "only": {row.loader for row in loaders.ROWS},
        "variants": {row.data.split("/")[0] for row in loaders.ROWS},
    }
    args = argparse.Namespace(**everything, lerobot_python=None, copies_python=sys.executable, stock_defaults=False)
    monkeypatch.setattr(loader_copies, "installed", lambda name, python: False)
    asked = loaders.wanted(args)
    lacking = loaders.missing(args, asked)
    assert lacking == {"lerobot", "lerobot-streaming", "mosaicml", "litdata", "webdataset"}
    text = loaders.table(loaders.quoted(asked, lacking))
    assert [line.split()[0] for line in text.splitlines()[1:] if "not installed" in line] == [
        row.loader for row in asked if row.loader in lacking
    ]


@pytest.mark.usefixtures("benchmarks")
def test_the_slow_row_is_the_stock_algorithm_as_it_is() -> None:
    import loaders

    slow = [row for row in loaders.ROWS if row.slow]
    assert [(row.loader, row.options) for row in slow] == [("stock-gr00t", {})]
    assert loaders._shard() == 1018  # 60 episodes have 2036 anchors, which are two shards


def test_the_writers_of_copies_need_none_of_our_packages() -> None:
    """They run in an environment that has the other library, and perhaps neither PyAV nor this project."""
    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    code = "import sys, loader_copies; print(sorted({'av', 'knonik', 'torch', 'PIL'} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
