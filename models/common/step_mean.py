"""One mean per optimiser step: over all unmasked entries of all micro-batches on all ranks.

A mean of the means of micro-batches is another number as soon as their masks differ in size: with padded steps left
out, with embodiments of different widths, or with a short last batch. So the gradient of the summed error is
accumulated, and divided once by the sum of all masks when that is known: after the last micro-batch, together with the
clipping, which multiplies every gradient anyway.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class StepMean:
    """Sums of one optimiser step on this rank; nothing here waits for the device."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def reset(self) -> None:
        """Begin a step."""
        self._sums = None

    def add(self, error: Tensor, weight: Tensor, *parts: Tensor) -> None:
        """Take in one micro-batch: its summed error, its weight, and sums of parts of the error; on one device."""
        sums = torch.stack([value.detach().float() for value in (error, weight, *parts)])
        self._sums = sums if self._sums is None else self._sums + sums

    def totals(self) -> tuple[Tensor, ...]:
        """What was added in the step, summed over all ranks: a small collective, for every rank to call."""
        assert self._sums is not None, "a step has at least one micro-batch"
        sums = self._sums.clone()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(sums)
        return sums.unbind()


def gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Gradients of an optimiser's parameters, those that have one."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def total_norm(grads: Sequence[Tensor]) -> Tensor:
    """L2 norm over all gradients; of sharded ones over all shards, a collective then."""
    if any(grad.dtype == torch.bfloat16 for grad in grads):
        # the common function would round the norm of every tensor, and of all, to three digits
        return torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]).norm()
    norm = nn.utils.get_total_norm(grads)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[operator]


def scale_(grads: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by one number that stays on the device."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        by_dtype.setdefault(grad.dtype, []).append(getattr(grad, "_local_tensor", grad))  # of a sharded one its shard
    for same in by_dtype.values():  # lists of one dtype are one kernel
        torch._foreach_mul_(same, factor.to(same[0].device))
