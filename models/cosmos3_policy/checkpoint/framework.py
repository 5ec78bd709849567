"""Weights as NVIDIA's framework keeps them: torch.distributed.checkpoint under its own names.

    FOLDER/iter_000010000/model/   .metadata, __*.distcp
    FOLDER/latest_checkpoint.txt   the name of the iteration

`checkpoint.load_path` of the framework takes `FOLDER/iter_000010000`.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from models.common.shards import new_folder
from models.cosmos3_policy.checkpoint.folder import LATEST_FILE
from models.cosmos3_policy.checkpoint.names import AVERAGE, NET, to_framework


def write_framework(
    tensors: Mapping[str, Tensor],
    folder: str | Path,
    *,
    step: int,
    averages: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write whole tensors by their Diffusers names as a folder the framework starts from, all of it or nothing.

    A warm start of the framework reads `net.` alone and begins its averages there; its evaluation reads `net_ema.`,
    which is written where there are averages: of trained tensors these, of frozen ones the tensors themselves.

    Args:
        tensors: every tensor of the network.
        folder: must not exist, or be empty.
        step: number of the iteration.
        averages: by name, of the trained tensors.
        dtype: of the stored tensors; None keeps each tensor's own. The framework trains from float32.

    Raises:
        ValueError: a name that the network has not.
        FileExistsError: `folder` holds something.
    """
    names = {name: to_framework(name) for name in tensors}
    if unknown := set(averages or {}) - set(tensors):
        raise ValueError(f"averages of tensors that the network has not: {sorted(unknown)}")

    def stored(tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", dtype).contiguous()

    state = {NET + names[name]: stored(tensor) for name, tensor in tensors.items()}
    if averages is not None:
        state |= {
            AVERAGE + theirs: stored(averages[name]) if name in averages else state[NET + theirs]
            for name, theirs in names.items()
        }
    iteration = f"iter_{step:09d}"
    with new_folder(folder) as temporary:
        writer = FileSystemWriter(temporary / iteration / "model", sync_files=True, thread_count=1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")  # one process, as asked for
            dcp.save(state, storage_writer=writer, no_dist=True)
        (temporary / LATEST_FILE).write_text(f"{iteration}\n")
