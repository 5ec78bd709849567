"""Which frame of which object each row of a camera shows, filled object by object as their headers are read."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from knonik.index.file import StoredRows
from knonik.index.stock import TOLERANCE_S, match_rows, match_rows_by_index
from knonik.metadata.episodes import CameraTable, EpisodeTable

MATCHES = ("time", "index")


class CameraRows:
    """Rows of one camera; one thread at a time may change it, any number may read.

    first: [E] first frame of each episode inside its object, -1 where the object was not read yet.
    """

    def __init__(self, camera: CameraTable, episodes: EpisodeTable) -> None:
        self.camera = camera
        self._episodes = episodes
        self.first = np.full(len(episodes), -1, np.int64)
        self._moved: NDArray[np.int32] | None = None
        # Rows out of tolerance, rising, and their seconds: one value, so that readers never see halves of two.
        self._far = (np.zeros(0, np.int64), np.zeros(0))
        self.far_objects: set[int] = set()
        # Episodes of each object in the order in which they lie there.
        self._order = np.lexsort((camera.start_s, camera.object))
        self._ends = np.searchsorted(camera.object[self._order], np.arange(len(camera.keys)), side="right")

    @property
    def num_far_rows(self) -> int:
        """Rows known so far whose frame breaks the stock tolerance; those without a timestamp are not counted."""
        return int(np.isfinite(self._far[1]).sum())

    def known_objects(self) -> NDArray[np.bool_]:
        """[keys] whether all episodes of an object have their place."""
        unknown = np.bincount(self.camera.object[self.first < 0], minlength=len(self.camera.keys))
        known: NDArray[np.bool_] = unknown == 0
        return known

    def members(self, number: int) -> NDArray[np.int64]:
        """Positions of the episodes in object `number`, in the order in which they lie there."""
        return self._order[self._ends[number - 1] if number else 0 : self._ends[number]]

    def frames(self, positions: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Frames inside their objects of rows [B] of the episodes at positions [B], which must be known."""
        found: NDArray[np.int64] = self.first[positions] + rows
        if self._moved is not None:
            found = found + self._moved[self._episodes.first_row[positions] + rows]
        return found

    def off_s(self, row: int) -> float:
        """Seconds between a row of the dataset and its frame if that is more than the stock tolerance, else 0."""
        rows, seconds = self._far
        place = int(np.searchsorted(rows, row))
        return float(seconds[place]) if place < len(rows) and rows[place] == row else 0.0

    def add(self, number: int, times_s: NDArray[np.float64], timestamps: NDArray[Any] | None) -> None:
        """Match the rows of object `number` to its frames.

        Args:
            times_s: [F] presentation times of the frames.
            timestamps: [rows] of the whole dataset; None where rows are matched by counting.

        Raises:
            ValueError: the object holds no frame.
        """
        members, key = self.members(number), self.camera.keys[number]
        if not len(times_s):
            raise ValueError(f"{key}: holds no video frame")
        length = self._episodes.length[members]
        start = self.camera.start_s[members]
        inside = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
        row = np.repeat(self._episodes.first_row[members], length) + inside
        if timestamps is None:
            found = match_rows_by_index(key, times_s, start, length)
        else:
            found = match_rows(key, times_s, start, length, timestamps[row].astype(np.float64))
        far = found.off_s > TOLERANCE_S
        self._put(row, found.frames - np.repeat(found.first, length) - inside, row[far], found.off_s[far])
        if far.any():
            self.far_objects.add(number)
        self.first[members] = found.first  # last: readers take it as the sign that the rest is there

    def add_unreadable(self, number: int) -> None:
        """Place the episodes of an object without readable header one after another.

        No frame of it can be read, but a batch that holds one of its rows can still be planned.
        """
        members = self.members(number)
        length = self._episodes.length[members]
        self.first[members] = np.cumsum(length) - length

    def _put(
        self,
        row: NDArray[np.int64],
        moved: NDArray[np.int64],
        far_rows: NDArray[np.int64],
        far_s: NDArray[np.float64],
    ) -> None:
        if moved.any():
            if self._moved is None:
                self._moved = np.zeros(self._episodes.num_rows, np.int32)
            self._moved[row] = moved
        if len(far_rows):
            rows, seconds = np.append(self._far[0], far_rows), np.append(self._far[1], far_s)
            order = np.argsort(rows, kind="stable")
            self._far = (rows[order], seconds[order])

    def adopt(self, stored: StoredRows, usable: NDArray[np.bool_]) -> None:
        """Take over what another index of the same dataset knows.

        Args:
            usable: [keys] objects whose rows may be taken.

        Raises:
            ValueError: it is of other episodes.
        """
        if len(stored.first) != len(self.first) or (
            stored.moved is not None and len(stored.moved) != self._episodes.num_rows
        ):
            raise ValueError("it lists other episodes")
        new = (self.first < 0) & (stored.first >= 0) & usable[self.camera.object]
        if not new.any():
            return
        owner = np.searchsorted(self._episodes.first_row, stored.far_rows, side="right") - 1
        far = new[owner]
        rows = np.zeros(0, np.int64)
        moved = np.zeros(0, np.int64)
        if stored.moved is not None:
            rows = np.flatnonzero(np.repeat(new, self._episodes.length))
            moved = stored.moved[rows].astype(np.int64)
        self._put(rows, moved, stored.far_rows[far], stored.far_s[far])
        self.far_objects |= set(self.camera.object[owner[far]].tolist())
        self.first[new] = stored.first[new]

    def stored(self, without: set[int]) -> StoredRows:
        """A copy to be written to a file, less the objects `without`."""
        first = self.first.copy()
        for number in without:
            first[self.members(number)] = -1
        return StoredRows(
            first=first,
            moved=None if self._moved is None else self._moved.copy(),
            far_rows=self._far[0],
            far_s=self._far[1],
        )
