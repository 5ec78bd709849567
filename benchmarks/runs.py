"""One recipe trained twice, through our loader and through the stock GR00T algorithm, and both in one report.

    python benchmarks/runs.py FOLDER [--steps 300] [--layouts 150] [key=value ...]

The recipe is the quickstart without its first stage and its evaluation; the dataset is generated as LeRobot v2.1, the
version the stock algorithm reads. Both runs are whole runs of `recipes train` in a process of their own, with the same
network, samples a step and metrics; only what gives the batches differs: `loader_stock.py` in one worker process, which
crops and colours the pictures itself, or `knonik`. FOLDER/report.html holds ours to the stock one; FOLDER must be new.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

KINDS = {"stock": "stock algorithm", "ours": "knonik"}  # the names in the report
EDGE = 64  # the generated pictures; the stock image path would blow them up to 256


def stock_data(recipe: Any, datasets: Any, processor: Any, batch_size: int) -> Any:
    """A data module with the arguments of `recipes.build.build_datamodule`, on the stock algorithm."""
    import loader_stock
    import numpy as np
    import torch
    from lightning.pytorch import LightningDataModule
    from torch.utils.data import DataLoader

    from knonik.batches.batch import Batch

    loader_stock._EDGE = EDGE
    (dataset,) = datasets
    dealt = 0

    def collate(samples: list[dict[str, Any]]) -> Batch:
        nonlocal dealt
        first, dealt = dealt, dealt + len(samples)
        pictures = {
            camera: torch.from_numpy(np.stack([sample["images"][number] for sample in samples])[:, None])
            for number, camera in enumerate(recipe.data.cameras)
        }
        rows = {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in ("state", "action")}
        position = torch.arange(first, dealt)
        nothing = torch.zeros_like(position)
        batch = Batch(
            images=pictures,
            state={"observation.state": rows["state"]},
            action={"action": rows["action"]},
            action_is_pad=torch.zeros(len(samples), recipe.data.horizon, dtype=torch.bool),
            text=[sample["text"] for sample in samples],
            dataset=nothing,
            episode=nothing,
            frame=nothing,
            position=position,
            begin=first,
        )
        batch.inputs.update(processor.prepare(batch))
        return batch

    class StockData(LightningDataModule):
        def train_dataloader(self) -> Any:
            folder = Path(dataset.uri)
            shards = loader_stock._iterable(folder, recipe.data.horizon, shard_size=1024, episode_sampling_rate=0.1)
            options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork", "collate_fn": collate}
            return DataLoader(shards, batch_size, **options)

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return batch

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return processor.to_network(batch, augment=False)  # the worker has drawn its own

        def gauges(self) -> dict[str, float]:
            return {}

        def stages(self) -> dict[str, Any]:
            return {}

    return StockData()


def train(folder: Path, kind: str, overrides: list[str]) -> None:
    """One of the two runs, in this process."""
    import logging

    import recipes.train
    from recipes.check import checked

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if kind == "stock":
        recipes.train.build_datamodule = stock_data
    fixed = [
        "run.first=null",
        "evaluation=null",
        "data.generate=null",
        "checkpoint.every_n_steps=100000",
        "schedule.warmup_steps=null",
    ]
    where = [f"data.uri={folder / 'data'}", f"data.cache.dir={folder / 'cache'}", f"run.dir={folder / kind}"]
    recipes.train.train(checked("quickstart", [*fixed, *where, f"run.name={KINDS[kind]}", *overrides]), STARTED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=300, help="steps of each run")
    parser.add_argument("--layouts", type=int, default=150, help="tables in the dataset, two episodes each")
    parser.add_argument("--only", choices=KINDS, help=argparse.SUPPRESS)  # the process of one run
    options, overrides = parser.parse_known_args()
    folder = options.folder.resolve()
    if options.only is not None:
        train(folder, options.only, [f"trainer.max_steps={options.steps}", *overrides])
        return
    from recipes.tabletop.demos import generate_demonstrations

    generate_demonstrations(folder / "data", layouts=options.layouts, version="v2.1", codec="h264")
    for kind in KINDS:
        command = [sys.executable, __file__, str(folder), "--only", kind, "--steps", str(options.steps), *overrides]
        if subprocess.run(command).returncode:
            raise SystemExit(f"the {kind} run failed; its own message stands above")
    report = [sys.executable, "-m", "recipes", "report", *(str(folder / kind) for kind in KINDS)]
    raise SystemExit(subprocess.run([*report, "--out", str(folder / "report.html")], cwd=HERE.parent).returncode)


if __name__ == "__main__":
    main()
