"""AdamW for bfloat16 parameters that loses nothing: the optimiser holds the lower half of their float32 values.

A float32 number is its nearest bfloat16 plus a signed 16-bit remainder of its bit pattern. The parameter is that
bfloat16, the state keeps the remainder, and each update runs in float32 on the two put together: 14 bytes per parameter
with gradient and moments instead of 16 for float32 weights, and no bfloat16 copies of the weights during the step.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

_FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")


class SplitAdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW` on the float32 values of its parameters, which may be bfloat16 or float32.

    For equal gradients the float32 values are those of AdamW on float32 parameters, bit for bit; a bfloat16 parameter
    is always the nearest to its float32 value (ties away from zero).

    Args:
        params: parameters or groups.
        lr, betas, eps, weight_decay: as in AdamW.
        fused: one kernel for the update, where the device has it.
        chunk: parameters updated at a time; bounds the float32 temporaries to 8 bytes each.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        fused: bool = True,
        chunk: int = 1 << 25,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": fused})
        self.chunk = chunk
        for group in self.param_groups:
            wrong = {p.dtype for p in group["params"]} - {torch.bfloat16, torch.float32}
            if wrong:
                raise ValueError(f"SplitAdamW: parameters of {wrong}; bfloat16 and float32 are handled")
            if any(hasattr(p, "to_local") for p in group["params"]):
                raise ValueError("SplitAdamW: sharded parameters are not handled; train with precision stock or lean")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters in self._chunks(p for p in group["params"] if p.grad is not None):
                self._update(parameters, group)
        return loss

    def master(self, parameter: Tensor) -> Tensor:
        """The float32 value of a parameter (a copy)."""
        low = self.state.get(parameter, {}).get("low")
        return parameter.detach().float() if low is None else join(parameter.detach(), low)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in the base class, which would round moments and remainders to the parameters' bfloat16."""
        super().load_state_dict(state_dict)
        keys = (key for group in state_dict["param_groups"] for key in group["params"])
        parameters = (p for group in self.param_groups for p in group["params"])
        for key, parameter in zip(keys, parameters, strict=True):
            saved = state_dict["state"].get(key, {})
            if saved and ("low" in saved) != (parameter.dtype == torch.bfloat16):
                raise ValueError(
                    "the saved optimizer state belongs to another precision mode: a run continues in the mode it was "
                    "started in (model.precision)"
                )
            for name, value in saved.items():
                if name != "step":
                    self.state[parameter][name] = value.detach().clone().to(parameter.device)

    def _chunks(self, parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
        found: list[Tensor] = []
        size = 0
        for parameter in parameters:
            if found and size + parameter.numel() > self.chunk:
                yield found
                found, size = [], 0
            found.append(parameter)
            size += parameter.numel()
        if found:
            yield found

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        fused = group["fused"] and parameters[0].device.type in _FUSED_DEVICES
        states = [self._state(parameter, fused) for parameter in parameters]
        masters = [join(p, state["low"]) if "low" in state else p for p, state in zip(parameters, states, strict=True)]
        adamw(
            masters,
            [parameter.grad.float() for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            foreach=False,
            fused=fused,
            grad_scale=getattr(self, "grad_scale", None),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for parameter, master, state in zip(parameters, masters, states, strict=True):
            if "low" in state:
                split(master, parameter, state["low"])

    def _state(self, parameter: Tensor, fused: bool) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu")
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
            if parameter.dtype == torch.bfloat16:
                state["low"] = torch.zeros_like(parameter, dtype=torch.int16)
        return state


def join(high: Tensor, low: Tensor) -> Tensor:
    """bfloat16 and int16 remainder -> the float32 they stand for."""
    return ((high.view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)


def split(value: Tensor, high: Tensor, low: Tensor) -> None:
    """Write a finite float32 into its nearest bfloat16 `high` and the int16 remainder `low`; `join` undoes it.

    Ties go away from zero: half to even, as a cast does it, would leave one remainder too many for 16 bits.
    """
    bits = value.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    high.copy_(upper.to(torch.int16).view(torch.bfloat16))
    low.copy_((bits - (upper << 16)).to(torch.int16))
