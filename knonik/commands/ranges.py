"""`knonik ranges`: a filter that names episodes by words, as the ranges by episode id that a loader reads."""

import argparse
import json
from pathlib import Path
from typing import Any

from knonik.order.named_ranges import DROID_KEY

HELP = "turn a file of frames to keep, by episode names, into ranges by episode id"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("filter", type=Path, metavar="FILE", help="JSON {name: [[start, stop], ...], ...}")
    parser.add_argument("--output", type=Path, required=True, help="JSON file for `ranges` of a dataset")
    parser.add_argument(
        "--horizon",
        type=int,
        default=0,
        help="frames behind an anchor that must be kept as well, 32 for windows of 33; default: %(default)s",
    )
    parser.add_argument(
        "--column", default="episode_id", help="of the dataset's episode list, with the names; default: %(default)s"
    )
    parser.add_argument("--key", default=DROID_KEY, help="a name in FILE, {0} for the episode's; default: DROID's")


def run(args: argparse.Namespace) -> dict[str, Any]:
    import knonik
    from knonik.cache import replacing
    from knonik.order.named_ranges import episode_names, named_ranges

    if args.horizon < 0:
        raise ValueError(f"--horizon={args.horizon} is not allowed; give 0 or more")
    with knonik.open(args.uri, cache_dir=args.cache_dir, background=False) as dataset:
        names = episode_names(dataset, args.column)
        ranges = named_ranges(args.filter, dataset, names, key=args.key, horizon=args.horizon)
        possible = len(dataset.anchors(1 + args.horizon))
        uri, episodes = dataset.uri, len(dataset.episodes)
    with replacing(args.output) as temporary:
        temporary.write_text(json.dumps({str(episode): pairs for episode, pairs in sorted(ranges.items())}))
        temporary.chmod(0o644)
    return {
        "uri": uri,
        "output": str(args.output),
        "episodes": len(ranges),
        "of_episodes": episodes,
        "anchors": sum(stop - start for pairs in ranges.values() for start, stop in pairs),
        "of_anchors": possible,
    }


def text(result: dict[str, Any]) -> str:
    share = 100 * result["anchors"] / result["of_anchors"]
    return (
        f"{result['output']}: {result['episodes']} of {result['of_episodes']} episodes, {result['anchors']} of "
        f"{result['of_anchors']} anchors ({share:.2f} %)"
    )
