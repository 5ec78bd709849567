"""The steps of one logging interval, from all ranks: what every meter reads."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

import numpy as np
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
    recompute_flops: list[int] = field(default_factory=list)
    """Sum over ranks."""
    device_idle_s: list[float] = field(default_factory=list)
    """Longest time a device had nothing to do while its host waited for the loader; NaN where no device tells."""
    compile_s: list[float] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)
    warm_up: list[bool] = field(default_factory=list)
    """The step was a warm-up on some rank."""
    waits_of_ranks: list[list[float]] = field(default_factory=list)
    """Each rank's wait for its loader."""
    peer_waits_of_ranks: list[list[float]] = field(default_factory=list)
    """Each rank's wait for the gradients of the others."""
    steps_of_ranks: list[list[float]] = field(default_factory=list)
    """Each rank's step time."""

    def __post_init__(self) -> None:
        """Columns that were not given say nothing."""
        steps = len(self.index)
        unknown: dict[str, list[object]] = {
            "recompute_flops": [0] * steps,
            "device_idle_s": [math.nan] * steps,
            "compile_s": [0.0] * steps,
            "pause_s": [0.0] * steps,
            "warm_up": [False] * steps,
        }
        for name, values in unknown.items():
            if not getattr(self, name):
                object.__setattr__(self, name, values)

    def __len__(self) -> int:
        return len(self.index)

    def timed(self) -> list[int]:
        """Places of the steps whose time says something about the others: no warm-up."""
        return [place for place, warm_up in enumerate(self.warm_up) if not warm_up]


class Meter(Protocol):
    """Turns a window into metrics; names as documented in the user guide."""

    def measure(self, window: Window) -> dict[str, float]: ...


def joined(windows: Sequence[Window]) -> Window:
    """Windows that follow each other as one."""
    columns = [column.name for column in fields(Window) if column.name != "world_size"]
    return Window(
        **{name: [value for window in windows for value in getattr(window, name)] for name in columns},
        world_size=windows[-1].world_size,
    )


# What a step says of itself in the collective, in this order; loss and weight follow.
_TIMES = ("wait_s", "step_s", "peer_wait_s", "compile_s", "pause_s")
_COUNTS = ("samples", "flops", "recompute_flops")


def of_slowest_rank(seconds: float, device: torch.device) -> float:
    """The largest of all ranks' values; a collective, so every rank must call it."""
    if not (dist.is_available() and dist.is_initialized()):
        return seconds
    value = torch.tensor(seconds, dtype=torch.float32, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def gather(steps: Sequence[Step], device: torch.device) -> Window:
    """Put the steps of all ranks together; every rank must call it with the same number of steps.

    One collective of a few numbers per step and one device synchronisation (for the losses) per call.
    """
    losses = torch.stack([step.loss for step in steps]).to(device, torch.float64)
    names = (*_TIMES, *_COUNTS)
    rows = [
        [*(getattr(s, name) for name in names), math.nan if s.device_idle_s is None else s.device_idle_s, s.warm_up]
        for s in steps
    ]
    given = [step.loss_weight for step in steps if step.loss_weight is not None]
    assert len(given) in (0, len(steps)), "a module gives a weight in every step or in none"
    weights = torch.stack(given).to(device, torch.float64) if given else torch.ones_like(losses)
    table = torch.tensor(rows, dtype=torch.float64).to(device)
    local = torch.cat([table, losses.unsqueeze(1), weights.unsqueeze(1)], dim=1)  # [steps, columns]
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world_size == 1:
        ranks = local.unsqueeze(0)
    else:
        parts = [torch.empty_like(local) for _ in range(world_size)]
        dist.all_gather(parts, local)
        ranks = torch.stack(parts)  # [ranks, steps, columns]
    # numpy from here on: a reduction of PyTorch's wakes its thread pool, which took a millisecond for each of these
    values = np.moveaxis(ranks.cpu().numpy(), 2, 0)
    columns = dict(zip((*names, "device_idle_s", "warm_up", "loss", "weight"), values, strict=True))
    most = {name: columns[name].max(axis=0).tolist() for name in (*_TIMES, "device_idle_s", "warm_up")}  # NaN wins
    totals = {name: [int(value) for value in columns[name].sum(axis=0)] for name in _COUNTS}
    weight = columns["weight"]
    return Window(
        index=[step.index for step in steps],
        loss=((columns["loss"] * weight).sum(axis=0) / weight.sum(axis=0)).tolist(),
        step_s=most["step_s"],
        wait_s=most["wait_s"],
        slowest_rank=columns["wait_s"].argmax(axis=0).tolist(),
        **totals,
        world_size=world_size,
        device_idle_s=most["device_idle_s"],
        compile_s=most["compile_s"],
        pause_s=most["pause_s"],
        warm_up=[bool(value) for value in most["warm_up"]],
        waits_of_ranks=columns["wait_s"].T.tolist(),
        peer_waits_of_ranks=columns["peer_wait_s"].T.tolist(),
        steps_of_ranks=columns["step_s"].T.tolist(),
    )
