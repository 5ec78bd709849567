"""`knonik check`: what is wrong with a dataset, and what will make it slow, before a GPU is rented for it."""

import argparse
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

HELP = "list everything wrong with a dataset, and what will make it slow"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--columns", nargs="*", metavar="KEY", help="columns to look into; default: all numeric ones")


def run(args: argparse.Namespace) -> dict[str, Any]:
    import knonik
    from knonik.check import check_dataset
    from knonik.stores.base import StoreUnavailable

    with _warnings() as told:
        try:
            dataset = knonik.open(args.uri, cache_dir=args.cache_dir)
        except (FileNotFoundError, StoreUnavailable):  # nothing is said of the dataset by that
            raise
        except (OSError, ValueError, KeyError) as error:
            problems = _why_not(args.uri, error)
            return {"uri": args.uri, "ok": False, "problems": problems, "warnings": told, "facts": {}}
        with dataset:
            found = check_dataset(dataset, args.columns)
    ends = tuple(found.problems)  # of what was warned of already
    return {
        "uri": dataset.uri,
        "ok": not found.problems,
        "problems": found.problems,
        "warnings": [*(line for line in dict.fromkeys(told) if not line.endswith(ends)), *found.warnings],
        "facts": found.facts,
    }


def _why_not(uri: str, error: Exception) -> list[str]:
    """All files that keep a dataset from being opened, where its metadata can be read; else the one error."""
    from knonik.check import data_file_problems
    from knonik.metadata.lerobot import read_metadata
    from knonik.stores.base import open_store

    store = open_store(uri)
    try:
        return data_file_problems(store, read_metadata(store).episodes) or [_message(error)]
    except (OSError, ValueError, KeyError):
        return [_message(error)]
    finally:
        store.close()


def _message(error: Exception) -> str:
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What the data layer warns of while the block runs; it belongs to the report."""
    told: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    handler, layer = Collect(logging.WARNING), logging.getLogger("knonik")
    propagated, layer.propagate = layer.propagate, False
    layer.addHandler(handler)
    try:
        yield told
    finally:
        layer.removeHandler(handler)
        layer.propagate = propagated


def _counted(problems: int) -> str:
    return {0: "no problems", 1: "1 problem"}.get(problems, f"{problems} problems")


def text(result: dict[str, Any]) -> str:
    lines = [f"{result['uri']}: " + (_counted(len(result["problems"])))]
    lines += [f"  problem  {line}" for line in result["problems"]]
    lines += [f"  warning  {line}" for line in result["warnings"]]
    lines += [f"  {name}: {value}" for name, value in result["facts"].items()]
    return "\n".join(lines)
