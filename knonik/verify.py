"""Prove that a dataset's frames are the stock loader's: every row, decoded twice by ways that share next to nothing.

One way is that of training: packets found by the index, no container. The other opens each video file with libav's
demuxer, decodes it from the first frame to the last, reads timestamps from the Parquet files and applies the stock rule
row by row: the frame with the nearest time, the first on a tie, not further away than 1e-4 s.
"""

import hashlib
import io
import logging
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import IO, Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from knonik.dataset import Dataset
from knonik.index.stock import TOLERANCE_S
from knonik.video.decode import GopDecoder, read_container
from knonik.video.frames import FrameReader, StoredPackets, frame_reader

logger = logging.getLogger(__name__)

_MOST_LISTED = 100
_FRAMES_AT_ONCE = 32  # decoded pictures held by a thread
_READ_AHEAD = 8 << 20  # bytes


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row and what is wrong with it."""

    camera: str
    episode: int
    frame: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `verify` found.

    frames: pictures compared. mismatches: rows whose pictures differ, or that only one way gives although the stock
    rule gives them. refused: rows without a frame near their timestamp, which the stock loader refuses and so do we.
    beyond_stock: rows that the stock loader refuses and we give, where `from_timestamp` has drifted. Lists end after
    100 rows, the numbers go on. failed: object -> error, for objects that could not be read. as_rgb24: camera -> why
    its planes were not compared. digest: SHA-256 over the pictures of all rows; equal datasets have equal ones.
    """

    uri: str
    transport: str
    cameras: tuple[str, ...]
    frames: int = 0
    num_mismatches: int = 0
    num_refused: int = 0
    num_beyond_stock: int = 0
    mismatches: tuple[BadRow, ...] = ()
    refused: tuple[BadRow, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    as_rgb24: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing differed and everything could be read."""
        return not self.num_mismatches and not self.failed


def verify(
    dataset: Dataset,
    *,
    cameras: Sequence[str] | None = None,
    episodes: Sequence[int] | None = None,
    transport: str = "rgb24",
    workers: int = 2,
) -> Report:
    """Compare every frame of `dataset` with an independent decode of its files by the stock rule.

    Args:
        dataset: opened with the stock rule, `match="time"`.
        cameras: None = all, depth cameras included.
        episodes: ids; None = those in use. A file is read whole, however few of its episodes are asked for.
        transport: `yuv420p` compares the planes after their conversion to RGB, with the same reference.
        workers: threads; each holds up to 32 pictures and one open file.

    Raises:
        KeyError: an unknown camera or episode.
        ValueError: the dataset was opened with another rule.
    """
    if dataset.match != "time":
        raise ValueError(f"the dataset was opened with match={dataset.match!r}; the stock rule is match='time'")
    begun = time.perf_counter()
    view = dataset if episodes is None else dataset.subset(episodes)
    cameras = list(cameras) if cameras is not None else [*dataset.cameras, *dataset.depth_cameras]
    readers, as_rgb24 = _readers(view, cameras, transport)
    jobs = [(camera, key) for camera in cameras for key in _objects(view, camera)]
    results = []
    with ThreadPoolExecutor(workers, thread_name_prefix="knonik-verify") as pool:
        work = [pool.submit(_compare, view, camera, key, readers[camera]) for camera, key in jobs]
        try:
            for (camera, key), future in zip(jobs, work, strict=True):
                results.append(future.result())
                logger.info("verified %d of %d: %s of %s", len(results), len(jobs), camera, key)
        finally:
            pool.shutdown(cancel_futures=True)
    for reader in readers.values():
        reader.close()
    report = Report(uri=dataset.uri, transport=transport, cameras=tuple(cameras), as_rgb24=as_rgb24)
    return replace(_add(report, jobs, results), seconds=time.perf_counter() - begun)


def _readers(dataset: Dataset, cameras: Sequence[str], transport: str) -> tuple[dict[str, FrameReader], dict[str, str]]:
    decoder, packets = GopDecoder(), StoredPackets(dataset)
    readers, as_rgb24 = {}, {}
    for camera in cameras:
        readers[camera] = frame_reader(dataset, camera, packets=packets, transport=transport, decoder=decoder)
        if transport != "rgb24" and readers[camera].colour is None:
            as_rgb24[camera] = "no planes; see the warning" if camera in dataset.cameras else "a depth camera"
    return readers, as_rgb24


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Rows of one camera shown by one object, and per row the pictures' digests: ours and stock, None = refused."""

    episodes: NDArray[np.int64]
    frames: NDArray[np.int64]
    ours: list[bytes | None]
    stock: list[bytes | None]
    off_s: list[float]
    error: str = ""


def _objects(dataset: Dataset, camera: str) -> list[str]:
    table = dataset.episodes.cameras.get(camera)
    if table is None:
        raise KeyError(f"camera {camera!r} is unknown; the dataset has {', '.join(dataset.episodes.cameras) or 'none'}")
    return [table.keys[number] for number in np.unique(table.object).tolist()]


def _compare(dataset: Dataset, camera: str, key: str, reader: FrameReader) -> _Rows:
    episodes, frames = _rows(dataset, camera, key)
    try:
        pictures, times = _container(dataset, camera, key)
        stock, off_s = _stock_rule(dataset, camera, key, episodes, frames, pictures, times)
        ours = _ours(dataset, camera, key, episodes, frames, reader)
    except (RuntimeError, ValueError, OSError) as error:
        return _Rows(episodes=episodes, frames=frames, ours=[], stock=[], off_s=[], error=str(error))
    return _Rows(episodes=episodes, frames=frames, ours=ours, stock=stock, off_s=off_s)


def _rows(dataset: Dataset, camera: str, key: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    table = dataset.episodes
    here = np.flatnonzero(table.cameras[camera].object == table.cameras[camera].keys.index(key))
    length = table.length[here]
    return np.repeat(table.ids[here], length), np.concatenate([np.arange(n) for n in length])


def _ours(
    dataset: Dataset,
    camera: str,
    key: str,
    episodes: NDArray[np.int64],
    frames: NDArray[np.int64],
    reader: FrameReader,
) -> list[bytes | None]:
    """Digest of each row's picture by the way of training."""
    _, numbers = dataset.index.locate_many(episodes, camera, frames)
    wanted = np.unique(numbers)
    groups = np.array([dataset.index.group(key, number) for number in wanted.tolist()])
    found: dict[int, bytes] = {}
    buffers = np.empty((_FRAMES_AT_ONCE, *reader.spec.shape), reader.spec.dtype)
    for group in np.unique(groups):
        members = wanted[groups == group].tolist()
        for begin in range(0, len(members), _FRAMES_AT_ONCE):
            some = members[begin : begin + _FRAMES_AT_ONCE]
            reader.read(key, some, list(buffers[: len(some)]))
            found |= zip(some, map(_digest, _converted(dataset, camera, reader, buffers[: len(some)])), strict=True)
    far = dataset.index.has_far_rows(key)
    rows = zip(episodes.tolist(), frames.tolist(), numbers.tolist(), strict=True)
    return [None if far and dataset.index.off_s(camera, e, f) else found[number] for e, f, number in rows]


def _converted(dataset: Dataset, camera: str, reader: FrameReader, pictures: NDArray[Any]) -> NDArray[Any]:
    if reader.colour is None:
        return pictures
    import torch

    from knonik.video.colour import to_rgb

    return to_rgb(torch.from_numpy(pictures), *dataset.image_shape(camera), reader.colour).numpy()


def _container(dataset: Dataset, camera: str, key: str) -> tuple[list[bytes], list[float]]:
    """Digest and time of every picture of an object, in order; images of a data file have no times."""
    table = dataset.episodes.cameras[camera]
    with _open(dataset, key) as file:
        if table.kind == "image":
            from knonik.video.images import decode_image

            column = pq.ParquetFile(file).read(columns=[camera]).column(camera).to_pylist()
            bodies = (value["bytes"] if isinstance(value, dict) else value for value in column)
            return [_digest(decode_image(body)) for body in bodies], []
        pictures: Iterator[tuple[float, NDArray[Any]]]
        if table.depth is not None:
            from knonik.video.depth import millimetres

            scale = millimetres(table.depth)
            pictures = ((at, scale[codes][..., None]) for at, codes in read_container(file, "gray12le"))
        else:
            pictures = read_container(file)
        found = [(at, _digest(picture)) for at, picture in pictures]
    found.sort(key=lambda entry: entry[0])
    return [digest for _, digest in found], [at for at, _ in found]


def _stock_rule(
    dataset: Dataset,
    camera: str,
    key: str,
    episodes: NDArray[np.int64],
    frames: NDArray[np.int64],
    pictures: Sequence[bytes],
    times: Sequence[float],
) -> tuple[list[bytes | None], list[float]]:
    """Digest of each row's picture by the stock rule, None where it refuses, and the distance in seconds."""
    table = dataset.episodes
    found: list[bytes | None] = []
    off_s: list[float] = []
    read: dict[str, dict[int, NDArray[np.float32]]] = {}
    for episode in dict.fromkeys(episodes.tolist()):
        place = table.position(episode)
        data_key = table.data_keys[table.data_object[place]]
        if data_key not in read:
            read = {data_key: _timestamps(dataset, data_key)}
        timestamps = read[data_key].get(episode, read[data_key].get(-1))
        if timestamps is None or len(timestamps) < table.length[place]:
            raise ValueError(f"{data_key} does not hold the {table.length[place]} rows of episode {episode}")
        start = float(table.cameras[camera].start_s[place])
        for frame in frames[episodes == episode].tolist():
            if not times:  # images: the row itself
                found.append(pictures[int(table.data_row[place]) + frame])
                off_s.append(0.0)
                continue
            query = start + float(timestamps[frame])
            right = bisect_left(times, query)
            near = min(range(max(0, right - 2), min(len(times), right + 2)), key=lambda i: abs(times[i] - query))
            off = float(abs(np.float32(times[near]) - np.float32(query)))
            found.append(pictures[near] if off < TOLERANCE_S else None)
            off_s.append(off)
    return found, off_s


def _timestamps(dataset: Dataset, key: str) -> dict[int, NDArray[np.float32]]:
    """Timestamps in a data file by episode id; by -1 if the file does not say whose rows it holds."""
    try:
        with _open(dataset, key) as file:
            parquet = pq.ParquetFile(file)
            rows = parquet.read(columns=[c for c in ("timestamp", "episode_index") if c in parquet.schema_arrow.names])
    except (OSError, ValueError) as error:  # Arrow's own are ValueErrors, and name no file
        raise ValueError(f"{key}: {error}") from error
    timestamps = np.ravel(np.array(rows.column("timestamp").to_pylist(), np.float32))
    if "episode_index" not in rows.column_names:
        return {-1: timestamps}
    ids = np.ravel(np.array(rows.column("episode_index").to_pylist(), np.int64))
    return {episode: timestamps[ids == episode] for episode in np.unique(ids).tolist()}


def _open(dataset: Dataset, key: str) -> IO[bytes]:
    path = dataset.store.local_path(key)
    if path is not None:
        return path.open("rb")
    # Files are read from end to end here, so large ranges: a GET a frame would wait for latency most of the time.
    return io.BufferedReader(dataset.store.open(key).detach(), _READ_AHEAD)


def _digest(picture: NDArray[Any]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(picture).data).digest()


def _add(report: Report, jobs: Sequence[tuple[str, str]], results: Sequence[_Rows]) -> Report:
    mismatches: list[BadRow] = []
    refused: list[BadRow] = []
    failed: dict[str, str] = {}
    frames = beyond = 0
    lines: dict[tuple[str, int, int], bytes] = {}
    for (camera, key), rows in zip(jobs, results, strict=True):
        if rows.error:
            failed[key] = rows.error
            continue
        for place, (episode, frame) in enumerate(zip(rows.episodes.tolist(), rows.frames.tolist(), strict=True)):
            ours, stock = rows.ours[place], rows.stock[place]
            bad = BadRow(camera=camera, episode=episode, frame=frame, reason="")
            lines[camera, episode, frame] = ours or b"refused"
            if stock is None:
                reason = f"the nearest frame is {rows.off_s[place]:.6f} s away from the timestamp"
                beyond += ours is not None
                refused += [replace(bad, reason=reason)] if ours is None else []
            elif ours is None:
                mismatches.append(replace(bad, reason="refused here, given by the stock rule"))
            else:
                frames += 1
                mismatches += [replace(bad, reason="other pixels")] if ours != stock else []
    digest = hashlib.sha256()
    for (camera, episode, frame), line in sorted(lines.items()):
        digest.update(f"{camera} {episode} {frame} ".encode() + line)
    return replace(
        report,
        frames=frames,
        num_mismatches=len(mismatches),
        num_refused=len(refused),
        num_beyond_stock=beyond,
        mismatches=tuple(mismatches[:_MOST_LISTED]),
        refused=tuple(refused[:_MOST_LISTED]),
        failed=failed,
        digest=digest.hexdigest(),
    )
