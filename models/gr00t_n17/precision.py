"""Named precision modes: in which dtype every weight is kept.

    stock   float32 everywhere, run under bfloat16 autocast (or in float32): the reference.
    lean    frozen weights that only ever enter bfloat16 products are kept in bfloat16. Under bfloat16 autocast the loss
            and all gradients are those of `stock`, bit for bit: autocast would round these weights in every step.
    bf16    `lean`, and the trained weights of products too; the optimiser keeps the other half of their float32 values
            (`models.common.split_adamw`). Not equal to `stock`: gradients are summed and clipped in bfloat16.

In all modes the residual streams, norms, per-embodiment biases, flow variables and rotary tables stay float32. Token
embedding and vision position table are looked up and then cast, which is lossless only where the checkpoint stores
bfloat16, as the released one does.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from models.common.embodiment import CategorySpecificLinear

MODES = ("stock", "lean", "bf16")


def check_mode(mode: str) -> str:
    """The mode, or ValueError with what is allowed."""
    if mode not in MODES:
        raise ValueError(f"precision={mode!r}: one of {', '.join(MODES)}")
    return mode


def weight_dtypes(
    network: nn.Module, mode: str, stored: Mapping[str, torch.dtype] | None = None
) -> dict[str, torch.dtype]:
    """dtype of every parameter by name; the network may be on the meta device.

    Args:
        network: its `requires_grad` flags say what is trained.
        mode: one of `MODES`.
        stored: dtypes of the tensors in the checkpoint. Lookup tables stored wider than bfloat16 stay float32 while
            frozen. Without it the tables are taken to be bfloat16, as released.
    """
    check_mode(mode)
    dtypes = {name: torch.float32 for name, _ in network.named_parameters()}
    if mode == "stock":
        return dtypes
    for path, module in network.named_modules():
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            if _only_in_products(module, name) and (mode == "bf16" or not parameter.requires_grad):
                dtypes[name] = torch.bfloat16
            elif name in _lookup_tables(path, module):
                narrow = stored is None or stored.get(name) in (torch.bfloat16, None)
                if mode == "bf16" or (narrow and not parameter.requires_grad):
                    dtypes[name] = torch.bfloat16
    return dtypes


def apply(network: nn.Module, mode: str, stored: Mapping[str, torch.dtype] | None = None) -> dict[str, torch.dtype]:
    """Cast the parameters of a network in place, on the meta device or a real one; returns `weight_dtypes`."""
    dtypes = weight_dtypes(network, mode, stored)
    for name, parameter in network.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])
    return dtypes


def is_mixed(network: nn.Module) -> bool:
    """Whether a network keeps weights in bfloat16 beside float32 ones, so that it has to run under autocast."""
    dtypes = {parameter.dtype for parameter in network.parameters()}
    return torch.bfloat16 in dtypes and torch.float32 in dtypes


def context(network: nn.Module) -> AbstractContextManager[object]:
    """bfloat16 autocast on the network's device where its weights need it; for evaluation and deployment."""
    if not is_mixed(network):
        return nullcontext()
    return torch.autocast(next(network.parameters()).device.type, torch.bfloat16)


def _only_in_products(module: nn.Module, name: str) -> bool:
    if isinstance(module, CategorySpecificLinear):
        # The bias is added after the product: in float32 it lifts the result, and the token stream, to float32.
        return name.endswith("W")
    return isinstance(module, nn.Linear | nn.Conv3d)


def _lookup_tables(path: str, module: nn.Module) -> tuple[str, ...]:
    # The head's position embedding is added as it stands and is small: float32 in every mode.
    if isinstance(module, nn.Embedding) and path.endswith(("embed_tokens", "visual.pos_embed")):
        return (f"{path}.weight",)
    return ()
