"""The video index of a dataset: object and frame number of every row, and the packets of every frame.

It is built from container headers and the timestamp column alone and kept, a few bytes a frame, in the cache folder.
"""

import json
import logging
import zipfile
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knonik.cache import one_builder, replacing
from knonik.columns import load_columns
from knonik.episodes import CameraTable, EpisodeTable
from knonik.gop import Gop, ObjectIndex
from knonik.lerobot import Metadata
from knonik.mp4 import CodecRecord, PacketTable, read_packets
from knonik.stock import TOLERANCE_S, match_rows
from knonik.store import Store

logger = logging.getLogger(__name__)

_FORMAT = 1  # raise it when the meaning of the cached arrays changes
_CONNECTIONS = 16  # headers are small, so latency counts and not bandwidth


@dataclass(frozen=True, kw_only=True)
class CameraRows:
    """Where the rows of one camera are.

    first: [E] first frame of each episode inside its object. frames: [rows] frame inside the object, or None where row
    r of an episode simply is frame first + r. far_rows, far_s: rows whose frame is more than the stock tolerance away,
    and by how many seconds.
    """

    first: NDArray[np.int64]
    frames: NDArray[np.int64] | None
    far_rows: NDArray[np.int64]
    far_s: NDArray[np.float64]


class VideoIndex:
    """Answers "which object and frame" and "which packets"; safe to use from many threads."""

    def __init__(
        self, episodes: EpisodeTable, tables: Mapping[str, PacketTable], cameras: Mapping[str, CameraRows]
    ) -> None:
        self.versions: Mapping[str, str] = {}
        self._far_keys: frozenset[str] | None = None
        self._episodes = episodes
        self._tables = tables
        self._cameras = cameras
        self._objects: dict[str, ObjectIndex] = {}

    def locate(self, episode: int, camera: str, frame: int) -> tuple[str, int]:
        """(object key, frame number inside the object) of a row, given by episode id and row inside the episode."""
        table, rows = self._camera(camera)
        position = self._episodes.position(episode)
        length = int(self._episodes.length[position])
        if not 0 <= frame < length:
            raise IndexError(f"episode {episode} has frames 0..{length - 1}, frame {frame} was asked for")
        key = table.keys[table.object[position]]
        if rows.frames is None:
            return key, int(rows.first[position]) + frame
        return key, int(rows.frames[self._episodes.first_row[position] + frame])

    def locate_many(
        self, episodes: NDArray[np.int64], camera: str, frames: NDArray[np.int64]
    ) -> tuple[list[str], NDArray[np.int64]]:
        """`locate` for many rows at once: object keys and frame numbers inside them."""
        table, rows = self._camera(camera)
        positions = self._episodes.positions(episodes)
        if np.any((frames < 0) | (frames >= self._episodes.length[positions])):
            raise IndexError("a frame lies outside its episode")
        inside = (
            rows.first[positions] + frames
            if rows.frames is None
            else rows.frames[self._episodes.first_row[positions] + frames]
        )
        return [table.keys[number] for number in table.object[positions].tolist()], inside

    def object(self, key: str) -> ObjectIndex:
        """Frames of one video object. Made at first use; two threads may make it twice, with the same result."""
        found = self._objects.get(key)
        if found is None:
            if key not in self._tables:
                raise KeyError(f"{key} is no video object of this dataset")
            found = self._objects[key] = ObjectIndex(key, self._tables[key])
        return found

    def gop(self, key: str, frame: int) -> Gop:
        """The packets that present frame `frame` of object `key`."""
        return self.object(key).gop(frame)

    def group(self, key: str, number: int) -> int:
        """Number of the GOP that presents frame `number` of object `key`: frames with equal groups decode together."""
        return self.object(key).gop_number(number)

    def unit_span(self, key: str, group: int) -> tuple[int, int]:
        """(offset, length) of the bytes of object `key` that any frame of GOP `group` needs."""
        return self.object(key).span(group)

    def version(self, key: str) -> str:
        """Version of the object the index was made from, "" if unknown."""
        return self.versions.get(key, "")

    def has_far_rows(self, key: str) -> bool:
        """Whether some row shown by object `key` breaks the stock tolerance."""
        if self._far_keys is None:
            found = set()
            for name, rows in self._cameras.items():
                episodes = np.searchsorted(self._episodes.first_row, rows.far_rows, side="right") - 1
                table = self._episodes.cameras[name]
                found |= {table.keys[number] for number in np.unique(table.object[episodes]).tolist()}
            self._far_keys = frozenset(found)
        return key in self._far_keys

    def off_s(self, camera: str, episode: int, frame: int) -> float:
        """Seconds between the row's time and its frame if that is more than the stock tolerance, else 0."""
        _, rows = self._camera(camera)
        row = self._episodes.first_row[self._episodes.position(episode)] + frame
        place = int(np.searchsorted(rows.far_rows, row))
        hit = place < len(rows.far_rows) and rows.far_rows[place] == row
        return float(rows.far_s[place]) if hit else 0.0

    def num_far_rows(self, camera: str) -> int:
        """Rows of the dataset whose frame breaks the stock tolerance."""
        return len(self._camera(camera)[1].far_rows)

    def _camera(self, camera: str) -> tuple[CameraTable, CameraRows]:
        if camera not in self._cameras:
            raise KeyError(f"camera {camera!r} is unknown; the dataset has {', '.join(self._cameras) or 'none'}")
        return self._episodes.cameras[camera], self._cameras[camera]


def load_index(store: Store, metadata: Metadata, folder: Path) -> VideoIndex:
    """The index of a whole dataset: read from `folder` if it fits, otherwise built and put there."""
    path = folder / "index.npz"
    if index := _reuse(path, metadata):
        return index
    with one_builder(folder, "index"):
        if index := _reuse(path, metadata):  # another process was faster
            return index
        tables, cameras = _build(store, metadata, folder)
        _save(path, metadata, tables, cameras)
    logger.info("video index built: %d objects, %d packets", len(tables), sum(map(len, tables.values())))
    return VideoIndex(metadata.episodes, tables, cameras)


def _reuse(path: Path, metadata: Metadata) -> VideoIndex | None:
    if not path.exists():
        return None
    try:
        index = _load(path, metadata)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        logger.warning("index cache %s is damaged or out of date (%s); it is built again", path, error)
        return None
    logger.info("video index reused from %s", path)
    return index


def _build(store: Store, metadata: Metadata, folder: Path) -> tuple[dict[str, PacketTable], dict[str, CameraRows]]:
    episodes = metadata.episodes
    keys = sorted({key for camera in episodes.cameras.values() for key in camera.keys})
    if not keys:
        return {}, {}
    with ThreadPoolExecutor(min(_CONNECTIONS, len(keys)), thread_name_prefix="knonik-index") as pool:
        tables = dict(zip(keys, pool.map(lambda key: read_packets(store, key, metadata.sizes[key]), keys), strict=True))
    timestamps = load_columns(store, episodes, ["timestamp"], folder)["timestamp"][:, 0]
    cameras = {name: _camera_rows(camera, episodes, tables, timestamps) for name, camera in episodes.cameras.items()}
    return tables, cameras


def _camera_rows(
    camera: CameraTable, episodes: EpisodeTable, tables: Mapping[str, PacketTable], timestamps: NDArray[Any]
) -> CameraRows:
    first = np.zeros(len(episodes), np.int64)
    frames = np.zeros(episodes.num_rows, np.int64)
    off = np.zeros(episodes.num_rows)
    order = np.lexsort((camera.start_s, camera.object))
    ends = np.searchsorted(camera.object[order], np.arange(len(camera.keys)), side="right")
    for number, key in enumerate(camera.keys):
        members = order[ends[number - 1] if number else 0 : ends[number]]
        times = ObjectIndex(key, tables[key]).frame_times_s
        if not len(times):
            raise ValueError(f"{key}: holds no video frame")
        length = episodes.length[members]
        row = np.repeat(episodes.first_row[members] - (np.cumsum(length) - length), length) + np.arange(length.sum())
        matched = match_rows(key, times, camera.start_s[members], length, timestamps[row].astype(np.float64))
        first[members], frames[row], off[row] = matched.first, matched.frames, matched.off_s
    plain = np.repeat(first - episodes.first_row, episodes.length) + np.arange(episodes.num_rows)
    (far,) = np.nonzero(off > TOLERANCE_S)
    return CameraRows(
        first=first,
        frames=None if np.array_equal(frames, plain) else frames,
        far_rows=far.astype(np.int64),
        far_s=off[far],
    )


_PACKET_FIELDS = ("offset", "size", "pts", "dts")


def _save(path: Path, metadata: Metadata, tables: Mapping[str, PacketTable], cameras: Mapping[str, CameraRows]) -> None:
    codecs = list(dict.fromkeys(table.codec for table in tables.values()))
    number = {codec: i for i, codec in enumerate(codecs)}
    header = {
        "format": _FORMAT,
        "fingerprint": metadata.fingerprint,
        "objects": [[key, len(table), number[table.codec]] for key, table in tables.items()],
        "codecs": [{**asdict(codec), "extradata": codec.extradata.hex()} for codec in codecs],
        "cameras": list(cameras),
    }
    arrays: dict[str, NDArray[Any]] = {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}
    for name in _PACKET_FIELDS:
        joined = (
            np.concatenate([getattr(table, name) for table in tables.values()]) if tables else np.zeros(0, np.int64)
        )
        arrays[name] = joined if name == "size" else np.diff(joined, prepend=0)
    # Packets usually follow each other without a gap: then nothing but the sizes is left to store.
    arrays["offset"] = arrays["offset"] - np.append(0, arrays["size"])[: len(arrays["size"])]
    for name in ("sync", "shown"):
        joined = (
            np.concatenate([getattr(table, name) for table in tables.values()]) if tables else np.zeros(0, np.bool_)
        )
        arrays[name] = np.packbits(joined)
    for i, rows in enumerate(cameras.values()):
        arrays |= {f"first{i}": rows.first, f"far_rows{i}": rows.far_rows, f"far_s{i}": rows.far_s}
        if rows.frames is not None:
            arrays[f"frames{i}"] = np.diff(rows.frames, prepend=0)
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def _load(path: Path, metadata: Metadata) -> VideoIndex:
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    header = json.loads(arrays["header"].tobytes())
    if header["format"] != _FORMAT or header["fingerprint"] != metadata.fingerprint:
        raise ValueError("it was written for another dataset or by another version")
    if header["cameras"] != list(metadata.episodes.cameras):
        raise ValueError("it lists other cameras")
    codecs = [CodecRecord(**{**codec, "extradata": bytes.fromhex(codec["extradata"])}) for codec in header["codecs"]]
    total = sum(count for _, count, _ in header["objects"])
    packets: dict[str, NDArray[Any]] = {name: arrays[name] for name in _PACKET_FIELDS}
    packets["offset"] = packets["offset"] + np.append(0, packets["size"])[: len(packets["size"])]
    packets |= {name: np.cumsum(packets[name]) for name in ("offset", "pts", "dts")}
    packets |= {name: np.unpackbits(arrays[name], count=total).astype(np.bool_) for name in ("sync", "shown")}
    if any(len(values) != total for values in packets.values()):
        raise ValueError("its arrays have different lengths")
    tables, begin = {}, 0
    for key, count, codec in header["objects"]:
        part = {name: values[begin : begin + count] for name, values in packets.items()}
        tables[key] = PacketTable(codec=codecs[codec], **part)
        begin += count
    cameras = {}
    for i, name in enumerate(header["cameras"]):
        moved = arrays.get(f"frames{i}")
        cameras[name] = CameraRows(
            first=arrays[f"first{i}"],
            frames=None if moved is None else np.cumsum(moved),
            far_rows=arrays[f"far_rows{i}"],
            far_s=arrays[f"far_s{i}"],
        )
        if len(cameras[name].first) != len(metadata.episodes):
            raise ValueError("it lists other episodes")
    return VideoIndex(metadata.episodes, tables, cameras)
