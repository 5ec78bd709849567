"""`knonik peek`: a contact sheet of samples as a PNG file."""

import argparse
from pathlib import Path
from typing import Any

_MOST = 200  # rows; each is some 500 lines of pixels, and the sheet is made in memory

HELP = "write a contact sheet of samples: pictures, instruction, states and actions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=Path("peek.png"), help="PNG file; default: %(default)s")
    parser.add_argument(
        "--samples", nargs="+", metavar="EPISODE:FRAME", help="which rows; default: --count rows drawn at random"
    )
    parser.add_argument("--count", type=int, default=4, help="rows to draw; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the draw; default: %(default)s")
    parser.add_argument("--cameras", nargs="+", metavar="KEY", help="default: all")
    parser.add_argument(
        "--columns", nargs="+", metavar="KEY", help="columns to plot; default: the first four of floats"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    import knonik
    from knonik.cache import replacing
    from knonik.peek import Sample, contact_sheet, png, random_samples

    if not 1 <= args.count <= _MOST:
        raise ValueError(f"--count={args.count} is not allowed; give 1 to {_MOST}")
    if args.output.suffix.lower() != ".png" or args.output.is_dir():
        raise ValueError(f"--output {args.output} is no PNG file; give a name that ends in .png")
    named = [_parse(entry) for entry in args.samples or []]
    with knonik.open(args.uri, cache_dir=args.cache_dir) as dataset:
        samples = [Sample(episode=e, frame=f) for e, f in named] or random_samples(dataset, args.count, args.seed)
        sheet = contact_sheet(dataset, samples, cameras=args.cameras, columns=args.columns)
        uri = dataset.uri
    with replacing(args.output) as temporary:
        png(sheet, str(temporary))
        temporary.chmod(0o644)
    return {
        "uri": uri,
        "output": str(args.output),
        "height": sheet.shape[0],
        "width": sheet.shape[1],
        "samples": [{"episode": sample.episode, "frame": sample.frame} for sample in samples],
    }


def text(result: dict[str, Any]) -> str:
    rows = ", ".join(f"{sample['episode']}:{sample['frame']}" for sample in result["samples"])
    return f"{result['output']}: {result['width']}x{result['height']} pixels, episode:frame {rows}"


def _parse(entry: str) -> tuple[int, int]:
    episode, colon, frame = entry.partition(":")
    if not colon or not episode.isdigit() or not frame.isdigit():
        raise ValueError(f"--samples {entry!r} is not EPISODE:FRAME, such as 3:17")
    return int(episode), int(frame)
