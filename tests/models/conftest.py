"""Every test of the models draws the same numbers each time it runs."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    torch.manual_seed(0)
