"""`knonik index`: build the side index of a dataset, and publish it next to the dataset when asked."""

import argparse
import time
from typing import Any

from knonik.sizes import format_size

HELP = "build the index, so that runs find it; --publish puts it beside the dataset for everybody"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--columns", nargs="*", metavar="KEY", help="also map these columns; without KEY those a default loader reads"
    )
    parser.add_argument("--publish", action="store_true", help="write it to .knonik/ below the dataset")


def run(args: argparse.Namespace) -> dict[str, Any]:
    import knonik

    begin = time.perf_counter()
    with knonik.open(args.uri, cache_dir=args.cache_dir) as dataset:
        dataset.index.wait()
        keys = args.columns
        if keys is not None:
            default = ("observation.state", "action", "task_index")
            keys = keys or [key for key in default if key in dataset.features]
            dataset.columns(keys)
        published = None
        if args.publish:
            from knonik.index.video_index import publish_index

            published = str(publish_index(dataset))
        counted = dataset.store.gauges()
        return {
            "uri": dataset.uri,
            "ok": not dataset.index.errors,
            "damaged": {key: str(error) for key, error in sorted(dataset.index.errors.items())},
            "version": dataset.version,
            "fingerprint": dataset.fingerprint,
            "episodes": len(dataset.episodes),
            "rows": len(dataset),
            "fps": dataset.fps,
            "cameras": dataset.cameras,
            "depth_cameras": dataset.depth_cameras,
            "columns": keys or [],
            "seconds": round(time.perf_counter() - begin, 3),
            "gets": counted["gets"],
            "get_bytes": counted["get_bytes"],
            "published": published,
        }


def text(result: dict[str, Any]) -> str:
    lines = [
        f"{result['uri']}: {result['version']}, {result['episodes']:,} episodes, {result['rows']:,} rows, "
        f"{result['fps']:g} fps",
        f"cameras: {', '.join(result['cameras']) or 'none'}",
        *([f"depth cameras: {', '.join(result['depth_cameras'])}"] if result["depth_cameras"] else []),
        *([f"columns mapped: {', '.join(result['columns'])}"] if result["columns"] else []),
        f"{result['seconds']:.1f} s, {result['gets']:,.0f} reads, {format_size(result['get_bytes'])}",
        *(f"cannot be used: {error}" for error in result["damaged"].values()),
        f"fingerprint {result['fingerprint']}",
        *([f"published as {result['published']}"] if result["published"] else []),
    ]
    return "\n".join(lines)
