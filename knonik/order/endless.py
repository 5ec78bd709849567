"""The endless order of one dataset: its epochs, each a permutation of the anchors, one after the other."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from knonik.order.anchors import AnchorOrder, Anchors
from knonik.order.blocks import BlockOrder, gop_runs, longest_window
from knonik.order.select import digest_arrays

if TYPE_CHECKING:
    from knonik.dataset import Dataset

ORDERS = ("exact", "blocks")
Int64Array = NDArray[np.int64]


class EndlessOrder:
    """Position p >= 0 is item p % N of epoch p // N, N being the number of anchors.

    Attributes:
        anchors: the steps that are ordered.
        longest_window: samples of one lane among which those of a GOP lie; 1 in an exact order.
        runs: [R] anchors of each run of the order `blocks`, in stored order; None in an exact order.
    """

    def __init__(self, anchors: Anchors, *, seed: int, shuffle: bool = True) -> None:
        self.anchors, self._seed, self._shuffle = anchors, seed, shuffle
        self.longest_window = 1
        self.runs: Int64Array | None = None
        self._window, self._lanes = 1, 1
        self._epochs: dict[int, AnchorOrder | BlockOrder] = {}

    @classmethod
    def blocks(
        cls,
        dataset: "Dataset",
        anchors: Anchors,
        *,
        seed: int,
        windows: Mapping[str, Sequence[int] | range],
        window: int,
        lanes: int,
    ) -> "EndlessOrder":
        """The order `blocks`; see `knonik.order.blocks`.

        Args:
            windows: camera of the dataset to step offsets.
            window: samples over which the samples of a GOP are spread at least, in one lane.
        """
        self = cls(anchors, seed=seed)
        self._window, self._lanes = window, lanes
        self.runs = gop_runs(dataset, anchors, windows, window)
        self.longest_window = longest_window(self.runs, window)
        return self

    def __len__(self) -> int:
        return len(self.anchors)

    def take(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(episode ids, frames) at positions [n] of any epochs."""
        epochs, items = np.divmod(positions, len(self))
        episodes, frames = np.empty_like(positions), np.empty_like(positions)
        met = np.unique(epochs).tolist()
        for epoch in met:
            chosen = epochs == epoch
            episodes[chosen], frames[chosen] = self._take(epoch, items[chosen])
        # Positions go forward, in small steps over an epoch's border: an epoch well left does not come back.
        self._epochs = {epoch: order for epoch, order in self._epochs.items() if epoch >= met[-1] - 1}
        return episodes, frames

    def digest(self) -> bytes:
        """Changes with whatever the order depends on beside the seed, and with nothing else."""
        digest = hashlib.sha256(b"exact" if self.runs is None else b"blocks")
        digest_arrays(digest, self.anchors.ids, self.anchors.starts, self.anchors.counts)
        if self.runs is not None:
            digest_arrays(digest, self.runs, np.array([self._window, self._lanes]))
        return digest.digest() + bytes([self._shuffle])

    def _take(self, epoch: int, items: Int64Array) -> tuple[Int64Array, Int64Array]:
        order = self._epochs.get(epoch)
        if order is None:
            order = self._epochs[epoch] = self._epoch(epoch)
        if isinstance(order, BlockOrder):
            return self.anchors.take(order.take(items))
        return order.take(items)

    def _epoch(self, epoch: int) -> AnchorOrder | BlockOrder:
        if self.runs is None:
            return AnchorOrder(self.anchors, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
        return BlockOrder(
            self.runs,
            seed=self._seed,
            epoch=epoch,
            window=self._window,
            lanes=self._lanes,
            begin=epoch * len(self),
        )
