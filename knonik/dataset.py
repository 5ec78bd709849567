"""`open` a LeRobot dataset where it lies, and ask it for frames, rows, order and statistics."""

import copy
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from knonik.cache import cache_root
from knonik.columns.arrays import Column, load_columns
from knonik.columns.statistics import Statistics, cached_statistics
from knonik.index.gop import Gop
from knonik.index.stock import TOLERANCE_S
from knonik.index.video_index import VideoIndex, load_index
from knonik.metadata.episodes import EpisodeTable
from knonik.metadata.lerobot import Metadata, read_metadata
from knonik.metadata.modality import text_column as resolve_text_column
from knonik.order.anchors import AnchorOrder, Anchors
from knonik.order.select import Ranges, common_ranges, find_anchors, read_ranges, split_episodes
from knonik.order.windows import window_frames
from knonik.stores.base import Store, open_store

if TYPE_CHECKING:
    from knonik.video.frames import FrameReader


def open(
    uri: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    episodes: Sequence[int] | None = None,
    ranges: Ranges | str | os.PathLike[str] | None = None,
    text_column: str | None = None,
    match: str = "time",
    background: bool = True,
) -> "Dataset":
    """Open a LeRobot v2.0, v2.1 or v3.0 dataset in place.

    Args:
        uri: /path, file:///path or s3://bucket/prefix.
        cache_dir: folder for the index and the columns; default $KNONIK_CACHE, else the user's cache folder.
        episodes: ids of the episodes to use; default all.
        ranges: frames that may be anchors, {episode id: [(start, stop), ...]} or a JSON file of that form; episodes it
            does not name have none. Windows may reach beyond a range. Default: every frame.
        text_column: integer column whose values select the text of a row from the tasks, such as
            `annotation.human.action.task_description` or a name among modality.json's annotations; default task_index.
        match: `time` gives a row the frame at its timestamp, as stock loaders do; `index` gives row k of an episode
            the k-th frame after its first, for datasets whose timestamps are those of a step's end.
        background: index the video files that were not indexed yet now if they are few, else in a thread; False: each
            when it is first asked for.

    Raises:
        FileNotFoundError: nothing there.
        knonik.metadata.lerobot.MetadataError: the metadata is damaged or contradicts the files.
        KeyError: an episode id or the text column does not exist.
        ValueError: a range is empty or reaches beyond its episode.
    """
    store = open_store(uri)
    try:
        metadata = read_metadata(store)
        folder = cache_root(cache_dir) / metadata.fingerprint
        index = load_index(store, metadata, folder, background=background, match=match)
        return Dataset(
            store,
            metadata,
            index,
            folder,
            metadata.episodes if episodes is None else metadata.episodes.subset(episodes),
            resolve_text_column(text_column, metadata.modality, metadata.features),
            None if ranges is None else read_ranges(ranges, metadata.episodes),
            match,
        )
    except BaseException:
        store.close()
        raise


class Dataset:
    """An opened dataset; made by `open`.

    Attributes:
        uri, version, fps, features, tasks, fingerprint: from the metadata; tasks maps task_index to text.
        cameras: keys of the colour cameras, stored as video or as images.
        depth_cameras: keys of the cameras that hold depth maps.
        objects: key to size and version of every data and video object, as listed when opened.
        modality: GR00T's names for parts of the vectors, cameras and language columns; None without modality.json.
        text_column: the column whose values select a row's text.
        episodes: table of the episodes in use.
        ranges: frames that may be anchors, per episode id; None = all.
        match: the rule that gives a row its frame, see `open`.
        store, index: for readers that fetch and decode on their own.
    """

    def __init__(
        self,
        store: Store,
        metadata: Metadata,
        index: VideoIndex,
        folder: Path,
        episodes: EpisodeTable,
        text_column: str = "task_index",
        ranges: Ranges | None = None,
        match: str = "time",
    ) -> None:
        self.store = store
        self.index = index
        self.uri = store.uri
        self.version = metadata.version
        self.fps = metadata.fps
        self.features: dict[str, dict[str, Any]] = metadata.features
        self.tasks = metadata.tasks
        self.fingerprint = metadata.fingerprint
        self.objects = metadata.objects
        self.modality = metadata.modality
        self.text_column = text_column
        tables = metadata.episodes.cameras
        self.cameras = [name for name, table in tables.items() if table.depth is None]
        self.depth_cameras = [name for name, table in tables.items() if table.depth is not None]
        self.episodes = episodes
        self.ranges = ranges
        self.match = match
        self._whole: Dataset | None = None  # of a view: the dataset whose store it uses
        self._all_episodes = metadata.episodes
        self._folder = folder
        self._columns: dict[str, Column] = {}
        self._readers: dict[str, FrameReader] = {}

    def __len__(self) -> int:
        return self.episodes.num_rows

    def __repr__(self) -> str:
        return (
            f"Dataset({self.uri!r}, {self.version}, {len(self.episodes)} episodes, {len(self)} rows, {self.fps:g} fps)"
        )

    @property
    def folder(self) -> Path:
        """Where files made of its pictures are kept, apart for each `match`: by another rule rows show other frames."""
        return self._folder if self.match == "time" else self._folder / self.match

    def column(self, key: str) -> Column:
        """Read-only mapped values [R, D] of one column over all R rows of the whole dataset; index it with `rows`.

        Raises:
            knonik.metadata.lerobot.MetadataError: a data file of the episodes in use is damaged; names it and them.
        """
        return self.columns([key])[key]

    def columns(self, keys: Sequence[str]) -> dict[str, Column]:
        """`column` for several keys, read in one pass over the data files."""
        wanted = [key for key in keys if key not in self._columns]
        if wanted and self.index.needs_timestamps:
            wanted.append("timestamp")  # in the same pass, or the index would read all data files once more
        if wanted:
            self._columns |= load_columns(
                self.store, self._all_episodes, wanted, self._folder, in_use=self.episodes.ids
            )
        return {key: self._columns[key] for key in keys}

    def rows(self, episodes: NDArray[np.int64], frames: NDArray[np.int64]) -> NDArray[np.int64]:
        """Row numbers for `column`, of episode ids [B] and frames [B] or [B, T] inside them."""
        first = self.episodes.first_row[self.episodes.positions(episodes)]
        return frames + first.reshape(first.shape + (1,) * (frames.ndim - first.ndim))

    def window(
        self, episodes: NDArray[np.int64], frames: NDArray[np.int64], offsets: Sequence[int] | range
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Frames [B, T] at `offsets` from anchors [B], edge frames repeated beyond the episode, and is_pad [B, T]."""
        return window_frames(frames, self.episodes.length[self.episodes.positions(episodes)], offsets)

    def texts(self, episodes: NDArray[np.int64], frames: NDArray[np.int64]) -> list[str]:
        """Task text of each row [B], looked up by the value its `text_column` has."""
        values = self.column(self.text_column)[self.rows(episodes, frames), 0].tolist()
        try:
            return [self.tasks[value] for value in values]
        except KeyError as error:
            raise KeyError(
                f"{self.text_column} {error} stands in the rows but not in the table of tasks under meta/"
            ) from None

    def locate(self, episode: int, camera: str, frame: int) -> tuple[str, int]:
        """(object key, frame number inside it) of a row; the episode must be in use."""
        self.episodes.position(episode)
        return self.index.locate(episode, camera, frame)

    def gop(self, key: str, frame: int) -> Gop:
        """The packets that present frame `frame` of video object `key`."""
        return self.index.gop(key, frame)

    def frame(self, *, episode: int, camera: str, frame: int) -> NDArray[Any]:
        """The picture of a row, the very one the stock loader gives.

        Returns:
            uint8 [H, W, 3] RGB; of a depth camera uint16 [H, W, 1] millimetres.

        Raises:
            ValueError: the nearest frame is further from the row's timestamp than the stock tolerance of 1e-4 s.
        """
        key, number = self.locate(episode, camera, frame)
        off_s = self.index.off_s(camera, episode, frame)
        if math.isinf(off_s):
            raise ValueError(
                f"episode {episode}, camera {camera}, frame {frame}: the row has no timestamp: "
                "its data file is damaged, or holds none here"
            )
        if off_s:
            raise ValueError(
                f"episode {episode}, camera {camera}, frame {frame}: the nearest video frame ({number} of {key}) is "
                f"{off_s:.6f} s away from the row's timestamp, the stock tolerance is {TOLERANCE_S:g} s; "
                f"{self.index.num_far_rows(camera)} rows of the dataset are like this"
            )
        reader = self._reader(camera)
        picture = np.empty(reader.spec.shape, reader.spec.dtype)
        try:
            reader.read(key, [number], [picture])
        except RuntimeError as error:
            where = f"episode {episode}, camera {camera}, frame {frame} (frame {number} of {key})"
            raise RuntimeError(f"{where}: {error}") from error
        return picture

    def _reader(self, camera: str) -> "FrameReader":
        # Imported late: an index can be read where no video library is installed.
        from knonik.video.frames import StoredPackets, frame_reader

        if camera not in self._readers:
            self._readers[camera] = frame_reader(self, camera, packets=StoredPackets(self))
        return self._readers[camera]

    def image_shape(self, camera: str) -> tuple[int, int]:
        """(height, width) of a camera's pictures, from the first of them that can be used."""
        if self.episodes.cameras[camera].kind == "image":
            height, width, _ = self._reader(camera).spec.shape
            return height, width
        codec = self.index.object(self.first_usable(camera)[0]).codec
        return codec.height, codec.width

    def first_usable(self, camera: str) -> tuple[str, int]:
        """(object key, frame number inside it) of the first row in use whose video object can be used.

        Raises:
            the error of the first object, if none can.
        """
        table = self.episodes.cameras[camera]
        for position in sorted(np.unique(table.object, return_index=True)[1].tolist()):
            if self.index.usable(table.keys[table.object[position]]):
                return self.index.locate(int(self.episodes.ids[position]), camera, 0)
        self.index.object(table.keys[table.object[0]])
        raise AssertionError("an object that cannot be used gives no frames")

    def subset(
        self, episodes: Sequence[int] | None = None, ranges: Ranges | str | os.PathLike[str] | None = None
    ) -> "Dataset":
        """A view of some episodes, or of some ranges of frames as anchors (see `open`), or both.

        It shares store, index and column files with this dataset and ends with it; closing the view changes nothing.

        Raises:
            KeyError: an episode is not in use, or not in the dataset.
        """
        view = copy.copy(self)
        # Columns are mapped again: a data file that is damaged stands in the way of those who use its episodes.
        view._whole, view._readers, view._columns = self._whole or self, {}, {}
        if episodes is not None:
            view.episodes = self.episodes.subset(episodes)
        if ranges is not None:
            chosen = read_ranges(ranges, self._all_episodes)
            view.ranges = chosen if self.ranges is None else common_ranges(self.ranges, chosen)
        return view

    def split(self, validation: float = 0.05, seed: int = 0) -> tuple["Dataset", "Dataset"]:
        """(training, validation) views that share no episode; an episode's side depends on its id and `seed` alone.

        See `split_episodes`.
        """
        training, held_out = split_episodes(self.episodes, validation, seed)
        return self.subset(training), self.subset(held_out)

    def anchors(self, horizon: int = 1) -> Anchors:
        """The anchor steps in stored order: rows of the episodes in use inside `ranges`; see `find_anchors`."""
        return find_anchors(self.episodes, self.ranges, horizon)

    def order(self, *, seed: int, epoch: int, horizon: int = 1, shuffle: bool = True) -> AnchorOrder:
        """Order of the anchor steps in one epoch: item i is (episode id, frame), in O(1). See `AnchorOrder`."""
        return AnchorOrder(self.anchors(horizon), seed=seed, epoch=epoch, shuffle=shuffle)

    def statistics(self, key: str) -> Statistics:
        """Min, max, mean, std, q01, q99 of a column, float64 [D], over all rows of the episodes in use."""
        return cached_statistics(key, self.column(key), self.episodes, self._folder)

    def close(self) -> None:
        """Release the store's connections and the mapped columns, those that nobody else refers to."""
        self._columns = {}
        self._readers = {}
        if self._whole is None:
            self.index.close()
            self.store.close()

    def __enter__(self) -> "Dataset":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
