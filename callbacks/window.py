"""The steps of one logging interval, from all ranks: what every meter reads."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
import torch.distributed as dist

from callbacks.step_clock import Step


@dataclass(frozen=True, slots=True)
class Window:
    """Measured steps, one column per step; times in seconds of the slowest rank."""

    index: list[int]
    loss: list[float]
    """Mean over ranks, by the weights that the module gives."""
    step_s: list[float]
    wait_s: list[float]
    slowest_rank: list[int]
    """Rank that waited longest for its loader in that step."""
    samples: list[int]
    """Sum over ranks."""
    flops: list[int]
    """Sum over ranks."""
    world_size: int

    def __len__(self) -> int:
        return len(self.index)


class Meter(Protocol):
    """Turns a window into metrics; names as documented in the user guide."""

    def measure(self, window: Window) -> dict[str, float]: ...


def joined(windows: Sequence[Window]) -> Window:
    """Windows that follow each other as one."""
    columns = [field.name for field in fields(Window) if field.name != "world_size"]
    return Window(
        **{name: [value for window in windows for value in getattr(window, name)] for name in columns},
        world_size=windows[-1].world_size,
    )


def gather(steps: Sequence[Step], device: torch.device) -> Window:
    """Put the steps of all ranks together; every rank must call it with the same number of steps.

    One collective of a few numbers per step and one device synchronisation (for the losses) per call.
    """
    losses = torch.stack([step.loss for step in steps]).to(device, torch.float64)
    table = torch.tensor([[s.wait_s, s.step_s, s.samples, s.flops] for s in steps], dtype=torch.float64)
    given = [step.loss_weight for step in steps if step.loss_weight is not None]
    assert len(given) in (0, len(steps)), "a module gives a weight in every step or in none"
    weights = torch.stack(given).to(device, torch.float64) if given else torch.ones_like(losses)
    local = torch.cat([table.to(device), losses.unsqueeze(1), weights.unsqueeze(1)], dim=1)  # [steps, 6]
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world_size == 1:
        ranks = local.unsqueeze(0)
    else:
        parts = [torch.empty_like(local) for _ in range(world_size)]
        dist.all_gather(parts, local)
        ranks = torch.stack(parts)  # [ranks, steps, 6]
    ranks = ranks.cpu()
    wait, slowest = ranks[:, :, 0].max(dim=0)
    return Window(
        index=[step.index for step in steps],
        loss=((ranks[:, :, 4] * ranks[:, :, 5]).sum(dim=0) / ranks[:, :, 5].sum(dim=0)).tolist(),
        step_s=ranks[:, :, 1].max(dim=0).values.tolist(),
        wait_s=wait.tolist(),
        slowest_rank=slowest.tolist(),
        samples=[int(value) for value in ranks[:, :, 2].sum(dim=0)],
        flops=[int(value) for value in ranks[:, :, 3].sum(dim=0)],
        world_size=world_size,
    )
