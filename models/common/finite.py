"""Gradients that are no numbers: their entries count as 0, and a run in which that does not end is ended.

One overflow in one product would otherwise reach every weight through the norm that the gradients are clipped by. The
step is made with what is left, so that a rare accident costs no more than its own part of one step.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class FiniteGuard:
    """Repairs the gradients of one step after the other; nothing here waits for the device.

    Args:
        patience: steps in a row with gradients that are no numbers after which the run is ended.
    """

    def __init__(self, patience: int = 100) -> None:
        if patience < 1:
            raise ValueError(f"patience={patience}: at least 1 step is needed")
        self.patience = patience
        self.total: Tensor | None = None
        """Steps so far in which something was repaired, on the device."""
        self._streak: Tensor | None = None
        self._seen: Tensor | None = None
        self._event: torch.cuda.Event | None = None

    @torch.no_grad()
    def repair_(self, grads: Sequence[Tensor]) -> None:
        """Put 0 for every entry that is infinite or no number, in place; a collective of one number.

        Raises:
            RuntimeError: `patience` steps in a row were repaired, or some more: their count arrives behind the device.
        """
        self._check()
        local = [shard for grad in grads if (shard := getattr(grad, "_local_tensor", grad)).numel()]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for grad in local:
            by_dtype.setdefault(grad.dtype, []).append(grad)
        device = grads[0].device
        bad = torch.zeros((), device=device)
        for same in by_dtype.values():
            largest = torch.stack(torch._foreach_norm(same, float("inf")))
            bad = torch.maximum(bad, (~largest.isfinite()).any().float())
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        for grad in local:
            torch.nan_to_num_(grad, nan=0.0, posinf=0.0, neginf=0.0)
        self._count(bad)

    def _count(self, bad: Tensor) -> None:
        if self._streak is None or self.total is None:
            self._streak, self.total = torch.zeros_like(bad), torch.zeros_like(bad)
            self._seen = torch.zeros((), pin_memory=bad.is_cuda)
        assert self._seen is not None
        self.total = self.total + bad
        self._streak = (self._streak + 1) * bad
        self._seen.copy_(self._streak, non_blocking=True)
        if bad.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def _check(self) -> None:
        """Read the count of the step before, if it has arrived; else it is read a step later."""
        if self._seen is None or (self._event is not None and not self._event.query()):
            return
        streak = int(self._seen.numpy())
        if streak >= self.patience:
            raise RuntimeError(
                f"the gradients of the last {streak} steps held infinities or values that are no numbers: lower "
                "optimizer.lr or clip harder, and continue from a checkpoint before them"
            )
