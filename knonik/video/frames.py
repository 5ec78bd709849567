"""Pictures of a camera by object and frame number, whatever the camera's storage is."""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from knonik.video.decode import CodecInfo, DecodeError, FrameTags, GopDecoder, swscale_rgb

if TYPE_CHECKING:
    from knonik.dataset import Dataset
    from knonik.video.colour import ColourSpec

logger = logging.getLogger(__name__)

Rest = Callable[[], object]
Start = Callable[[], Rest | None]
"""The first part of a read; gives the rest of it, None where nothing is left to do."""

TRANSPORTS = ("rgb24", "yuv420p")
_UINT8 = np.dtype(np.uint8)


@dataclass(frozen=True, kw_only=True)
class FrameSpec:
    """Shape and element type of one picture as a reader writes it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Packets(Protocol):
    """Where the compressed packets come from; `knonik.fetch.source` has the sources."""

    def packets(self, key: str, frame: int) -> tuple[list[memoryview], list[int]]:
        """Packets of an object from the sync packet to the last one needed for `frame`, and their pts."""


class StoredPackets:
    """Packets read from the dataset's store whenever they are asked for."""

    def __init__(self, dataset: "Dataset") -> None:
        self._index, self._store = dataset.index, dataset.store

    def packets(self, key: str, frame: int) -> tuple[list[memoryview], list[int]]:
        """One range read."""
        return self._index.object(key).fetch(self._store, frame)


class FrameReader(Protocol):
    """Pictures of one camera; `read` may be called from any number of threads."""

    @property
    def spec(self) -> FrameSpec:
        """What `out` of `read` must be like."""

    @property
    def colour(self) -> "ColourSpec | None":
        """How the planes encode colour under the transport `yuv420p`; None where pictures need no conversion."""

    def read(self, key: str, numbers: Sequence[int], out: Sequence[NDArray[Any]]) -> None:
        """Write frames `numbers` of object `key`, which belong to one group (GOP or row group), into `out`.

        Raises:
            StoreError: their bytes cannot be had.
            DecodeError, ImageError: they give no such picture.
        """

    def prepare(self, key: str, numbers: Sequence[int], out: Sequence[NDArray[Any]]) -> Start:
        """`read` for who has several to do: all begun, then all ended, they cost less than one after another."""

    def close(self) -> None:
        """Let go of decoders and files."""


def frame_reader(
    dataset: "Dataset",
    camera: str,
    *,
    packets: Packets,
    transport: str = "rgb24",
    decoder: GopDecoder | None = None,
) -> FrameReader:
    """A reader for a camera of `dataset`.

    Args:
        dataset: an opened dataset; its index says which packets and times belong to a frame.
        camera: one of its colour or depth cameras.
        packets: where compressed packets come from; image cameras do not use it.
        transport: `rgb24`, uint8 [H, W, 3]; `yuv420p`, the planes of a colour video as uint8 [N], see
            `colour.Planes`. Video whose conversion is not reproduced bit for bit on the device comes as rgb24, with a
            warning; images are always rgb24 and depth maps are uint16 [H, W, 1] millimetres.
        decoder: shared by readers, so that cameras of one kind share codec contexts; None makes a new one.

    Raises:
        ValueError: an unknown transport.
        KeyError: an unknown camera.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport={transport!r} is not known; allowed: {', '.join(TRANSPORTS)}")
    table = dataset.episodes.cameras.get(camera)
    if table is None:
        raise KeyError(f"camera {camera!r} is unknown; the dataset has {', '.join(dataset.episodes.cameras) or 'none'}")
    if table.kind == "image":
        return _ImageReader(dataset, camera)
    decoder = decoder or GopDecoder()
    height, width = dataset.image_shape(camera)
    if table.depth is not None:
        from knonik.video.depth import millimetres

        return _DepthReader(dataset, packets, decoder, (height, width), millimetres(table.depth))
    if transport == "yuv420p":
        from knonik.video.colour import plane_bytes

        colour, reason = plane_colour(dataset, camera, decoder)
        if colour is not None:
            shape: tuple[int, ...] = (plane_bytes(height, width),)
            return _VideoReader(dataset, packets, decoder, shape, colour)
        logger.warning("camera %s comes as rgb24 although transport='yuv420p' was asked for: %s", camera, reason)
    return _VideoReader(dataset, packets, decoder, (height, width, 3), None)


def plane_colour(dataset: "Dataset", camera: str, decoder: GopDecoder) -> "tuple[ColourSpec | None, str]":
    """How a camera's planes become RGB on a device, or None and the reason why they do not bit for bit.

    Decodes the camera's first usable frame: colour tags stand in the stream, and container headers may contradict it.
    """
    from knonik.video.colour import ColourSpec, reproducible

    height, width = dataset.image_shape(camera)
    if not reproducible(height, width):
        return None, f"pictures of {height}x{width} have an odd number of rows, between which chroma is interpolated"
    key, number = dataset.first_usable(camera)
    frames = dataset.index.object(key)
    packets, pts = StoredPackets(dataset).packets(key, number)
    picture = np.empty((height, width, 3), np.uint8)
    tags = decoder.decode(frames.codec, packets, pts, [int(frames.pts[number])], [picture])
    assert tags is not None
    colour = ColourSpec.of(tags)
    if colour is None:
        return None, f"{key} stores {tags.pix_fmt} with colour matrix {tags.matrix} and range {tags.range}"
    if not _as_swscale(colour):
        return None, "the libswscale of this machine converts in another way than the device would"
    return colour, ""


@functools.cache
def _as_swscale(colour: "ColourSpec") -> bool:
    """Whether libswscale, as built for and run by this machine, agrees with the conversion on the device.

    A spot check of 2^21 of the 2^24 triples, some 50 ms once per process; the tests compare them all.
    """
    import torch

    from knonik.video.colour import to_rgb

    tags = min(colour.tags, key=lambda tags: (tags.pix_fmt, tags.matrix, tags.range))
    chroma = np.arange(256, dtype=np.uint8)
    pairs = np.concatenate([chroma.repeat(256), np.tile(chroma, 256)])  # every U with every V, each over 2x2 pixels
    for first in range(0, 256, 32):
        luma = np.tile(np.array([[first, first + 9], [first + 18, first + 31]], np.uint8), (256, 256))
        planes = np.concatenate([luma.reshape(-1), pairs])
        ours = to_rgb(torch.from_numpy(planes), 512, 512, colour).numpy()
        if not np.array_equal(ours, swscale_rgb(planes, 512, 512, tags)):
            return False
    return True


class _VideoReader:
    """Frames of a colour video: rgb24 where `colour` is None, else planes."""

    def __init__(
        self,
        dataset: "Dataset",
        packets: Packets,
        decoder: GopDecoder,
        shape: tuple[int, ...],
        colour: "ColourSpec | None",
    ) -> None:
        self._index, self._packets, self._decoder = dataset.index, packets, decoder
        self.spec = FrameSpec(shape=shape, dtype=_UINT8)
        self.colour = colour
        self._format = "rgb24" if colour is None else "yuv420p"
        self._allowed: frozenset[FrameTags] | None = None if colour is None else colour.tags

    def read(self, key: str, numbers: Sequence[int], out: Sequence[NDArray[Any]]) -> None:
        self.prepare(key, numbers, out)()()

    def prepare(
        self, key: str, numbers: Sequence[int], out: Sequence[NDArray[Any]]
    ) -> Callable[[], Callable[[], None]]:
        frames = self._index.object(key)
        wanted = [int(frames.pts[number]) for number in numbers]
        return functools.partial(self._start, key, max(numbers), frames.codec, wanted, out)

    def _start(
        self, key: str, last: int, codec: CodecInfo, wanted: list[int], out: Sequence[NDArray[Any]]
    ) -> Callable[[], None]:
        packets, pts = self._packets.packets(key, last)
        try:
            rest = self._decoder.start(codec, packets, pts, wanted, out, self._format, self._allowed)
        except DecodeError as error:
            raise self._named(key, error) from error
        return functools.partial(self._end, key, rest)

    def _end(self, key: str, rest: Rest) -> None:
        try:
            rest()
        except DecodeError as error:
            raise self._named(key, error) from error

    def _named(self, key: str, error: DecodeError) -> DecodeError:
        hint = "" if self.colour is None else "; if other tags are the cause, give transport='rgb24'"
        return DecodeError(f"{key}: {error}{hint}")

    def close(self) -> None:
        self._decoder.close()


class _DepthReader:
    """Frames of a depth video in millimetres."""

    colour = None

    def __init__(
        self,
        dataset: "Dataset",
        packets: Packets,
        decoder: GopDecoder,
        size: tuple[int, int],
        table: NDArray[np.uint16],
    ) -> None:
        self._index, self._packets, self._decoder, self._size, self._table = (
            dataset.index, packets, decoder, size, table
        )  # fmt: skip
        self.spec = FrameSpec(shape=(*size, 1), dtype=np.dtype(np.uint16))

    def read(self, key: str, numbers: Sequence[int], out: Sequence[NDArray[Any]]) -> None:
        frames = self._index.object(key)
        packets, pts = self._packets.packets(key, max(numbers))
        codes = np.empty((len(numbers), *self._size), np.uint16)
        wanted = frames.pts[list(numbers)].tolist()
        try:
            self._decoder.decode(frames.codec, packets, pts, wanted, list(codes), "gray12le")
        except DecodeError as error:
            raise DecodeError(f"{key}: {error}") from error
        for picture, array in zip(codes, out, strict=True):
            array[..., 0] = self._table[picture]

    def prepare(self, key: str, numbers: Sequence[int], out: Sequence[NDArray[Any]]) -> Callable[[], None]:
        return functools.partial(self.read, key, numbers, out)

    def close(self) -> None:
        self._decoder.close()


class _ImageReader:
    """Pictures kept as encoded images in the data files."""

    colour = None

    def __init__(self, dataset: "Dataset", camera: str) -> None:
        from knonik.video.images import ImageFiles, decode_image

        self._files = ImageFiles(dataset.store, camera, dataset.folder / "images", dataset.objects)
        key, row = dataset.locate(int(dataset.episodes.ids[0]), camera, 0)
        # The declared shape may have its axes in any order; the first picture does not lie.
        self.spec = FrameSpec(shape=decode_image(self._files.read(key, row)).shape, dtype=_UINT8)

    def read(self, key: str, numbers: Sequence[int], out: Sequence[NDArray[Any]]) -> None:
        from knonik.video.images import ImageError, decode_image

        for number, array in zip(numbers, out, strict=True):
            try:
                picture = decode_image(self._files.read(key, number))
                if picture.shape != array.shape:
                    raise ImageError(f"the picture is {picture.shape}, expected {array.shape}")
            except ImageError as error:
                raise ImageError(f"{key}, row {number}: {error}") from error
            array[...] = picture

    def prepare(self, key: str, numbers: Sequence[int], out: Sequence[NDArray[Any]]) -> Callable[[], None]:
        return functools.partial(self.read, key, numbers, out)

    def close(self) -> None:
        """Nothing is held open."""
