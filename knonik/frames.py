"""Pictures of a camera by object and frame number, whatever the camera's storage is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from knonik.video import GopDecoder

if TYPE_CHECKING:
    from knonik.dataset import Dataset

TRANSPORTS = ("rgb24", "yuv420p")


@dataclass(frozen=True, kw_only=True)
class FrameSpec:
    """Shape and element type of one picture as a reader writes it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Packets(Protocol):
    """Where the compressed packets come from; `knonik.fetch` has the sources."""

    def packets(self, key: str, frame: int) -> tuple[list[memoryview], list[int]]:
        """Packets of an object from the sync packet to the last one needed for `frame`, and their pts."""


class FrameReader(Protocol):
    """Pictures of one camera; `read` may be called from any number of threads."""

    @property
    def spec(self) -> FrameSpec:
        """What `out` of `read` must be like."""

    def read(self, key: str, numbers: Sequence[int], out: Sequence[NDArray[Any]]) -> None:
        """Write frames `numbers` of object `key`, which belong to one group (GOP or row group), into `out`."""

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
        camera: one of its cameras.
        packets: where compressed packets come from.
        transport: `rgb24`.
        decoder: shared by readers, so that cameras of one kind share codec contexts; None makes a new one.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport={transport!r} is not known; allowed: {', '.join(TRANSPORTS)}")
    return _VideoReader(dataset, camera, packets, decoder or GopDecoder())


class _VideoReader:
    def __init__(self, dataset: "Dataset", camera: str, packets: Packets, decoder: GopDecoder) -> None:
        self._index, self._packets, self._decoder = dataset.index, packets, decoder
        self.spec = FrameSpec(shape=(*dataset.image_shape(camera), 3), dtype=np.dtype(np.uint8))
        self.colour = None

    def read(self, key: str, numbers: Sequence[int], out: Sequence[NDArray[Any]]) -> None:
        frames = self._index.object(key)
        packets, pts = self._packets.packets(key, max(numbers))
        self._decoder.decode(frames.codec, packets, pts, frames.pts[list(numbers)].tolist(), out)

    def close(self) -> None:
        self._decoder.close()
