"""Start-up at the scale of DROID: projected columns in shared mappings against every row as a Python object.

    python benchmarks/startup.py [--rows 2000000] [--full-rows 25000] [--ranks 8] [--folder FOLDER] [--json FILE]

Generates rows with the columns of the public DROID set (lerobot/droid_1.0.1: names, widths and 265 steps an episode, a
row group each, as its recorder writes them; values are random) and starts up on them in two ways, each in `--ranks`
fresh processes at once, as on a node, with warm page cache:

full    what a loader does that reads every column of every data file and of the episode list into Python objects, each
        rank for itself; on the first `--full-rows` rows, since its cost is linear in the rows and all would not fit
knonik  opens the dataset with an empty cache, maps the eight columns a policy needs and lists the windows of 33 frames;
        the ranks share the columns, which one of them builds; then every value is read once

Printed are seconds and peak proportional memory (PSS, minus that after imports, of all processes together), a row and
extrapolated to the 18 M rows of DROID on 8 ranks. Both ways share the machine's cores, so their seconds fall alike with
more of them; CPU time does not depend on what else runs. Beside it stands what was published for a policy on this set:
from 37 min to 25 s (89 times), and from 1,734 GB to 46 GB (-97 %).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

DROID_ROWS = 18_000_000
DROID_RANKS = 8
PUBLISHED = {"full": (37 * 60, 1734.0), "knonik": (25, 46.0)}  # seconds and GB before and after
WINDOW_FRAMES = 33
EPISODE_ROWS = 265
FILE_EPISODES = 400
VECTORS = {
    "observation.state": 8,
    "observation.state.joint_position": 7,
    "observation.state.cartesian_position": 6,
    "observation.state.gripper_position": 1,
    "action": 8,
    "action.original": 7,
    "action.joint_position": 7,
    "action.cartesian_position": 6,
    "action.gripper_position": 1,
    "action.joint_velocity": 7,
    "action.cartesian_velocity": 6,
    "action.gripper_velocity": 1,
    "camera_extrinsics.wrist_left": 6,
    "camera_extrinsics.exterior_1_left": 6,
    "camera_extrinsics.exterior_2_left": 6,
    "discount": 1,
    "reward": 1,
}
TEXTS = (
    "language_instruction",
    "language_instruction_2",
    "language_instruction_3",
    "task_category",
    "building",
    "collector_id",
    "date",
)
FLAGS = ("is_first", "is_last", "is_terminal", "is_episode_successful")
COUNTERS = ("frame_index", "episode_index", "index", "task_index")
NEEDED = (
    "observation.state.joint_position",
    "observation.state.gripper_position",
    "action.joint_position",
    "action.gripper_position",
    "timestamp",
    "index",
    "episode_index",
    "task_index",
)


def generate(folder: Path, rows: int) -> int:
    """Write a v3.0 dataset of about `rows` rows without video; returns how many it has."""
    num_episodes = max(1, rows // EPISODE_ROWS)
    rng = np.random.default_rng(0)
    for place in ("data/chunk-000", "meta/episodes/chunk-000"):
        (folder / place).mkdir(parents=True)
    for number, first in enumerate(range(0, num_episodes, FILE_EPISODES)):
        episodes = np.arange(first, min(first + FILE_EPISODES, num_episodes))
        table = _rows(episodes, rng)
        with pq.ParquetWriter(folder / f"data/chunk-000/file-{number:03d}.parquet", table.schema) as writer:
            for begin in range(0, len(table), EPISODE_ROWS):
                writer.write_table(table.slice(begin, EPISODE_ROWS))
    ids = np.arange(num_episodes)
    stats = {
        f"stats/{name}/{kind}": pa.array([[0.5] * width] * num_episodes)
        for name, width in VECTORS.items()
        for kind in ("min", "max", "mean", "std", "count")
    }
    listed = {
        "episode_index": ids,
        "tasks": [[f"do thing {i} with the object on the table"] for i in ids],
        "length": np.full(num_episodes, EPISODE_ROWS),
        "data/chunk_index": np.zeros_like(ids),
        "data/file_index": ids // FILE_EPISODES,
        "dataset_from_index": ids * EPISODE_ROWS,
        "dataset_to_index": (ids + 1) * EPISODE_ROWS,
    }
    pq.write_table(pa.table(listed | stats), folder / "meta/episodes/chunk-000/file-000.parquet")
    texts = [f"do thing {i} with the object on the table" for i in ids]
    pq.write_table(pa.table({"task_index": ids, "task": texts}), folder / "meta/tasks.parquet")
    features = {name: {"dtype": "float32", "shape": [width]} for name, width in VECTORS.items()}
    features |= {name: {"dtype": "string", "shape": [1]} for name in TEXTS}
    features |= {name: {"dtype": "bool", "shape": [1]} for name in FLAGS}
    features |= {"timestamp": {"dtype": "float32", "shape": [1]}}
    features |= {name: {"dtype": "int64", "shape": [1]} for name in COUNTERS}
    info = {
        "codebase_version": "v3.0",
        "fps": 15,
        "chunks_size": 1000,
        "features": features,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    }
    (folder / "meta/info.json").write_text(json.dumps(info))
    return num_episodes * EPISODE_ROWS


def _rows(episodes: np.ndarray, rng: np.random.Generator) -> pa.Table:
    episode = np.repeat(episodes, EPISODE_ROWS)
    step = np.tile(np.arange(EPISODE_ROWS), len(episodes))
    columns: dict[str, Any] = {}
    for name, width in VECTORS.items():
        flat = pa.array(rng.standard_normal(len(episode) * width, dtype=np.float32))
        columns[name] = flat if width == 1 else pa.FixedSizeListArray.from_arrays(flat, width)
    for name in TEXTS:
        columns[name] = pa.array([f"{name} of episode {i} in words" for i in episodes]).take(
            pa.array(episode - episodes[0])
        )
    columns |= {name: pa.array(step == 0) for name in FLAGS}
    columns["timestamp"] = pa.array((step / 15).astype(np.float32))
    columns |= {"frame_index": step, "episode_index": episode, "index": episode * EPISODE_ROWS + step}
    return pa.table(columns | {"task_index": episode})


def read_fully(folder: Path, rows: int) -> int:
    """Every column of the data files that hold the first `rows` rows, and of their episodes, as Python objects."""
    count, objects = 0, []
    for path in sorted(folder.rglob("data/**/*.parquet")):
        file = pq.ParquetFile(path)
        # No more of a file than is wanted: the rest would be counted with these rows.
        table = file.read_row_groups(_row_groups(file, rows - count)).slice(0, rows - count)
        objects += table.to_pylist()
        count = len(objects)
        if count >= rows:
            break
    objects.sort(key=lambda row: row["index"])
    # Of the list no more than belongs to these rows: its cost, too, is told per row.
    listed = pq.ParquetFile(folder / "meta/episodes/chunk-000/file-000.parquet")
    episodes = next(listed.iter_batches(max(1, count // EPISODE_ROWS))).to_pylist()
    return len(objects) if episodes else 0


def _row_groups(file: pq.ParquetFile, rows: int) -> list[int]:
    """The first row groups of a file that hold `rows` rows, or all."""
    ends = np.cumsum([file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)])
    return list(range(min(len(ends), int(np.searchsorted(ends, rows)) + 1)))


def read_needed(folder: Path, cache: Path) -> int:
    """Open the dataset, map what is needed and list the windows, then read every value once."""
    import knonik

    begin_cpu = time.process_time()
    with knonik.open(folder, cache_dir=cache) as dataset:
        columns = dataset.columns(NEEDED)
        windows = len(dataset.anchors(WINDOW_FRAMES))
        for values in columns.values():
            for begin in range(0, len(values), 1 << 20):
                values[begin : begin + (1 << 20)].sum()
        _say(rows=len(dataset), windows=windows, cpu_s=time.process_time() - begin_cpu)
        sys.stdin.readline()  # memory of the ranks is summed while all of them have everything mapped
        return len(dataset)


def _say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def worker(kind: str, folder: Path, argument: str) -> None:
    import knonik  # noqa: F401  imports are not part of the measurement, for either way

    _say(ready=True)
    sys.stdin.readline()
    if kind == "full":
        begin_cpu = time.process_time()
        _say(rows=read_fully(folder, int(argument)), cpu_s=time.process_time() - begin_cpu)
        sys.stdin.readline()
    else:
        read_needed(folder, Path(argument))


def pss_bytes(pid: int) -> int:
    """Proportional set size of a process: pages it shares count by their share."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no Pss in smaps_rollup of process {pid}")


@contextmanager
def _peak(pids: list[int]) -> Iterator[list[int]]:
    """Peak of the summed PSS while the block runs, in the first element."""
    peak, end = [0], threading.Event()

    def watch() -> None:
        while not end.wait(0.05):
            peak[0] = max(peak[0], sum(pss_bytes(pid) for pid in pids))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        end.set()
        thread.join()


def measure(kind: str, folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Run one worker per argument at once: rows, seconds until all are done, CPU seconds, peak PSS over that before."""
    command = [sys.executable, __file__, "--worker", kind, "--folder", str(folder), "--argument"]
    workers = [
        subprocess.Popen([*command, argument], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for argument in arguments
    ]
    try:
        for process in workers:
            assert process.stdout is not None
            process.stdout.readline()
        pids = [process.pid for process in workers]
        before = sum(map(pss_bytes, pids))
        with _peak(pids) as peak:
            begin = time.perf_counter()
            for process in workers:
                _go_on(process)
            said = [json.loads(process.stdout.readline()) for process in workers if process.stdout]
            seconds = time.perf_counter() - begin
            after = [pss_bytes(pid) for pid in pids]
        for process in workers:
            _go_on(process)
            process.wait(60)
    finally:
        for process in workers:
            process.kill()
            process.wait()
    peak_bytes = max(peak[0], sum(after)) - before
    cpu_s = sum(answer["cpu_s"] for answer in said)
    rows = said[0]["rows"]
    return {"loader": kind, "processes": len(workers)} | {
        "rows": rows, "seconds": seconds, "cpu_s": cpu_s, "pss_bytes": peak_bytes
    }  # fmt: skip


def _go_on(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def at_scale(row: dict[str, Any], *, per_rank: bool) -> dict[str, float]:
    """Seconds and GB of a measured way at the rows of DROID on 8 ranks; costs are linear in the rows.

    per_rank: each process has memory of its own; else what all processes took together is what a node takes.
    """
    share = DROID_ROWS / row["rows"]
    ranks = DROID_RANKS / row["processes"] if per_rank else 1.0
    return {"droid_s": row["seconds"] * share, "droid_gb": row["pss_bytes"] * share * ranks / 1e9}


def report(full: dict[str, Any], ours: dict[str, Any]) -> str:
    """The table; adds to both rows what follows from the measured."""
    lines = []
    for row in (full, ours):
        row |= at_scale(row, per_rank=row is full)
        row["us_per_row"] = row["seconds"] / row["rows"] * 1e6
        row["cpu_us_per_row"] = row["cpu_s"] / row["processes"] / row["rows"] * 1e6
        row["bytes_per_row"] = row["pss_bytes"] / row["rows"]
        seconds, gigabytes = PUBLISHED[row["loader"]]
        lines.append(
            f"{row['loader']:7} {row['processes']} process(es), {row['rows']} rows: {row['seconds']:.2f} s "
            f"({row['us_per_row']:.2f} us a row; CPU {row['cpu_us_per_row']:.2f} a process), peak PSS "
            f"+{row['pss_bytes'] / 1e6:.0f} MB ({row['bytes_per_row']:.0f} B a row); at 18 M rows on 8 ranks "
            f"{row['droid_s']:.0f} s, {row['droid_gb']:.1f} GB (published {seconds} s, {gigabytes:.0f} GB)"
        )
    faster, less = full["droid_s"] / ours["droid_s"], 100 * (1 - ours["droid_gb"] / full["droid_gb"])
    cpu = full["cpu_us_per_row"] / ours["cpu_us_per_row"]
    lines.append(
        f"knonik on {os.cpu_count()} cores: {faster:.0f} times as fast ({cpu:.0f} times by CPU time over all ranks), "
        f"{less:.2f} % less memory on 8 ranks; published 89 times and 97 %"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--full-rows", type=int, default=25_000)
    parser.add_argument("--ranks", type=int, default=DROID_RANKS)
    parser.add_argument("--folder", type=Path, help="keep the generated set here and use it again")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=["full", "knonik"], help=argparse.SUPPRESS)
    parser.add_argument("--argument", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.folder, args.argument)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch) / "set"
        if not (folder / "meta/info.json").exists():
            begin = time.perf_counter()
            rows = generate(folder, args.rows)
            print(f"generated {rows} rows in {time.perf_counter() - begin:.0f} s", flush=True)
        full = measure("full", folder, [str(args.full_rows)] * args.ranks)
        ours = measure("knonik", folder, [f"{scratch}/cache"] * args.ranks)
    print(report(full, ours))
    if args.json:
        args.json.write_text(json.dumps([full, ours], indent=1))


if __name__ == "__main__":
    main()
