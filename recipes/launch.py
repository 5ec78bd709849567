"""Command line: `python -m recipes train|show|check|eval|export|report|dashboard`. The only place that prints.

Heavy libraries are imported inside the commands that need them: `--help`, `show` and errors in a recipe answer at
once.
"""

import argparse
import json
import logging
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from recipes.load import RecipeError, available, examine, load, to_yaml
from recipes.ranks import is_first, is_first_of_node, under_torchrun, world_size
from recipes.run_folder import RunFolder

# what the closing table shows, in this order: key of summary.json, label, format
_TABLE = (
    ("steps", "steps", "{:,}"),
    ("samples_seen", "samples seen", "{:,}"),
    ("loss_first", "loss, first 5 % of steps", "{:.4f}"),
    ("loss_last", "loss, last 5 % of steps", "{:.4f}"),
    ("samples_per_s", "samples/s", "{:.1f}"),
    ("step_s_median", "step, median", "{:.3f} s"),
    ("first_batch_s", "first batch after start", "{:.1f} s"),
    ("data_wait_frac", "data wait, share of step time", "{:.2%}"),
    ("data_wait_max_s", "data wait, longest", "{:.3f} s"),
    ("tflops_per_device", "TFLOP/s per device", "{:.4f}"),
    ("mfu", "MFU", "{:.1%}"),
    ("peak_rss_gb", "peak memory", "{:.2f} GB"),
    ("val_loss", "loss, held-out episodes", "{:.4f}"),
    ("val_loss_best", "  ... lowest of the run", "{:.4f}"),
    ("val_action_mae", "action error, held-out, mean abs.", "{:.4f}"),
    ("episodes_evaluated", "held-out layouts", "{:,}"),
    ("success_rate_untrained", "success, untrained", "{:.1%}"),
    ("success_rate", "success, trained", "{:.1%}"),
    ("success_rate_swapped", "success, instruction swapped", "{:.1%}"),
    ("followed_text_rate_swapped", "  ... did what the text said", "{:.1%}"),
)


def main(argv: list[str] | None = None) -> NoReturn:
    """Run a command; exits with 0, 2 for problems in what was asked, or 128 + signal when stopped."""
    started_at = time.perf_counter()
    arguments = _parsed(_parser(), argv)
    logging.basicConfig(
        level=logging.INFO if is_first() else logging.WARNING,
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    logging.getLogger("botocore").setLevel(logging.WARNING)  # it tells at every start where it found its credentials
    logging.getLogger("models.gr00t_n17.config").addFilter(_Once())  # a config file is looked at several times
    try:
        code = _COMMANDS[arguments.command](arguments, started_at)
    except RecipeError as error:
        if is_first_of_node():
            print(error, file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 128 + signal.SIGINT
    sys.exit(code)


def _parsed(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """What was asked, with overrides also behind options, where `argparse` does not look for them."""
    arguments, behind = parser.parse_known_args(argv)
    if behind:
        if "overrides" not in arguments or any(item.startswith("-") for item in behind):
            parser.error(f"unrecognized arguments: {' '.join(behind)}")
        arguments.overrides += behind
    return arguments


class _Once(logging.Filter):
    """Lets every message through once."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        new = message not in self._seen
        self._seen.add(message)
        return new


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks; give 1 or more")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m recipes", description="Training recipes for robot policies.")
    commands = parser.add_subparsers(dest="command", required=True)
    names = f"recipe name or YAML file; recipes: {', '.join(available())}"
    for command, text in (
        ("train", "train a recipe, or continue its run"),
        ("show", "print the resolved recipe"),
        ("check", "report every problem of a recipe without starting it"),
    ):
        sub = commands.add_parser(command, help=text, description=text)
        sub.add_argument("recipe", help=names)
        sub.add_argument(
            "overrides",
            nargs="*",
            metavar="key=value",
            help="values over the recipe's, by dotted key; +group=value for several",
        )
        if command != "show":
            sub.add_argument("--allow-drift", action="store_true", help="continue a run with a changed recipe")
            if command == "check":
                sub.add_argument("--memory", action="store_true", help="also print the memory of a rank by part")
                sub.add_argument(
                    "--ranks",
                    type=_ranks,
                    help="that the run will have; without it and torchrun as few as the recipe says",
                )
    text = "evaluate a run or an exported checkpoint: in its world, and beside recorded episodes"
    sub = commands.add_parser("eval", help=text, description=text)
    sub.add_argument("run", type=Path, help="run folder, or checkpoint folder in the released layout")
    sub.add_argument("--uri", help="dataset to compare with; a run's own held-out episodes without it")
    sub.add_argument("--embodiment", help="tag of the dataset's robot, for a checkpoint folder that knows several")
    sub.add_argument("--episodes", type=int, help="compare with so many episodes of each dataset at most")
    sub.add_argument("--stride", type=int, help="steps between two predictions; a whole chunk without it")
    sub.add_argument("--step", type=int, help="checkpoint of this step instead of the run's newest")
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    text = "write a run's weights as a checkpoint folder in the released layout"
    sub = commands.add_parser("export", help=text, description=text)
    sub.add_argument("run", type=Path, help="run folder")
    sub.add_argument("folder", type=Path, help="folder to make")
    sub.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    sub.add_argument(
        "--layout",
        choices=("released", "framework"),
        default="released",
        help="framework: cosmos3_policy as a distributed checkpoint that NVIDIA's framework trains from",
    )
    sub.add_argument("--ema", action="store_true", help="the average of the weights over the steps, where one is kept")
    which = sub.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="checkpoint of this step instead of the newest")
    which.add_argument(
        "--checkpoint", type=Path, help="a checkpoint by its path: a file, or the folder of a sharded one"
    )
    text = "put runs side by side: one HTML page that needs no network, or their table as Markdown or JSON"
    sub = commands.add_parser("report", help=text, description=text)
    sub.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="run folder; the first is what others are held to"
    )
    sub.add_argument(
        "--out", type=Path, help="file to write; without it report.html in the first run's folder, or stdout"
    )
    sub.add_argument("--format", choices=("html", "markdown", "json"), default="html")
    sub.add_argument("--price", type=float, help="of one device for one hour, for the cost of each run")
    sub.add_argument(
        "--steps", type=int, help="N of the time to N steps; the last step that all have reached without it"
    )
    sub.add_argument("--loss", type=float, help="the loss to reach; the lowest that all reach at their end without it")
    text = "make the dashboard of this project's metrics in Weights & Biases, or print its panels"
    sub = commands.add_parser("dashboard", help=text, description=text)
    sub.add_argument(
        "project", nargs="?", help="ENTITY/PROJECT to store it in; without it the panels are printed as JSON"
    )
    return parser


def _show(arguments: argparse.Namespace, started_at: float) -> int:
    print(to_yaml(load(arguments.recipe, arguments.overrides)), end="")
    return 0


def _check(arguments: argparse.Namespace, started_at: float) -> int:
    from recipes.check import checked
    from recipes.family import family

    ranks = arguments.ranks or world_size()
    if arguments.ranks is None and not under_torchrun():
        told = examine(arguments.recipe, arguments.overrides)[0]
        least = told.parallel.least_ranks
        ranks = least * max(1, -(-told.trainer.num_nodes // least))
    recipe = checked(arguments.recipe, arguments.overrides, allow_drift=arguments.allow_drift, ranks=ranks)
    print(f"{recipe.run.name}: no problems{f' on {ranks} ranks' if ranks > 1 else ''}")
    if arguments.memory:
        print(family(recipe).memory_table(recipe, ranks))
    return 0


def _train(arguments: argparse.Namespace, started_at: float) -> int:
    # first what needs no import: a run that is complete is only shown
    recipe, problems = examine(arguments.recipe, arguments.overrides)
    summary = None if problems else RunFolder(recipe.run.dir).completed(recipe)
    if summary is not None:
        if is_first():
            print(f"{recipe.run.name} is complete in {recipe.run.dir}; it is shown as it is, nothing was trained.")
            print("Give a new run.dir or seed to train again, or a larger trainer.max_steps to train on.")
            _print_table(summary, recipe.run.dir)
        return 0
    from recipes.check import checked
    from recipes.stages import to_do

    recipe = checked(arguments.recipe, arguments.overrides, allow_drift=arguments.allow_drift)
    if world_size() > 1 and (missing := to_do(recipe)):
        single = shlex.join(["python", "-m", "recipes", "train", arguments.recipe, *arguments.overrides])
        raise RecipeError([*missing, f"run: start once without torchrun first: {single}"])
    from recipes.train import train

    summary, code = train(recipe, started_at)
    if summary is not None:
        _print_table(summary, recipe.run.dir)
    return code


def _eval(arguments: argparse.Namespace, started_at: float) -> int:
    if problems := _eval_problems(arguments):
        print("\n".join(problems), file=sys.stderr)
        return 2
    from recipes.evaluate import evaluate_folder, evaluate_run

    choice = {"stride": arguments.stride, "limit": arguments.episodes}
    try:
        if RunFolder(arguments.run).recipe is None:
            result = evaluate_folder(arguments.run, arguments.uri, embodiment=arguments.embodiment, **choice)
        else:
            result = evaluate_run(arguments.run, step=arguments.step, uri=arguments.uri, **choice)
    except (ValueError, OSError, ImportError) as error:  # the last of a package that the model needs beside ours
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(result, indent=2) if arguments.json else _lines(result))
    return 0


def _eval_problems(arguments: argparse.Namespace) -> list[str]:
    """Options that do not go with what is to be evaluated."""
    if RunFolder(arguments.run).recipe is not None:
        if arguments.embodiment is not None:
            return ["--embodiment: a run knows its robot; it is for checkpoint folders"]
        return []
    if any((arguments.run / file).is_file() for file in ("latest_checkpoint.txt", "model/.metadata", ".metadata")):
        return [
            f"{arguments.run} is a distributed checkpoint: a training starts from it (model.weights), eval reads the "
            "released layout; export the run without --layout framework"
        ]
    if not any((arguments.run / file).is_file() for file in ("config.json", "transformer/config.json")):
        return [f"{arguments.run} is neither a run folder (no recipe.json) nor a checkpoint folder (no config.json)"]
    problems = []
    if arguments.uri is None:
        problems.append(f"--uri: {arguments.run} is a checkpoint folder; name a dataset to compare with")
    if arguments.step is not None:
        problems.append("--step: a checkpoint folder has one step only; it is for run folders")
    return problems


def _lines(result: dict[str, Any], indent: str = "  ") -> str:
    """Figures for people, one a line."""
    lines = []
    for name, value in result.items():
        if isinstance(value, list):
            lines += [f"{indent}{name}:", *(_lines(part, indent + "  ") for part in value)]
        else:
            lines.append(
                f"{indent}{name:<32} {value:.6g}" if isinstance(value, float) else f"{indent}{name:<32} {value}"
            )
    return "\n".join(lines)


def _export(arguments: argparse.Namespace, started_at: float) -> int:
    from recipes.export import export_run

    try:
        written = export_run(
            arguments.run,
            arguments.folder,
            dtype=arguments.dtype,
            step=arguments.step,
            checkpoint=arguments.checkpoint,
            averaged=arguments.ema,
            layout=arguments.layout,
        )
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(written, indent=2))
    return 0


def _report(arguments: argparse.Namespace, started_at: float) -> int:
    from recipes.report.figures import compare
    from recipes.report.page import page
    from recipes.report.reading import read_runs
    from recipes.report.text import as_json, markdown

    write = {"html": page, "markdown": markdown, "json": as_json}[arguments.format]
    try:
        runs = read_runs(arguments.runs)
        comparison = compare(runs, steps=arguments.steps, loss=arguments.loss, price=arguments.price)
        text = write(runs, comparison)
        out = arguments.out
        if out is None and arguments.format == "html":
            out = arguments.runs[0] / "report.html"
        if out is not None:
            out.write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(text if out is None else out, end="" if out is None else "\n")
    return 0


def _dashboard(arguments: argparse.Namespace, started_at: float) -> int:
    from recipes.dashboard import create, panels

    try:
        print(json.dumps(panels(), indent=2) if arguments.project is None else create(arguments.project))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


_COMMANDS = {
    "show": _show,
    "check": _check,
    "train": _train,
    "eval": _eval,
    "export": _export,
    "report": _report,
    "dashboard": _dashboard,
}


def _print_table(summary: dict[str, Any], folder: str) -> None:
    rows = [(label, form.format(summary[key])) for key, label, form in _TABLE if summary.get(key) is not None]
    width = max(len(label) for label, _ in rows)
    print()
    for label, value in rows:
        print(f"  {label:<{width}}  {value:>12}")
    if summary.get("mfu") is None and summary.get("mfu_reason"):
        print(f"  MFU: none, {summary['mfu_reason']}")
    print(f"\nrun folder: {folder}")
