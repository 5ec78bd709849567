"""What measuring on held-out samples is the same for every model: which sample is which, modes, sums over ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.common.batch import Batch


class HeldOut(Batch, Protocol):
    """A batch on the CPU with `inputs` prepared, its samples named by dataset, episode and frame, int64 [B] each."""

    @property
    def dataset(self) -> Tensor: ...

    @property
    def episode(self) -> Tensor: ...

    @property
    def frame(self) -> Tensor: ...

    def to(self, device: torch.device) -> Self: ...

    def rgb(self) -> Self: ...


def sample_keys(batch: HeldOut) -> Tensor:
    """One integer per sample that names it whatever batch it is in, int64 [B]."""
    return (batch.dataset << 48) + (batch.episode << 24) + batch.frame


@contextmanager
def eval_mode(network: nn.Module) -> Iterator[None]:
    """Eval mode inside; every part gets its own mode back: frozen parts of a network that trains are in eval mode."""
    modes = [(part, part.training) for part in network.modules()]
    network.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def action_metrics(names: Sequence[str], errors: np.ndarray) -> dict[str, float]:
    """`val/action_mse` and `val/action_mae` over all entries, and with `/NAME` behind over those of one action group.

    Args:
        errors: [groups, 3], of each group its summed squared error, summed absolute error, and entries; a group
            without entries is left out.
    """
    metrics: dict[str, float] = {}
    if errors[:, 2].sum() > 0:
        for column, name in enumerate(("val/action_mse", "val/action_mae")):
            metrics[name] = float(errors[:, column].sum() / errors[:, 2].sum())
            for group, row in zip(names, errors, strict=True):
                if row[2] > 0:
                    metrics[f"{name}/{group}"] = float(row[column] / row[2])
    return metrics


def summed_over_ranks(values: Sequence[np.ndarray], device: torch.device) -> list[np.ndarray]:
    """Sums of float64 arrays over all ranks; every rank must call it, with arrays of the same shapes."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return list(values)
    flat = torch.from_numpy(np.concatenate([value.reshape(-1) for value in values])).to(device)
    dist.all_reduce(flat)
    parts = np.split(flat.cpu().numpy(), np.cumsum([value.size for value in values])[:-1])
    return [part.reshape(value.shape) for part, value in zip(parts, values, strict=True)]
