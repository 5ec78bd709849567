"""Static memory of a rank in training by part: weights, gradients, optimiser state and averages, from shapes alone.

Activations depend on the batch and are not in it, nor are the device's context and fragmentation. Data parallelism adds
nothing: gradients are views into its buckets. Sharding splits what is trained; frozen weights are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from models.gr00t_n17 import precision
from models.gr00t_n17.config import GR00TN17Config

if TYPE_CHECKING:
    from models.gr00t_n17.network import GR00TN17

# The first prefix that fits decides; names are those of the state dict.
_PARTS = {
    "vision": "backbone.model.model.visual.",
    "token_embedding": "backbone.model.model.language_model.embed_tokens.",
    "decoder": "backbone.model.model.language_model.",
    "vl_adapter": "action_head.vl",
    "dit": "action_head.model.",
    "encoders": "action_head.",
}
PARTS = tuple(_PARTS)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes. `weights` by part (`PARTS`); the other three of the trained parameters, by part as well.

    `autocast_copies` is what autocast keeps beside them from the forward pass to the end of the backward: one bfloat16
    copy of every trained float32 weight that enters a product; of a sharded run, where blocks are gathered and freed
    one after the other, 0. It is not part of the static total.
    """

    weights: dict[str, int]
    gradients: dict[str, int]
    optimizer: dict[str, int]
    averages: dict[str, int]
    autocast_copies: int
    parameters: int
    trained: int

    @property
    def static_total(self) -> int:
        columns = (self.weights, self.gradients, self.optimizer, self.averages)
        return sum(sum(column.values()) for column in columns)

    def table(self) -> str:
        """Parts by row in GB (1e9 bytes), for people."""
        columns = {name: getattr(self, name) for name in ("weights", "gradients", "optimizer", "averages")}
        lines = [f"{'GB on a rank':<20}" + "".join(f"{name:>11}" for name in (*columns, "total"))]
        rows = [(part, [column[part] for column in columns.values()]) for part in PARTS]
        rows.append(("static", [sum(column.values()) for column in columns.values()]))
        for name, values in rows:
            lines.append(f"{name:<20}" + "".join(f"{value / 1e9:>11.2f}" for value in (*values, sum(values))))
        copies = self.autocast_copies / 1e9
        more = f"; during a step autocast keeps {copies:.2f} GB more" if self.autocast_copies else ""
        lines.append(f"{self.parameters / 1e6:.1f} M parameters, {self.trained / 1e6:.1f} M trained{more}")
        return "\n".join(lines)


def predict(config: GR00TN17Config, *, mode: str = "stock", slots: Sequence[int] | None = None) -> Memory:
    """Memory of training a network of this configuration: its tune switches, a precision mode and active slots."""
    from models.gr00t_n17.network import GR00TN17

    with torch.device("meta"):
        network = GR00TN17(config, slots=slots)
    precision.apply(network, mode)
    return measure(network)


def measure(network: GR00TN17, *, shard: int = 1, averaged: bool = False) -> Memory:
    """Memory of training a network as it stands: dtypes and requires_grad of its parameters, adapters included.

    Optimiser state per trained parameter: two float32 moments, and 16 bits more where the parameter is bfloat16.

    Args:
        shard: ranks over which what is trained is split, each tensor along its first axis.
        averaged: whether averages of the trained weights are kept.
    """
    weights, gradients, optimizer, averages = (dict.fromkeys(PARTS, 0) for _ in range(4))
    copies = parameters = trained = 0
    narrow = precision.weight_dtypes(network, "bf16")
    for name, parameter in network.named_parameters():
        part = next(part for part, prefix in _PARTS.items() if name.startswith(prefix))
        count, size = parameter.numel(), parameter.element_size()
        parameters += count
        if parameter.requires_grad:
            trained += count
            if shard == 1 and parameter.dtype == torch.float32 and narrow[name] == torch.bfloat16:
                copies += count * 2
            count = _largest_shard(parameter, shard)
            gradients[part] += count * size
            optimizer[part] += count * (10 if parameter.dtype == torch.bfloat16 else 8)
            averages[part] += count * 4 if averaged else 0
        weights[part] += count * size
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        averages=averages,
        autocast_copies=copies,
        parameters=parameters,
        trained=trained,
    )


def _largest_shard(parameter: torch.Tensor, shard: int) -> int:
    """Values of a parameter on its first rank: rows are dealt in equal runs, the last of which may be short."""
    if not parameter.dim():
        return parameter.numel()
    rows = parameter.shape[0]
    return -(-rows // shard) * (parameter.numel() // max(1, rows))
