"""Static memory of a training run by part: weights, gradients and optimiser state, counted from the network's shapes.

Activations depend on the batch and are not in it, nor are the device's context and fragmentation. Data parallelism adds
nothing: gradients are views into its buckets.
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
    """Bytes. `weights` by part (`PARTS`); `gradients` and `optimizer` of the trained parameters, by part as well.

    `autocast_copies` is what autocast keeps beside them from the forward pass to the end of the backward: one bfloat16
    copy of every trained float32 weight that enters a product. It is not part of the static total.
    """

    weights: dict[str, int]
    gradients: dict[str, int]
    optimizer: dict[str, int]
    autocast_copies: int
    parameters: int
    trained: int

    @property
    def static_total(self) -> int:
        return sum(self.weights.values()) + sum(self.gradients.values()) + sum(self.optimizer.values())

    def table(self) -> str:
        """Parts by row in GB (1e9 bytes), for people."""
        lines = [f"{'GB':<20}{'weights':>9}{'gradients':>11}{'optimizer':>11}{'total':>8}"]
        rows = [(part, self.weights[part], self.gradients[part], self.optimizer[part]) for part in PARTS]
        sums = [sum(column.values()) for column in (self.weights, self.gradients, self.optimizer)]
        for name, *values in (*rows, ("static", *sums)):
            cells = [f"{value / 1e9:.2f}" for value in (*values, sum(values))]
            lines.append(f"{name:<20}{cells[0]:>9}{cells[1]:>11}{cells[2]:>11}{cells[3]:>8}")
        lines.append(
            f"{self.parameters / 1e6:.1f} M parameters, {self.trained / 1e6:.1f} M trained; "
            f"during a step autocast keeps {self.autocast_copies / 1e9:.2f} GB more"
        )
        return "\n".join(lines)


def predict(config: GR00TN17Config, *, mode: str = "stock", slots: Sequence[int] | None = None) -> Memory:
    """Memory of training a network of this configuration: its tune switches, a precision mode and active slots."""
    from models.gr00t_n17.network import GR00TN17

    with torch.device("meta"):
        network = GR00TN17(config, slots=slots)
    precision.apply(network, mode)
    return measure(network)


def measure(network: GR00TN17) -> Memory:
    """Memory of training a network as it stands: dtypes and requires_grad of its parameters, adapters included.

    Optimiser state per trained parameter: two float32 moments, and 16 bits more where the parameter is bfloat16.
    """
    weights, gradients, optimizer = (dict.fromkeys(PARTS, 0) for _ in range(3))
    copies = parameters = trained = 0
    narrow = precision.weight_dtypes(network, "bf16")
    for name, parameter in network.named_parameters():
        part = next(part for part, prefix in _PARTS.items() if name.startswith(prefix))
        count, size = parameter.numel(), parameter.element_size()
        parameters += count
        weights[part] += count * size
        if parameter.requires_grad:
            trained += count
            gradients[part] += count * size
            optimizer[part] += count * (10 if parameter.dtype == torch.bfloat16 else 8)
            if parameter.dtype == torch.float32 and narrow[name] == torch.bfloat16:
                copies += count * 2
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        autocast_copies=copies,
        parameters=parameters,
        trained=trained,
    )
