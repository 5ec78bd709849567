"""Gradients that are no numbers: their entries count as 0, and a run in which that does not end is ended.

One overflow in one product would otherwise reach every weight through the norm that the gradients are clipped by. The
step is made with what is left, so that a rare accident costs no more than its own part of one step.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LAG = 2
"""Steps after which a GPU's count is read. The step between keeps the device at work meanwhile."""


class FiniteGuard:
    """Repairs the gradients of one step after the other; the device never runs out of work for it.

    How many steps in a row were repaired is read some steps later, when the device has long counted it: always the same
    number of steps, so that all ranks end at the same one, whose collectives would otherwise wait for those gone.

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
        self._counts: deque[tuple[Tensor, Any]] = deque()

    @torch.no_grad()
    def repair_(self, grads: Sequence[Tensor]) -> None:
        """Put 0 for every entry that is infinite or no number, in place; a collective of one number.

        Raises:
            RuntimeError: `patience` steps in a row were repaired; raised on every rank in the same step, the next one
                on a CPU and the one after that on a GPU.
        """
        self._check(LAG if grads[0].is_cuda else 1)
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
        self.total = self.total + bad
        self._streak = (self._streak + 1) * bad
        self._counts.append((self._streak.to("cpu", non_blocking=True), self._mark(bad)))

    def _mark(self, bad: Tensor) -> Any:
        """What says whether the device has come as far as this; None where it computes at once."""
        return torch.cuda.current_stream(bad.device).record_event() if bad.is_cuda else None

    def _check(self, lag: int) -> None:
        """Read the count of the step `lag` steps back."""
        if len(self._counts) < lag:
            return
        seen, mark = self._counts.popleft()
        # Hardly ever true. All that was asked of the device since is still before it when this returns.
        if mark is not None and not mark.query():
            mark.synchronize()
        streak = int(seen.numpy())  # on the host by now, and no read of a device's value
        if streak >= self.patience:
            raise RuntimeError(
                f"the gradients of the last {streak} steps held infinities or values that are no numbers: lower "
                "optimizer.lr or clip harder, and continue from a checkpoint before them"
            )
