"""What measuring a run costs: the same steps with all callbacks and with none, in turns.

    python benchmarks/metrics_overhead.py [--step-ms 50] [--steps 40] [--pairs 7] [--every 10] [--json]

A step computes a little and then waits until its length is reached, so that what is compared is the time around it; on
a GPU it is filled with matrix products instead. Every pair trains the same number of steps twice, in alternating
order: with the clock, all meters, the record, a line of progress at each row and the CSV logger, and with Lightning
alone. Rows are written every `--every` steps and are part of the figure. Printed are the median over pairs of the
difference in wall time, its spread, the difference in CPU time, and what both are of a step. Not measured: the
collective between ranks, and W&B, which sends from a process of its own.
"""

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from callbacks.data_wait import DataWait
from callbacks.gauges import Gauges
from callbacks.host import Host
from callbacks.memory import Memory
from callbacks.metrics import Metrics
from callbacks.mfu import Mfu
from callbacks.progress import Progress
from callbacks.rank_times import RankTimes
from callbacks.run_record import RunRecord
from callbacks.step_clock import StepClock
from callbacks.throughput import Throughput
from callbacks.verdict import Verdict

WARM_UP = 5
WIDTH = 2048


class Timed(LightningModule):
    """Steps of a given length that keep when they ended, by the host's clock and by the process's CPU time."""

    step_flops = step_recompute_flops = 10**9

    def __init__(self, step_s: float, products: int) -> None:
        super().__init__()
        self.step_s, self.products = step_s, products
        self.layer = torch.nn.Linear(8, 8)
        self.filling = torch.nn.Buffer(torch.zeros(WIDTH if products else 1, WIDTH if products else 1))
        self.ends: list[tuple[float, float]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        began = time.perf_counter()
        self.ends.append((began, time.process_time()))
        loss = self.layer(batch).square().mean()
        for _ in range(self.products):
            torch.mm(self.filling, self.filling)
        if not self.products:
            time.sleep(max(0.0, began + self.step_s - time.perf_counter()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Ones:
    """Endless batches that are there at once."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        batch = torch.ones(4, 8)
        while True:
            yield batch


def measured(folder: Path, row_s: float) -> list[Callback]:
    """All that a run measures with; a row is written about every `row_s` seconds."""
    clock, record = StepClock(time.perf_counter()), RunRecord(folder)
    record.resume_at(0)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    ranks, mfu, host, memory = RankTimes(), Mfu(device, "bf16-mixed", 1.0), Host(), Memory(device)
    stages = {name: {"busy_s": 1.0, "starved_s": 1.0, "blocked_s": 1.0, "items": 1.0} for name in ("fetch", "decode")}
    verdict = Verdict(ranks, mfu, host, memory, lambda: stages)
    gauges = Gauges(lambda: {f"gauge_{number}": float(number) for number in range(40)}, lambda: stages)
    meters = [DataWait(), Throughput(10**6), ranks, mfu, memory, host, gauges, verdict]
    return [clock, Metrics(clock, meters, record, verdict, Progress(every_s=row_s))]


def train(callbacks: list[Callback], folder: Path, options: argparse.Namespace, products: int) -> tuple[float, float]:
    """Mean wall and CPU seconds of a step, without the first ones; whole intervals between two rows."""
    module = Timed(options.step_ms / 1000, products)
    trainer = Trainer(
        accelerator="auto", devices=1, max_steps=WARM_UP + options.steps + 1, callbacks=callbacks,
        logger=CSVLogger(folder, flush_logs_every_n_steps=options.every), log_every_n_steps=options.every,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, train_dataloaders=Ones())
    (wall, cpu), (wall_end, cpu_end) = module.ends[WARM_UP], module.ends[WARM_UP + options.steps]
    return (wall_end - wall) / options.steps, (cpu_end - cpu) / options.steps


def products_for(step_s: float) -> int:
    """Matrix products that fill a step of this length on the GPU; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    square = torch.zeros(WIDTH, WIDTH, device="cuda")
    for repeats in (10, 100):  # the first round warms up
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            torch.mm(square, square)
        torch.cuda.synchronize()
        one_s = (time.perf_counter() - began) / repeats
    return max(1, round(step_s / one_s))


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Figures of all pairs."""
    products = products_for(options.step_ms / 1000)
    pairs: list[dict[str, tuple[float, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.pairs):
            pair = {}
            for name in ("with", "without") if number % 2 else ("without", "with"):
                where = Path(folder) / f"{number}-{name}"
                where.mkdir()
                row_s = options.step_ms * options.every / 1000
                pair[name] = train(measured(where, row_s) if name == "with" else [], where, options, products)
            pairs.append(pair)
    wall = [pair["with"][0] - pair["without"][0] for pair in pairs]
    cpu = [pair["with"][1] - pair["without"][1] for pair in pairs]
    step_s = statistics.median(pair["without"][0] for pair in pairs)
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "step_s": step_s,
        "steps": options.steps,
        "pairs": options.pairs,
        "rows_every": options.every,
        "wall_s": statistics.median(wall),
        "wall_least_s": min(wall),
        "wall_most_s": max(wall),
        "wall_frac": statistics.median(wall) / step_s,
        "cpu_s": statistics.median(cpu),
        "cpu_frac": statistics.median(cpu) / step_s,
        "wall_frac_of_1_s": statistics.median(wall),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=50.0, help="length of a step")
    parser.add_argument("--steps", type=int, default=40, help="steps of a run")
    parser.add_argument("--pairs", type=int, default=7, help="runs with callbacks, and as many without")
    parser.add_argument("--every", type=int, default=10, help="steps between two rows of metrics")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    if options.steps % options.every:
        parser.error(
            f"--steps {options.steps} is no multiple of --every {options.every}: rows would be counted unevenly"
        )
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    figures = compare(options)
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    print(f"device {figures['device']}, {options.pairs} pairs of {options.steps} steps, a row every {options.every}")
    print(f"step without callbacks   {1000 * figures['step_s']:9.3f} ms")
    spread = f"{1e6 * figures['wall_least_s']:.0f} to {1e6 * figures['wall_most_s']:.0f}"
    print(
        f"more wall time a step    {1e6 * figures['wall_s']:9.0f} us  {figures['wall_frac']:8.3%}  (pairs {spread} us)"
    )
    print(f"more CPU time a step     {1e6 * figures['cpu_s']:9.0f} us  {figures['cpu_frac']:8.3%}")
    print(f"of a step of 1 s         {figures['wall_frac_of_1_s']:22.4%}")


if __name__ == "__main__":
    main()
