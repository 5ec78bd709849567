"""Loaders side by side: rate, CPU per sample, first batch, memory, and the waits of a paced consumer.

    python benchmarks/loaders.py [--data FOLDER] [--only knonik-exact floor ...] [--paced-steps 3000] [--json FILE]

One run, the same generated data (`loader_data.py`), the same batch. Every loader runs in a process of its own; they
take turns of a few seconds, and those whose turn it is not are stopped, so that a machine that is busy for a while hits
all of them. Read CPU-ms a sample first: it is the CPU time of the whole process tree and moves least on a shared
machine. `first batch` counts from the start of the process, with the pages of the dataset out of the page cache, less
the time Python took to import libraries. `floor` is the same packets decoded with nothing around it, on one thread.

Loaders that are not installed are named as such. For LeRobot give the interpreter of an environment that has it:
`--lerobot-python PATH` (Python 3.12, lerobot 0.6); without one, its row quotes an earlier measurement and says so.
`mosaicml`, `litdata` and `webdataset` read lossy JPEG copies of the data in their own formats, made beside it where the
library is installed (`--copies-python PATH`, 0.4 GB each); they decode no video, so they have no ratio to the floor.

`stock-gr00t` has shards of 64 samples in place of 1024: the work per sample is the same, but the first batch needs a
whole shard, and the next one is loaded meanwhile. At its defaults it is measured over a whole shard, after another one
for the first batch: `--stock-defaults` adds that row, which takes minutes. `knonik-s3` also counts its requests in runs
without the disk cache, beside those that its plan foretold (`foretold` in the JSON).
"""

import argparse
import json
import signal
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import loader_copies
import loader_data
from loader_turns import Entry, Server, measure_together

HORIZON = 8
NOT_THIS_RUN = "not installed here; an earlier run on two shared cores"
WARM_BATCHES = 6  # by then every loader has the memory, decoders and queues it works with; a run has thousands
EDGE = 256  # training size: the shorter side after the model's first resize


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: which loader, on which data, with which options."""

    loader: str
    module: str
    data: str
    note: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    remote: bool = False
    warm_epochs: int = 0
    slow: bool = False  # shown only when asked for

    @property
    def copy(self) -> bool:
        """Whether it reads a JPEG copy."""
        return self.module == JPEG

    @property
    def variant(self) -> str:
        return " ".join(part for part in (self.data.split("/")[0], self.note) if part)


OURS, FLOOR, STOCK, LEROBOT = "loader_knonik", "loader_floor", "loader_stock", "loader_lerobot"
JPEG, LOSSY = "loader_jpeg", "lossy JPEG q90 copy"
CACHED = {"prefix_edge": EDGE, "decoded_bytes": 8 << 30}
ROWS = (
    Row(loader="floor", module=FLOOR, data="av1g2/v30"),
    Row(loader="knonik-exact", module=OURS, data="av1g2/v30"),
    Row(loader="knonik-exact", module=OURS, data="av1g2/v30", note="yuv420p", options={"transport": "yuv420p"}),
    Row(loader="knonik-cached", module=OURS, data="av1g2/v30", note="256", options=CACHED, warm_epochs=1),
    Row(loader="knonik-s3", module=OURS, data="av1g2/v30", note="30 ms", remote=True),
    Row(loader="stock-gr00t", module=STOCK, data="av1g2/v21", note="shards of 64", options={"shard_size": 64}),
    Row(loader="stock-gr00t", module=STOCK, data="av1g2/v21", note="defaults", slow=True),
    Row(loader="lerobot", module=LEROBOT, data="av1g2/v30", note="uint8"),
    Row(loader="lerobot-streaming", module=LEROBOT, data="av1g2/v30", note="uint8", options={"streaming": True}),
    *(
        Row(loader=name, module=JPEG, data="av1g2/v30", note=LOSSY, options={"library": name})
        for name in loader_copies.PACKAGES
    ),
    Row(loader="floor", module=FLOOR, data="h264g2/v30"),
    Row(loader="knonik-exact", module=OURS, data="h264g2/v30"),
    Row(loader="floor", module=FLOOR, data="h264g250/v30"),
    Row(loader="knonik-exact", module=OURS, data="h264g250/v30"),
    Row(loader="knonik-blocks", module=OURS, data="h264g250/v30", options={"order": "blocks"}),
)  # fmt: skip
# Measured once, on two shared cores, the same kind of data: torch 2.11, lerobot 0.6.1 with torchcodec 0.11.1,
# mosaicml-streaming 0.13, litdata 0.2.76 and webdataset 1.0.2.
QUOTED = {
    ("lerobot", "av1g2 uint8"): {"samples_per_s": 19.8, "cpu_ms_per_sample": 39.2, "peak_pss_gb": 1.19},
    ("lerobot-streaming", "av1g2 uint8"): {"samples_per_s": 29.7, "cpu_ms_per_sample": 33.4, "peak_pss_gb": 2.21},
    ("mosaicml", f"av1g2 {LOSSY}"): {"samples_per_s": 69.5, "cpu_ms_per_sample": 15.4, "peak_pss_gb": 0.89},
    ("litdata", f"av1g2 {LOSSY}"): {"samples_per_s": 52.4, "cpu_ms_per_sample": 18.1, "peak_pss_gb": 0.76},
    ("webdataset", f"av1g2 {LOSSY}"): {"samples_per_s": 63.7, "cpu_ms_per_sample": 17.6, "peak_pss_gb": 1.02},
}


def wanted(args: argparse.Namespace) -> list[Row]:
    """The rows that were asked for."""
    asked = [row for row in ROWS if row.loader in args.only and row.data.split("/")[0] in args.variants]
    return [row for row in asked if args.stock_defaults or not row.slow]


def missing(args: argparse.Namespace, rows: list[Row]) -> set[str]:
    """Loaders of these rows that are not installed."""
    lacking = {row.loader for row in rows if row.module == LEROBOT and args.lerobot_python is None}
    copies = [row.loader for row in rows if row.copy]
    return lacking | {name for name in copies if not loader_copies.installed(name, args.copies_python)}


def entries(rows: list[Row], args: argparse.Namespace, scratch: Path, server: Server | None) -> list[Entry]:
    """What to start; data and copies that are not there are made."""
    found = []
    copies = [row.loader for row in rows if row.copy]
    loader_copies.ensure(copies, args.data, python=args.copies_python, horizon=HORIZON)
    pythons = {LEROBOT: args.lerobot_python, JPEG: args.copies_python}
    for row in rows:
        folder = loader_data.ensure(row.data, args.data)
        folder = loader_copies.place(row.loader, args.data) if row.copy else folder
        spec = {
            "module": row.module,
            "data": server.uri(row.data) if server is not None and row.remote else str(folder),
            "batch": args.batch_size,
            "horizon": HORIZON,
            "fps": loader_data.FPS,
            "threads": args.threads,
            "options": dict(row.options),
        }
        # A start without index needs a cache folder that no other row has filled.
        spec["cache"] = str(scratch / (f"row{len(found)}" if row.module == OURS else "shared"))
        found.append(
            Entry(
                loader=row.loader,
                variant=row.variant,
                spec=spec,
                folder=folder,
                python=pythons.get(row.module, sys.executable),
                server=server if row.remote else None,
                paced=row.loader in ("knonik-exact", "knonik-s3") and not row.options,
                warm_samples=_warm(row, args.batch_size),
                turn_samples=_shard() if row.slow else 0,
            )
        )
    return found


def _warm(row: Row, batch: int) -> int:
    """Samples taken before the first turn; the stock algorithm, which takes minutes for them, does so on its own."""
    epochs = row.warm_epochs * sum(loader_data.lengths(loader_data.EPISODES))
    return epochs or (0 if row.module == STOCK else WARM_BATCHES * batch)


def _shard() -> int:
    """Samples of a shard of the stock algorithm at its defaults."""
    anchors = sum(steps - HORIZON + 1 for steps in loader_data.lengths(loader_data.EPISODES))
    return anchors // -(-anchors // 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(dict.fromkeys(row.loader for row in ROWS))
    variants = list(dict.fromkeys(row.data.split("/")[0] for row in ROWS))
    parser.add_argument("--data", type=Path, default=loader_data.default_folder(), help="made there when missing")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="LOADER")
    parser.add_argument("--variants", nargs="+", choices=variants, default=variants, metavar="VARIANT")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--threads", type=int, help="decode threads of our loader; default: cores less one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a turn")
    parser.add_argument("--paced-steps", type=int, default=0, help="steps of the paced run, batch 8; 0 leaves it out")
    parser.add_argument("--pace", type=float, default=0.9, help="share of the measured rate that the consumer takes")
    parser.add_argument("--latency-ms", type=float, default=30.0, help="first byte of the loopback S3 server")
    parser.add_argument("--gbit", type=float, default=1.0, help="its link, shared by all connections")
    parser.add_argument("--lerobot-python", help="interpreter of an environment with lerobot")
    parser.add_argument(
        "--copies-python", default=sys.executable, help="interpreter that has mosaicml-streaming, litdata or webdataset"
    )
    parser.add_argument("--stock-defaults", action="store_true", help="add stock-gr00t with shards of 1024: minutes")
    parser.add_argument("--json", type=Path, help="write the rows there")
    args = parser.parse_args()
    # Ended from outside, it still has to end the loaders, most of which are stopped and would stay so.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    asked = wanted(args)
    lacking = missing(args, asked)
    present = [row for row in asked if row.loader not in lacking]
    for row in present:  # before the server looks for its folder
        loader_data.ensure(row.data, args.data)
    with tempfile.TemporaryDirectory(prefix="loaders-") as scratch:
        server = Server.start(args) if any(row.remote for row in present) else None
        try:
            rows = measure_together(entries(present, args, Path(scratch), server), args)
        finally:
            if server is not None:
                server.stop()
    rows += quoted(asked, lacking)
    print(table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def quoted(rows: list[Row], lacking: set[str]) -> list[dict[str, Any]]:
    """Earlier figures of the loaders that are not installed."""
    return [
        {"loader": row.loader, "variant": row.variant, **QUOTED[row.loader, row.variant], "quoted": NOT_THIS_RUN}
        for row in rows
        if row.loader in lacking
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text; `/floor` is the CPU's ratio to the floor on the same data, `others` cores that others kept."""
    floors = {row["variant"]: row["cpu_ms_per_sample"] for row in rows if row["loader"] == "floor"}
    columns = {
        "samples/s": "samples_per_s",
        "CPU-ms": "cpu_ms_per_sample",
        "/floor": "floors",
        "first s": "first_batch_s",
        "no index": "first_batch_no_index_s",
        "PSS GB": "peak_pss_gb",
        "longest s": "longest_wait_s",
        "others": "others_cores",
    }
    lines = [f"{'loader':18} {'data':26}" + "".join(f"{name:>10}" for name in columns)]
    for row in rows:
        floor = None if LOSSY in row["variant"] else floors.get(row["variant"].split()[0])
        shown = {**row, "floors": row["cpu_ms_per_sample"] / floor if floor else None}
        line = f"{row['loader']:18} {row['variant']:26}"
        line += "".join(f"{_cell(shown.get(key)):>10}" for key in columns.values())
        lines.append(line + (f"  quoted: {row['quoted']}" if "quoted" in row else ""))
    return "\n".join([*lines, *_paced(rows)])


def _paced(rows: list[dict[str, Any]]) -> list[str]:
    columns = {
        "steps": "steps",
        "p50 ms": "p50_ms",
        "p99 ms": "p99_ms",
        "max s": "max_s",
        "total s": "total_wait_s",
        "over 1 s": "over_1s",
        "share %": "wait_percent",
        "over 2ms": "over_2ms",
        "no core": "over_2ms_withheld",
        "others": "others_cores",
    }
    lines = []
    for row in rows:
        if "paced" not in row:
            continue
        paced = row["paced"]
        shown = {
            **paced,
            **{f"{q}_ms": 1e3 * paced[f"{q}_s"] for q in ("p50", "p99")},
            "wait_percent": 100 * paced["wait_share"],
        }
        line = f"{row['loader']:18} {row['variant']:26}"
        lines.append(line + "".join(f"{_cell(shown[key]):>10}" for key in columns.values()))
    return ["", f"{'paced':45}" + "".join(f"{name:>10}" for name in columns), *lines] if lines else []


def _cell(value: float | None) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.3g}"


if __name__ == "__main__":
    main()
