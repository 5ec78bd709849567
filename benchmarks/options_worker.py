"""One side of `options.py`: a recipe's module under Lightning's Trainer, one step for every line on standard input.

    python options_worker.py FOLDER key=value ...

FOLDER holds batch.safetensors, the batch of all ranks, and sizes.json. Answers each line with the loss of the step and
its seconds, and closes with what the options report about themselves; as JSON, on rank 0 of torchrun's ranks alone.
"""

import dataclasses
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from callbacks.step_clock import StepClock  # noqa: E402
from recipes.build import build_module, build_network  # noqa: E402
from recipes.load import load  # noqa: E402
from recipes.ranks import is_first, rank, world_size  # noqa: E402
from recipes.run import Run  # noqa: E402
from recipes.run_folder import RunFolder  # noqa: E402
from recipes.schema import Recipe  # noqa: E402


class Gate(Callback):
    """Lets a step begin when its line has come, and answers when the step is done."""

    def __init__(self, answers: Any) -> None:
        self.answers = answers
        self._begin = 0.0

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if self.answers is not None and not sys.stdin.readline():
            trainer.should_stop = True
        _settle(trainer)
        self._begin = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        _settle(trainer)
        seconds = time.perf_counter() - self._begin
        if self.answers is not None:
            loss = float(trainer.callback_metrics["train/loss"])
            self.answers.write(json.dumps({"loss": loss, "wall": seconds}) + "\n")
            self.answers.flush()


def _settle(trainer: Trainer) -> None:
    """What was queued for the device is done: a benchmark may wait where a run must not."""
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()


def batches(folder: Path) -> Iterator[dict[str, Any]]:
    """The same samples in every step, at new positions, so that noise and time differ: this rank's rows."""
    whole: dict[str, Any] = load_file(folder / "batch.safetensors")
    size = len(whole["state"])
    images = len(whole["image_grid_thw"]) // size
    patches = len(whole["pixel_values"]) // size
    mine = slice(rank() * size // world_size(), (rank() + 1) * size // world_size())
    rows = {"pixel_values": patches, "image_grid_thw": images}
    batch = {
        name: values[mine.start * rows.get(name, 1) : mine.stop * rows.get(name, 1)] for name, values in whole.items()
    }
    batch["embodiment_id"] = int(batch["embodiment_id"][0])
    step = 0
    while True:
        yield {**batch, "position": torch.arange(mine.start, mine.stop) + step * size}
        step += 1


class Endless(torch.utils.data.IterableDataset):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return batches(self.folder)


def recipe_of(folder: Path, overrides: list[str]) -> Recipe:
    """The stock fine-tune at the sizes of sizes.json, from random weights."""
    fixed = ["model.weights=null", "model.embodiment=null", "model.embodiment_id=0", "trainer.log_every_n_steps=1"]
    fixed += [f"run.dir={folder / 'run'}", "data.uri=none", "precision=fp32", "optimizer.lr=1e-4"]
    recipe = load("gr00t_n17/finetune", [*fixed, *overrides])
    sizes = json.loads((folder / "sizes.json").read_text())
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, config=sizes))


def peak_bytes(module: LightningModule) -> int:
    """Most memory of the device, or of this process where the device is the CPU."""
    if module.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(arguments: list[str]) -> None:
    folder, overrides = Path(arguments[0]), arguments[1:]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # the answers alone go to the parent: libraries print messages of their own
    answers = os.fdopen(os.dup(1), "w") if is_first() else None
    os.dup2(2, 1)
    recipe = recipe_of(folder, overrides)
    run_folder = RunFolder(recipe.run.dir)
    if is_first():
        run_folder.create(recipe)
    run = Run(recipe, run_folder, StepClock(time.perf_counter()), samples_per_epoch=0, resumable=False)
    callbacks: list[Callback] = run.trainer.callbacks  # type: ignore[attr-defined]
    callbacks.append(Gate(answers))
    module = build_module(recipe, build_network(recipe))
    if answers is not None:
        print(json.dumps({"torch": torch.__version__, "device": str(run.trainer.strategy.root_device)}), file=answers)
        answers.flush()
    run.fit(module, train_dataloaders=torch.utils.data.DataLoader(Endless(folder), batch_size=None))
    if answers is not None:
        print(json.dumps({"peak_bytes": peak_bytes(module)}), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
