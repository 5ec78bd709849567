"""Where the network can be cut: layers, and which parameters are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from models.common.block_options import CheckpointingConfig, CompileConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from models.common.checkpointing import CheckpointingReport
    from models.common.compile import CompileReport
    from models.cosmos3_policy.network import Cosmos3Policy

BLOCKS = CompileConfig(scope="blocks")
VARLEN = "torch_attn._varlen_attn"
"""FlashAttention over packed samples, as checkpointing knows it."""
LENGTH_MULTIPLE = 256
"""Caption tokens of a pack are padded to a multiple of this for compiled layers: few shapes, few graphs."""
ACTION_HEADS = ("action_proj_in.", "action_proj_out.", "action_modality_embed")
"""Beginnings of the names that make up the action heads: fresh in a warm start, at five times the learning rate."""
_TRAINED = ("norm_moe_gen.", "proj_in.", "proj_out.", "time_embedder.", *ACTION_HEADS)
_TRAINED_IN_LAYER = ("_moe_gen.", ".add_", ".to_add_out.", ".norm_added_")


def is_trained(name: str) -> bool:
    """Whether a parameter belongs to the generation tower and its heads; the caption tower is frozen."""
    return name.startswith(_TRAINED) or any(part in name for part in _TRAINED_IN_LAYER)


def set_trainable(network: Cosmos3Policy) -> None:
    """Set requires_grad by name."""
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(is_trained(name))


def blocks(network: Cosmos3Policy) -> dict[str, list[nn.Module]]:
    """The layers, whose forward is the generation tower's: the units to compile, checkpoint or shard."""
    return {"layers": list(network.layers)}


def gradient_blocks(network: Cosmos3Policy) -> dict[str, list[nn.Module]]:
    """The blocks that run with gradients, so that they keep activations: all of them."""
    return blocks(network)


def checkpoint_blocks(
    network: Cosmos3Policy, config: CheckpointingConfig, *, example: Callable[[], Any] | None = None
) -> CheckpointingReport:
    """Make the chosen layers recompute in the backward pass, in place; before they are compiled and sharded.

    What captions go through is not recomputed: it has no backward pass. `network.checkpointing` keeps the report.
    Arguments: `models.common.checkpointing.apply`.
    """
    import torch.nn.attention.varlen  # noqa: F401 (defines the operation that is to be kept)

    from models.common import checkpointing

    save = (*checkpointing.DEFAULT_SAVE, VARLEN)
    report = checkpointing.apply(gradient_blocks(network), config, example=example, default_save=save)
    network.checkpointing = report
    return report


def compile_network(
    network: Cosmos3Policy, config: CompileConfig = BLOCKS, *, backend: str | Callable = "inductor"
) -> CompileReport:
    """Compile the layers of the generation tower in place. Parameter names stay; `network.compiled` keeps the report.

    Raises:
        ValueError: scope `model`, which packs of changing lengths would compile again and again.
    """
    from models.common import compile as compiling

    if config.scope == "model":
        raise ValueError("compile.scope=model: this model is compiled layer by layer, set compile.scope=blocks")
    report = compiling.apply(blocks(network), config, backend=backend)
    network.compiled = report
    if config.scope == "blocks":
        network.length_multiple = LENGTH_MULTIPLE
    return report


def shard(network: Cosmos3Policy, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None) -> None:
    """Shard what is trained over the last axis of a mesh, in place; what is frozen stays whole and is never gathered.

    After checkpointing and compiling of the layers. Parameter names stay; parameters become DTensors. Enter the
    network by `forward` or `generate`; `understand` runs on frozen weights alone.

    Args:
        policy: dtypes of gathered weights and reduced gradients; None means those of the parameters.
    """
    from models.common.mesh import shard_modules

    # The noise level is embedded in float32. Norms are rounded as the stream is that they read.
    unrounded = [network.time_embedder]
    shard_modules(network, list(network.layers), mesh, policy, entries=("generate",), unrounded=unrounded)


def tuned_parameters(network: Cosmos3Policy) -> dict[str, nn.Parameter]:
    """Trained parameters by name."""
    return {name: p for name, p in network.named_parameters() if p.requires_grad}
