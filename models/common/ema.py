"""Exponential moving average of the trained weights, in float32, beside the network they belong to.

The averages are parameters of their own, named like the network's and never trained: they are saved and restored with
the module that holds them, move with it, and are sharded where the network's are. Training is the same with and
without them.
"""

import logging
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models.common.step_options import EmaConfig

logger = logging.getLogger(__name__)

RATE, DECAY = 0.1, 0.999


def power_exponent(rate: float) -> float:
    """Exponent g of the averaging profile t^g whose standard deviation is `rate` of the run so far.

    Karras et al. 2023 (arXiv 2312.02696), equation 126: the largest real root of a cubic; 6.94 at 0.1.
    """
    roots = np.roots([1.0, 7.0, 16.0 - rate**-2, 12.0 - rate**-2])
    return float(max(root.real for root in roots if abs(root.imag) < 1e-9))


class Ema(nn.Module):
    """Averages of the trained parameters of one network.

    Args:
        config: which average.
    """

    def __init__(self, config: EmaConfig) -> None:
        super().__init__()
        self.config = config
        self._exponent = power_exponent(config.rate or RATE) + 1.0 if config.kind == "power" else 0.0
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._applied = False

    def beta(self, step: int) -> float:
        """What step `step`, the first being 1, leaves of the average; 0 in the first step of a power average."""
        if self.config.kind == "constant":
            return self.config.decay or DECAY
        return (1.0 - 1.0 / step) ** self._exponent

    def track(self, network: nn.Module) -> None:
        """Begin at the network's present weights, or, called again, follow its parameters wherever they are now.

        Call it again when parameters have been replaced, as sharding does, which begins anew.
        """
        trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
        kept = {name: p for name, p in self.named_parameters() if name in trained and _alike(p, trained[name])}
        self._modules.clear()
        self._parameters.clear()
        self._pairs = []
        for name, parameter in trained.items():
            average = kept.get(name)
            if average is None:
                average = nn.Parameter(parameter.detach().to(torch.float32, copy=True), requires_grad=False)
            _put(self, name, average)
            self._pairs.append((parameter, average))

    @torch.no_grad()
    def update(self, step: int, value_of: Callable[[nn.Parameter], Tensor] | None = None) -> None:
        """Take in the weights after step `step`, the first being 1.

        Args:
            value_of: float32 values of a parameter that is kept in less, such as `SplitAdamW.master`.
        """
        assert not self._applied, "the network holds its averages: nothing can be taken from it"
        if not self._pairs:
            return
        values = [_local(p if value_of is None else value_of(p)).float() for p, _ in self._pairs]
        torch._foreach_lerp_([_local(average) for _, average in self._pairs], values, 1.0 - self.beta(step))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The network computes with its averages inside; afterwards every weight is back, bit for bit.

        float32 weights change places with their averages, which takes no memory.
        """
        kept: list[Tensor | None] = []
        with torch.no_grad():
            for parameter, average in self._pairs:
                weight = _local(parameter).clone()
                _local(parameter).copy_(_local(average))
                exchanged = weight.dtype == torch.float32
                if exchanged:
                    _local(average).copy_(weight)
                kept.append(None if exchanged else weight)
        self._applied = True
        try:
            yield
        finally:
            with torch.no_grad():
                for (parameter, average), weight in zip(self._pairs, kept, strict=True):
                    if weight is None:
                        weight, own = _local(average).clone(), _local(parameter)
                        _local(average).copy_(own)
                    _local(parameter).copy_(weight)
            self._applied = False

    def complete(self, state: MutableMapping[str, Any], *, own: str = "ema.", network: str = "network.") -> None:
        """Give a checkpoint that holds no averages those that begin at its weights.

        Args:
            state: a checkpoint's state dict, changed in place.
            own, network: prefixes of the averages and of the network in it.
        """
        missing = [name for name, _ in self.named_parameters() if f"{own}{name}" not in state]
        if missing:
            logger.warning("ema: the checkpoint holds no averages of %d tensors; they begin here", len(missing))
        for name in missing:
            state[f"{own}{name}"] = state[f"{network}{name}"].detach().to(torch.float32, copy=True)


def without_averages(state: MutableMapping[str, Any], own: str = "ema.") -> None:
    """Take the averages out of a checkpoint's state dict, for a run that keeps none."""
    for name in [name for name in state if name.startswith(own)]:
        del state[name]


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register under a dotted name, which becomes a nest of empty modules."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        child = module._modules[part]
        assert child is not None
        module = child
    module.register_parameter(last, parameter)


def _alike(average: Tensor, parameter: Tensor) -> bool:
    """Same shape and laid out over the same ranks."""
    layouts = [(getattr(t, "device_mesh", None), getattr(t, "placements", None)) for t in (average, parameter)]
    return average.shape == parameter.shape and layouts[0] == layouts[1]


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, or the tensor; writing to it writes to the whole."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator, no-any-return]
