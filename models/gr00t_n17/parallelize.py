"""Where the network can be cut: transformer blocks by part, and which parameters are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from models.common.block_options import CheckpointingConfig, CompileConfig
from models.gr00t_n17.config import GR00TN17Config

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from models.common.checkpointing import CheckpointingReport
    from models.common.compile import CompileReport
    from models.gr00t_n17.network import GR00TN17

WHOLE = CompileConfig(scope="model")


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


def gradient_blocks(network: GR00TN17) -> dict[str, list[nn.Module]]:
    """The blocks that run with gradients, so that they keep activations; of the decoder these are its last layers."""
    backbone, head = network.backbone, network.action_head
    by_part = blocks(network)
    if not backbone.train_visual:
        by_part["vision"] = []
        by_part["llm"] = by_part["llm"][backbone.llm_grad_from :]
    adapter = (head.vlln, head.vl_self_attention)
    if not by_part["llm"] and not any(p.requires_grad for module in adapter for p in module.parameters()):
        by_part["vl_self_attention"] = []
    return by_part


def checkpoint_blocks(
    network: GR00TN17, config: CheckpointingConfig, *, example: Callable[[], Any] | None = None
) -> CheckpointingReport:
    """Make the chosen blocks recompute in the backward pass, in place; before they are compiled and sharded.

    Blocks are counted among those of their part that run with gradients. `network.checkpointing` keeps the report,
    from which `recompute.recompute_flops` knows the cost. Arguments: `models.common.checkpointing.apply`.
    """
    from models.common import checkpointing

    report = checkpointing.apply(gradient_blocks(network), config, example=example)
    network.checkpointing = report
    return report


def compile_network(
    network: GR00TN17, config: CompileConfig = WHOLE, *, backend: str | Callable = "inductor"
) -> CompileReport:
    """Compile in place: each block by itself, or (scope `model`) the backbone and the head's loss as one graph each.

    Parameter names stay. Shapes are static unless `dynamic` says otherwise: pad prompts to few lengths
    (processor.prompt_multiple), or each new length compiles again. For scope `model` pass noise and time to the loss,
    and one integer or device tensor as embodiment id. `network.compiled` keeps the report.
    """
    from models.common import compile as compiling

    if config.scope == "model":
        functions = {"backbone": (network.backbone, "compute"), "head": (network.action_head, "loss")}
        report = compiling.apply_to_functions(functions, config, backend=backend)
    else:
        report = compiling.apply(blocks(network), config, backend=backend)
    network.compiled = report
    return report


def shard(network: GR00TN17, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None) -> None:
    """Shard what is trained over the last axis of a mesh, in place; what is frozen stays whole and is never gathered.

    After checkpointing and compiling of the blocks. Parameter names stay; parameters become DTensors. Enter the
    network by its `forward`, or its backbone by `forward` or `upper` and its head by `loss` or `sample`.

    Args:
        policy: dtypes of gathered weights and reduced gradients; None means those of the parameters.
    """
    from models.common.mesh import shard_modules

    by_part = blocks(network)
    shard_modules(network.backbone, [*by_part["vision"], *by_part["llm"]], mesh, policy, entries=("upper",))
    units = [*by_part["vl_self_attention"], *by_part["dit"]]
    shard_modules(network.action_head, units, mesh, policy, entries=("loss", "sample"))


def tuned_parameters(network: GR00TN17) -> dict[str, nn.Parameter]:
    """Trained parameters by name."""
    return {name: p for name, p in network.named_parameters() if p.requires_grad}
