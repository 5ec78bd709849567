"""Model FLOPs of a pack, forward and in a training step, counted from the configuration (a multiply-add is two).

Two definitions stand side by side. `Flops.training` is the numerator of MFU here and for the other models: matrix
products and attention (full, also where it is causal), the frozen caption tower forward only; the module adds the
frozen video encoder, `vae_flops`. `upstream_flops` counts as the callback of NVIDIA's framework does: normalisation,
softmax and activations too, a backward pass of everything, frozen or not, and all layers once more as soon as anything
recomputes. What it calls MFU is nearer to HFU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.common.checkpointing import CheckpointingReport, kept_kinds
from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.layers.heads import SINUSOID

if TYPE_CHECKING:
    from models.cosmos3_policy.network import Cosmos3Policy
    from models.cosmos3_policy.packed import Packed

# Upstream's costs of one element.
_NORM, _SOFTMAX, _SWIGLU = 5, 5, 3


@dataclass(frozen=True, kw_only=True)
class PackShape:
    """Lengths of the samples of a pack: caption tokens, latent patches and action rows, one number each a sample."""

    text: tuple[int, ...]
    vision: tuple[int, ...]
    action: tuple[int, ...]

    @classmethod
    def of(cls, packed: Packed, config: Cosmos3PolicyConfig) -> PackShape:
        """From shapes and host integers alone: nothing is read from the device."""
        vision: list[int] = []
        action: list[int] = []
        for group in packed.groups():
            count = group.stop - group.start
            vision += [group.tokens(config.latent_patch_size) - group.rows] * count
            action += [group.rows] * count
        return cls(text=packed.text_lengths, vision=tuple(vision), action=tuple(action))

    @property
    def generated(self) -> tuple[int, ...]:
        """Tokens of the generation tower."""
        return tuple(v + a for v, a in zip(self.vision, self.action, strict=True))


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Products of one pack's forward pass by part, and what the backward pass does not need of the heads'."""

    understanding: int
    generation: int
    heads: int
    unneeded: int
    """Gradients of inputs that no weight stands before."""

    @property
    def forward(self) -> int:
        return self.understanding + self.generation + self.heads

    @property
    def training(self) -> int:
        """Forward and backward; the frozen tower has no backward pass."""
        return self.understanding + 3 * (self.generation + self.heads) - self.unneeded


@dataclass(frozen=True, kw_only=True)
class UpstreamFlops:
    """One pack as upstream counts it.

    frozen: a training step without the backward pass of the frozen tower. training: with it. recomputed: what is added
    in every checkpointing mode but none.
    """

    forward: int
    frozen: int
    training: int
    recomputed: int

    @property
    def checkpointed(self) -> int:
        """What upstream divides by time and peak when it checkpoints: its MFU, before the video encoder is added."""
        return self.training + self.recomputed


def count_flops(config: Cosmos3PolicyConfig, shape: PackShape) -> Flops:
    """Matrix products and attention of one pack."""
    texts, generated = sum(shape.text), sum(shape.generated)
    layers, weights = config.num_hidden_layers, _layer_weights(config)
    understood, seen = _pairs(shape)
    width, wide = config.hidden_size, _queries(config)
    vision = 2 * config.patch_latent_dim * width * sum(shape.vision)
    action = 2 * config.action_dim * width * sum(shape.action)
    time = 2 * SINUSOID * width * len(shape.text)
    return Flops(
        understanding=layers * (2 * weights * texts + 4 * wide * understood),
        generation=layers * (2 * weights * generated + 4 * wide * seen),
        heads=2 * vision + 2 * action + time + 2 * width * width * len(shape.text),
        unneeded=vision + action + time,
    )


def step_flops(network: Cosmos3Policy, shape: PackShape) -> int:
    """Model FLOPs of forward and backward of one micro-batch."""
    return count_flops(network.config, shape).training


def recompute_flops(network: Cosmos3Policy, shape: PackShape) -> int:
    """FLOPs that one micro-batch runs again for activation checkpointing; 0 without it.

    Only layers of the generation tower recompute. A recomputation ends where the backward has all it needs, so the last
    product of a layer does not run again; results kept by mode `selective` do not either.
    """
    report: CheckpointingReport | None = getattr(network, "checkpointing", None)
    if report is None or not report.recomputed:
        return 0
    config, kept = network.config, kept_kinds(report)
    _, seen = _pairs(shape)
    products = 0 if "mm" in kept else _layer_weights(config) - config.hidden_size * config.intermediate_size
    attention = 0 if "attention" in kept else 4 * _queries(config) * seen
    again = 2 * products * sum(shape.generated) + attention
    return sum(len(indices) for indices in report.recomputed.values()) * again


def upstream_flops(config: Cosmos3PolicyConfig, shape: PackShape) -> UpstreamFlops:
    """One pack by the formulas of the framework's callback; the embedder of noise levels counts once a modality."""
    texts, generated = sum(shape.text), sum(shape.generated)
    layers, weights, wide = config.num_hidden_layers, _layer_weights(config), _queries(config)
    width = config.hidden_size
    heads_width = wide + config.num_key_value_heads * config.head_dim
    each = 2 * weights + _SWIGLU * config.intermediate_size + _NORM * (2 * width + heads_width)
    pair = 4 * wide + _SOFTMAX * config.num_attention_heads
    understood, seen = _pairs(shape)
    blocks = layers * (each * (texts + generated) + pair * (understood + seen))
    embedder = 2 * (SINUSOID * width + width * width)
    edges = 4 * config.patch_latent_dim * width * sum(shape.vision) + 4 * config.action_dim * width * sum(shape.action)
    edges += embedder * ((sum(shape.vision) > 0) + (sum(shape.action) > 0))
    forward = blocks + edges + _NORM * width * (texts + generated)
    backward = 2 * (layers * (each * generated + pair * seen) + edges + _NORM * width * generated)
    return UpstreamFlops(forward=forward, frozen=forward + backward, training=3 * forward, recomputed=blocks)


def _layer_weights(config: Cosmos3PolicyConfig) -> int:
    """Matrix weights of one tower in one layer."""
    wide, keys = _queries(config), config.num_key_value_heads * config.head_dim
    return config.hidden_size * (2 * wide + 2 * keys + 3 * config.intermediate_size)


def _queries(config: Cosmos3PolicyConfig) -> int:
    return config.num_attention_heads * config.head_dim


def _pairs(shape: PackShape) -> tuple[int, int]:
    """(query, key) pairs of the caption tower, its mask taken for full, and of the generation tower."""
    understood = sum(length * length for length in shape.text)
    seen = sum(own * (own + text) for own, text in zip(shape.generated, shape.text, strict=True))
    return understood, seen
