"""libswscale writing straight into a batch's memory.

The converter of PyAV makes a frame of its own, out of which the picture has to be copied: 0.9 MB for 480x640, read and
written once more through the caches the decoder works in, 3 % of what decoding an AV1 frame costs. So the very library
that PyAV is linked to is called here with the batch's memory as its destination. Only where that was seen to give the
same bytes and to keep inside the picture; everything else goes PyAV's way.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BILINEAR = 2  # what PyAV asks for where no interpolation is named; without scaling it chooses nothing
_ALIGNED = 16  # bytes, of rows and of their begin: what the vector code of libswscale stores at once
_FORMATS = ("yuv420p", "yuvj420p")
_FULL_RANGE = 2  # AVCOL_RANGE_JPEG
_GUARD_BYTES = 4096

_Four = ctypes.c_void_p * 4
_FourInts = ctypes.c_int * 4


def fits(pix_fmt: str, height: int, width: int) -> bool:
    """Whether such pictures may be converted here: libswscale then works pixel by pixel, in whole vectors."""
    return pix_fmt in _FORMATS and height % 2 == 0 and width % _ALIGNED == 0 and height > 0 < width


class Converter:
    """Frames of one size and one kind of tags to rgb24; used by one thread at a time.

    Args:
        module: path of a compiled module that is linked to libswscale.
        pix_fmt, matrix, range: as in `decode.FrameTags`.

    Raises:
        OSError: libswscale cannot be reached through the module, or does not convert such frames.
    """

    def __init__(self, module: str, height: int, width: int, pix_fmt: str, matrix: int, range: int) -> None:
        self._swscale = library = _library(module)
        source, target = library.av_get_pix_fmt(pix_fmt.encode()), library.av_get_pix_fmt(b"rgb24")
        self._context = library.sws_getContext(
            width, height, source, width, height, target, _BILINEAR, None, None, None
        )
        if not self._context:
            raise OSError(f"libswscale makes no converter from {pix_fmt}")
        coefficients = library.sws_getCoefficients(matrix)
        full, one = int(range == _FULL_RANGE or pix_fmt == "yuvj420p"), 1 << 16
        if library.sws_setColorspaceDetails(self._context, coefficients, full, coefficients, 1, 0, one, one) < 0:
            raise OSError(f"libswscale does not take colour matrix {matrix}")
        self._height, self._shape = height, (height, width, 3)
        self._picture = ctypes.c_uint8 * (height * width * 3)
        # Made once: making them for each frame would take longer than filling them in.
        self._sources, self._source_strides = _Four(), _FourInts()
        self._targets, self._target_strides = _Four(), _FourInts(3 * width)

    def __del__(self) -> None:
        if getattr(self, "_context", None):
            self._swscale.sws_freeContext(self._context)

    def write(self, frame: Any, array: NDArray[np.uint8]) -> bool:
        """Convert a decoded frame into `array` [H, W, 3]; False if its memory, or libswscale, does not allow it."""
        try:
            # Takes memory that is writable and without gaps; asking the array for its address costs twice as much.
            picture = self._picture.from_buffer(array)  # type: ignore[arg-type]  # arrays are buffers
        except (TypeError, ValueError):
            return False
        address = ctypes.addressof(picture)
        if array.shape != self._shape or array.itemsize != 1 or address % _ALIGNED:
            return False
        self._targets[0] = address
        for number, plane in enumerate(frame.planes):
            self._sources[number], self._source_strides[number] = plane.buffer_ptr, plane.line_size
        rows: int = self._swscale.sws_scale(
            self._context,
            self._sources,
            self._source_strides,
            0,
            self._height,
            self._targets,
            self._target_strides,
        )
        return rows == self._height

    def agrees(self, frame: Any, expected: NDArray[np.uint8]) -> bool:
        """Whether a frame becomes `expected` [H, W, 3], and nothing beside it is written."""
        guarded = np.full(expected.size + 2 * _GUARD_BYTES + _ALIGNED, 0xA5, np.uint8)
        begin = _GUARD_BYTES + -guarded.ctypes.data % _ALIGNED
        picture = guarded[begin : begin + expected.size].reshape(expected.shape)
        return (
            self.write(frame, picture)
            and np.array_equal(picture, expected)
            and bool((guarded[:begin] == 0xA5).all())
            and bool((guarded[begin + expected.size :] == 0xA5).all())
        )


@functools.cache
def _library(module: str) -> Any:
    # Symbols are looked up in the module and in all it is linked to, so wherever a package keeps its libraries, these
    # are the ones its converter uses. The module is loaded already; this counts one more user of it.
    library = ctypes.CDLL(module)
    pointer, number = ctypes.c_void_p, ctypes.c_int
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "av_get_pix_fmt": (number, [ctypes.c_char_p]),
        "sws_getCoefficients": (pointer, [number]),
        "sws_getContext": (pointer, [*[number] * 7, pointer, pointer, pointer]),
        "sws_setColorspaceDetails": (number, [pointer, pointer, number, pointer, number, number, number, number]),
        "sws_scale": (number, [pointer, pointer, pointer, number, number, pointer, pointer]),
        "sws_freeContext": (None, [pointer]),
    }
    for name, (result, arguments) in signatures.items():
        try:
            function: Callable[..., Any] = getattr(library, name)
        except AttributeError as error:
            raise OSError(f"{module} leads to no {name}") from error
        function.restype, function.argtypes = result, arguments  # type: ignore[attr-defined]
    return library
