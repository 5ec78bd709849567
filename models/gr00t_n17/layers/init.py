"""Initial weights for training from scratch, a function of the seed alone."""

import math

import torch
from torch import Tensor, nn

from models.common.embodiment import CategorySpecificLinear

POSITION_SCALE = 0.7


@torch.no_grad()
def init_weights(backbone: nn.Module, action_head: nn.Module, seed: int) -> None:
    """Fill every parameter in place; the same values on every device and whatever the global generator did before.

    Backbone: linear and convolution N(0, 1 / fan_in) with zero bias, token embedding N(0, 1), position table of fixed
    waves. The small standard deviation usual in pre-training (0.02) leaves a network this narrow almost blind.
    Head: the defaults of the layers, per-embodiment weights N(0, 1 / in), position embedding N(0, 0.02).
    """
    generator = torch.Generator().manual_seed(seed)
    for module in backbone.modules():
        if isinstance(module, nn.Linear | nn.Conv3d):
            _normal(module.weight, module.weight[0].numel() ** -0.5, generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            _normal(module.weight, 1.0, generator)
        else:
            _reset_norm(module)
    table = backbone.visual.pos_embed.weight
    table.copy_(POSITION_SCALE * waves(round(len(table) ** 0.5), table.shape[1]))
    for module in action_head.modules():
        if isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            for parameter in (module.weight, module.bias):
                parameter.copy_((torch.rand(parameter.shape, generator=generator) * 2 - 1) * bound)
        elif isinstance(module, CategorySpecificLinear):
            _normal(module.W, module.W.shape[1] ** -0.5, generator)
            module.b.zero_()
        elif isinstance(module, nn.Embedding):
            _normal(module.weight, 0.02, generator)
        else:
            _reset_norm(module)


def waves(side: int, width: int) -> Tensor:
    """Sines and cosines of row and column [side * side, width]: half a period per table to one per four entries."""
    count = math.ceil(width / 4)
    frequencies = math.pi * torch.logspace(0, math.log2(max(side / 2, 1)), count, base=2.0)
    angles = torch.linspace(0, 1, side)[:, None] * frequencies
    axis = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows = axis[:, None].expand(side, side, -1)
    columns = axis[None].expand(side, side, -1)
    return torch.cat([rows, columns], dim=-1).flatten(0, 1)[:, :width]


def _normal(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    # Drawn on the CPU in float32, so that device and dtype do not change the values.
    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def _reset_norm(module: nn.Module) -> None:
    """Ones and zeros for anything else that owns parameters: LayerNorm and the RMSNorm of the decoder."""
    for name, parameter in module.named_parameters(recurse=False):
        parameter.fill_(0.0 if name == "bias" else 1.0)
