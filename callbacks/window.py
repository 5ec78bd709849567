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


# What a step says of itself in the collective; its loss and, where the module gives one, the weight of that follow.
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
    given = [step.loss_weight for step in steps if step.loss_weight is not None]
    assert len(given) in (0, len(steps)), "a module gives a weight in every step or in none"
    losses = torch.stack([step.loss for step in steps]).to(device, torch.float64)
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world_size == 1:
        return _of_one_rank(steps, losses.tolist())
    table = torch.tensor([_of_step(step) for step in steps], dtype=torch.float64, device=device)
    weights = [torch.stack(given).to(device, torch.float64).unsqueeze(1)] if given else []
    local = torch.cat([table, losses.unsqueeze(1), *weights], dim=1)
    parts = [torch.empty_like(local) for _ in range(world_size)]
    dist.all_gather(parts, local)
    ranks = torch.stack(parts).cpu().numpy()  # [ranks, steps, columns]
    # numpy from here on: a reduction of PyTorch's wakes its thread pool, which took a millisecond for each of these
    names = (*_TIMES, *_COUNTS, "device_idle_s", "warm_up")
    most = dict(zip(names, ranks.max(axis=0).T.tolist(), strict=False))  # NaN wins
    totals = dict(zip(names, ranks.sum(axis=0).T.tolist(), strict=False))
    waits, steps_s, peer_waits = (ranks[:, :, names.index(name)].T for name in ("wait_s", "step_s", "peer_wait_s"))
    loss = ranks[:, :, len(names)]
    weight = ranks[:, :, len(names) + 1] if given else np.ones_like(loss)
    return Window(
        index=[step.index for step in steps],
        loss=((loss * weight).sum(axis=0) / weight.sum(axis=0)).tolist(),
        step_s=most["step_s"],
        wait_s=most["wait_s"],
        slowest_rank=waits.argmax(axis=1).tolist(),
        samples=[*map(int, totals["samples"])],
        flops=[*map(int, totals["flops"])],
        recompute_flops=[*map(int, totals["recompute_flops"])],
        world_size=world_size,
        device_idle_s=most["device_idle_s"],
        compile_s=most["compile_s"],
        pause_s=most["pause_s"],
        warm_up=[*map(bool, most["warm_up"])],
        waits_of_ranks=waits.tolist(),
        peer_waits_of_ranks=peer_waits.tolist(),
        steps_of_ranks=steps_s.tolist(),
    )


def _of_one_rank(steps: Sequence[Step], losses: list[float]) -> Window:
    """The window where there is nobody to gather from."""
    waits, times = [step.wait_s for step in steps], [step.step_s for step in steps]
    return Window(
        index=[step.index for step in steps],
        loss=losses,
        step_s=times,
        wait_s=waits,
        slowest_rank=[0] * len(steps),
        samples=[step.samples for step in steps],
        flops=[step.flops for step in steps],
        recompute_flops=[step.recompute_flops for step in steps],
        world_size=1,
        device_idle_s=[math.nan if step.device_idle_s is None else step.device_idle_s for step in steps],
        compile_s=[step.compile_s for step in steps],
        pause_s=[step.pause_s for step in steps],
        warm_up=[step.warm_up for step in steps],
        waits_of_ranks=[[wait] for wait in waits],
        peer_waits_of_ranks=[[step.peer_wait_s] for step in steps],
        steps_of_ranks=[[seconds] for seconds in times],
    )


def _of_step(step: Step) -> list[float]:
    """What a step says of itself beside its loss: `_TIMES`, `_COUNTS`, the device's idle time, whether a warm-up."""
    return [
        *(getattr(step, name) for name in _TIMES),
        *(getattr(step, name) for name in _COUNTS),
        math.nan if step.device_idle_s is None else step.device_idle_s,
        step.warm_up,
    ]
