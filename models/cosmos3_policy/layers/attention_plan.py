"""Which tokens of a pack attend to which, prepared once for all layers, in the form each implementation reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from models.cosmos3_policy.packed import to_device

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Backend = Literal["sdpa", "padded", "varlen", "flex"]
_BLOCK = 128


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """A gather of rows and its inverse: `index` is what stands at each place, `place` where each row went."""

    index: Tensor
    place: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Attention among samples of `lengths`, which see captions of `context_lengths` too, or else are causal.

    What a backend does not read is None. Only `sdpa` reads the lengths, which are different in each pack: for the
    others, equal shapes make one compiled graph.
    """

    backend: Backend
    lengths: tuple[int, ...]
    context_lengths: tuple[int, ...] | None = None
    queries: Rows | None = None
    """padded: tokens to [N, padded_queries]; None where all samples are as long."""
    keys: Rows | None = None
    """padded: captions' and own tokens to [N, padded_keys]; varlen: the same by sample, one after the other."""
    padded_queries: int = 0
    padded_keys: int = 0
    mask: Tensor | None = None
    query_starts: Tensor | None = None
    key_starts: Tensor | None = None
    longest_query: int = 0
    longest_key: int = 0
    block_mask: BlockMask | None = None


def plan_attention(
    lengths: tuple[int, ...],
    context_lengths: tuple[int, ...] | None = None,
    *,
    rows: int | None = None,
    context_rows: int | None = None,
    backend: Backend = "sdpa",
    device: torch.device | str = "cpu",
    multiple: int = 1,
) -> Plan:
    """Prepare the attention of a pack.

    Args:
        lengths: tokens of each sample.
        context_lengths: caption tokens that each sample sees; None for causal attention of captions to themselves.
        rows, context_rows: length of the token axes; rows after the samples' are padding.
        backend: what will run.
        multiple: sizes that follow from lengths are rounded up to it, so that few different ones occur.
    """
    rows = sum(lengths) if rows is None else rows
    plan = Plan(backend=backend, lengths=lengths, context_lengths=context_lengths)
    if backend == "sdpa":
        return plan
    own = np.repeat(np.arange(len(lengths)), lengths)
    own = np.r_[own, np.full(rows - len(own), len(lengths))]
    seen = own[:0]
    if context_lengths is not None:
        seen = np.repeat(np.arange(len(context_lengths)), context_lengths)
        context_rows = len(seen) if context_rows is None else context_rows
        seen = np.r_[seen, np.full(context_rows - len(seen), -1)]
    samples = _Samples(own=own, keys=np.r_[seen, own], causal=context_lengths is None, count=len(lengths))
    build = {"padded": _padded, "varlen": _varlen, "flex": _flex}[backend]
    return replace(plan, **build(samples, device, multiple))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Samples:
    """Number of the sample that each query and key belongs to; other numbers are padding. Keys: captions, then own."""

    own: np.ndarray
    keys: np.ndarray
    causal: bool
    count: int


def _padded(samples: _Samples, device: torch.device | str, multiple: int) -> dict[str, Any]:
    count = samples.count
    key_lengths = np.bincount(samples.keys[(samples.keys >= 0) & (samples.keys < count)], minlength=count)
    query_lengths = np.bincount(samples.own, minlength=count)[:count]
    values: dict[str, Any] = {"padded_queries": int(query_lengths.max())}
    if len(set(query_lengths.tolist())) > 1 or len(samples.own) > query_lengths.sum():
        values["padded_queries"] = width = _round_up(int(query_lengths.max()), multiple)
        values["queries"] = _rows(*_grid(samples.own, count, width), device)
    values["padded_keys"] = width = _round_up(int(key_lengths.max()), multiple)
    index, place = _grid(samples.keys, count, width)
    if samples.causal:
        values["padded_queries"] = width  # a square, whose padding no token is behind
        values["queries"] = _rows(index, place, device)
    else:
        mask = np.arange(width) < key_lengths[:, None]
        values["mask"] = to_device(torch.from_numpy(mask[:, None, None]), device)
        place = place[len(samples.keys) - len(samples.own) :]
    return {**values, "keys": _rows(index, place, device)}


def _varlen(samples: _Samples, device: torch.device | str, multiple: int) -> dict[str, Any]:
    # Padding of the queries is one sample more, so that its values are numbers; that of the keys is in none.
    count = samples.count + int(samples.own[-1] == samples.count)
    query_lengths = np.bincount(samples.own, minlength=count)
    key_lengths = np.bincount(samples.keys[samples.keys >= 0], minlength=count)
    values: dict[str, Any] = {
        "query_starts": _starts(query_lengths, device),
        "key_starts": _starts(key_lengths, device),
        "longest_query": _round_up(int(query_lengths.max()), multiple),
        "longest_key": _round_up(int(key_lengths.max()), multiple),
    }
    if not samples.causal:
        order = np.argsort(np.where(samples.keys < 0, count, samples.keys), kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        values["keys"] = _rows(order, place[len(samples.keys) - len(samples.own) :], device)
    return values


def _flex(samples: _Samples, device: torch.device | str, multiple: int) -> dict[str, Any]:
    from torch.nn.attention.flex_attention import BlockMask

    some, every = _blocks(samples)
    partial = some & ~every
    own, keys = (to_device(torch.from_numpy(x), device) for x in (samples.own, samples.keys))
    causal = samples.causal

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = own[query] == keys[key]
        return same & (key <= query) if causal else same

    block_mask = BlockMask.from_kv_blocks(
        *_block_lists(partial, device),
        *_block_lists(every, device),
        BLOCK_SIZE=_BLOCK,
        mask_mod=mask,
        seq_lengths=(len(samples.own), len(samples.keys)),
    )
    return {"block_mask": block_mask}


def _blocks(samples: _Samples) -> tuple[np.ndarray, np.ndarray]:
    """Which blocks of (query, key) pairs hold a pair that is attended, and which nothing else."""
    numbers = range(-1, samples.count + 1)
    queries = np.stack([_any(samples.own == i) for i in numbers], axis=1)
    keys = np.stack([_any(samples.keys == i) for i in numbers], axis=1)
    some = queries @ keys.T
    every = some & (queries.sum(1) == 1)[:, None] & (keys.sum(1) == 1)[None]
    # The last block may reach beyond the end of an axis.
    every[-1] &= len(samples.own) % _BLOCK == 0
    every[:, -1] &= len(samples.keys) % _BLOCK == 0
    if samples.causal:
        below = np.tri(len(queries), dtype=bool)
        some, every = some & below, every & np.tri(len(queries), k=-1, dtype=bool)
    return some, every


def _any(flags: np.ndarray) -> np.ndarray:
    """By blocks."""
    return np.add.reduceat(flags, np.arange(0, len(flags), _BLOCK)) > 0


def _block_lists(chosen: np.ndarray, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Number of chosen key blocks of each query block, and their numbers first in a row of all; both [1, 1, ...]."""
    counts = chosen.sum(1).astype(np.int32)
    order = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    return tuple(to_device(torch.from_numpy(x)[None, None], device) for x in (counts, order))  # type: ignore[return-value]


def _grid(numbers: np.ndarray, count: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of each sample in a line of `width`, row 0 where there are no more; and the place of each row."""
    index = np.zeros((count, width), dtype=np.int64)
    place = np.zeros(len(numbers), dtype=np.int64)
    for i in range(count):
        found = np.flatnonzero(numbers == i)
        index[i, : len(found)] = found
        place[found] = i * width + np.arange(len(found))
    return index.reshape(-1), place


def _rows(index: np.ndarray, place: np.ndarray, device: torch.device | str) -> Rows:
    return Rows(index=to_device(torch.from_numpy(index), device), place=to_device(torch.from_numpy(place), device))


def _starts(lengths: np.ndarray, device: torch.device | str) -> Tensor:
    return to_device(torch.from_numpy(np.r_[0, np.cumsum(lengths)].astype(np.int32)), device)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
