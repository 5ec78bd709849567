"""Stored values into the parameters of a network, and the names that do not fit as lines to read."""

import re
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.common.sharded_state import distribute

_NUMBERED = re.compile(r"(.*?\.)(\d+)(\..*)", re.DOTALL)


def place(
    network: nn.Module,
    name: str,
    target: Tensor,
    fill: Callable[[Tensor], None],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Fill a parameter in place, or make it anew where it is on meta or shall have another device or dtype.

    Args:
        network: holds `target` under `name`.
        fill: writes the values into a tensor of the target's shape.
        device: None leaves the parameter where it is, one on meta goes to the CPU.
        dtype: None keeps its own.
    """
    if device is None:
        device = "cpu" if target.is_meta else target.device
    device = torch.device(device)
    dtype = target.dtype if dtype is None else dtype
    fits = not target.is_meta and target.dtype == dtype and _same_device(target.device, device)
    if not fits and isinstance(target, DTensor):
        raise ValueError(f"{name} is sharded: it is filled where it lies, in its own dtype; call to_empty before")
    value = target if fits else torch.empty(target.shape, dtype=dtype, device=device)
    fill(value)
    if fits:
        return
    path, _, leaf = name.rpartition(".")
    if isinstance(target, nn.Parameter):
        value = nn.Parameter(value, requires_grad=target.requires_grad)
    setattr(network.get_submodule(path), leaf, value)


def copy(target: Tensor, value: Tensor) -> None:
    """Into a tensor on any device, or into this rank's part of a sharded one.

    The value goes over the bus in its stored dtype: the cast then happens on the device and takes no host memory.
    """
    value = value if target.device.type == "cpu" else value.to(target.device)
    target.copy_(distribute(value, target))


def fitting_report(kind: str, names: Iterable[str]) -> list[str]:
    """Every name; those that differ in their first number alone, which is a block's, share a line."""
    names = list(names)
    lines: dict[tuple[str, str], list[int]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        head, number, tail = match.groups() if match else (name, "-1", "")
        lines.setdefault((head, tail), []).append(int(number))
    shown = [f"  {head}{_ranges(numbers)}{tail}" for (head, tail), numbers in lines.items()]
    return [f"{kind} ({len(names)}):", *shown] if names else []


def _same_device(a: torch.device, b: torch.device) -> bool:
    return a.type == b.type and (b.index is None or a.index == b.index)


def _ranges(numbers: list[int]) -> str:
    """[3] -> 3, [0, 1, 2, 5] -> {0-2,5}; -1 stands for no number."""
    if len(numbers) == 1:
        return "" if numbers[0] < 0 else str(numbers[0])
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) + "}"
