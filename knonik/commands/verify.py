"""`knonik verify`: decode every frame twice, by the way of training and by the stock rule, and compare."""

import argparse
import os
from dataclasses import asdict
from typing import Any

HELP = "decode every frame by our path and by the stock rule; exit code 1 on any difference"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cameras", nargs="+", metavar="KEY", help="default: all, depth cameras included")
    parser.add_argument("--episodes", nargs="+", type=int, metavar="ID", help="default: all")
    parser.add_argument(
        "--transport", choices=("rgb24", "yuv420p"), default="rgb24", help="yuv420p compares planes once converted"
    )
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="default: %(default)s threads")


def run(args: argparse.Namespace) -> dict[str, Any]:
    import knonik
    from knonik.verify import verify

    if args.workers < 1:
        raise ValueError(f"--workers={args.workers} is not allowed; give 1 or more")
    with knonik.open(args.uri, cache_dir=args.cache_dir) as dataset:
        report = verify(
            dataset, cameras=args.cameras, episodes=args.episodes, transport=args.transport, workers=args.workers
        )
    return {**asdict(report), "seconds": round(report.seconds, 3), "ok": report.ok}


def text(result: dict[str, Any]) -> str:
    lines = [
        f"{result['uri']}: {result['frames']:,} frames compared as {result['transport']}, "
        f"{result['num_mismatches']:,} mismatches, {result['seconds']:.1f} s",
        *(f"  differs: {_row(row)}" for row in result["mismatches"]),
        *(f"  cannot be read: {key}: {error}" for key, error in result["failed"].items()),
    ]
    if result["num_refused"]:
        lines.append(f"{result['num_refused']:,} rows have no frame near their time, stock loaders refuse them too:")
        lines += [f"  {_row(row)}" for row in result["refused"][:5]]
    if result["num_beyond_stock"]:
        lines.append(
            f"{result['num_beyond_stock']:,} rows are refused by stock loaders, because from_timestamp drifts; "
            "here they are found by counting frames"
        )
    lines += [f"camera {camera} was compared as it is: {reason}" for camera, reason in result["as_rgb24"].items()]
    return "\n".join([*lines, f"digest {result['digest']}"])


def _row(row: dict[str, Any]) -> str:
    return f"{row['camera']} episode {row['episode']} frame {row['frame']}: {row['reason']}"
