"""Memory of a rank in training, by part: what stays, from the network's shapes, and what a step adds, from its pack.

Trained weights, their gradients, averages and optimiser state are float32 and split over the ranks of a shard; frozen
weights are whole on every rank and in bfloat16, so that no step gathers them. Not in it: what kernels and the video
encoder use while they run, what the loader has prefetched, the device's context and fragmentation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.flops import PackShape
from models.cosmos3_policy.parallelize import is_trained

FP32, BF16 = 4, 2
PARTS = ("generation_layers", "caption_layers", "token_embedding", "lm_head", "heads")
_LONELY = {"embed_tokens.weight": "token_embedding", "lm_head.weight": "lm_head", "norm.weight": "caption_layers"}
_GATHERED_LAYERS = 2
"""The layer that runs and the next, whose weights are already on their way."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank. `weights`, `gradients`, `optimizer` and `averages` by part (`PARTS`); `step` by purpose.

    parameters, trained: numbers of values of the whole network. notes: lines under the table.
    """

    weights: Mapping[str, int]
    gradients: Mapping[str, int]
    optimizer: Mapping[str, int]
    averages: Mapping[str, int]
    step: Mapping[str, int]
    parameters: int
    trained: int
    notes: tuple[str, ...] = field(default=())

    @property
    def static_total(self) -> int:
        columns = (self.weights, self.gradients, self.optimizer, self.averages)
        return sum(sum(column.values()) for column in columns)

    @property
    def total(self) -> int:
        return self.static_total + sum(self.step.values())

    def table(self) -> str:
        """Parts by row in GB (1e9 bytes), for people."""
        columns = {name: getattr(self, name) for name in ("weights", "gradients", "optimizer", "averages")}
        lines = [f"{'GB on a rank':<20}" + "".join(f"{name:>11}" for name in (*columns, "total"))]
        rows = [(part, [column.get(part, 0) for column in columns.values()]) for part in PARTS]
        rows.append(("static", [sum(column.values()) for column in columns.values()]))
        for name, values in rows:
            lines.append(f"{name:<20}" + "".join(f"{value / 1e9:>11.2f}" for value in (*values, sum(values))))
        lines += [f"{name:<64}{value / 1e9:>11.2f}" for name, value in self.step.items()]
        if self.step:
            lines.append(f"{'total':<64}{self.total / 1e9:>11.2f}")
        lines.append(f"{self.parameters / 1e6:,.1f} M parameters, {self.trained / 1e6:,.1f} M trained")
        return "\n".join([*lines, *self.notes])


def predict(
    config: Cosmos3PolicyConfig,
    *,
    shard: int = 1,
    averaged: bool = True,
    frozen_dtype: torch.dtype = torch.bfloat16,
    shape: PackShape | None = None,
    recomputed: int | None = None,
    gathers: bool | None = None,
    video_bytes: int = 0,
) -> Memory:
    """Memory of training a network of this configuration.

    Args:
        shard: ranks over which the trained state is split; replicas change nothing.
        averaged: whether averages of the trained weights are kept.
        frozen_dtype: of the frozen weights.
        shape: the pack of a rank; None leaves out what a step adds.
        recomputed: layers that recompute; None means all of them.
        gathers: trained weights are gathered in bfloat16 layer by layer; by default where `shard` is above 1. Otherwise
            autocast keeps a bfloat16 copy of every trained matrix for the length of a step.
        video_bytes: of the clips of a pack on the device.
    """
    from models.cosmos3_policy.network import Cosmos3Policy

    with torch.device("meta"):
        network = Cosmos3Policy(config)
    trained, frozen = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
    for name, parameter in network.named_parameters():
        (trained if is_trained(name) else frozen)[_part(name)] += parameter.numel()
    whole = sum(trained.values())

    def split(size: int) -> dict[str, int]:
        return {part: -(-count * size // shard) for part, count in trained.items()}

    weights = {part: value + frozen[part] * frozen_dtype.itemsize for part, value in split(FP32).items()}
    layers = config.num_hidden_layers
    gathers = shard > 1 if gathers is None else gathers
    step: dict[str, int] = {}
    if shape is not None:
        layer = trained["generation_layers"] // layers
        if gathers:
            heads = trained["heads"]
            step[f"gathered weights, {_GATHERED_LAYERS} layers and heads"] = (_GATHERED_LAYERS * layer + heads) * BF16
        else:
            step["bfloat16 copies of the trained weights"] = whole * BF16
        step |= activations(config, shape, layers if recomputed is None else recomputed)
        if video_bytes:
            step["clips"] = video_bytes
    notes = []
    if frozen["lm_head"]:
        size = frozen["lm_head"] * frozen_dtype.itemsize / 1e9
        notes.append(f"lm_head, {size:.2f} GB, is part of the checkpoint's layout and never runs")
    return Memory(
        weights=weights,
        gradients=split(FP32),
        optimizer=split(2 * FP32),
        averages=split(FP32) if averaged else dict.fromkeys(PARTS, 0),
        step=step,
        parameters=whole + sum(frozen.values()),
        trained=whole,
        notes=tuple(notes),
    )


def activations(config: Cosmos3PolicyConfig, shape: PackShape, recomputed: int) -> dict[str, int]:
    """Bytes a step keeps for its backward pass, the stream between the layers in bfloat16, by purpose.

    A layer that recomputes keeps its input; while it recomputes, it needs what any other layer keeps throughout.
    """
    tokens, texts, layers = sum(shape.generated), sum(shape.text), config.num_hidden_layers
    row = config.hidden_size * BF16
    keys = config.num_key_value_heads * config.head_dim
    inner = inner_bytes(config, shape)
    kept = layers - recomputed
    tables = 2 * FP32 * config.head_dim * tokens
    latents = config.patch_latent_dim * sum(shape.vision) + config.action_dim * sum(shape.action)
    return {
        "captions' keys and values of all layers": layers * 2 * keys * BF16 * texts,
        f"inputs of {layers} layers": layers * tokens * row,
        f"inside {kept} layers that do not recompute": kept * inner,
        "inside the layer that recomputes at the time": inner if recomputed else 0,
        "tokens before the first and after the last layer, angles": 3 * tokens * row + tables,
        "noise, noised values, targets and velocities": 4 * FP32 * latents,
    }


def inner_bytes(config: Cosmos3PolicyConfig, shape: PackShape) -> int:
    """Bytes that one layer keeps besides its input and the captions' keys and values, uncompiled, weights left out.

    A compiled layer keeps less: what is cheap is computed again.
    """
    tokens, texts = sum(shape.generated), sum(shape.text)
    width, inner = config.hidden_size, config.intermediate_size
    heads, pairs = config.num_attention_heads, config.num_key_value_heads
    queries, keys = heads * config.head_dim, pairs * config.head_dim
    # norms: the normed stream twice; query and key before and after their norm and rotation; the value; the output of
    # attention; the stream after it; gate, its activation, up and their product
    stream = 3 * width + 2 * queries + 2 * keys + keys + queries + 4 * inner
    # in float32: reciprocal norms of the stream, queries and keys, and the log-sum-exp of attention
    scalars = 2 + heads + pairs + heads
    return tokens * (stream * BF16 + scalars * FP32) + texts * 2 * keys * BF16


def _part(name: str) -> str:
    if name in _LONELY:
        return _LONELY[name]
    if name.startswith("layers."):
        return "generation_layers" if is_trained(name) else "caption_layers"
    return "generation_layers" if name == "norm_moe_gen.weight" else "heads"
