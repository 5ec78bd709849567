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

    def value(variable: str, of_recipe: Any) -> Any:
        # an argument would win over the variable; a variable is how a scheduler or a user overrides one start
        return os.environ.get(variable) or of_recipe

    return WandbLogger(
        name=value("WANDB_NAME", recipe.run.name),
        save_dir=value("WANDB_DIR", str(folder.path)),
        project=value("WANDB_PROJECT", recipe.wandb.project),
        entity=value("WANDB_ENTITY", recipe.wandb.entity),
        group=value("WANDB_RUN_GROUP", recipe.wandb.group),
        tags=None if os.environ.get("WANDB_TAGS") else list(recipe.wandb.tags),
        id=value("WANDB_RUN_ID", _run_id(folder)) if os.environ.get("RANK", "0") == "0" else None,
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
