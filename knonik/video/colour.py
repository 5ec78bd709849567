"""Colour planes to RGB on any device, bit for bit what libswscale makes of them on the CPU.

For 8-bit 4:2:0 pictures with an even number of rows swscale's x86 converter works pixel by pixel: a pixel takes the
chroma of its 2x2 block as it is, and every product is cut to 16 bits:

    luma = (8 Y - offset) * scale >> 16              red   = clip(luma + (v * red_v >> 16))
    u = 8 U - 1024, v = 8 V - 1024                   green = clip(luma + (u * green_u >> 16) + (v * green_v >> 16))
                                                     blue  = clip(luma + (u * blue_u >> 16))

With whole numbers only, the same holds on a GPU. The tests compare all 2^24 triples for every matrix and range against
the libswscale at hand. With an odd number of rows swscale interpolates chroma between rows, which is not reproduced.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from knonik.video.decode import FrameTags

# Matrices in units of 2^-16: V to red, U to blue, -U to green, -V to green. They follow from the luma weights of the
# standards for limited range, as libswscale rounds them (libswscale/yuv2rgb.c, ff_yuv2rgb_coeffs).
_MATRICES: Mapping[str, tuple[int, int, int, int]] = {
    "bt601": (104597, 132201, 25675, 53279),
    "bt709": (117489, 138438, 13975, 34925),
    "bt2020": (110013, 140363, 12277, 42626),
    "fcc": (104448, 132798, 24759, 53109),
    "smpte240m": (117579, 136230, 16907, 35559),
}
# AVCOL_SPC_* to matrix: swscale takes BT.601 where the stream says nothing. Others (RGB, YCgCo, BT.2020 with constant
# luminance, ICtCp) it refuses or would treat by rules of their own.
_TAGGED: Mapping[int, str] = {1: "bt709", 2: "bt601", 4: "fcc", 5: "bt601", 6: "bt601", 7: "smpte240m", 9: "bt2020"}
_RANGES = {0: False, 1: False, 2: True}  # AVCOL_RANGE_*: unspecified counts as limited
_PIECE_BYTES = 64 << 20  # of intermediates, so that a batch needs little more memory than its result


@dataclass(frozen=True, kw_only=True)
class ColourSpec:
    """How planes encode colour. matrix: `bt601`, `bt709`, `bt2020`, `fcc` or `smpte240m`. full_range: 0..255 luma."""

    matrix: str
    full_range: bool

    def __post_init__(self) -> None:
        if self.matrix not in _MATRICES:
            raise ValueError(f"matrix={self.matrix!r} is not known; allowed: {', '.join(_MATRICES)}")

    @classmethod
    def of(cls, tags: "FrameTags") -> "ColourSpec | None":
        """The spec by which swscale converts frames with these tags; None where it is not reproduced here."""
        if tags.pix_fmt not in ("yuv420p", "yuvj420p") or tags.matrix not in _TAGGED or tags.range not in _RANGES:
            return None
        full = _RANGES[tags.range] or tags.pix_fmt == "yuvj420p"
        return cls(matrix=_TAGGED[tags.matrix], full_range=full)

    @property
    def tags(self) -> "frozenset[FrameTags]":
        """All tags of frames that are converted by this spec."""
        from knonik.video.decode import FrameTags  # late: planes can be converted where no video library is

        pix_fmts = ("yuv420p", "yuvj420p")
        found = (FrameTags(pix_fmt=p, matrix=m, range=r) for p in pix_fmts for m in _TAGGED for r in _RANGES)
        return frozenset(tags for tags in found if ColourSpec.of(tags) == self)

    @property
    def factors(self) -> "Factors":
        """The 16-bit factors of this spec."""
        red_v, blue_u, green_u, green_v = _MATRICES[self.matrix]
        scale, offset = (1 << 16, 0) if self.full_range else ((255 << 16) // 219, 16)
        if self.full_range:  # chroma spans 255 levels instead of 224
            red_v, blue_u, green_u, green_v = (value * 224 // 255 for value in (red_v, blue_u, green_u, green_v))
        return Factors(
            luma=_rounded(scale),
            offset=8 * offset,
            red_v=_rounded(red_v),
            green_u=_rounded(-green_u),
            green_v=_rounded(-green_v),
            blue_u=_rounded(blue_u),
        )


@dataclass(frozen=True, kw_only=True)
class Factors:
    """Factors of the formulas above, in units of 2^-13, and the offset of luma in units of 1/8."""

    luma: int
    offset: int
    red_v: int
    green_u: int
    green_v: int
    blue_u: int


def _rounded(value: int) -> int:
    """2^-16 units to 2^-13 units, halves upwards."""
    return ((value << 13) + (1 << 15)) >> 16


def reproducible(height: int, width: int) -> bool:
    """Whether pictures of this size are converted pixel by pixel; the columns may be odd, the rows may not."""
    return height % 2 == 0 and width > 0


def plane_bytes(height: int, width: int) -> int:
    """Bytes of a picture's three planes: Y rows, U rows, V rows, chroma sides halved and rounded up."""
    return height * width + 2 * (-(-height // 2)) * (-(-width // 2))


def black_planes(height: int, width: int, spec: ColourSpec) -> torch.Tensor:
    """uint8 [N] of a black picture: lowest luma, and chroma in the middle, where it is none."""
    planes = torch.full((plane_bytes(height, width),), 128, dtype=torch.uint8)
    planes[: height * width] = 0 if spec.full_range else 16
    return planes


@dataclass(frozen=True, kw_only=True)
class Planes:
    """Pictures as colour planes, half the bytes of RGB.

    data: uint8 [B, T, N] with N = `plane_bytes(height, width)`. height, width: pixels. spec: how they encode colour.
    """

    data: torch.Tensor
    height: int
    width: int
    spec: ColourSpec

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Planes":
        """The same planes on `device`; a CUDA copy is asynchronous only from pinned memory."""
        return replace(self, data=self.data.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Planes":
        """A copy in page-locked memory."""
        return replace(self, data=self.data.pin_memory())

    def rgb(self) -> torch.Tensor:
        """uint8 [B, T, H, W, 3] on the same device, equal to the `rgb24` transport bit for bit."""
        return to_rgb(self.data, self.height, self.width, self.spec)


def to_rgb(data: torch.Tensor, height: int, width: int, spec: ColourSpec) -> torch.Tensor:
    """uint8 [..., H, W, 3] from planes uint8 [..., N].

    Raises:
        ValueError: N does not fit the size, or the size is not `reproducible`.
    """
    if data.dtype != torch.uint8 or data.shape[-1:] != (plane_bytes(height, width),):
        wanted = f"uint8 [..., {plane_bytes(height, width)}] for {height}x{width} pixels"
        raise ValueError(f"data is {data.dtype} {list(data.shape)}; {wanted} was expected")
    if not reproducible(height, width):
        raise ValueError(f"{height}x{width} planes are not converted: the height must be even; use transport='rgb24'")
    flat = data.reshape(-1, data.shape[-1])
    rgb = torch.empty((len(flat), height, width, 3), dtype=torch.uint8, device=data.device)
    piece = max(1, _PIECE_BYTES // (8 * height * width))
    for begin in range(0, len(flat), piece):
        _convert(flat[begin : begin + piece], rgb[begin : begin + piece], spec.factors)
    return rgb.reshape(*data.shape[:-1], height, width, 3)


def _convert(planes: torch.Tensor, rgb: torch.Tensor, factors: Factors) -> None:
    """Planes uint8 [P, N] into rgb uint8 [P, H, W, 3]."""
    count, height, width, _ = rgb.shape
    rows, columns = height // 2, -(-width // 2)
    luma_bytes, chroma_bytes = height * width, rows * columns
    luma = planes[:, :luma_bytes].to(torch.int32)
    luma = luma.mul_(8 * factors.luma).sub_(factors.offset * factors.luma).bitwise_right_shift_(16).to(torch.int16)
    luma = luma.view(count, rows, 2, width)
    u = planes[:, luma_bytes : luma_bytes + chroma_bytes].to(torch.int32).sub_(128).mul_(8)
    v = planes[:, luma_bytes + chroma_bytes :].to(torch.int32).sub_(128).mul_(8)
    red = v * factors.red_v >> 16
    green = (u * factors.green_u >> 16) + (v * factors.green_v >> 16)
    blue = u * factors.blue_u >> 16
    out, wide = rgb.view(count, rows, 2, width, 3), torch.empty_like(luma)
    for channel, chroma in enumerate((red, green, blue)):
        # Each value twice along a row: one contiguous run per row is twice as fast on a CPU as blocks of 2x2.
        twice = chroma.to(torch.int16).view(count, rows, 1, columns, 1).expand(-1, -1, -1, -1, 2)
        torch.add(luma, twice.reshape(count, rows, 1, 2 * columns)[..., :width], out=wide)
        out[..., channel] = wide.clamp_(0, 255)
