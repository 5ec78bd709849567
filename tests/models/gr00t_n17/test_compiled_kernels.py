"""The DiT's blocks as the compiler's own kernels: gradients equal those of the eager blocks, dropout off and on.

The adaptive norms' scale and shift are the pattern whose compiled backward has been wrong (pytorch issue 193061).
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.common.block_options import CheckpointingConfig, CompileConfig
from models.common.checkpointing import apply as checkpoint
from models.common.compile import apply as compile_blocks
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.layers.dit import AlternateVLDiT

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("fresh_compiler")]


def make(dropout: float) -> AlternateVLDiT:
    torch.manual_seed(0)
    return AlternateVLDiT(GR00TN17Config.tiny(diffusion_model_cfg={"num_layers": 2, "dropout": dropout}))


def step(dit: AlternateVLDiT) -> tuple[Tensor, list[Tensor]]:
    g = torch.Generator().manual_seed(1)
    x, context = (torch.randn(2, n, 64, generator=g).requires_grad_() for n in (9, 12))
    valid, image = torch.ones(2, 12, dtype=torch.bool), torch.arange(12).expand(2, 12) < 8
    torch.manual_seed(2)
    y = dit(x, torch.tensor([3, 700]), context, valid, image)
    loss = (y * torch.randn(y.shape, generator=g)).mean()
    loss.backward()
    return loss.detach(), [x.grad, context.grad, *(p.grad for p in dit.parameters())]


@pytest.mark.parametrize("values", [{}, {"mode": "full"}], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_compiled_gradients_equal_eager_ones(dropout: float, values: dict[str, Any]) -> None:
    loss, gradients = step(make(dropout))
    dit = make(dropout)
    blocks = {"dit": list(dit.transformer_blocks)}
    checkpoint(blocks, CheckpointingConfig(**values))
    # The compiler draws in its own way unless it is told to draw as eager does.
    config = CompileConfig(scope="blocks", on_failure="raise", inductor={"fallback_random": True})
    report = compile_blocks(blocks, config)
    compiled_loss, compiled_gradients = step(dit)
    assert report.graphs == 2
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-5, atol=0)
    scale = max(float(b.abs().max()) for b in gradients)  # those of key biases are zero but for rounding
    for a, b in zip(compiled_gradients, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6 * scale)
