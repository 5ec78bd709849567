"""Low-rank adapters (LoRA, arXiv 2106.09685) on the transformer blocks, and merging them back into the weights.

A part that is named as a target is frozen as a whole and trains its adapters instead; all other parts follow the tune
switches. Adapters sit on every linear layer of the part's blocks but the ones that make the adaptive norms' scale and
shift. They are the layers of the package peft, which is only needed to train them, not to merge or to deploy.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from models.gr00t_n17.parallelize import blocks

if TYPE_CHECKING:
    from models.gr00t_n17.network import GR00TN17

TARGETS = ("llm", "vision", "dit", "vl_self_attention")
_ADAPTER = "default"  # peft's name of the only adapter of a layer
_SEED_BITS = 63


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters B A of one rank, scaled by alpha / rank; `dropout` acts on their input."""

    targets: tuple[str, ...]
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", tuple(self.targets))
        problems = []
        unknown = [target for target in self.targets if target not in TARGETS]
        if unknown or not self.targets or len(set(self.targets)) != len(self.targets):
            problems.append(f"targets={list(self.targets)}: one or more of {', '.join(TARGETS)}, each once")
        if self.rank < 1:
            problems.append(f"rank={self.rank}: at least 1")
        if not self.alpha > 0:
            problems.append(f"alpha={self.alpha}: above 0")
        if not 0 <= self.dropout < 1:
            problems.append(f"dropout={self.dropout}: in [0, 1)")
        if problems:
            raise ValueError("lora: " + "; ".join(problems))

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


def freeze_targets(network: GR00TN17, config: LoraConfig) -> None:
    """Freeze the parts that get adapters; the network may be on the meta device.

    Call it before dtypes are chosen (`precision.weight_dtypes`), so that these weights count as frozen there.
    """
    whole = {
        "llm": network.backbone.language_model,
        "vision": network.backbone.visual,
        "dit": network.action_head.model,
        "vl_self_attention": network.action_head.vl_self_attention,
    }
    for target in config.targets:
        whole[target].requires_grad_(False)
        if not list(adapted_layers(network, target)):
            raise ValueError(f"lora.targets: {target} has no blocks in this model; leave it out")
    network.train(network.training)


def add_lora(network: GR00TN17, config: LoraConfig, *, seed: int) -> None:
    """Put adapters on the targets, in place. The network computes the same as before: every B begins at zero.

    Args:
        network: with its weights loaded and in their dtypes: the names of the adapted weights change here.
        config: what to adapt.
        seed: of the first values of A, which are the same on every rank.

    Raises:
        ValueError: peft is not installed, the network is on the meta device or has adapters already.
    """
    if importlib.util.find_spec("peft") is None:
        raise ValueError("adapters (model.lora) need the package peft; install the extra: pip install -e '.[lora]'")
    if any(parameter.is_meta for parameter in network.parameters()):
        raise ValueError("add_lora: the network is on the meta device; load its weights before")
    if any(True for _ in lora_layers(network)):
        raise ValueError("add_lora: the network has adapters already; merge_lora takes them in")
    import peft

    freeze_targets(network, config)
    names = [name for target in config.targets for name in adapted_layers(network, target)]
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    options = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=names, bias="none"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % (1 << _SEED_BITS))
        peft.inject_adapter_in_model(options, network, adapter_name=_ADAPTER)
    for name, parameter in network.named_parameters():
        # peft freezes everything else; the other parts keep what their switches say
        is_adapter = ".lora_A." in name or ".lora_B." in name
        parameter.requires_grad_(is_adapter or name in trained)
        if is_adapter:
            parameter.data = parameter.data.float()  # peft takes over the dtype of a bfloat16 layer
    backbone = network.backbone
    if "vision" in config.targets:
        backbone.train_visual = True
    if "llm" in config.targets:
        backbone.llm_grad_from = 0
    network.lora = config
    network.train(network.training)


def merge_lora(network: GR00TN17) -> None:
    """Add every adapter to the weight it sits on and take it away, in place; a network without adapters is left alone.

    Sums are formed in float32 and rounded once to the weight's own dtype. The merged weights stay frozen.
    """
    for name, layer in list(lora_layers(network)):
        base = layer.base_layer
        update = low_rank_update(layer)
        base.weight.data = (base.weight.data.float() + update).to(base.weight.dtype)
        parent, _, child = name.rpartition(".")
        setattr(network.get_submodule(parent), child, base)
    network.lora = None


def lora_layers(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Adapted layers by name: `base_layer` beside `lora_A` and `lora_B`."""
    for name, module in network.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "lora_A"):
            yield name, module


@torch.no_grad()
def low_rank_update(layer: nn.Module) -> Tensor:
    """What an adapter adds to its weight [out, in], in float32."""
    a, b = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
    return (b.float() @ a.float()) * layer.scaling[_ADAPTER]


def adapted_layers(network: GR00TN17, target: str) -> Iterator[str]:
    """Names of the linear layers of a target's blocks that get adapters."""
    of_blocks = {id(block) for block in blocks(network)[target]}
    for path, block in network.named_modules():
        if id(block) in of_blocks:
            for name, module in block.named_modules():
                if isinstance(module, nn.Linear) and not name.startswith("norm"):
                    yield f"{path}.{name}"
