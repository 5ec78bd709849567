"""The order of samples as a pure function: a keyed permutation of [0, N), O(1) in memory and in access at any position.

A Feistel network permutes the smallest power of two that holds N; results outside [0, N) are permuted again until they
fall inside ("cycle walking", Black and Rogaway 2002), fewer than two passes on average. Nothing depends on workers,
ranks or a library's random generator.
"""

import operator
from dataclasses import dataclass
from functools import cached_property
from typing import SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

_ROUNDS = 10
_MASK64 = (1 << 64) - 1
_BLOCK = 1 << 15  # positions worked on at once, so that temporaries stay in cache


def mix64(value: int) -> int:
    """Mix 64 bits: each input bit flips each output bit about half the time (SplitMix64 finaliser, Steele 2014)."""
    value &= _MASK64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK64
    return value ^ value >> 31


class Permutation:
    """A permutation of [0, n) chosen by (seed, epoch).

    Args:
        n: number of items, 1 or more, below 2^62.
        seed: any integer; its lowest 64 bits count.
        epoch: any integer; its lowest 64 bits count.
    """

    def __init__(self, n: int, seed: int, epoch: int = 0) -> None:
        if not 1 <= n < 1 << 62:
            raise ValueError(f"a permutation of {n} items was asked for; 1 to 2^62 - 1 are possible")
        self._n = n
        bits = max(2, (n - 1).bit_length())
        self._low_bits = bits // 2
        self._low = (1 << self._low_bits) - 1
        self._high = (1 << bits - self._low_bits) - 1
        state = mix64(mix64(seed + 0x9E3779B97F4A7C15) ^ epoch)
        self._keys = tuple(mix64(state + (i + 1) * 0x9E3779B97F4A7C15) for i in range(_ROUNDS))

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: SupportsIndex) -> int:
        value = operator.index(index)
        if not -self._n <= value < self._n:
            raise IndexError(f"position {value} is outside a permutation of {self._n}")
        value = self._encrypt(value % self._n)
        while value >= self._n:
            value = self._encrypt(value)
        return value

    def take(self, indices: ArrayLike) -> NDArray[np.int64]:
        """Permuted values of many positions at once, same shape as `indices` (integers in [0, n))."""
        positions = np.asarray(indices, np.int64)
        if positions.size and not (positions.min() >= 0 and positions.max() < self._n):
            raise IndexError(f"positions {positions.min()}..{positions.max()} are not all inside [0, {self._n})")
        flat = positions.reshape(-1).astype(np.uint64)
        for start in range(0, len(flat), _BLOCK):
            block = flat[start : start + _BLOCK]
            values = self._encrypt_array(block)
            (walk,) = np.nonzero(values >= np.uint64(self._n))
            while len(walk):
                values[walk] = self._encrypt_array(values[walk])
                walk = walk[values[walk] >= np.uint64(self._n)]
            block[:] = values
        return flat.astype(np.int64).reshape(positions.shape)

    def _encrypt(self, value: int) -> int:
        low, high = value & self._low, value >> self._low_bits
        for i, key in enumerate(self._keys):
            if i % 2:
                low ^= mix64(high + key) & self._low
            else:
                high ^= mix64(low + key) & self._high
        return high << self._low_bits | low

    def _encrypt_array(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        low, high = values & np.uint64(self._low), values >> np.uint64(self._low_bits)
        for i, key in enumerate(self._keys):
            if i % 2:
                low ^= mix64_array(high + np.uint64(key)) & np.uint64(self._low)
            else:
                high ^= mix64_array(low + np.uint64(key)) & np.uint64(self._high)
        mixed: NDArray[np.uint64] = high << np.uint64(self._low_bits) | low
        return mixed


def mix64_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix64` in place on a temporary array; numpy's uint64 arithmetic wraps as wanted."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


@dataclass(frozen=True, kw_only=True)
class Anchors:
    """The anchor steps of a dataset in stored order, numbered 0 to len - 1, as stretches of consecutive frames.

    ids: [S] episode id of each stretch; an episode may have several. starts: [S] first frame. counts: [S] frames, all
    above 0. Stretches are sorted and do not touch, so equal anchors have equal arrays.
    """

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """[S] anchors up to the end of each stretch."""
        return np.cumsum(self.counts)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def take(self, numbers: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(episode ids, frames) of anchors given by number, both shaped like `numbers`."""
        wanted = np.asarray(numbers, np.int64)
        stretches = np.searchsorted(self.ends, wanted, side="right")
        before = self.ends[stretches] - self.counts[stretches]
        return self.ids[stretches], wanted - before + self.starts[stretches]


class AnchorOrder:
    """Order of the anchor steps of a dataset for one epoch; item i is (episode id, frame).

    Args:
        anchors: the steps to order, at least one.
        seed, epoch: choose the permutation.
        shuffle: False gives the anchors in stored order, for every epoch.
    """

    def __init__(self, anchors: Anchors, *, seed: int, epoch: int, shuffle: bool = True) -> None:
        self._anchors, self._total = anchors, len(anchors)
        self._permutation = Permutation(self._total, seed, epoch) if shuffle else None

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, index: SupportsIndex) -> tuple[int, int]:
        position = operator.index(index)
        if not -self._total <= position < self._total:
            raise IndexError(f"position {position} is outside an order of {self._total} anchors")
        position %= self._total
        number = position if self._permutation is None else self._permutation[position]
        episode, frame = self._anchors.take(number)
        return int(episode), int(frame)

    def take(self, indices: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(episode ids, frames) of many positions, both shaped like `indices`."""
        positions = np.asarray(indices, np.int64)
        if self._permutation is not None:
            return self._anchors.take(self._permutation.take(positions))
        if positions.size and not (positions.min() >= 0 and positions.max() < self._total):
            raise IndexError(f"positions {positions.min()}..{positions.max()} are not all inside [0, {self._total})")
        return self._anchors.take(positions)
