"""Memory for the frames of batches, used again as soon as nobody refers to it.

Fresh memory costs a page fault and a cleared page for every 4 KB of it: 180 MB for 64 samples of three 480x640 cameras
are 45,000 faults, as much time as decoding some frames. So the memory of a batch that its receiver dropped serves the
next one. Who still holds the tensor, a view of it or an array made of it keeps its memory from being used again.
"""

import weakref
from collections import deque
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class BufferPool:
    """Hands out tensors and takes their memory back when the last reference to it is gone. Thread safe.

    Args:
        keep: buffers of one size that may lie idle; more than these are freed.
        pin_memory: page-locked memory for asynchronous copies to a GPU. PyTorch's own allocator recycles it then: it
            alone knows when a copy that is under way has left the memory.
    """

    def __init__(self, *, keep: int, pin_memory: bool = False) -> None:
        self._keep = keep
        self._pin_memory = pin_memory
        self._idle: dict[int, deque[NDArray[np.uint8]]] = {}
        self._allocated = 0
        self._recycled = 0

    def take(self, shape: Sequence[int], dtype: Any = np.uint8) -> torch.Tensor:
        """A tensor of the given shape and numpy dtype; its content is arbitrary."""
        kind = np.dtype(dtype)
        size = prod(shape) * kind.itemsize
        if self._pin_memory:
            self._allocated += 1
            flat = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            return flat.view(getattr(torch, kind.name)).view(*shape)
        idle = self._idle.setdefault(size, deque())
        try:
            owner = idle.pop()
            self._recycled += 1
        except IndexError:
            owner = np.empty(size, np.uint8)
            self._allocated += 1
        # The tensor's storage holds this very view object and nothing else does, so the view dies with the storage,
        # whichever tensor or array was the last one to use it.
        lease: NDArray[Any] = owner.view(kind).reshape(tuple(shape))
        weakref.finalize(lease, _give_back, idle, owner, self._keep).atexit = False
        return torch.from_numpy(lease)

    def gauges(self) -> dict[str, float]:
        """`buffers_allocated` and `buffers_recycled`, counts since the start; `buffers_idle_bytes` now."""
        idle = sum(size * len(buffers) for size, buffers in list(self._idle.items()))
        return {
            "buffers_allocated": self._allocated,
            "buffers_recycled": self._recycled,
            "buffers_idle_bytes": idle,
        }

    def close(self) -> None:
        """Free what lies idle; buffers handed out are freed by their holders."""
        self._keep = 0
        for idle in self._idle.values():
            idle.clear()
        self._idle = {}


def _give_back(idle: deque[NDArray[np.uint8]], owner: NDArray[np.uint8], keep: int) -> None:
    # Runs inside whatever thread drops the last reference, perhaps in a garbage collection: no lock may be taken here.
    if len(idle) < keep:
        idle.append(owner)
