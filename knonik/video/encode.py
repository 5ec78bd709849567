"""Encode episodes as mp4 and join them. With `decode.py` the only module that imports `av`."""

import io
import os
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import av
import numpy as np
from av.video.reformatter import VideoReformatter
from numpy.typing import NDArray

# Presets trade size for time; robot sets are written once and read many times, and these decode equally fast.
_ENCODERS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "av1": ("libsvtav1", {"preset": "10", "svtav1-params": "lp=1"}),
    "h264": ("libx264", {"preset": "veryfast", "threads": "1", "x264-params": "scenecut=0"}),
    "hevc": (
        "libx265",
        {
            "preset": "ultrafast",
            # Adaptive quantisation corrupts the heap for pictures of some sizes below 64.
            "x265-params": "log-level=none:pools=none:frame-threads=1:scenecut=0:open-gop=0:aq-mode=0:cutree=0",
        },
    ),
}
_QUALITY = {"av1": 30, "h264": 20, "hevc": 24}
# Columns and rows that share a chroma sample.
_SUBSAMPLING = {"yuv420p": (2, 2), "yuv422p": (2, 1), "yuv444p": (1, 1), "gray12le": (1, 1)}
# Matrix -> its number for swscale, and AVCOL_SPC_* for the stream.
_MATRICES = {"bt601": (5, 6), "bt709": (1, 1), "bt2020": (9, 9), "fcc": (4, 4), "smpte240m": (7, 7)}
_CLOCK = 90000  # ticks a second where frames have times of their own


def encode_mp4(
    target: Path | BinaryIO,
    frames: NDArray[Any],
    *,
    fps: float,
    codec: str = "av1",
    gop: int = 2,
    crf: int | None = None,
    bframes: int = 0,
    pix_fmt: str = "yuv420p",
    matrix: str | None = None,
    full_range: bool = False,
    times_s: Sequence[float] | None = None,
) -> None:
    """Write one mp4 of `frames`, a key frame every `gop` frames, header at the end as recorders leave it.

    Args:
        target: path or writable binary file.
        frames: uint8 [N, H, W, 3] rgb, sides multiples of the chroma blocks of `pix_fmt`; for `gray12le` uint16
            [N, H, W] codes 0..4095, which are kept without loss (`hevc` only).
        fps: frames per second.
        codec: `av1` (SVT-AV1), `h264` (x264) or `hevc` (x265); one thread, so callers run several at once.
        gop: distance of key frames in frames; 2 is what LeRobot records.
        crf: constant quality; None takes 30 for AV1 (as LeRobot), 20 for H.264 and 24 for HEVC.
        bframes: most B-frames between two others, H.264 and HEVC only.
        pix_fmt: `yuv420p`, `yuv422p`, `yuv444p` or `gray12le`; AV1 has the first only.
        matrix: `bt601`, `bt709`, `bt2020`, `fcc` or `smpte240m`, written into the stream; None leaves it unspecified,
            which readers take for BT.601.
        full_range: use all 256 levels, and say so in the stream.
        times_s: [N] rising presentation times, seconds; None takes k / fps.
    """
    if codec not in _ENCODERS:
        raise ValueError(f"codec={codec!r} is not known; allowed: {', '.join(_ENCODERS)}")
    if pix_fmt not in _SUBSAMPLING or (codec == "av1" and pix_fmt != "yuv420p"):
        raise ValueError(f"pix_fmt={pix_fmt!r} is not known for {codec}; allowed: {', '.join(_SUBSAMPLING)}")
    if matrix is not None and matrix not in _MATRICES:
        raise ValueError(f"matrix={matrix!r} is not known; allowed: None, {', '.join(_MATRICES)}")
    if gop < 1:
        raise ValueError(f"gop={gop} is not allowed; give 1 or more frames")
    if bframes < 0 or (bframes and codec == "av1"):
        raise ValueError(f"bframes={bframes} is not allowed for {codec}; give 0, or 1 or more with h264 or hevc")
    if times_s is not None and (len(times_s) != len(frames) or np.any(np.diff(times_s) <= 0)):
        raise ValueError(f"times_s must be {len(frames)} rising times, one per frame")
    _check_frames(frames, pix_fmt, codec)
    height, width = frames.shape[1:3]
    encoder, options = _ENCODERS[codec][0], _options(codec, gop, bframes, pix_fmt)
    if codec == "av1":
        # SVT-AV1 prints its banner on stderr for every clip and has no other switch for it.
        os.environ.setdefault("SVT_LOG", "1")
    if pix_fmt != "gray12le":
        options["crf"] = str(_QUALITY[codec] if crf is None else crf)
    pictures = _Pictures(pix_fmt, matrix, full_range)
    with av.open(target if not isinstance(target, Path) else str(target), "w", format="mp4") as container:
        stream: Any = container.add_stream(encoder, rate=_rate(fps), options=options)
        context = stream.codec_context
        context.gop_size = gop
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        context.thread_count = 1
        if matrix is not None:
            context.colorspace = _MATRICES[matrix][1]
        if full_range:
            context.color_range = 2
        if times_s is not None:
            context.time_base = Fraction(1, _CLOCK)
        for index, pixels in enumerate(frames):
            frame = pictures.frame(pixels)
            frame.time_base = 1 / _rate(fps) if times_s is None else Fraction(1, _CLOCK)
            frame.pts = index if times_s is None else round(times_s[index] * _CLOCK)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


class _Pictures:
    """Turns arrays into frames of a pixel format."""

    def __init__(self, pix_fmt: str, matrix: str | None, full_range: bool) -> None:
        self._pix_fmt, self._reformatter = pix_fmt, VideoReformatter()
        self._options: dict[str, Any] = {"format": pix_fmt, "threads": 1}
        if matrix is not None:
            self._options["dst_colorspace"] = _MATRICES[matrix][0]
        if full_range:
            self._options["dst_color_range"] = 2

    def frame(self, pixels: NDArray[Any]) -> Any:
        if self._pix_fmt == "gray12le":
            return av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="gray12le")
        rgb = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
        return self._reformatter.reformat(rgb, **self._options)


def _check_frames(frames: NDArray[Any], pix_fmt: str, codec: str) -> None:
    if pix_fmt == "gray12le":
        if codec != "hevc" or frames.ndim != 3 or frames.dtype != np.uint16 or not len(frames) or frames.max() > 4095:
            raise ValueError(
                f"gray12le takes uint16 [N, H, W] up to 4095 and codec='hevc', given {frames.dtype} "
                f"{list(frames.shape)} and {codec!r}"
            )
        return
    if frames.ndim != 4 or frames.shape[3] != 3 or frames.dtype != np.uint8 or not len(frames):
        raise ValueError(f"frames must be uint8 [N, H, W, 3] with N >= 1, given {frames.dtype} {list(frames.shape)}")
    columns, rows = _SUBSAMPLING[pix_fmt]
    if frames.shape[1] % rows or frames.shape[2] % columns:
        even = "even sides" if rows == 2 else "an even width"
        raise ValueError(f"frames are {frames.shape[1]}x{frames.shape[2]}; {pix_fmt} needs {even}, crop or pad them")


def _options(codec: str, gop: int, bframes: int, pix_fmt: str) -> dict[str, str]:
    options = dict(_ENCODERS[codec][1])
    if codec == "av1":
        options["svtav1-params"] += f":keyint={gop}"  # libav's own `g` cannot ask for key frames only
    elif codec == "h264":
        options["bf"] = str(bframes)
    else:
        options["x265-params"] += f":keyint={gop}:min-keyint={gop}:bframes={bframes}"
        if bframes:
            options["x265-params"] += ":b-adapt=0"
        if pix_fmt == "gray12le":
            options["x265-params"] += ":lossless=1"
    return options


class Mp4Joiner:
    """One mp4 made of several mp4s by packet copy, so each of them begins on its own key frame; header first.

    All parts must come from the same encoder settings and size: the codec record of the first serves all.
    """

    def __init__(self, path: Path, *, fps: float) -> None:
        self._path = path
        self._rate = _rate(fps)
        self._container: Any = None
        self._stream: Any = None
        self._record: bytes | None = None
        self._frames = 0

    def add(self, part: bytes) -> tuple[float, float]:
        """Append a whole mp4 given as bytes; returns the seconds at which it begins and ends in the joined file."""
        with av.open(io.BytesIO(part), "r") as source:
            stream: Any = source.streams.video[0]
            record = stream.codec_context.extradata
            if self._container is None:
                self._container = av.open(str(self._path), "w", format="mp4", options={"movflags": "faststart"})
                self._stream = self._container.add_stream_from_template(stream, opaque=True)
                self._record = record
            elif record != self._record:
                raise ValueError(f"{self._path.name}: a part has another codec record; use equal sizes and settings")
            begin = self._frames
            shift = round(Fraction(begin) / self._rate / stream.time_base)
            for packet in source.demux(stream):
                if packet.size == 0:  # demux ends with an empty packet
                    continue
                packet.pts += shift
                packet.dts += shift
                packet.stream = self._stream
                self._container.mux_one(packet)
                self._frames += 1
        return float(begin / self._rate), float(self._frames / self._rate)

    def close(self) -> None:
        """Finish the file."""
        if self._container is not None:
            self._container.close()
            self._container = None

    def __enter__(self) -> "Mp4Joiner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _rate(fps: float) -> Fraction:
    # Containers store rates as fractions; 1001 covers the television rates (30000/1001).
    return Fraction(fps).limit_denominator(1001)
