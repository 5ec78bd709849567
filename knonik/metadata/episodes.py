"""The episode table: where the rows and the video of each episode are, as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from knonik.stores.base import ObjectInfo


@dataclass(frozen=True, kw_only=True)
class DepthSpec:
    """Scale of a depth video: 12-bit code c stands for the depth at share c / 4095 of the way from min_m to max_m.

    min_m, max_m, shift_m: metres. log: the way is equal steps of ln(depth + shift_m) instead of equal steps of depth.
    Defaults are those of LeRobot's depth encoder.
    """

    min_m: float = 0.01
    max_m: float = 10.0
    shift_m: float = 3.5
    log: bool = True


@dataclass(frozen=True, kw_only=True)
class CameraTable:
    """Pictures of one camera for every episode.

    keys: distinct objects. object: [E] index into keys. start_s: [E] seconds inside the object at which the episode
    begins; 0 and without meaning for images. kind: "video" in colour, "image" for encoded images inside the data files
    (then keys and object are those of the data, and the picture of a frame is in row data_row + frame of the object),
    "depth" for a depth video, whose codes `depth` explains.
    """

    keys: tuple[str, ...]
    object: NDArray[np.int64]
    start_s: NDArray[np.float64]
    kind: Literal["video", "image", "depth"] = "video"
    depth: DepthSpec | None = None


@dataclass(frozen=True, kw_only=True)
class EpisodeTable:
    """Episodes in the order of their ids; every array has one entry per episode [E].

    ids: episode ids, which are names and never positions. length: rows. first_row: number of the first row among the
    rows of the whole dataset. data_keys: distinct Parquet objects. data_object: index into data_keys. data_row: first
    row inside that object. data_info: size and version of each of data_keys, empty where they were not listed.
    tasks: task texts the metadata lists for the episode. cameras: per camera key its table.
    """

    ids: NDArray[np.int64]
    length: NDArray[np.int64]
    first_row: NDArray[np.int64]
    data_keys: tuple[str, ...]
    data_object: NDArray[np.int64]
    data_row: NDArray[np.int64]
    tasks: tuple[tuple[str, ...], ...]
    cameras: dict[str, CameraTable]
    data_info: tuple[ObjectInfo, ...] = ()

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
                name: replace(camera, object=camera.object[keep], start_s=camera.start_s[keep])
                for name, camera in self.cameras.items()
            },
        )
