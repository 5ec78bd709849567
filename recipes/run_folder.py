"""The folder of a run: the recipe it was started with, its checkpoints, and what may change when it continues."""

import fcntl
import json
import logging
import os
import re
import socket
import zipfile
from pathlib import Path
from typing import IO, Any

from recipes.load import RecipeError, diff, from_dict, to_dict, to_yaml
from recipes.schema import Recipe

logger = logging.getLogger(__name__)

RECIPE_FILE = "recipe.json"
SUMMARY_FILE = "summary.json"
LOCK_FILE = ".lock"
_CHECKPOINT = re.compile(r"step-(\d+)\.ckpt")

# Keys that do not change what is computed from a given position on, or that only say how long and how it is watched.
FREE_KEYS = (
    "trainer.max_steps",
    "trainer.max_time",
    "trainer.log_every_n_steps",
    "trainer.profiler",
    "trainer.num_nodes",
    "trainer.accelerator",
    "data.uri",  # a dataset may move; whether it is the same one is decided by its fingerprint
    "data.cache",
    "data.decode_threads",
    "data.ring_batches",
    "data.ring_bytes",
    "data.startup",
    "data.transport",  # the same values by another way
    "data.batch_size",
    "data.global_batch_size",
    "checkpoint",
    "logger",
    "wandb",
    "metrics",
    "evaluation",
    "validation",
    "model.feature_cache",  # the same features, made once
    "parallel",  # like the number of ranks: sums in another order
    "checkpointing",  # computed again instead of kept
    "lookahead",  # computed earlier
    "graphs",  # launched as one
    "ema",  # beside the training, which does not notice; begins where there was none
    "compile.on_failure",
    "compile.cache_dir",
    "parallel",  # checkpoints are read by any number of ranks
    "run.torch_threads",
    "run.dir",
)


class RunFolder:
    """Paths and state of one run.

    Args:
        path: `run.dir` of the recipe.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._lock: IO[str] | None = None

    @property
    def summary(self) -> dict[str, Any] | None:
        """What the finished run reported; None while it is not finished."""
        file = self.path / SUMMARY_FILE
        if not file.is_file():
            return None
        values: dict[str, Any] = json.loads(file.read_text())
        return values

    def completed(self, recipe: Recipe) -> dict[str, Any] | None:
        """The summary, when this very recipe has already been trained to its last step; None otherwise."""
        summary = self.summary
        if summary is None or summary.get("steps", 0) < recipe.trainer.max_steps or self.drift(recipe):
            return None
        return summary

    @property
    def recipe(self) -> dict[str, Any] | None:
        """The resolved recipe the run was started with; None for a new folder."""
        file = self.path / RECIPE_FILE
        if not file.is_file():
            return None
        values: dict[str, Any] = json.loads(file.read_text())
        return values

    def latest_checkpoint(self) -> tuple[Path, int] | None:
        """Newest whole checkpoint and its step; files still being written have another name."""
        return next(((path, step) for step, path in reversed(self._stored()) if is_whole(path)), None)

    def set_damaged_aside(self) -> None:
        """Rename checkpoints that were cut short, so that their step can be saved again and nothing is deleted.

        Raises:
            RecipeError: none is whole. Starting over would cut the record of the steps, so the user decides.
        """
        if self._stored() and self.latest_checkpoint() is None:
            message = (
                f"run.dir: no checkpoint in {self.checkpoints} is whole, so the run cannot continue; "
                "move them away to train from the first step again, or give another run.dir"
            )
            raise RecipeError([message])
        for _, file in self._stored():
            if not is_whole(file):
                aside = file.rename(file.with_name(f"{file.name}.damaged"))
                logger.warning("checkpoint %s is not whole: kept as %s, not used", file, aside.name)

    def claim(self) -> None:
        """Hold the folder for this process, until it ends in whatever way.

        Raises:
            RecipeError: another process holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        file = (self.path / LOCK_FILE).open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip()
            file.close()
            message = f"run.dir: {self.path} is in use by {holder or 'another process'}; wait, or give another run.dir"
            raise RecipeError([message]) from error
        except OSError as error:  # some network file systems have no locks
            logger.warning("%s cannot be locked (%s); do not start the same run twice", self.path, error.strerror)
        else:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
        self._lock = file

    def prune(self, keep: int) -> None:
        """Delete all but the newest `keep` checkpoints; -1 keeps all. Lightning counts only those it wrote itself."""
        from models.common.sharded_state import discard  # needs torch, which `show` must not wait for

        for _, path in self._stored()[:-keep] if keep > 0 else []:
            discard(path)

    def _stored(self) -> list[tuple[int, Path]]:
        files = self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()
        return sorted((int(match[1]), file) for file in files if (match := _CHECKPOINT.fullmatch(file.name)))

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint of a step goes, a file or a folder of shards; the name sorts by step."""
        return self.checkpoints / f"step-{step:08d}.ckpt"

    def create(self, recipe: Recipe) -> None:
        """Make the folder and store the recipe in it, resolved, as JSON for programs and YAML for people."""
        from callbacks.run_record import write_atomically  # needs torch, which `show` must not wait for

        self.checkpoints.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / RECIPE_FILE, json.dumps(to_dict(recipe), indent=2) + "\n")
        write_atomically(self.path / "recipe.yaml", to_yaml(recipe))

    def drift(self, recipe: Recipe) -> list[str]:
        """What differs from the recipe this folder was started with, one line per key that is not free to change."""
        stored = self.recipe
        if stored is None:
            return []
        changed = diff(_completed(stored), to_dict(recipe))
        return [
            f"{key}: was {old!r} when the run in {self.path} began, now {new!r}"
            for key, (old, new) in changed.items()
            if not any(key == free or key.startswith(f"{free}.") for free in FREE_KEYS)
        ]

    def fixed(self, recipe: Recipe) -> list[str]:
        """What differs and cannot change even if it is asked for: the checkpoints could not be read."""
        stored = self.recipe
        if stored is None or self.latest_checkpoint() is None:
            return []
        # each of them has groups of its own in the optimizer's state
        before = sorted((stored.get("optimizer") or {}).get("lr_multipliers") or {})
        now = sorted(recipe.optimizer.lr_multipliers)
        if before == now:
            return []
        return [
            f"optimizer.lr_multipliers: was for {before or 'no parts'} when the run in {self.path} began, now for "
            f"{now or 'no parts'}; only the values may change when a run continues: give a multiplier of 1 where there "
            "shall be none, or a new run.dir"
        ]

    def changes(self, recipe: Recipe) -> dict[str, tuple[Any, Any]]:
        """Every key that differs from the stored recipe, the free ones too."""
        return diff(self.recipe or {}, to_dict(recipe)) if self.recipe else {}


def is_whole(checkpoint: Path) -> bool:
    """Whether nothing of a checkpoint is missing: of a file its end, of a folder any byte of the files it lists."""
    if not checkpoint.is_dir():
        return zipfile.is_zipfile(checkpoint)  # its directory stands at the end, so a part of the file has none
    try:
        sizes: dict[str, int] = json.loads((checkpoint / "files.json").read_text())
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _completed(stored: dict[str, Any]) -> dict[str, Any]:
    """A stored recipe with the defaults of keys that did not exist yet when its run began."""
    try:
        return to_dict(from_dict(stored))
    except RecipeError:  # a key that is no more: told as a difference
        return stored
