"""`knonik check`: what is wrong with a dataset, and what will make it slow, before a GPU is rented for it."""

import argparse
from typing import Any

HELP = "list everything wrong with a dataset, and what will make it slow"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--columns", nargs="*", metavar="KEY", help="columns to look into; default: all numeric ones")


def run(args: argparse.Namespace) -> dict[str, Any]:
    import knonik
    from knonik.check import check_dataset
    from knonik.meta_files import MetadataError

    try:
        dataset = knonik.open(args.uri, cache_dir=args.cache_dir)
    except (MetadataError, ValueError, KeyError) as error:
        # Without metadata there is nothing else to look at.
        return {"uri": args.uri, "ok": False, "problems": [str(error)], "warnings": [], "facts": {}}
    with dataset:
        found = check_dataset(dataset, args.columns)
    return {
        "uri": dataset.uri,
        "ok": not found.problems,
        "problems": found.problems,
        "warnings": found.warnings,
        "facts": found.facts,
    }


def text(result: dict[str, Any]) -> str:
    lines = [f"{result['uri']}: " + ("no problems" if result["ok"] else f"{len(result['problems'])} problems")]
    lines += [f"  problem  {line}" for line in result["problems"]]
    lines += [f"  warning  {line}" for line in result["warnings"]]
    lines += [f"  {name}: {value}" for name, value in result["facts"].items()]
    return "\n".join(lines)
