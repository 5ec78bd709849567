"""Video through libav: decode the packets of one GOP. `encode.py` writes; no other module imports `av`.

Decoding needs no container: a codec context is fed the codec record and the packets of a GOP, from its key frame on,
in the order they are stored. There is no seek, no file handle and no header read on that path. A frame depends only on
packets stored before its own, so decoding stops at the last wanted packet and what the decoder still holds back for
reordering (B-frames) is drained.
"""

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol

import av
import av.video.reformatter
import numpy as np
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

from knonik.video import swscale

logger = logging.getLogger(__name__)

# libav's own `av1` decoder needs hardware; container readers take dav1d too.
_DECODERS: Mapping[str, str] = {"av1": "libdav1d"}
# Of rgb: larger pictures, held back, would push out of the caches what the decoder works with.
_MOST_HELD_BYTES = 2 << 20


class DecodeError(RuntimeError):
    """Packets that do not give the wanted frames."""


class CodecInfo(Protocol):
    """What a decoder must know of a stream before its first packet."""

    @property
    def name(self) -> str:
        """libav's name of the codec, such as `av1`, `h264`, `hevc`."""

    @property
    def extradata(self) -> bytes:
        """The codec's configuration record as stored in the container."""


@dataclass(frozen=True, kw_only=True)
class FrameTags:
    """How a decoded frame stores colour, as libav names and numbers it.

    pix_fmt: such as `yuv420p`. matrix: AVCOL_SPC_*, 1 is BT.709, 5 and 6 are BT.601, 9 is BT.2020, 2 is unspecified.
    range: AVCOL_RANGE_*, 1 is limited, 2 is full, 0 is unspecified.
    """

    pix_fmt: str
    matrix: int
    range: int


class GopDecoder:
    """Decodes wanted frames of one GOP at a time; safe to call from any number of threads.

    Every thread keeps its own `contexts_per_thread` most recently used codec contexts (1-5 MB each), each with one
    codec thread: parallelism comes from the caller's threads, and libav's own threads are known to dead-lock there.
    """

    def __init__(self, contexts_per_thread: int = 8) -> None:
        self._capacity = contexts_per_thread
        self._local = threading.local()

    def decode(
        self,
        codec: CodecInfo,
        packets: Sequence[bytes | memoryview],
        pts: Sequence[int],
        wanted: Sequence[int],
        out: Sequence[NDArray[Any]],
        format: str = "rgb24",
        allowed: Collection[FrameTags] | None = None,
    ) -> FrameTags | None:
        """Write the frames with presentation times `wanted` into `out`; returns how they store colour.

        Args:
            codec: codec name and configuration record.
            packets: the packets of a GOP in stored order; the first one is a key frame.
            pts: presentation time of each packet, any unit, each value once.
            wanted: presentation times asked for, in any order; repeats are allowed.
            out: one array per wanted frame, shaped as `format` says.
            format: `rgb24`, uint8 [H, W, 3] by libav's default conversion; `yuv420p`, uint8 [N] with the rows of Y, U
                and V one after another, without padding; `gray12le`, uint16 [H, W]. The last two must be what the
                stream holds: only rgb24 is converted to.
            allowed: tags the frames may have; None allows all.

        Raises:
            DecodeError: a wanted time is in no packet, a frame does not come out, or it is not of the size, format or
                tags that `out`, `format` and `allowed` say.
        """
        return self.start(codec, packets, pts, wanted, out, format, allowed)()

    def start(
        self,
        codec: CodecInfo,
        packets: Sequence[bytes | memoryview],
        pts: Sequence[int],
        wanted: Sequence[int],
        out: Sequence[NDArray[Any]],
        format: str = "rgb24",
        allowed: Collection[FrameTags] | None = None,
    ) -> Callable[[], FrameTags | None]:
        """`decode` in two steps: decodes now, and what it gives writes the frame, in the same thread.

        Several GOPs decoded and then several frames converted cost less than both in turns, for each kind of work
        finds its code and tables in the caches. So that memory stays bounded, the one frame of a GOP is left to the
        second step, and only if it is small; others are written now.
        """
        if format not in _WRITERS:
            raise ValueError(f"format={format!r} is not known; allowed: {', '.join(_WRITERS)}")
        targets: dict[int, list[NDArray[Any]]] = {}
        for time, array in zip(wanted, out, strict=True):
            targets.setdefault(time, []).append(array)
        last = len(pts) - 1
        while last >= 0 and pts[last] not in targets:
            last -= 1
        if missing := targets.keys() - pts:
            raise DecodeError(f"no packet has pts {sorted(missing)}; the GOP holds {_span(pts)}")
        key = (codec.name, codec.extradata)
        contexts: OrderedDict[tuple[str, bytes], _Context]
        try:
            contexts = self._local.contexts
        except AttributeError:
            contexts = self._local.contexts = OrderedDict()
        # Taken out while in use: a context that failed half-way is not used again.
        context = contexts.pop(key, None) or _Context(codec)
        try:
            rest = context.decode(packets, pts, last, targets, format, allowed)
        except av.FFmpegError as error:
            raise DecodeError(f"{codec.name} decoder refused a packet of the GOP {_span(pts)}: {error}") from error
        contexts[key] = context
        if len(contexts) > self._capacity:
            contexts.popitem(last=False)
        return rest

    def close(self) -> None:
        """Drop the calling thread's codec contexts; other threads' go when these threads end."""
        self._local = threading.local()


class _Context:
    """One open decoder with its colour converter, owned by one thread."""

    def __init__(self, codec: CodecInfo) -> None:
        self._decoder: Any = av.CodecContext.create(_DECODERS.get(codec.name, codec.name), "r")
        self._decoder.extradata = codec.extradata
        self._decoder.thread_count = 1
        # Without this a H.264 decoder guesses the reordering depth of streams that do not state it and may drop
        # B-frames at the start; a container reader avoids that by probing the file, which this path never sees.
        self._decoder.options = {"strict": "1"}
        # One converter for all frames and no threads of its own: setting one up costs more than a small frame does.
        self._reformatter = VideoReformatter()
        self._kinds: dict[_Kind, tuple[FrameTags, swscale.Converter | None]] = {}
        self._used = False

    def decode(
        self,
        packets: Sequence[bytes | memoryview],
        pts: Sequence[int],
        last: int,
        targets: dict[int, list[NDArray[Any]]],
        format: str,
        allowed: Collection[FrameTags] | None,
    ) -> Callable[[], FrameTags | None]:
        decode = self._decoder.decode
        if self._used:
            self._decoder.flush_buffers()
        self._used = True
        holds = len(targets) == 1
        found: FrameTags | None = None
        for index in range(last + 2):
            if index <= last:
                packet = av.Packet(packets[index])  # type: ignore[arg-type]  # any buffer is taken
                packet.pts = pts[index]
                packet.dts = index  # any rising value: only order matters here
            elif targets:
                packet = None  # gives what is held back for reordering
            else:
                break
            for frame in decode(packet):
                if (arrays := targets.pop(frame.pts, None)) is not None:
                    if holds and arrays[0].nbytes <= _MOST_HELD_BYTES:
                        return functools.partial(self._deliver, frame, arrays, format, allowed)
                    found = self._deliver(frame, arrays, format, allowed)
        if targets:
            raise DecodeError(f"no frame came out for pts {sorted(targets)} of the GOP {_span(pts)}")
        return lambda: found

    def _deliver(
        self,
        frame: Any,
        arrays: list[NDArray[Any]],
        format: str,
        allowed: Collection[FrameTags] | None,
    ) -> FrameTags:
        if frame.is_corrupt:
            raise DecodeError(f"the frame with pts {frame.pts} is damaged")
        kind = frame.format.name, frame.colorspace, frame.color_range, frame.height, frame.width
        try:
            found, converter = self._kinds[kind]
        except KeyError:
            found, converter = self._kinds[kind] = _of_kind(kind)
        if allowed is not None and found not in allowed:
            raise DecodeError(
                f"the frame with pts {frame.pts} is {found.pix_fmt} with colour matrix {found.matrix} and range "
                f"{found.range}, unlike the first frames of its camera"
            )
        if format == "rgb24":
            # Of an interlaced frame PyAV converts each field by itself.
            if converter is not None and not frame.interlaced_frame and converter.write(frame, arrays[0]):
                for array in arrays[1:]:
                    array[...] = arrays[0]
                return found
            try:
                frame = self._reformatter.reformat(frame, format="rgb24", threads=1)
            except av.FFmpegError as error:
                raise DecodeError(f"the frame with pts {frame.pts} cannot be converted to rgb24: {error}") from error
        elif found.pix_fmt not in _SAME_LAYOUT[format]:
            raise DecodeError(f"the frame with pts {frame.pts} is {found.pix_fmt}, which cannot be given as {format}")
        for array in arrays:
            _WRITERS[format](frame, array)
        return found


_Kind = tuple[str, int, int, int, int]  # pix_fmt, matrix, range, height, width


def _of_kind(kind: _Kind) -> tuple[FrameTags, swscale.Converter | None]:
    """Tags of such frames, and what writes them straight into an array; None where that is not known to be the same."""
    pix_fmt, matrix, range, height, width = kind
    tags = FrameTags(pix_fmt=pix_fmt, matrix=int(matrix), range=int(range))
    return tags, _converter(tags, height, width) if _writes_the_same(tags, height, width) else None


def _converter(tags: FrameTags, height: int, width: int) -> swscale.Converter:
    module = av.video.reformatter.__file__
    return swscale.Converter(module, height, width, tags.pix_fmt, tags.matrix, tags.range)


@functools.lru_cache(maxsize=64)
def _writes_the_same(tags: FrameTags, height: int, width: int) -> bool:
    """Whether libswscale, given an array to write to, makes of a noisy frame what PyAV makes of it: 10 ms, once."""
    if not swscale.fits(tags.pix_fmt, height, width):
        return False
    frame = _frame(np.random.default_rng(0).integers(0, 256, height * width * 3 // 2, np.uint8), height, width, tags)
    try:
        return _converter(tags, height, width).agrees(frame, _rgb(frame))
    except (OSError, av.FFmpegError) as error:  # what PyAV refuses too, it will refuse by itself
        logger.info("pictures are copied out of PyAV's frames: %s", error)
        return False


def _plane(frame: Any, number: int, dtype: Any, height: int, *row: int) -> NDArray[Any]:
    """A view of a plane's pixels without the padding of its rows; `to_ndarray` would copy them once more."""
    plane, item = frame.planes[number], np.dtype(dtype).itemsize
    inner = (item,) if len(row) == 1 else (row[1] * item, item)
    return np.ndarray((height, *row), dtype, plane, strides=(plane.line_size, *inner))


def _write(frame: Any, array: NDArray[Any], pixels: NDArray[Any]) -> None:
    if array.shape != pixels.shape:
        raise DecodeError(f"the frame with pts {frame.pts} is {pixels.shape}, expected {array.shape}")
    array[...] = pixels


def _write_rgb24(frame: Any, array: NDArray[Any]) -> None:
    _write(frame, array, _plane(frame, 0, np.uint8, frame.height, frame.width, 3))


def _write_yuv420p(frame: Any, array: NDArray[Any]) -> None:
    height, width = frame.height, frame.width
    half = -(-height // 2), -(-width // 2)
    luma, chroma = height * width, half[0] * half[1]
    if array.shape != (luma + 2 * chroma,):
        raise DecodeError(
            f"the frame with pts {frame.pts} has planes of {luma + 2 * chroma} bytes, expected {array.shape}"
        )
    array[:luma].reshape(height, width)[...] = _plane(frame, 0, np.uint8, height, width)
    array[luma : luma + chroma].reshape(half)[...] = _plane(frame, 1, np.uint8, *half)
    array[luma + chroma :].reshape(half)[...] = _plane(frame, 2, np.uint8, *half)


def _write_gray12le(frame: Any, array: NDArray[Any]) -> None:
    _write(frame, array, _plane(frame, 0, np.dtype("<u2"), frame.height, frame.width))


_WRITERS: Mapping[str, Callable[[Any, NDArray[Any]], None]] = {
    "rgb24": _write_rgb24,
    "yuv420p": _write_yuv420p,
    "gray12le": _write_gray12le,
}
# yuvj420p is the old name of full-range yuv420p; its range stands in the tags as well.
_SAME_LAYOUT: Mapping[str, tuple[str, ...]] = {"yuv420p": ("yuv420p", "yuvj420p"), "gray12le": ("gray12le",)}


def _span(pts: Sequence[int]) -> str:
    return f"of {len(pts)} packets, pts {min(pts)}..{max(pts)}" if pts else "of no packets"


def read_container(file: IO[bytes], format: str = "rgb24") -> Iterator[tuple[float, NDArray[Any]]]:
    """Time in seconds and picture of every frame of a video file in presentation order, by libav's own demuxer.

    The slow way, which shares nothing with `GopDecoder` but the codecs and swscale: what `knonik verify` compares with.
    `file` must be seekable; `format` is `rgb24` or `gray12le`.

    Raises:
        DecodeError: no video file, or a damaged one.
    """
    try:
        with av.open(file, "r") as container:
            if not container.streams.video:
                raise DecodeError("the file holds no video")
            stream: Any = container.streams.video[0]
            stream.codec_context.thread_count = 1
            for frame in container.decode(stream):
                if format != "rgb24" and frame.format.name != format:
                    raise DecodeError(f"the frame at {frame.time} s is {frame.format.name}, expected {format}")
                yield float(frame.pts * stream.time_base), frame.to_ndarray(format=format)
    except av.FFmpegError as error:  # some of them are OSErrors, ValueErrors or EOFErrors, and some are none
        raise DecodeError(f"libav cannot read the file: {error}") from error


def swscale_rgb(planes: NDArray[np.uint8], height: int, width: int, tags: FrameTags) -> NDArray[np.uint8]:
    """Planes [N] (as `yuv420p` of `GopDecoder`) to [H, W, 3] by the libswscale at hand, as PyAV calls it."""
    return _rgb(_frame(planes, height, width, tags))


def _frame(planes: NDArray[np.uint8], height: int, width: int, tags: FrameTags) -> Any:
    frame: Any = av.VideoFrame(width, height, tags.pix_fmt)
    frame.colorspace, frame.color_range = tags.matrix, tags.range
    half = -(-height // 2), -(-width // 2)
    ends = np.cumsum([height * width, half[0] * half[1], half[0] * half[1]])
    for plane, part, shape in zip(frame.planes, np.split(planes, ends[:2]), ((height, width), half, half), strict=True):
        rows = np.zeros((shape[0], plane.line_size), np.uint8)
        rows[:, : shape[1]] = part.reshape(shape)
        plane.update(rows)
    return frame


def _rgb(frame: Any) -> NDArray[np.uint8]:
    rgb: Any = VideoReformatter().reformat(frame, format="rgb24", threads=1)
    return _plane(rgb, 0, np.uint8, frame.height, frame.width, 3).copy()
