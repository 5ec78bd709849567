"""Command line of the data layer: `knonik index|check|verify|peek|bench URI`, also as `python -m knonik`.

Each command is a module of `knonik.commands` with

    HELP                    one line
    add_arguments(parser)   its own options; the dataset, --cache-dir and --json are added here
    run(args) -> dict       does it; the values are JSON's own. `ok: False` makes the exit code 1
    text(result) -> str     the same for people

Exit codes: 0, 1 when the command found something wrong with the dataset, 2 when it could not do what it was asked.
"""

import argparse
import json
import logging
import signal
import sys
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NoReturn

from knonik import commands

_FIRST = ("index", "check", "verify", "peek", "bench")  # the order of a dataset's life; others follow by name


def main(argv: list[str] | None = None) -> NoReturn:
    """Run one command; results go to standard output, progress and errors to standard error."""
    args = make_parser().parse_args(argv)
    logging.basicConfig(
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    # Not of the libraries: botocore tells at every start where it found its credentials.
    logging.getLogger("knonik").setLevel(logging.WARNING if args.quiet else logging.INFO)
    command = import_module(f"knonik.commands.{args.command}")
    try:
        result: dict[str, Any] = command.run(args)
    except (OSError, ValueError, KeyError, RuntimeError, MemoryError) as error:
        message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        message = f"not enough memory: {message}" if isinstance(error, MemoryError) else message
        if args.json:
            _say(json.dumps({"ok": False, "error": message}))
        sys.stderr.write(f"knonik {args.command}: {message}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(128 + signal.SIGINT)
    _say(json.dumps(result) if args.json else command.text(result))
    sys.exit(0 if result.get("ok", True) else 1)


def make_parser() -> argparse.ArgumentParser:
    """The parser with all commands; importing them costs nothing, their work loads what it needs."""
    parser = argparse.ArgumentParser(prog="knonik", description="LeRobot datasets, read where they lie.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    names = [module.name for module in iter_modules(commands.__path__)]
    for name in sorted(names, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)):
        module = import_module(f"knonik.commands.{name}")
        sub = subparsers.add_parser(name, help=module.HELP, description=module.HELP)
        sub.add_argument("uri", metavar="URI", help="/path, file:///path or s3://bucket/prefix")
        sub.add_argument("--cache-dir", metavar="FOLDER", help="default: $KNONIK_CACHE, else the user's cache folder")
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        sub.add_argument("--quiet", action="store_true", help="warnings only on standard error")
        module.add_arguments(sub)
    return parser


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
