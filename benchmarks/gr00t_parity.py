"""A whole training run beside the public port of the model: the loss of every step on equal data, noise and weights.

    python benchmarks/gr00t_parity.py --upstream-python PYTHON [--steps 200] [--folder FOLDER] [--json FILE]

Trains the quickstart's policy with the ordinary command (everything trained, AdamW, warm-up, clipping, its data layer
and processor) on demonstrations of a few layouts, and keeps what the network is given at each step. The upstream class,
in the environment of `gr00t_upstream.py`, then starts from the same weights and takes the same batches. Float32, one
thread, SDPA. Printed are both curves every 20 steps and the largest relative difference over all.
"""

import argparse
import csv
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from models.common.optim import OptimizerConfig, ScheduleConfig  # noqa: E402
from models.gr00t_n17.network import GR00TN17  # noqa: E402
from recipes.build import optimizer, schedule  # noqa: E402
from recipes.check import checked  # noqa: E402
from recipes.schema import Recipe  # noqa: E402
from recipes.train import train  # noqa: E402


def overrides(folder: Path, steps: int) -> list[str]:
    """The quickstart without its first stage and evaluation, one draw per sample (upstream knows no other)."""
    return [
        f"run.dir={folder / 'run'}",
        "run.first=null",
        "evaluation=null",
        f"data.uri={folder / 'data'}",
        "data.generate.layouts=8",
        "data.batch_size=4",
        "model.flow_draws=1",
        "model.processor.duplicate_frames=true",
        f"trainer.max_steps={steps}",
    ]


def losses(run: Path) -> list[float]:
    """The loss of every step, as the run keeps it."""
    with (run / "steps.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def frames_digest(pixel_values: Tensor) -> str:
    """SHA-256 of normalised pixels as the bytes they were."""
    frames = (pixel_values * 127.5 + 127.5).round().byte()
    return hashlib.sha256(frames.contiguous().numpy().tobytes()).hexdigest()


@contextmanager
def recording(folder: Path) -> Iterator[None]:
    """Keep the weights before the first step and everything the network is given at each."""
    forward, count = GR00TN17.forward, 0

    def recorded(network: GR00TN17, inputs: Any, noise: Any = None, time: Any = None) -> Any:
        nonlocal count
        if count == 0:
            weights = {name: tensor.contiguous().clone() for name, tensor in network.state_dict().items()}
            save_file(weights, str(folder / "weights.safetensors"))
            (folder / "sizes.json").write_text(json.dumps(network.config.to_dict()))
        ids = inputs["embodiment_id"]
        ids = inputs["position"] * 0 + ids
        names = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw", "state", "action", "action_mask")
        batch = {name: inputs[name] for name in names} | {"embodiment_id": ids, "noise": noise, "time": time}
        save_file({k: v.contiguous() for k, v in batch.items()}, str(folder / f"batch-{count:05d}.safetensors"))
        count += 1
        return forward(network, inputs, noise, time)

    GR00TN17.forward = recorded
    try:
        yield
    finally:
        GR00TN17.forward = forward


def settings(recipe: Recipe) -> dict[str, Any]:
    """What the other side needs of optimiser and schedule, the rates written out."""
    optim: OptimizerConfig = optimizer(recipe)
    rates: ScheduleConfig = schedule(recipe)
    return {
        "weight_decay": optim.weight_decay,
        "eps": optim.eps,
        "betas": optim.betas,
        "clip": recipe.trainer.gradient_clip_val,
        "rates": [optim.lr * rates.factor(step) for step in range(recipe.trainer.max_steps)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream-python", required=True, help="Python of an environment with LeRobot's groot extra")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="keep data, batches and curves here")
    parser.add_argument("--json", type=Path, help="write upstream's curve to this file, for the test")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        recipe = checked("quickstart", overrides(folder, arguments.steps))
        with recording(folder):
            train(recipe, time.perf_counter())
        (folder / "settings.json").write_text(json.dumps(settings(recipe)))
        command = [arguments.upstream_python, str(HERE / "gr00t_upstream.py"), "train", str(folder)]
        subprocess.run(command, check=True)
        first = load_file(folder / "batch-00000.safetensors")
        ours, theirs = losses(folder / "run"), json.loads((folder / "curve.json").read_text())
    assert len(ours) == len(theirs) == arguments.steps
    apart = [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
    print(f"{'step':>5} {'ours':>12} {'upstream':>12} {'relative':>10}")
    for step in sorted({*range(0, arguments.steps, 20), arguments.steps - 1}):
        print(f"{step:5d} {ours[step]:12.7f} {theirs[step]:12.7f} {apart[step]:10.1e}")
    print(f"largest relative difference {max(apart):.1e} at step {apart.index(max(apart))}")
    if arguments.json:
        golden = {"first_frames_sha256": frames_digest(first["pixel_values"]), "loss": theirs}
        arguments.json.write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
