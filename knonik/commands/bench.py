"""`knonik bench`: what a loader with given options delivers on this machine, and what it costs."""

import argparse
import resource
import sys
import time
from typing import Any

from knonik.sizes import format_size, parse_size

HELP = "measure a loader on this machine: samples/s, CPU-ms a sample, first batch, memory, reads"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=int, default=64, help="samples of one rank (default 64)")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the measurement (default 10)")
    parser.add_argument("--skip", type=int, default=4, help="batches before it (default 4)")
    parser.add_argument("--cameras", nargs="+", metavar="KEY", help="default: all")
    parser.add_argument("--horizon", type=int, default=8, help="action steps of a sample (default 8)")
    parser.add_argument("--threads", type=int, help="decode threads; default: cores less one, at most 8")
    parser.add_argument("--order", choices=("exact", "blocks"), help="default: exact")
    parser.add_argument("--block-window", type=int, metavar="SAMPLES", help="of --order blocks: samples mixed")
    parser.add_argument("--transport", choices=("rgb24", "yuv420p"), help="default: rgb24")
    parser.add_argument("--ram", type=_size, metavar="SIZE", help="compressed packets in memory, such as 1GB")
    parser.add_argument("--disk", type=_size, metavar="SIZE", help="compressed packets on disk; 0 = none")
    parser.add_argument("--decoded", type=_size, metavar="SIZE", help="decoded pictures on disk")
    parser.add_argument("--world-size", type=int, default=1, help="ranks that share each batch; this is rank 0")


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:  # of which argparse would show only the name of the function
        raise argparse.ArgumentTypeError(str(error)) from None


def _check(args: argparse.Namespace, is_local: bool) -> None:
    """Refuse what the loader does not get to see, and what would change nothing."""
    if args.seconds <= 0:
        raise ValueError(f"--seconds={args.seconds:g} is not allowed; give more than 0")
    for name, least in (("skip", 0), ("horizon", 1)):
        if (value := getattr(args, name)) < least:
            raise ValueError(f"--{name}={value} is not allowed; give {least} or more")
    if args.block_window is not None and args.order != "blocks":
        raise ValueError(f"--block-window={args.block_window} has no effect without --order blocks")
    if is_local and (given := [f"--{name}" for name in ("ram", "disk") if getattr(args, name) is not None]):
        raise ValueError(f"{' and '.join(given)}: no effect on {args.uri}, which is local and read directly")


def run(args: argparse.Namespace) -> dict[str, Any]:
    import knonik

    options = {
        "order": args.order,
        "block_window": args.block_window,
        "transport": args.transport,
        "ram_bytes": args.ram,
        "disk_bytes": args.disk,
        "decoded_bytes": args.decoded,
        "decode_threads": args.threads,
        "cameras": args.cameras,
    }
    begin = time.perf_counter()
    with knonik.open(args.uri, cache_dir=args.cache_dir) as dataset:
        _check(args, dataset.store.is_local)
        columns = [key for key in ("observation.state", "action") if key in dataset.features]
        loader = knonik.Loader(
            dataset,
            batch_size=args.batch_size,
            windows={"action": range(args.horizon)} if "action" in columns else {},
            state=[key for key in columns if key != "action"],
            action=[key for key in columns if key == "action"],
            world_size=args.world_size,
            **{name: value for name, value in options.items() if value is not None},
        )
        with loader:
            next(loader)
            first_batch_s = time.perf_counter() - begin
            for _ in range(args.skip):
                next(loader)
            return {
                "uri": dataset.uri,
                "options": {name: value for name, value in options.items() if value is not None},
                "batch_size": args.batch_size,
                "anchors": loader.num_anchors,
                "first_batch_s": first_batch_s,
                **_measured(loader, args.seconds),
            }


def _measured(loader: Any, seconds: float) -> dict[str, Any]:
    stages, before = loader.stages(), loader.gauges()
    cpu, begin, samples, waits = time.process_time(), time.perf_counter(), 0, []
    while (asked := time.perf_counter()) - begin < seconds or not samples:
        samples += len(next(loader))
        waits.append(time.perf_counter() - asked)
    wall_s, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    gauges = loader.gauges()
    spent = {
        name: {key: round(value - stages[name][key], 3) for key, value in stage.items()}
        for name, stage in loader.stages().items()
    }
    counted = {name: gauges[name] - before.get(name, 0.0) for name in gauges}
    return {
        "samples": samples,
        "samples_per_s": samples / wall_s,
        "cpu_ms_per_sample": 1e3 * cpu_s / samples,
        "longest_wait_s": max(waits),
        "peak_rss_bytes": _peak_rss_bytes(),
        "gets_per_sample": counted.get("gets", 0.0) / samples,
        "get_bytes_per_sample": counted.get("get_bytes", 0.0) / samples,
        **({"reads_per_sample": counted["reads"] / samples} if "reads" in counted else {}),
        **({"read_bytes_per_sample": counted["read_bytes"] / samples} if "read_bytes" in counted else {}),
        "counted": {name: counted[name] for name in ("pool_hits", "disk_hits", "decoded_hits") if name in counted},
        "gauges": gauges,
        "stages": spent,
    }


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def text(result: dict[str, Any]) -> str:
    busiest = {name: stage["busy_s"] for name, stage in result["stages"].items()}
    kind = "read" if "reads_per_sample" in result else "GET"  # of a local file, or of a store
    rows = [
        ("samples/s", f"{result['samples_per_s']:.1f}"),
        ("CPU-ms a sample", f"{result['cpu_ms_per_sample']:.2f}"),
        ("first batch after open", f"{result['first_batch_s']:.2f} s"),
        ("longest wait", f"{result['longest_wait_s']:.3f} s"),
        ("peak RSS", format_size(result["peak_rss_bytes"])),
        (f"{kind}s a sample", f"{result[f'{kind.lower()}s_per_sample']:.3f}"),
        ("bytes read a sample", format_size(result[f"{kind.lower()}_bytes_per_sample"])),
        *((name.replace("_", " "), f"{value:,.0f}") for name, value in result["counted"].items()),
        *((f"{name} busy", f"{seconds:.1f} s") for name, seconds in busiest.items()),
    ]
    width = max(len(label) for label, _ in rows)
    head = f"{result['uri']}: {result['samples']} of {result['anchors']:,} samples, batch {result['batch_size']}"
    return "\n".join([head, *(f"  {label:<{width}}  {value:>10}" for label, value in rows)])
