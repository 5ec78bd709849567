"""Where the network can be cut: transformer blocks by part, and which parameters are trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from models.gr00t_n17.config import GR00TN17Config

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from models.gr00t_n17.network import GR00TN17


def blocks(network: GR00TN17) -> dict[str, list[nn.Module]]:
    """Transformer blocks in the order they run, by part: the units to compile, checkpoint or shard."""
    head = network.action_head
    return {
        "vision": list(network.backbone.visual.blocks),
        "llm": list(network.backbone.language_model.layers),
        "vl_self_attention": list(head.vl_self_attention.transformer_blocks),
        "dit": list(head.model.transformer_blocks),
    }


def parts(network: GR00TN17) -> dict[str, list[nn.Module]]:
    """Modules behind each tune switch of the config; `tune_top_llm_layers` is handled by `set_trainable`."""
    head = network.action_head
    projector: list[nn.Module] = [head.state_encoder, head.action_encoder, head.action_decoder]
    if network.config.add_pos_embed:
        projector.append(head.position_embedding)
    return {
        "tune_visual": [network.backbone.visual],
        "tune_llm": [network.backbone.language_model],
        "tune_projector": projector,
        "tune_diffusion_model": [head.model],
        "tune_vlln": [head.vlln, head.vl_self_attention],
    }


def set_trainable(network: GR00TN17, config: GR00TN17Config) -> None:
    """Set requires_grad by the tune switches and tell the backbone from where on it needs gradients."""
    for switch, modules in parts(network).items():
        for module in modules:
            module.requires_grad_(getattr(config, switch))
    layers = network.backbone.language_model.layers
    first_trained = 0 if config.tune_llm else len(layers) - config.tune_top_llm_layers
    for layer in layers[first_trained:]:
        layer.requires_grad_(True)
    network.backbone.train_visual = config.tune_visual
    network.backbone.llm_grad_from = first_trained
    # The head taps before the final norm, so this weight never gets a gradient, which DDP would wait for.
    network.backbone.language_model.norm.requires_grad_(False)
    network.train(network.training)


def compile_network(network: GR00TN17, **options: Any) -> None:
    """Compile the device work of a step in place, as one graph for the backbone and one for the head's loss.

    Parameter names stay. Shapes are static: pad prompts to few lengths (processor.prompt_multiple), or each new length
    compiles again. Pass noise and time to the loss, and one integer or device tensor as embodiment id.

    Args:
        options: of `torch.compile`, e.g. mode or backend.
    """
    options = {"dynamic": False, "fullgraph": True, **options}
    backbone: Any = network.backbone
    head: Any = network.action_head
    backbone.compute = torch.compile(backbone.compute, **options)
    head.loss = torch.compile(head.loss, **options)


def shard(network: GR00TN17, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None) -> None:
    """Shard what is trained over the last axis of a mesh, in place; what is frozen stays whole and is never gathered.

    After checkpointing and compiling of the blocks. Parameter names stay; parameters become DTensors. Enter the
    network by its `forward`, or its backbone by `forward` and its head by `loss` or `sample`.

    Args:
        policy: dtypes of gathered weights and reduced gradients; None means those of the parameters.
    """
    from models.common.mesh import shard_modules

    by_part = blocks(network)
    shard_modules(network.backbone, [*by_part["vision"], *by_part["llm"]], mesh, policy)
    units = [*by_part["vl_self_attention"], *by_part["dit"]]
    shard_modules(network.action_head, units, mesh, policy, entries=("loss", "sample"))


def tuned_parameters(network: GR00TN17) -> dict[str, nn.Parameter]:
    """Trained parameters by name."""
    return {name: p for name, p in network.named_parameters() if p.requires_grad}
