"""What a block keeps for its backward pass, measured, and how many blocks can keep it within a budget."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class BlockUse:
    """Of one block and one micro-batch.

    `inner_bytes` are kept for the backward pass besides the inputs, weights excluded; `inputs` holds bytes by storage,
    because neighbours share inputs. `recompute_flops` are what a recomputation runs: the products up to the last kept
    value.
    """

    inner_bytes: int
    inputs: dict[int, int]
    recompute_flops: int

    def __add__(self, other: BlockUse) -> BlockUse:
        """Two calls in one pass."""
        return BlockUse(
            inner_bytes=self.inner_bytes + other.inner_bytes,
            inputs={**self.inputs, **other.inputs},
            recompute_flops=self.recompute_flops + other.recompute_flops,
        )


def measure(block: nn.Module, run: Callable, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BlockUse:
    """Call `run`, the forward of a block, on the side, with gradients, and see what it keeps; draws are taken back."""
    weights = {_key(t) for t in (*block.parameters(), *block.buffers())}
    inputs = {_key(t): _bytes(t) for t in tree_leaves((args, dict(kwargs))) if isinstance(t, Tensor)}
    inner: dict[int, int] = {}
    flops = 0
    counter = FlopCounterMode(
        display=False,
        custom_mapping={torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention_flops},
    )

    def pack(tensor: Tensor) -> Tensor:
        nonlocal flops
        flops = counter.get_total_flops()
        if _key(tensor) not in weights and _key(tensor) not in inputs:
            inner[_key(tensor)] = _bytes(tensor)
        return tensor

    devices = sorted({t.device.index for t in tree_leaves((args, dict(kwargs))) if isinstance(t, Tensor) and t.is_cuda})
    with (
        torch.random.fork_rng(devices=devices),
        counter,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        result = run(*args, **kwargs)
    del result  # it held everything that was kept, so that no two storages had one address
    return BlockUse(inner_bytes=sum(inner.values()), inputs=inputs, recompute_flops=flops)


def peak(uses: Mapping[Key, BlockUse], recomputed: frozenset[Key]) -> tuple[int, int]:
    """(bytes kept at the end of the forward pass, most bytes kept at any time of the backward pass).

    Args:
        uses: blocks in the order they run.
        recomputed: those that keep their inputs only. While one recomputes, the blocks after it are done and hold
            nothing any more.
    """
    held, most = 0, 0
    known: set[int] = set()
    for key, use in uses.items():
        held += sum(size for storage, size in use.inputs.items() if storage not in known)
        known |= use.inputs.keys()
        if key in recomputed:
            most = max(most, held + use.inner_bytes)
        else:
            held += use.inner_bytes
    return held, max(held, most)


def plan_kept(uses: Mapping[Key, BlockUse], budget: float) -> frozenset[Key]:
    """The largest set of blocks that can keep what they need within `budget` bytes at any time.

    Small ones are kept first, and of equal ones the last: while an early block recomputes, the later ones hold nothing.
    """
    places = {key: place for place, key in enumerate(uses)}
    order = sorted(uses, key=lambda key: (uses[key].inner_bytes, -places[key]))
    for count in range(len(order), 0, -1):
        kept = frozenset(order[:count])
        if peak(uses, frozenset(uses) - kept)[1] <= budget:
            return kept
    return frozenset()


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _cpu_attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """The counter knows the attention of GPUs only."""
    return sdpa_flop_count(query, key, value)
