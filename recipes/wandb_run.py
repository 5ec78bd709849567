"""The Weights & Biases run of a run folder: one for all ranks, and the same one when the run continues."""

import json
import os
import secrets
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger

from callbacks.run_record import write_atomically
from recipes.run_folder import RunFolder
from recipes.schema import Recipe


def wandb_logger(recipe: Recipe, folder: RunFolder, config: dict[str, Any]) -> Logger:
    """Logger of this run; only global rank 0 talks to W&B. `WANDB_MODE` and the other variables keep working."""
    return WandbLogger(
        name=recipe.run.name,
        save_dir=str(folder.path),
        project=recipe.wandb.project,
        entity=recipe.wandb.entity,
        group=recipe.wandb.group,
        tags=list(recipe.wandb.tags),
        id=_run_id(folder) if os.environ.get("RANK", "0") == "0" else None,
        resume="allow",
        log_model=False,
        config=config,
    )


def _run_id(folder: RunFolder) -> str:
    """The run's id, drawn once and kept in the run folder."""
    file = folder.path / "wandb.json"
    if file.is_file():
        return str(json.loads(file.read_text())["id"])
    run_id = secrets.token_hex(4)
    write_atomically(file, json.dumps({"id": run_id}) + "\n")
    return run_id
