"""What a process tree costs: CPU time, memory, and how long the machine kept its threads from running (Linux)."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil


def tree(pid: int) -> Iterator[psutil.Process]:
    """The process and all its living descendants."""
    root = psutil.Process(pid)
    yield root
    yield from root.children(recursive=True)


def cpu_s(pid: int) -> float:
    """CPU seconds of the tree since it began, ended children included at every level."""
    total = 0.0
    for process in tree(pid):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def machine_busy_s() -> float:
    """CPU seconds the whole machine has worked."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def run_delay_s() -> float:
    """Seconds the threads of this process have been ready to run while every core worked for somebody."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(path.read_text().split()[1])
        except OSError:  # the thread has just ended
            continue
    return total / 1e9


def pss_bytes(pid: int) -> int:
    """Proportional set size of the tree: shared pages are counted once in all."""
    total = 0
    for process in tree(pid):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


class PeakPss:
    """Largest PSS of a tree, sampled twice a second by a thread of the observer while `watching`."""

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self.watching = True
        self._pid = pid
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(0.5):
            try:
                self.peak = max(self.peak, pss_bytes(self._pid) if self.watching else 0)
            except psutil.Error:
                return

    def stop(self) -> float:
        """End the sampling; the peak in GB (1e9 bytes)."""
        self._done.set()
        self._thread.join()
        return self.peak / 1e9


def forget_pages(folder: Path) -> None:
    """Drop the files of a folder from the page cache, so that the next reader finds it cold."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


def age_s() -> float:
    """Seconds since this process was started."""
    return time.time() - psutil.Process().create_time()
