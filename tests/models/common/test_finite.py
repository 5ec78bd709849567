"""Gradients that are no numbers become 0 where they are none, and too many such steps end the run."""

import pytest
import torch

from models.common import finite
from models.common.finite import FiniteGuard


def gradients(*bad: float) -> list[torch.Tensor]:
    return [torch.tensor([1.0, *bad]), torch.ones(2, dtype=torch.bfloat16), torch.empty(0)]


def test_only_what_is_no_number_is_replaced() -> None:
    guard = FiniteGuard()
    grads = gradients(float("nan"), float("inf"), float("-inf"), -3e38)
    guard.repair_(grads)
    assert grads[0].tolist() == [1.0, 0.0, 0.0, 0.0, float(torch.tensor(-3e38))]
    assert grads[1].tolist() == [1.0, 1.0]
    guard.repair_(gradients(2.0))
    assert float(guard.total) == 1.0


def test_a_row_of_such_steps_ends_the_run_and_a_good_one_breaks_the_row() -> None:
    guard = FiniteGuard(patience=3)
    for bad in (True, True, False, True, True, True):
        guard.repair_(gradients(float("nan")) if bad else gradients())
    with pytest.raises(RuntimeError, match="the last 3 steps"):
        guard.repair_(gradients())
    assert float(guard.total) == 5.0


def test_patience_of_no_step_is_refused() -> None:
    with pytest.raises(ValueError, match="patience=0"):
        FiniteGuard(0)


class _Device(FiniteGuard):
    """A guard of a rank whose device is late, or never is."""

    def __init__(self, *, late: bool) -> None:
        super().__init__(patience=3)
        self.late, self.waits = late, 0

    def _mark(self, bad: torch.Tensor) -> "_Device":
        return self

    def query(self) -> bool:
        return not self.late

    def synchronize(self) -> None:
        self.waits += 1

    def _check(self, lag: int) -> None:
        super()._check(finite.LAG)


def test_ranks_whose_devices_are_not_equally_fast_end_in_the_same_step() -> None:
    ended = []
    for late in (False, True):
        guard = _Device(late=late)
        for step in range(20):
            try:
                guard.repair_(gradients(float("nan")) if step >= 5 else gradients())
            except RuntimeError:
                ended.append((step, late, guard.waits > 0))
                break
    assert ended == [(9, False, False), (9, True, True)]
