"""The datasets a loader reads from: for each, where its packets come from and who makes pictures of them."""

import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from knonik.batches.decoded import DecodedFrames, open_decoded
from knonik.columns.arrays import data_version
from knonik.dataset import Dataset
from knonik.fetch.source import PacketSource, packet_source
from knonik.video.colour import ColourSpec, black_planes
from knonik.video.decode import GopDecoder
from knonik.video.frames import FrameReader, FrameSpec, frame_reader

Cameras = Mapping[str, str]  # camera in the batch -> key in a dataset


class FramePrefix(Protocol):
    """The deterministic first step of the image path, done once per picture on the CPU, such as a resize."""

    @property
    def key(self) -> str:
        """Names the arithmetic and its settings: pictures made under one key are reused under the same key only."""

    def shape(self, height: int, width: int) -> tuple[int, int]:
        """Size of the result for a picture of the given size."""

    def __call__(self, frames: torch.Tensor) -> torch.Tensor:
        """uint8 [N, H, W, 3] to uint8 [N, h, w, 3], each picture on its own; called from several threads."""


class TimedSource:
    """A source of packets that counts, for each thread, the seconds it waited for them."""

    def __init__(self, source: PacketSource) -> None:
        self.announce, self.done = source.announce, source.done
        self.gauges, self.close = source.gauges, source.close
        self._packets, self._ahead = source.packets, source.ahead
        self._waited = _Waited()

    def ahead(self, frames: Sequence[tuple[str, int]]) -> None:
        """That of the source."""
        begin = time.perf_counter()
        self._ahead(frames)
        self._waited.seconds += time.perf_counter() - begin

    def packets(self, key: str, frame: int) -> tuple[list[memoryview], list[int]]:
        """Those of the source."""
        begin = time.perf_counter()
        try:
            return self._packets(key, frame)
        finally:
            self._waited.seconds += time.perf_counter() - begin

    def waited_s(self) -> float:
        """Seconds the calling thread has waited since its last call of this."""
        seconds, self._waited.seconds = self._waited.seconds, 0.0
        return seconds


class _Waited(threading.local):
    seconds = 0.0


class _NoPackets:
    """For readers that are only asked what their pictures are like."""

    def packets(self, key: str, frame: int) -> tuple[list[memoryview], list[int]]:
        raise AssertionError("this reader makes no pictures")


@dataclass(frozen=True, kw_only=True)
class PictureSpec:
    """What the pictures of a batch camera are like.

    frame: shape and element type in the batch. size: (height, width) of the picture. colour: how planes encode colour;
    None for pictures that are no planes. prefixed: the prefix is applied.
    """

    frame: FrameSpec
    size: tuple[int, int]
    colour: ColourSpec | None = None
    prefixed: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of one picture."""
        return prod(self.frame.shape) * self.frame.dtype.itemsize

    @property
    def black(self) -> NDArray[Any]:
        """A picture of a camera that a part does not have."""
        if self.colour is None:
            return np.zeros(self.frame.shape, self.frame.dtype)
        black: NDArray[Any] = black_planes(*self.size, self.colour).numpy()
        return black


@dataclass(frozen=True, kw_only=True)
class OpenPart:
    """One dataset of the source; readers and kept pictures go by the names cameras have in the batch."""

    dataset: Dataset
    source: TimedSource
    readers: Mapping[str, FrameReader]
    decoded: Mapping[str, DecodedFrames] = field(default_factory=dict)

    def kind(self, key: str) -> str:
        """`video`, `depth` or `image`: how a camera of the dataset is stored."""
        return self.dataset.episodes.cameras[key].kind

    def close(self) -> None:
        """Stop the source, let go of decoders and files."""
        with ExitStack() as stack:  # one that fails keeps no other from being closed
            for decoded in self.decoded.values():
                stack.callback(decoded.close)
            for reader in self.readers.values():
                stack.callback(reader.close)
            stack.callback(self.source.close)


def picture_specs(
    parts: Sequence[tuple[Dataset, Cameras]], *, transport: str, prefix: FramePrefix | None
) -> dict[str, PictureSpec]:
    """Spec of every batch camera.

    Raises:
        ValueError: a camera differs between the parts, or a prefix is asked for pictures that are no rgb.
    """
    if prefix is not None and transport != "rgb24":
        raise ValueError(f"transport={transport!r} does not go with a prefix, which works on rgb; give 'rgb24'")
    specs: dict[str, PictureSpec] = {}
    for dataset, cameras in parts:
        for camera, key in cameras.items():
            spec = _picture_spec(dataset, key, transport, prefix)
            known = specs.setdefault(camera, spec)
            if known != spec:
                raise ValueError(
                    f"camera {camera}: pictures of {dataset.uri} ({key}) are {_text(spec)}, those of the parts before "
                    f"are {_text(known)}; give a prefix that makes them equal, or other batch names"
                )
    return specs


def _picture_spec(dataset: Dataset, key: str, transport: str, prefix: FramePrefix | None) -> PictureSpec:
    reader = frame_reader(dataset, key, packets=_NoPackets(), transport=transport)
    spec = PictureSpec(frame=reader.spec, size=dataset.image_shape(key), colour=reader.colour)
    reader.close()
    if prefix is None or spec.frame.dtype != np.uint8 or spec.frame.shape[-1:] != (3,):
        return spec
    size = prefix.shape(*spec.size)
    return PictureSpec(frame=FrameSpec(shape=(*size, 3), dtype=spec.frame.dtype), size=size, prefixed=True)


def _text(spec: PictureSpec) -> str:
    return f"{spec.frame.dtype} {list(spec.frame.shape)}" + (f" {spec.colour}" if spec.colour else "")


def check_decoded(parts: Sequence[tuple[Dataset, Cameras]], specs: Mapping[str, PictureSpec], limit: int) -> None:
    """Whether the decoded pictures of all parts fit.

    Raises:
        ValueError: they do not; names the bytes needed.
    """
    needed = sum(decoded_bytes(dataset, cameras, specs) for dataset, cameras in parts)
    if needed > limit:
        raise ValueError(
            f"decoded_bytes={limit} is too small: the pictures of {sum(len(dataset) for dataset, _ in parts)} rows "
            f"need {needed} bytes ({needed / 1e9:.2f} GB); give at least that, a prefix that makes them smaller, or 0 "
            "for no cache of decoded pictures"
        )


def decoded_bytes(dataset: Dataset, cameras: Cameras, specs: Mapping[str, PictureSpec]) -> int:
    """Bytes of all pictures of the rows in use."""
    return len(dataset) * sum(specs[camera].num_bytes for camera in cameras)


def open_parts(
    parts: Sequence[tuple[Dataset, Cameras]],
    specs: Mapping[str, PictureSpec],
    *,
    transport: str,
    prefix: FramePrefix | None,
    ram_bytes: int,
    disk_bytes: int | None,
    decoded_limit: int,
    connections: int,
) -> list[OpenPart]:
    """Start the packet sources and make the readers. The RAM pool and the connections are shared out evenly."""
    opened: list[OpenPart] = []
    decoder = GopDecoder()
    try:
        for dataset, cameras in parts:
            source = TimedSource(
                packet_source(
                    dataset,
                    ram_bytes=ram_bytes // len(parts),
                    disk_bytes=disk_bytes,
                    connections=max(1, connections // len(parts)),
                    cameras=sorted(set(cameras.values())),
                )
            )
            readers: dict[str, FrameReader] = {}
            decoded: dict[str, DecodedFrames] = {}
            opened.append(OpenPart(dataset=dataset, source=source, readers=readers, decoded=decoded))
            for camera, key in cameras.items():
                readers[camera] = frame_reader(dataset, key, packets=source, transport=transport, decoder=decoder)
            if decoded_limit:
                decoded |= _decoded(dataset, cameras, specs, transport, prefix, decoded_limit)
    except BaseException:
        for part in opened:
            part.close()
        raise
    return opened


def _decoded(
    dataset: Dataset,
    cameras: Cameras,
    specs: Mapping[str, PictureSpec],
    transport: str,
    prefix: FramePrefix | None,
    limit: int,
) -> dict[str, DecodedFrames]:
    settings = {}
    for camera, key in cameras.items():
        spec = specs[camera]
        # What pictures depend on beside the dataset: how they were made, and the very objects they were made from.
        # Rows also find their pictures by the timestamps in the data.
        versions = [dataset.index.version(name) for name in dataset.episodes.cameras[key].keys]
        objects = "\0".join([*versions, data_version(dataset.episodes)])
        made = f"{transport} {prefix.key if prefix is not None and spec.prefixed else ''} {_text(spec)}"
        settings[key] = f"{made} {hashlib.sha256(objects.encode()).hexdigest()}", spec.num_bytes
    kept = open_decoded(
        dataset.folder / "decoded",
        settings,
        rows=int((dataset.episodes.first_row + dataset.episodes.length).max()),
        limit_bytes=limit,
        needed_bytes=decoded_bytes(dataset, cameras, specs),
    )
    return {camera: kept[key] for camera, key in cameras.items()}
