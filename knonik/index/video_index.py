"""The video index of a dataset: object and frame number of every row, and the packets of every frame.

It is made from container headers and the timestamp column alone: for the objects that are asked for at once, for the
rest in the background. It is kept, a few bytes a frame, in the cache folder, and may be published beside the dataset.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from knonik.index.build import IndexBuilder
from knonik.index.cache import index_path, latest_path, read_index
from knonik.index.file import DAMAGE, decode_index, encode_index
from knonik.index.gop import Gop, ObjectIndex
from knonik.index.rows import MATCHES
from knonik.metadata.episodes import CameraTable, EpisodeTable
from knonik.metadata.lerobot import Metadata
from knonik.stores.base import Store

if TYPE_CHECKING:
    from knonik.dataset import Dataset

logger = logging.getLogger(__name__)

IMAGES_PER_GROUP = 64  # rows of a data file whose images are handled together
_AT_ONCE = 64  # objects read while opening: about two rounds over all connections, so a thread would gain nothing
_NAMES_SHOWN = 5


class VideoIndex:
    """Answers "which object and frame" and "which packets"; safe to use from many threads.

    An object's header is read when one of its rows or frames is first asked for, unless the background was faster. A
    damaged object does not stand in the way of the others: its rows get places, and its error is raised when its
    packets are asked for.
    """

    def __init__(self, episodes: EpisodeTable, builder: IndexBuilder) -> None:
        self._episodes, self._builder = episodes, builder
        self._objects: dict[str, ObjectIndex] = {}

    @property
    def complete(self) -> bool:
        """Whether no header is left to read."""
        return self._builder.complete

    @property
    def needs_timestamps(self) -> bool:
        """Whether the timestamp column will be read for headers that are still missing."""
        return self._builder.needs_timestamps

    @property
    def errors(self) -> dict[str, Exception]:
        """Objects found damaged so far."""
        return dict(self._builder.failures)

    def wait(self) -> None:
        """Have all headers read when it returns. Objects that cannot be used are then in `errors`.

        Raises:
            StoreUnavailable: the store does not answer at present.
        """
        self._builder.wait()

    def close(self) -> None:
        """End the background work; what was read so far is kept for the next run."""
        self._builder.close()

    def dump(self) -> bytes:
        """The index as the bytes of a file, as far as it is known."""
        return encode_index(self._builder.stored())

    def locate(self, episode: int, camera: str, frame: int) -> tuple[str, int]:
        """(object key, frame number inside the object) of a row, given by episode id and row inside the episode."""
        table = self._camera(camera)
        position = self._episodes.position(episode)
        length = int(self._episodes.length[position])
        if not 0 <= frame < length:
            raise IndexError(f"episode {episode} has frames 0..{length - 1}, frame {frame} was asked for")
        (number,) = self._frames(camera, table, np.array([position]), np.array([frame])).tolist()
        return table.keys[table.object[position]], number

    def locate_many(
        self, episodes: NDArray[np.int64], camera: str, frames: NDArray[np.int64]
    ) -> tuple[list[str], NDArray[np.int64]]:
        """`locate` for many rows at once: object keys and frame numbers inside them."""
        table = self._camera(camera)
        positions = self._episodes.positions(episodes)
        if np.any((frames < 0) | (frames >= self._episodes.length[positions])):
            raise IndexError("a frame lies outside its episode")
        keys = [table.keys[number] for number in table.object[positions].tolist()]
        return keys, self._frames(camera, table, positions, frames)

    def object(self, key: str) -> ObjectIndex:
        """Frames of one video object. Made at first use; two threads may make it twice, with the same result."""
        found = self._objects.get(key)
        if found is None:
            found = self._objects[key] = ObjectIndex(key, self._builder.table(key))
        return found

    def gop(self, key: str, frame: int) -> Gop:
        """The packets that present frame `frame` of object `key`."""
        return self.object(key).gop(frame)

    def group(self, key: str, number: int) -> int:
        """Number of the GOP that presents frame `number` of object `key`: frames with equal groups decode together.

        Images of a data file are grouped by 64 rows. Frames of a damaged object are all in group 0.
        """
        if not self._builder.is_video(key):
            return number // IMAGES_PER_GROUP
        return self.object(key).gop_number(number) if self.usable(key) else 0

    def groups(self, key: str, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """`group` for many frames of one object at once."""
        if not self._builder.is_video(key):
            return numbers // IMAGES_PER_GROUP
        return self.object(key).gop_numbers(numbers) if self.usable(key) else np.zeros_like(numbers)

    def unit_span(self, key: str, group: int) -> tuple[int, int]:
        """(offset, length) of the bytes of object `key` that any frame of GOP `group` needs.

        (0, 0) for a damaged object, whose error comes when its packets are asked for.
        """
        return self.object(key).span(group) if self.usable(key) else (0, 0)

    def version(self, key: str) -> str:
        """Version of an object of the dataset in its listing, "" if unknown."""
        return self._builder.version(key)

    def off_s(self, camera: str, episode: int, frame: int) -> float:
        """Seconds between the row's time and its frame if that is more than the stock tolerance, else 0."""
        table = self._camera(camera)
        if table.kind == "image":
            return 0.0
        position = np.array([self._episodes.position(episode)])
        self._frames(camera, table, position, np.zeros(1, np.int64))
        return self._builder.rows[camera].off_s(int(self._episodes.first_row[position[0]]) + frame)

    def has_far_rows(self, key: str) -> bool:
        """Whether some row shown by object `key`, which was located before, breaks the stock tolerance."""
        return self._builder.has_far_rows(key)

    def num_far_rows(self, camera: str) -> int:
        """Rows of the dataset whose frame breaks the stock tolerance; waits until all headers are read."""
        if self._camera(camera).kind == "image":
            return 0
        self._builder.wait()
        return self._builder.rows[camera].num_far_rows

    def _frames(
        self, camera: str, table: CameraTable, positions: NDArray[np.int64], frames: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        if table.kind == "image":
            rows: NDArray[np.int64] = self._episodes.data_row[positions] + frames
            return rows
        known = self._builder.rows[camera]
        unknown = known.first[positions] < 0
        if unknown.any():
            self._builder.need(table.keys[number] for number in np.unique(table.object[positions[unknown]]).tolist())
        return known.frames(positions, frames)

    def usable(self, key: str) -> bool:
        """Whether frames of object `key` can be found; its header is read now if it was not yet."""
        if key in self._objects:
            return True
        if self._builder.is_video(key):
            self._builder.need([key])
        return key not in self._builder.failures

    def _camera(self, camera: str) -> CameraTable:
        if camera not in self._episodes.cameras:
            raise KeyError(
                f"camera {camera!r} is unknown; the dataset has {', '.join(self._episodes.cameras) or 'none'}"
            )
        return self._episodes.cameras[camera]


def load_index(
    store: Store, metadata: Metadata, folder: Path, *, background: bool = True, match: str = "time"
) -> VideoIndex:
    """The index of a whole dataset, from what is there: `folder`, the one published beside the dataset, or neither.

    Args:
        folder: cache folder of the dataset; its parent serves all datasets.
        background: read the missing headers now if they are few, else in a thread. False: only when asked for, or by
            `wait`.
        match: `time` gives a row the frame its timestamp points at, as stock loaders do; `index` gives row k of an
            episode the k-th frame after its first, for sets whose timestamps are a step late.
    """
    if match not in MATCHES:
        raise ValueError(f"match={match!r} is not known; allowed: {', '.join(MATCHES)}")
    builder = IndexBuilder(store, metadata, folder, match)
    changed: list[str] = []
    own = index_path(folder, store.uri, match)
    if (stored := read_index(own)) is not None and stored.fingerprint == metadata.fingerprint:
        changed = builder.adopt(stored)
    if builder.complete:
        if stored is not None:
            logger.info("video index reused from %s", own)
    else:
        changed += _search(store, metadata, folder, builder, set(changed))
    if changed:
        names = ", ".join(sorted(set(changed))[:_NAMES_SHOWN])
        logger.warning("%d video objects have changed since they were indexed and are read again: %s%s",
                       len(set(changed)), names, ", ..." if len(set(changed)) > _NAMES_SHOWN else "")  # fmt: skip
    if background and builder.num_missing <= _AT_ONCE:
        builder.wait()
    elif background:
        builder.start()
    return VideoIndex(metadata.episodes, builder)


def _search(store: Store, metadata: Metadata, folder: Path, builder: IndexBuilder, changed: set[str]) -> list[str]:
    """Take over what other files know: of a copy elsewhere, of the other rule, published, of an earlier state."""
    found: list[str] = []
    for path in sorted(folder.glob("index-*.npz")) if folder.is_dir() else []:
        if not builder.complete and (stored := read_index(path)) is not None:
            found += builder.adopt(stored, without=changed, other_place=stored.uri != store.uri)
    if not builder.complete and builder.keys:
        key = published_key(metadata.fingerprint)
        try:
            if store.exists(key):
                stored = decode_index(store.read(key))
                found += builder.adopt(stored, without=changed, other_place=stored.uri != store.uri)
                logger.info("video index taken from %s in %s", key, store.uri)
        except DAMAGE as error:  # StoreError is an OSError
            logger.warning("published index %s of %s cannot be used (%s)", key, store.uri, error)
    latest = latest_path(folder, store.uri)
    if not builder.complete and latest.exists():
        before = folder.parent / latest.read_text().strip()
        if before != folder and (stored := read_index(index_path(before, store.uri, "time"))) is not None:
            found += builder.adopt(stored, without=changed)
    if builder.complete and builder.keys:
        builder.save()
        logger.info("video index reused from files of the same dataset")
    return found


def published_key(fingerprint: str) -> str:
    """Where the index of a dataset is published beside it; not under meta/, and no part of the fingerprint."""
    return f".knonik/index-{fingerprint}.npz"


def publish_index(dataset: "Dataset") -> str:
    """Write the whole index beside the dataset, for everybody who opens it from now on; returns its key.

    Raises:
        ValueError: objects are damaged.
        StoreError: the store cannot be written to.
    """
    dataset.index.wait()
    if errors := dataset.index.errors:
        few = "; ".join(str(errors[key]) for key in sorted(errors)[:_NAMES_SHOWN])
        raise ValueError(f"{len(errors)} video objects cannot be used, so the index is not published: {few}")
    key = published_key(dataset.fingerprint)
    dataset.store.write(key, dataset.index.dump())
    return key
