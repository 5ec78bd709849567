"""Active embodiment slots: which rows of the per-embodiment tensors a network holds, and how ids map to them.

A checkpoint stores every per-embodiment tensor as [max_num_embodiments, ...]. A run trains one slot or a few; the
others would cost weights, gradients and optimiser state (315.6 M of 325.8 M parameters at released size) for nothing.
"""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from models.common.embodiment import Category

_SLOT_TENSOR = re.compile(r"(?:^|\.)(?:state_encoder|action_encoder|action_decoder)\.\w+\.[Wb]$")


def is_slot_tensor(name: str) -> bool:
    """Whether a parameter's first axis counts embodiment slots, by its name in the state dict."""
    return _SLOT_TENSOR.search(name) is not None


def checked_slots(slots: Sequence[int] | None, max_num_embodiments: int) -> tuple[int, ...] | None:
    """The active slots in rising order, None for all; raises ValueError on an empty, repeated or unknown one."""
    if slots is None:
        return None
    found = tuple(sorted(int(slot) for slot in slots))
    if not found or len(set(found)) != len(found) or found[0] < 0 or found[-1] >= max_num_embodiments:
        raise ValueError(
            f"slots={tuple(slots)}: at least one slot, each once, of 0..{max_num_embodiments - 1} (max_num_embodiments)"
        )
    return found


def row_of(slot: int, slots: tuple[int, ...] | None) -> int:
    """Row of a slot in the held tensors; raises ValueError where the slot is not active."""
    if slots is None:
        return slot
    if slot not in slots:
        raise ValueError(
            f"embodiment_id={slot} is not active: the network was built with slots={slots} and holds no weights for "
            "it; name every embodiment of the data in `slots`"
        )
    return slots.index(slot)


def rows_of(ids: Category, slots: tuple[int, ...] | None) -> Category:
    """Rows of embodiment ids; an integer where all ids must have the same row, so that layers use a plain product.

    Ids on the CPU are checked here. Those on a device are checked there, without waiting for it.
    """
    if slots is None:
        return ids
    if isinstance(ids, int):
        return row_of(ids, slots)
    rows = torch.zeros_like(ids)
    known = torch.zeros_like(ids, dtype=torch.bool)
    for row, slot in enumerate(slots):
        here = ids == slot
        rows = rows + row * here
        known = known | here
    if ids.device.type == "cpu" and not torch.compiler.is_compiling():
        if not bool(known.all()):
            row_of(int(ids[~known][0]), slots)
    elif ids.device.type == "cuda":
        torch._assert_async(known.all())
    return 0 if len(slots) == 1 else rows


def pick_rows(tensor: Tensor, slots: tuple[int, ...] | None) -> Tensor:
    """The rows of a full tensor [max_num_embodiments, ...] that a network with these slots holds."""
    return tensor if slots is None else tensor[list(slots)]


def merge_rows(full: Tensor, rows: Tensor, slots: tuple[int, ...] | None) -> Tensor:
    """A copy of the full tensor with the held rows in their places, in the full tensor's dtype."""
    if slots is None:
        return rows.to(full.dtype)
    merged = full.clone()
    merged[list(slots)] = rows.to(full.dtype)
    return merged


def full_shapes(shapes: Mapping[str, Sequence[int]], max_num_embodiments: int) -> dict[str, tuple[int, ...]]:
    """Shapes by name as a checkpoint stores them, from the shapes a network with slots holds."""
    return {
        name: (max_num_embodiments, *shape[1:]) if is_slot_tensor(name) else tuple(shape)
        for name, shape in shapes.items()
    }
