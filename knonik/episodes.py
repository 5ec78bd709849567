"""The episode table: where the rows and the video of each episode are, as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, kw_only=True)
class CameraTable:
    """Video of one camera for every episode.

    keys: distinct video objects. object: [E] index into keys. start_s: [E] seconds inside the object at which the
    episode begins.
    """

    keys: tuple[str, ...]
    object: NDArray[np.int64]
    start_s: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class EpisodeTable:
    """Episodes in the order of their ids; every array has one entry per episode [E].

    ids: episode ids, which are names and never positions. length: rows. first_row: number of the first row among the
    rows of the whole dataset. data_keys: distinct Parquet objects. data_object: index into data_keys. data_row: first
    row inside that object.
    tasks: task texts the metadata lists for the episode. cameras: per camera key the video table.
    """

    ids: NDArray[np.int64]
    length: NDArray[np.int64]
    first_row: NDArray[np.int64]
    data_keys: tuple[str, ...]
    data_object: NDArray[np.int64]
    data_row: NDArray[np.int64]
    tasks: tuple[tuple[str, ...], ...]
    cameras: dict[str, CameraTable]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_rows(self) -> int:
        """Rows of the episodes in this table."""
        return int(self.length.sum())

    def positions(self, ids: ArrayLike) -> NDArray[np.int64]:
        """Positions in the table of the given episode ids, same shape.

        Raises:
            KeyError: an id is not in the table.
        """
        wanted = np.asarray(ids, np.int64)
        if not len(self.ids):
            raise KeyError("the episode table is empty")
        found = np.minimum(np.searchsorted(self.ids, wanted), len(self.ids) - 1)
        unknown = self.ids[found] != wanted
        if np.any(unknown):
            few = ", ".join(str(i) for i in np.unique(wanted[unknown])[:8])
            raise KeyError(
                f"episode ids {few} are not in use; the {len(self)} in use run from {self.ids[0]} to {self.ids[-1]}"
            )
        return found

    def position(self, episode: int) -> int:
        """Position in the table of one episode id; KeyError if it is not there."""
        if 0 <= episode < len(self.ids) and self.ids[episode] == episode:  # ids without gaps, nearly always
            return episode
        return int(self.positions(episode))

    def subset(self, ids: Sequence[int]) -> "EpisodeTable":
        """The table of some episodes only; `first_row` still counts rows of the whole dataset."""
        keep = np.unique(self.positions(list(ids)))
        return replace(
            self,
            ids=self.ids[keep],
            length=self.length[keep],
            first_row=self.first_row[keep],
            data_object=self.data_object[keep],
            data_row=self.data_row[keep],
            tasks=tuple(self.tasks[i] for i in keep),
            cameras={
                name: CameraTable(keys=camera.keys, object=camera.object[keep], start_s=camera.start_s[keep])
                for name, camera in self.cameras.items()
            },
        )
