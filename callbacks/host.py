"""How busy the host's cores are, and what memory this rank's processes hold; Linux tells, elsewhere it is unknown."""

import os
import time
from pathlib import Path

from callbacks.window import Window

GIB = 2**30
_CGROUP = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


class Cores:
    """Busy share of the cores this process may use, by all that runs on them.

    Under a quota of a control group (a container with a number of cores) it is the share of the quota; else of the
    cores in the process's affinity.
    """

    def __init__(self, proc: Path = _PROC, cgroup: Path = _CGROUP) -> None:
        self._proc, self._cgroup = proc, cgroup
        self._quota = _quota(cgroup)
        self._before = self._read()

    def busy_frac(self) -> float | None:
        """Mean since the last call; None where the system does not tell or no time has passed."""
        before, self._before = self._before, self._read()
        if before is None or self._before is None:
            return None
        busy, available = (now - then for now, then in zip(self._before, before, strict=True))
        return min(1.0, busy / available) if available > 0 else None

    def _read(self) -> tuple[float, float] | None:
        """(busy, available) core time since the start of the system, in one unit."""
        try:
            if self._quota is not None:
                usage = dict(line.split() for line in (self._cgroup / "cpu.stat").read_text().splitlines())
                return int(usage["usage_usec"]) / 1e6, time.perf_counter() * self._quota
            cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
            busy = total = 0
            for line in (self._proc / "stat").read_text().splitlines():
                name, *ticks = line.split()
                if name in cores:
                    # user, nice, system, idle, iowait, irq, softirq, steal; guest time is in user time already
                    user, nice, system, idle, iowait, *interrupts = map(int, ticks[:8])
                    busy += user + nice + system + sum(interrupts)
                    total += user + nice + system + idle + iowait + sum(interrupts)
            return float(busy), float(total)
        except (OSError, ValueError, KeyError, AttributeError):
            return None


def _quota(cgroup: Path) -> float | None:
    """Cores a control group may use at a time; None without a limit."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def process_tree(root: int, proc: Path = _PROC) -> list[int]:
    """A process and all that descend from it, as far as they can be seen."""
    found, left = [], [root]
    while left:
        process = left.pop()
        found.append(process)
        for children in (proc / str(process) / "task").glob("*/children"):
            try:
                left += map(int, children.read_text().split())
            except OSError:
                continue  # the thread has ended
    return found


def resident_bytes(process: int, proc: Path = _PROC) -> int:
    """Pages of a process that are in memory, shared ones in full; 0 when it is gone or the system does not tell."""
    try:
        return int((proc / str(process) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def proportional_bytes(process: int, proc: Path = _PROC) -> int:
    """The same with each shared page divided by the number of its users; 0 when the system does not tell."""
    try:
        for line in (proc / str(process) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0


class Host:
    """Meter of the cores and the memory of rank 0's host: its own process with the processes it started.

    Looking for those and for the proportional set takes long where there are many threads or much is mapped. It is done
    at the start, at the end, and between no more often than its own time allows: one part in `EASE` of the run. All of
    it is looked at no more than once in `every_s` seconds; between, the last figures stand.
    """

    EASE = 2000

    def __init__(self, cores: Cores | None = None, every_s: float = 1.0) -> None:
        self._cores = cores or Cores()
        self._every_s = every_s
        self._shown: dict[str, float] = {}
        self._share_s = 0.0
        self._seconds = 0.0
        self._tree: list[int] = []
        self._pss = 0
        self._most_pss = 0
        self._read_again_at = 0.0
        self._look_closely()
        self._began = time.perf_counter()

    def measure(self, window: Window) -> dict[str, float]:
        now = time.perf_counter()
        if self._shown and now - self._began < self._every_s:
            return self._shown
        metrics = {}
        frac = self._cores.busy_frac()
        if frac is not None:
            metrics["host/cpu_frac"] = frac
            self._share_s += frac * (now - self._began)
            self._seconds += now - self._began
        self._began = now
        if now >= self._read_again_at:
            self._look_closely()
        if rss := sum(map(resident_bytes, self._tree)):
            metrics["mem/rss_gib"] = rss / GIB
        if self._pss:
            metrics["mem/pss_gib"] = self._pss / GIB
            self._pss = 0
        self._shown = metrics
        return metrics

    @property
    def cpu_frac(self) -> float | None:
        """Mean over this start of the run; None where unknown."""
        return self._share_s / self._seconds if self._seconds else None

    def summary(self) -> dict[str, float]:
        """Figures of this start for `summary.json`; GB are 1e9 bytes, and what is unknown is left out."""
        self._look_closely()
        figures = {} if self.cpu_frac is None else {"host_cpu_frac": self.cpu_frac}
        if self._most_pss:
            figures["peak_pss_gb"] = self._most_pss / 1e9
        return figures

    def _look_closely(self) -> None:
        began = time.perf_counter()
        self._tree = process_tree(os.getpid())
        self._pss = sum(map(proportional_bytes, self._tree))
        self._most_pss = max(self._most_pss, self._pss)
        now = time.perf_counter()
        self._read_again_at = now + self.EASE * (now - began)
