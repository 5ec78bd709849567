"""Which rows of a data object are which rows of the dataset, checked against what the object itself says."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from knonik.metadata.episodes import EpisodeTable
from knonik.metadata.files import MetadataError


class RowMap:
    """The episodes `members` (positions in the table) of one data object, in the order of their rows in it."""

    def __init__(self, episodes: EpisodeTable, members: NDArray[np.int64], key: str) -> None:
        members = members[np.argsort(episodes.data_row[members], kind="stable")]
        self._key = key
        self._ids = episodes.ids[members]
        self._begin = episodes.data_row[members]
        self._end = self._begin + episodes.length[members]
        first_row = episodes.first_row[members]
        # Episodes that follow each other in both places are one stretch; usually all of them are.
        breaks = (self._begin[1:] != self._end[:-1]) | (first_row[1:] != first_row[:-1] + episodes.length[members][:-1])
        head = np.flatnonzero(np.append(True, breaks))
        tail = np.append(head[1:], len(members)) - 1
        self._stretches = list(
            zip(self._begin[head].tolist(), self._end[tail].tolist(), first_row[head].tolist(), strict=True)
        )

    def describe(self) -> str:
        """Which episodes the object holds, for messages."""
        low, high = self._ids.min(), self._ids.max()
        return f"it holds episode {low}" if low == high else f"it holds {len(self._ids)} episodes of {low}..{high}"

    def check_count(self, num_rows: int) -> None:
        """Compare the rows the object has with those its episodes need."""
        expected = int(self._end.max())
        if num_rows != expected:
            raise MetadataError(
                f"{self._key}: has {num_rows} rows, the metadata of episodes {self._ids.min()}..{self._ids.max()} "
                f"says {expected}"
            )

    def check_ids(self, begin: int, stored: NDArray[np.int64]) -> None:
        """Compare the episode_index of the rows from `begin` on with the episodes that should be there."""
        rows = np.arange(begin, begin + len(stored))
        member = np.searchsorted(self._begin, rows, side="right") - 1
        wrong = (member >= 0) & (rows < self._end[member]) & (stored != self._ids[member])
        if not np.any(wrong):
            return
        at = int(member[np.argmax(wrong)])
        found = np.unique(stored[wrong & (member == at)])[:4].tolist()
        raise MetadataError(
            f"{self._key}: rows {self._begin[at]}..{self._end[at] - 1} should be episode {self._ids[at]}, "
            f"their episode_index is {found}"
        )

    def pieces(self, begin: int, count: int) -> Iterator[tuple[slice, int]]:
        """Slices of the `count` rows of the object from `begin` on, and the row of the dataset each begins at."""
        for source, end, target in self._stretches:
            low, high = max(source, begin), min(end, begin + count)
            if low < high:
                yield slice(low - begin, high - begin), target + low - source
