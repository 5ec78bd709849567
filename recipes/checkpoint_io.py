"""Checkpoints are written beside their final name and renamed, so a kill or a full disk never leaves half of one."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from models.common import sharded_state


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's own goes through the system's temporary folder: from another file system the last move is a copy,
    which a kill cuts short under the final name. It also holds the whole file in memory first.

    Reads the folders of sharded runs too: a run may continue with other ranks than it began with.
    """

    def load_checkpoint(self, path: str | Path, *args: Any, **options: Any) -> dict[str, Any]:
        if Path(path).is_dir():
            return sharded_state.read(Path(path))
        return super().load_checkpoint(path, *args, **options)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        if storage_options is not None:
            raise TypeError("storage_options are not supported; checkpoints go to a local folder")
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            sharded_state.discard(path)  # no file can take a folder's place
        # One name for all: what a killed run left behind is overwritten by the next checkpoint.
        temporary = path.with_name(".writing.ckpt")
        try:
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except RuntimeError as error:  # what PyTorch makes of a full disk says nothing about the disk
            free = shutil.disk_usage(path.parent).free
            raise OSError(
                f"checkpoint {path} could not be written, {free / 1e6:,.0f} MB are free there; earlier checkpoints are "
                "whole, and the same command continues from them (checkpoint.keep and run.dir say how many and where)"
            ) from error
        finally:
            temporary.unlink(missing_ok=True)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        sharded_state.discard(Path(path))
