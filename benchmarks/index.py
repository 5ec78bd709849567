"""What indexing a dataset over S3 costs: reads and bytes a video file, bytes a frame, seconds, and two at once.

    python benchmarks/index.py --episodes 1000 --latency-ms 30 --gbit 1 --json rows.json

Sets of 1,000 episodes of 40 frames are written once, joined (v3.0, 100 episodes a file) and with a file for each
episode (v2.1, where the header alone takes 25 bytes a frame), and of 100 frames a file. Only reads of video files are
counted: metadata and the timestamp column are read before.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from s3_server import started

from knonik.cache import cache_root
from knonik.columns.arrays import load_columns
from knonik.index.video_index import load_index
from knonik.metadata.lerobot import read_metadata
from knonik.stores.base import open_store
from knonik.write.lerobot import EpisodeData, write_lerobot

SETS = {"v3.0 joined": ("v3.0", 40), "v2.1 short files": ("v2.1", 40), "v2.1 files of 100": ("v2.1", 100)}


def generate(folder: Path, version: str, episodes: int, frames: int) -> Path:
    """A set with one small camera; only the headers matter here."""
    root = folder / f"index-{version}-{episodes}x{frames}"
    if root.exists():
        return root

    def each() -> Iterator[EpisodeData]:
        rng = np.random.default_rng(0)
        for _ in range(episodes):
            pictures = rng.integers(0, 255, (frames, 4, 4, 3), np.uint8).repeat(8, axis=1).repeat(8, axis=2)
            state = np.zeros((frames, 2), np.float32)
            yield EpisodeData(columns={"action": state}, frames={"observation.images.top": pictures}, task="t")

    options = {"fps": 10, "robot_type": "none", "codec": "h264", "gop": 2}
    return write_lerobot(root, each(), version=version, **options)


def index_once(uri: str, folder: Path) -> dict[str, Any]:
    """Index everything and say what it took; runs in a process of its own."""
    store = open_store(uri)
    metadata = read_metadata(store)
    folder = folder / metadata.fingerprint
    load_columns(store, metadata.episodes, ["timestamp"], folder)
    before, begin = store.gauges(), time.perf_counter()
    index = load_index(store, metadata, folder)
    index.wait()
    seconds, after = time.perf_counter() - begin, store.gauges()
    digest = hashlib.sha256()
    for key in sorted(key for key in metadata.objects if key.endswith(".mp4")):
        digest.update(index.object(key).pts.astype(np.int64).tobytes())
        digest.update(repr(index.unit_span(key, 0)).encode())
    (kept,) = folder.glob("index-*.npz")
    index.close()
    store.close()
    return {
        "files": sum(key.endswith(".mp4") for key in metadata.objects),
        "frames": metadata.episodes.num_rows,
        "gets": after["gets"] - before["gets"],
        "get_bytes": after["get_bytes"] - before["get_bytes"],
        "seconds": round(seconds, 2),
        "kept_bytes": kept.stat().st_size,
        "digest": digest.hexdigest()[:16],
    }


def processes(uri: str, endpoint: str, folder: Path, count: int) -> list[dict[str, Any]]:
    """The same by several processes that begin together and share a cache folder."""
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    environment = {**os.environ, **keys, "AWS_ENDPOINT_URL": endpoint}
    command = [sys.executable, __file__, "--once", uri, str(folder)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(count)]
    answers = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit("indexing failed")
    return [json.loads(answer) for answer in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--once", nargs=2, metavar=("URI", "FOLDER"), help=argparse.SUPPRESS)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--latency-ms", type=float, default=30.0)
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    if options.once:
        print(json.dumps(index_once(options.once[0], Path(options.once[1]))))
        return
    folder = Path(os.environ.get("ROBOT_RECIPES_BENCH") or cache_root(None) / "bench")
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    print(
        f"{'set':<20}{'files':>7}{'frames':>9}{'GETs/file':>11}{'B/frame':>9}{'s':>7}{'kept B/frame':>14}  two at once"
    )
    for name, (version, frames) in SETS.items():
        root = generate(folder, version, options.episodes, frames)
        with started(root.parent, latency_ms=options.latency_ms, gbit=options.gbit) as endpoint:
            uri = f"s3://bucket/{root.name}"
            with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
                (alone,) = processes(uri, endpoint, Path(one), 1)
                both = processes(uri, endpoint, Path(two), 2)
        row = {
            "set": name,
            **alone,
            "gets_per_file": alone["gets"] / alone["files"],
            "bytes_per_frame": alone["get_bytes"] / alone["frames"],
            "two_gets_per_file": [answer["gets"] / answer["files"] for answer in both],
            "two_equal": all(answer["digest"] == alone["digest"] for answer in both),
        }
        rows.append(row)
        share = ", ".join(f"{gets:.2f}" for gets in row["two_gets_per_file"])
        print(
            f"{name:<20}{row['files']:>7}{row['frames']:>9,}{row['gets_per_file']:>11.2f}{row['bytes_per_frame']:>9.1f}"
            f"{row['seconds']:>7.1f}{row['kept_bytes'] / row['frames']:>14.2f}"
            f"  {share} GETs/file, {'equal' if row['two_equal'] else 'DIFFERENT'}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
