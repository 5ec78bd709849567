"""The disk cache gives back what was put and keeps its bound, through crashes, other processes and full disks."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from knonik.fetch.disk import DiskCache

EXTENT = 1000
SIZE = 2500  # two whole extents and a short one
BODY = bytes(i % 251 for i in range(SIZE))


def cache(folder: Path, limit: int = 100 * EXTENT, namespace: str = "one") -> DiskCache:
    return DiskCache(folder, limit, namespace=namespace, extent_bytes=EXTENT)


def fill(disk: DiskCache, key: str, version: str = "v") -> list[bool]:
    return [
        disk.put(key, version, SIZE, offset, BODY[offset : offset + length])
        for offset, length in disk.missing(key, version, SIZE)
    ]


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.name.isdigit() or path.suffix == ".part")


def test_gives_back_what_was_put(tmp_path: Path) -> None:
    disk = cache(tmp_path)
    assert disk.missing("a/b.mp4", "v", SIZE) == [(0, 1000), (1000, 1000), (2000, 500)]
    assert disk.put("a/b.mp4", "v", SIZE, 1000, BODY[1000:2000])
    assert disk.missing("a/b.mp4", "v", SIZE) == [(0, 1000), (2000, 500)]
    assert disk.read("a/b.mp4", "v", SIZE, 1100, 900) == BODY[1100:2000]
    assert disk.read("a/b.mp4", "v", SIZE, 900, 200) is None  # half of it is there
    assert disk.read("a/b.mp4", "v", SIZE, 1900, 200) is None
    assert disk.put("a/b.mp4", "v", SIZE, 0, memoryview(BODY)[:1000])
    assert disk.put("a/b.mp4", "v", SIZE, 2000, BODY[2000:])
    assert disk.read("a/b.mp4", "v", SIZE, 0, SIZE) == BODY
    assert disk.read("a/b.mp4", "v", SIZE, 2499, 1) == BODY[-1:]
    assert disk.read("a/b.mp4", "v", SIZE, 700, 0) == b""
    assert disk.read("a/b.mp4", "w", SIZE, 0, 10) is None
    assert disk.read("a/c.mp4", "v", SIZE, 0, 10) is None
    assert disk.used_bytes() == SIZE == on_disk(tmp_path)
    gauges = disk.gauges()
    assert (gauges["disk_bytes"], gauges["disk_limit_bytes"]) == (SIZE, 100 * EXTENT)
    assert (gauges["disk_hits"], gauges["disk_misses"], gauges["disk_puts"]) == (4, 4, 3)
    disk.close()
    later = cache(tmp_path)
    assert later.missing("a/b.mp4", "v", SIZE) == []
    assert later.read("a/b.mp4", "v", SIZE, 0, SIZE) == BODY
    assert later.put("a/b.mp4", "v", SIZE, 0, BODY[:1000])  # already there: nothing grows
    assert later.used_bytes() == SIZE
    later.close()


def test_only_whole_extents_and_possible_ranges(tmp_path: Path) -> None:
    disk = cache(tmp_path)
    for offset, body in ((500, BODY[500:1500]), (0, BODY[:999]), (2000, BODY[1000:2000]), (3000, b"")):
        with pytest.raises(ValueError, match="no extent"):
            disk.put("k", "v", SIZE, offset, body)
    with pytest.raises(ValueError, match="not within"):
        disk.read("k", "v", SIZE, 2400, 101)
    assert disk.used_bytes() == 0
    disk.close()


def test_limits(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"999 bytes holds not one extent of 1000: give at least"):
        cache(tmp_path, 999)
    with pytest.raises(ValueError, match="0 for no disk cache"):
        cache(tmp_path, -1)
    none = cache(tmp_path / "nothing", 0)
    assert fill(none, "k") == [False, False, False]
    assert none.read("k", "v", SIZE, 0, 10) is None
    assert len(none.missing("k", "v", SIZE)) == 3
    assert none.gauges()["disk_bytes"] == 0
    none.close()
    assert not (tmp_path / "nothing").exists()


def test_own_extents_stay_when_the_bound_is_reached(tmp_path: Path) -> None:
    disk = cache(tmp_path, 2 * EXTENT)
    assert fill(disk, "k") == [True, True, False]
    assert fill(disk, "other") == [False, False, False]
    assert disk.read("k", "v", SIZE, 0, 2000) == BODY[:2000]
    assert disk.used_bytes() == on_disk(tmp_path) == 2000
    assert disk.gauges()["disk_refused"] == 4
    disk.close()


def test_unused_namespaces_give_way_oldest_first(tmp_path: Path) -> None:
    for age, name in enumerate(("oldest", "older", "live")):
        made = cache(tmp_path, 8 * EXTENT, name)
        assert all(fill(made, name))
        made.close()
        (tmp_path / f"{name}-{EXTENT}" / "in-use").touch()
        os.utime(tmp_path / f"{name}-{EXTENT}" / "in-use", (1000 + age, 1000 + age))
    live = cache(tmp_path, 8 * EXTENT, "live")
    new = cache(tmp_path, 8 * EXTENT, "new")
    assert fill(new, "a") == [True, True, True]  # 7500 + 2500 > 8000: two extents of the oldest go
    older = cache(tmp_path, 8 * EXTENT, "older")
    assert older.missing("older", "v", SIZE) == []
    assert new.used_bytes() == on_disk(tmp_path) <= 8 * EXTENT
    older.close()
    assert fill(new, "b") == [True, True, True]
    assert fill(new, "c") == [False, False, True]  # only the short one still fits
    assert live.missing("live", "v", SIZE) == []
    assert live.read("live", "v", SIZE, 0, SIZE) == BODY
    assert new.used_bytes() == on_disk(tmp_path) <= 8 * EXTENT
    new.close()
    live.close()


def test_another_version_replaces_the_first(tmp_path: Path) -> None:
    disk = cache(tmp_path, 3 * EXTENT)
    assert all(fill(disk, "k", "first"))
    assert all(fill(disk, "k", "second"))
    assert disk.read("k", "second", SIZE, 0, SIZE) == BODY
    assert disk.read("k", "first", SIZE, 0, 1) is None
    assert disk.used_bytes() == on_disk(tmp_path) == SIZE
    disk.close()


def test_a_smaller_bound_holds_from_the_start(tmp_path: Path) -> None:
    disk = cache(tmp_path)
    fill(disk, "a")
    fill(disk, "b")
    disk.close()
    smaller = cache(tmp_path, 3 * EXTENT)
    assert smaller.used_bytes() == on_disk(tmp_path) <= 3 * EXTENT
    smaller.close()


def test_a_full_disk_is_no_room_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = cache(tmp_path)
    assert disk.put("k", "v", SIZE, 0, BODY[:1000])

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert not disk.put("k", "v", SIZE, 1000, BODY[1000:2000])
    assert not disk.put("k", "v", SIZE, 2000, BODY[2000:])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert disk.used_bytes() == on_disk(tmp_path) == 1000
    monkeypatch.undo()
    assert disk.put("k", "v", SIZE, 1000, BODY[1000:2000])
    disk.close()


FILLER = """
import sys
from pathlib import Path
from knonik.fetch.disk import DiskCache
folder, limit, name, keys = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4].split(",")
disk = DiskCache(folder, limit, namespace=name, extent_bytes=1000)
print("open", flush=True)
sys.stdin.readline()
most = 0
for key in keys:
    for offset in range(0, 20000, 1000):
        disk.put(key, "v", 20000, offset, bytes([len(key)]) * 1000)
        most = max(most, disk.used_bytes())
print(most, flush=True)
sys.stdin.readline()
"""


def filler(folder: Path, limit: int, namespace: str, keys: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", FILLER, str(folder), str(limit), namespace, keys],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def say(process: subprocess.Popen[str], answer: bool = True) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    return process.stdout.readline().strip() if answer else ""


def ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "open"


def test_processes_share_one_bound_and_the_same_extents(tmp_path: Path) -> None:
    """The same keys from two of one namespace, others from a third: all within the bound, nothing counted twice."""
    limit = 50_000
    processes = [filler(tmp_path, limit, name, keys) for name, keys in (("n", "a,b"), ("n", "a,b"), ("m", "c,d"))]
    try:
        for process in processes:
            ready(process)
        for process in processes:
            say(process, answer=False)
        for process in processes:
            assert process.stdout is not None
            assert 0 < int(process.stdout.readline()) <= limit
        here = cache(tmp_path, limit, "here")
        assert here.used_bytes() == on_disk(tmp_path) == limit
        assert not here.put("k", "v", SIZE, 0, BODY[:1000])  # all namespaces are in use
        here.close()
    finally:
        for process in processes:
            process.communicate("end\n")
    assert [process.returncode for process in processes] == [0, 0, 0]
    alone = cache(tmp_path, limit, "n")
    assert alone.used_bytes() == on_disk(tmp_path) == limit
    assert alone.read("a", "v", 20_000, 0, 20_000) in (b"\x01" * 20_000, None)
    alone.close()


def test_a_killed_process_leaves_no_wrong_count(tmp_path: Path) -> None:
    process = filler(tmp_path, 100_000, "one", "a")
    try:
        ready(process)
        assert say(process) == "20000"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    # What a kill between reserving and naming an extent leaves behind: bytes counted, a file without its name.
    (tmp_path / "bytes").write_text(f"{26_000:<31d}\n")
    left = next(tmp_path.glob(f"one-{EXTENT}/*/*")) / "x.part"
    left.write_bytes(b"half an extent")
    disk = cache(tmp_path, 100_000)
    assert not left.exists()
    assert disk.used_bytes() == on_disk(tmp_path) == 20_000
    assert disk.read("a", "v", 20_000, 500, 19_500) == b"\x01" * 19_500
    second = cache(tmp_path, 100_000, "two")  # beside a living user nothing is counted anew or deleted
    assert second.used_bytes() == 20_000
    second.close()
    disk.close()


def test_twenty_at_once(tmp_path: Path) -> None:
    caches = [cache(tmp_path, 30 * EXTENT, f"set{i % 4}") for i in range(20)]
    for i, disk in enumerate(caches):
        fill(disk, f"k{i}")
    assert caches[0].used_bytes() == on_disk(tmp_path) == 30 * EXTENT
    for disk in caches:
        disk.close()


def test_a_folder_that_cannot_be_used_costs_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, since
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    watch = since()
    with monkeypatch.context() as patch:
        patch.setattr("knonik.fetch.disk.os.pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            cache(tmp_path)
    assert watch.files() == []
