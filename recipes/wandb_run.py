"""The Weights & Biases run of a run folder: one for all ranks, and the same one when the run continues."""

import json
import os
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger

from callbacks.run_record import write_atomically
from recipes.load import RecipeError
from recipes.ranks import is_first
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
        id=value("WANDB_RUN_ID", _run_id(folder)) if is_first() else None,
        resume="allow",
        log_model=False,
        config=config,
    )


# What W&B shows of a run in its table, where the last value is not the one to compare runs by.
_SUMMARIES = {"val/loss": "min", "val/action_mae": "min", "val/action_mse": "min"}


def started(logger: Logger) -> Logger:
    """The logger with its W&B run begun, so that what is missing for it is known before the trainer starts.

    Raises:
        RecipeError: W&B cannot begin the run, most often for want of a login.
    """
    assert isinstance(logger, WandbLogger)
    try:
        run = logger.experiment  # begins the run; on ranks other than 0 it is a dummy
        for name, summary in _SUMMARIES.items():
            run.define_metric(name, step_metric="trainer/global_step", step_sync=True, summary=f"{summary},last")
    except Exception as error:  # W&B's own classes; its library is not imported here
        hint = "log in with `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
        raise RecipeError([f"logger: W&B cannot begin the run: {error} To go on, {hint}"]) from error
    return logger


def describe(loggers: Iterable[Logger], environment: Mapping[str, Any]) -> None:
    """Put beside the recipe, in the run's configuration, what this start runs on: fingerprint, commit, versions."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.config.update({"environment": dict(environment)}, allow_val_change=True)


def _run_id(folder: RunFolder) -> str:
    """The run's id, drawn once and kept in the run folder."""
    file = folder.path / "wandb.json"
    if file.is_file():
        return str(json.loads(file.read_text())["id"])
    run_id = secrets.token_hex(4)
    write_atomically(file, json.dumps({"id": run_id}) + "\n")
    return run_id
