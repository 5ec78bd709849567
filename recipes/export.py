"""A run's weights as a checkpoint folder in the released layout, for the servers and readers of that layout."""

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.family import family
from recipes.load import diff, to_dict
from recipes.run_folder import RunFolder
from recipes.schema import Recipe, RunConfig, TrainerConfig
from recipes.schema_data import DataConfig

if TYPE_CHECKING:
    from recipes.trained import TrainedRun

logger = logging.getLogger(__name__)

RELEASED = "released"

# Where things lay and how they were watched is nobody's business but the machine's.
_PRIVATE = ("run", "data.uri", "data.cache", "data.generate", "logger", "wandb", "metrics", "checkpoint", "evaluation")


def export_run(
    run: Path,
    out: Path,
    *,
    dtype: str = "bfloat16",
    step: int | None = None,
    checkpoint: Path | None = None,
    averaged: bool = False,
    layout: str = RELEASED,
) -> dict[str, Any]:
    """Write a run's newest checkpoint, or that of a step, as a checkpoint folder; on the CPU alone.

    Args:
        run: run folder.
        out: folder to make; must not exist, or be empty.
        dtype: of the weights, "bfloat16" as released or "float32".
        step: which checkpoint of the run.
        checkpoint: a checkpoint by its path instead: a file, or the folder of a sharded one.
        averaged: write the averages of the weights over the steps instead of the weights.
        layout: "released", or "framework", which only cosmos3_policy has: what NVIDIA's framework trains from.

    Returns:
        `folder`, `step`, `dtype` and `bytes` of what was written.

    Raises:
        ValueError: no run folder, no such checkpoint, one that does not fit its recipe, or a layout its model has not.
        FileExistsError: `out` holds something.
    """
    from recipes.trained import load_run

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not empty; name a new folder")
    trained = load_run(run, step=step, checkpoint=checkpoint, averaged=averaged)
    room = family(trained.recipe)
    if layout not in room.LAYOUTS:
        raise ValueError(f"layout={layout!r}: {trained.recipe.model.name} has {', '.join(room.LAYOUTS)}")
    room.export(trained, out, run=run, dtype=dtype, layout=layout, stored=RunFolder(run).recipe or {})
    written = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    return {"folder": str(out), "step": trained.step, "dtype": dtype, "bytes": written}


def changes(stored: dict[str, Any]) -> dict[str, Any]:
    """Keys of a stored recipe that differ from their defaults, by dotted name, paths and watching left out."""
    bare = Recipe(run=RunConfig(name="", dir=""), data=DataConfig(uri=""), trainer=TrainerConfig(max_steps=0))
    changed = {key: new for key, (_, new) in diff(to_dict(bare), stored).items() if new is not None}
    if "data.mixture" in changed:
        changed["data.mixture"] = [
            {key: value for key, value in part.items() if key != "uri" and value is not None}
            for part in changed["data.mixture"]
        ]
    return {
        key: value
        for key, value in sorted(changed.items())
        if not any(key == private or key.startswith(f"{private}.") for private in _PRIVATE)
    }


def run_facts(run: Path, trained: "TrainedRun", stored: dict[str, Any], dtype: str) -> dict[str, Any]:
    """What the model card of any model says of a run; the fields of `models.common.model_card.RunFacts`."""
    summary = RunFolder(run).summary or {}
    if summary.get("steps") != trained.step:
        summary = {}  # figures of another step
    return {
        "name": trained.recipe.run.name,
        "dtype": dtype,
        "steps": trained.step,
        "base": stored["model"]["weights"],
        "data": stored["data"]["uri"],
        "fingerprint": summary.get("fingerprint") or _fingerprint(run),
        "changes": changes(stored),
        "summary": summary,
    }


def _fingerprint(run: Path) -> str | None:
    """The data's fingerprint from the record every start of a run writes."""
    file = run / "environment.json"
    return json.loads(file.read_text()).get("fingerprint") if file.is_file() else None
