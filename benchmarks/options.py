"""What each training option does to the time, the memory and the loss of a step, beside the plain run.

    python benchmarks/options.py [--size tiny|mid] [--steps 8] [--batch 4] [--only NAME ...] [--json FILE]

GR00T N1.7 at two sizes: `tiny`, and `mid` with every depth of the released model at a quarter of its widths (201 M
parameters, see gr00t_step.py). The backbone is frozen and the head is trained with dropout, AdamW follows clipping at
1: the stock fine-tune, through the recipe's own module and Lightning's Trainer, on batches that are there already.

An option is what a recipe would say. Each is a pair of processes of one thread, the plain run and the option, which
take one step each in turn on the same samples with the same draws, so that both see the same machine. The first steps
compile and warm up and are left out of the times, not of the losses. Seconds are medians; the ratio is the median over
turns of option / plain; the loss is compared in every step. Options of several ranks split the plain run's batch.

The ladder at the end adds one option to the next, as a published comparison does.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from gr00t_step import make_batch, mid_size  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from models.gr00t_n17.config import GR00TN17Config  # noqa: E402

WARM_UP = 2
FROZEN = {"tune_llm": False, "tune_visual": False}


@dataclass(frozen=True, kw_only=True)
class Option:
    """A line of the table: overrides of a recipe, ranks, and what the documentation promises for the loss."""

    name: str
    overrides: tuple[str, ...] = ()
    ranks: int = 1
    label: str = "exact"
    gpu: bool = False


BLOCKS = ("compile.scope=blocks",)
MIX_ORDER = "compile.inductor={triton.mix_order_reduction: true}"
LAYERS = ("checkpointing.mode=layers", "checkpointing.last_k=2", "checkpointing.parts=[dit]")
OPTIONS = (
    Option(name="plain again"),
    Option(name="compile blocks", overrides=BLOCKS, label="tolerance"),
    Option(name="compile model", overrides=("compile.scope=model",), label="tolerance"),
    Option(name="checkpointing full", overrides=("checkpointing.mode=full",)),
    Option(name="checkpointing selective", overrides=("checkpointing.mode=selective",)),
    Option(name="checkpointing layers", overrides=LAYERS),
    Option(name="checkpointing auto 50 MB", overrides=("checkpointing.mode=auto", "checkpointing.memory_gb=0.05")),
    Option(name="lookahead", overrides=("lookahead=stream",)),
    Option(name="graphs head", overrides=("graphs=head",), gpu=True),
    Option(name="ema", overrides=("ema={kind: power}",)),
    Option(name="clip in AdamW", overrides=("optimizer.fold_clip=true",), label="tolerance"),
    Option(name="bf16-mixed", overrides=("precision=bf16-mixed",), label="approximate"),
    Option(name="DDP 2", ranks=2, label="tolerance"),
    Option(name="FSDP 2", ranks=2, overrides=("parallel.shard=2",), label="tolerance"),
    # the ladder
    Option(name="ladder: compile", overrides=(*BLOCKS, MIX_ORDER), label="tolerance", gpu=True),
    Option(name="ladder: no mix-order", overrides=BLOCKS, label="tolerance", gpu=True),
    Option(name="ladder: + layers", overrides=(*BLOCKS, *LAYERS), label="tolerance"),
    Option(name="ladder: + lookahead", overrides=(*BLOCKS, *LAYERS, "lookahead=stream"), label="tolerance"),
)


class Side:
    """A running `options_worker.py`, on one rank or several."""

    def __init__(self, folder: Path, option: Option, more: tuple[str, ...]) -> None:
        self.steps: list[dict[str, Any]] = []
        self.ready: dict[str, Any] = {}
        into, lines = os.pipe()
        answers, out = os.pipe()
        given = [str(folder), *more, *option.overrides]
        start = [sys.executable]
        if option.ranks > 1:
            start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={option.ranks}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [*start, str(HERE / "options_worker.py"), *given]
        self._process = subprocess.Popen(command, stdin=into, stdout=out, env=environment)
        os.close(into)
        os.close(out)
        self._lines, self._answers = os.fdopen(lines, "w"), os.fdopen(answers)

    def begin(self) -> None:
        """Wait until the side has built its network."""
        self.ready = self._answer()

    def step(self) -> None:
        self._lines.write("step\n")
        self._lines.flush()
        self.steps.append(self._answer())

    def close(self) -> dict[str, Any]:
        """What the side says at its end, after its last step."""
        closing = self._answer()
        self._process.wait()
        self._lines.close()
        self._answers.close()
        return closing

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise SystemExit("a side ended early; its own message stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def compared(option: Option, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The option and the plain run, step by step in turn."""
    more = (f"trainer.max_steps={arguments.steps}", f"trainer.accelerator={arguments.device}")
    sides = [
        Side(folder, Option(name="plain"), (*more, f"run.dir={folder / 'plain'}")),
        Side(folder, option, (*more, f"run.dir={folder / 'option'}")),
    ]
    for side in sides:
        side.begin()
    for turn in range(arguments.steps):
        for side in sides if turn % 2 else sides[::-1]:
            side.step()
    closing = [side.close() for side in sides]
    plain, tried = ([step["wall"] for step in side.steps][WARM_UP:] for side in sides)
    pairs = zip(sides[0].steps, sides[1].steps, strict=True)
    return {
        "name": option.name,
        "overrides": list(option.overrides),
        "ranks": option.ranks,
        "label": option.label,
        "plain_s": statistics.median(plain),
        "option_s": statistics.median(tried),
        "ratio": statistics.median(b / a for a, b in zip(plain, tried, strict=True)),
        "first_step_s": sides[1].steps[0]["wall"],
        "plain_peak_bytes": closing[0]["peak_bytes"],
        "option_peak_bytes": closing[1]["peak_bytes"],
        "loss_difference": max(abs(b["loss"] - a["loss"]) / abs(a["loss"]) for a, b in pairs),
        "device": sides[0].ready["device"],
        "torch": sides[0].ready["torch"],
    }


COLUMNS = (("plain s", 9), ("option s", 10), ("ratio", 8), ("first s", 9), ("peak", 10), ("loss differs by", 17))
HEADER = f"{'option':<26}" + "".join(f"{name:>{width}}" for name, width in COLUMNS) + "  label"


def line(row: dict[str, Any]) -> str:
    more = (row["option_peak_bytes"] - row["plain_peak_bytes"]) / 1e6
    return (
        f"{row['name']:<26}{row['plain_s']:>9.3f}{row['option_s']:>10.3f}{row['ratio']:>8.2f}{row['first_step_s']:>9.1f}"
        f"{more:>+7.0f} MB{row['loss_difference']:>17.1e}  {row['label']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("tiny", "mid"), default="tiny")
    parser.add_argument(
        "--steps", type=int, default=8, help=f"of every side, the first {WARM_UP} left out of the times"
    )
    parser.add_argument("--batch", type=int, default=4, help="samples of a step, over all ranks")
    parser.add_argument("--only", nargs="+", choices=[option.name for option in OPTIONS], metavar="NAME")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP:
        parser.error(f"--steps: more than {WARM_UP}, which are left out")
    config = GR00TN17Config.tiny(**FROZEN) if arguments.size == "tiny" else mid_size()
    gpu = arguments.device != "cpu" and _has_gpu()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        batch = make_batch(config, arguments.batch)
        batch["embodiment_id"].zero_()  # a slot that both sizes have
        save_file({k: v for k, v in batch.items() if k not in ("noise", "time")}, str(folder / "batch.safetensors"))
        (folder / "sizes.json").write_text(json.dumps(config.to_dict()))
        print(f"size {arguments.size}, batch {arguments.batch}, {arguments.steps} steps", HEADER, sep="\n", flush=True)
        for option in OPTIONS:
            if arguments.only and option.name not in arguments.only:
                continue
            if option.gpu and not gpu and not arguments.only:
                continue
            rows.append(compared(option, folder, arguments))
            print(line(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"size": arguments.size, "rows": rows}, indent=1) + "\n")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    main()
