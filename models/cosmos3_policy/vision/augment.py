"""The random part of the picture path on the device: one crop and one colour jitter per sample, for all its frames.

Frames come as they were decoded and leave as float32 levels, in chunks that bound the memory: a single frame at a time
on a CPU, whose caches then hold what the next pass reads, and as many as fit in a given number of bytes elsewhere. The
draws are host values, so that neither the order of the operations nor the place of the crop waits for the device.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from models.common import draws
from models.cosmos3_policy.inputs.settings import AugmentConfig
from models.cosmos3_policy.vision.jitter import SCRATCH_PLANES, Jitter, draw_jitter, jitter_

CPU_BLOCK = 32768
"""Pixels of a frame that are jittered at a time on a CPU: ten planes of them are about a second-level cache."""

DEVICE_BYTES = 512 * 2**20
"""Working memory on other devices, unless told otherwise."""


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """What one sample draws. top, left: place of the box between its first and last offset, in [0, 1)."""

    top: float
    left: float
    jitter: Jitter


class Augmentations(tuple[Augmentation, ...]):
    """The draws of a batch. They stay on the host where a batch moves all it holds to a device."""

    __slots__ = ()

    def to(self, *_: Any, **__: Any) -> "Augmentations":
        return self

    def pin_memory(self) -> "Augmentations":
        return self


def draw_augmentations(config: AugmentConfig, seed: int, positions: Sequence[int] | Tensor) -> Augmentations:
    """Draws of the samples at `positions` [N] (on the host), as functions of (seed, position)."""
    strength = (config.brightness, config.contrast, config.saturation, config.hue)
    places = draws.uniform(seed, "augment.crop", positions, (2,)).tolist()
    jitters = draw_jitter(seed, positions, strength)
    return Augmentations(
        Augmentation(top=top, left=left, jitter=jitter) for (top, left), jitter in zip(places, jitters, strict=True)
    )


def crop_box(share: float, height: int, width: int, drawn: Augmentation) -> tuple[int, int, int, int]:
    """(top, left, height, width) of the box; each side is cut to int(share * side), as the reference cuts it."""
    box_height, box_width = max(1, int(share * height)), max(1, int(share * width))
    top = int(drawn.top * (height - box_height + 1))
    left = int(drawn.left * (width - box_width + 1))
    return top, left, box_height, box_width


class ClipAugmenter:
    """Crop, resize back and jitter of clips whose frames have one size, with buffers that are used again."""

    def __init__(
        self, config: AugmentConfig, height: int, width: int, device: torch.device, *, max_bytes: int = DEVICE_BYTES
    ) -> None:
        self.config = config
        self.size = (height, width)
        self.device = device
        self.chunk_frames = 1 if device.type == "cpu" else max(1, max_bytes // _frame_bytes(height, width))
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def __call__(self, frames: Tensor, drawn: Augmentation) -> Iterator[tuple[int, Tensor]]:
        """uint8 [F, H, W, 3] -> (first frame, float32 levels [3, f, H, W]) chunk by chunk.

        A chunk is good until the next one is asked for. Levels lie in [0, 255] but for the last bits of float32.
        """
        top, left, height, width = crop_box(self.config.crop, *self.size, drawn)
        boxes = frames[:, top : top + height, left : left + width]
        for start in range(0, len(frames), self.chunk_frames):
            levels = self._resized(boxes[start : start + self.chunk_frames])
            count = levels.shape[1]
            block = min(CPU_BLOCK, self.size[0] * self.size[1]) if self.device.type == "cpu" else math.prod(self.size)
            scratch = self._buffer("scratch", (SCRATCH_PLANES, count, block), torch.float32)
            jitter_(levels.view(3, count, -1), drawn.jitter, scratch)
            yield start, levels

    def _resized(self, boxes: Tensor) -> Tensor:
        """uint8 [f, h, w, 3] -> float32 levels [3, f, H, W], bilinear."""
        count, height, width, _ = boxes.shape
        planes = boxes.permute(3, 0, 1, 2)
        out = self._buffer("levels", (3, count, *self.size), torch.float32)
        if (height, width) == self.size:
            return out.copy_(planes)
        # One more row and column on all sides, so that a pixel beside the edge has two neighbours too.
        bordered = self._buffer("bordered", (3, count, height + 2, width + 2), torch.uint8)
        bordered[:, :, 1:-1, 1:-1] = planes
        bordered[:, :, 0], bordered[:, :, -1] = bordered[:, :, 1], bordered[:, :, -2]
        bordered[..., 0], bordered[..., -1] = bordered[..., 1], bordered[..., -2]
        levels = self._buffer("source", tuple(bordered.shape), torch.float32).copy_(bordered)
        across = self._buffer("across", (3, count, height + 2, self.size[1]), torch.float32)
        _stretch(levels, taps_on(self.device, width, self.size[1]), 3, across)
        return _stretch(across, taps_on(self.device, height, self.size[0]), 2, out)

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        key = (name, math.prod(shape))
        if key not in self._buffers:
            self._buffers[key] = torch.empty(key[1], dtype=dtype, device=self.device)
        return self._buffers[key].view(shape)


def _frame_bytes(height: int, width: int) -> int:
    """Working memory of one frame: three float32 planes at four stages, one of uint8, and the jitter's scratch."""
    return height * width * (3 * 4 * 4 + 3 + SCRATCH_PLANES * 4)


class Taps(NamedTuple):
    """Output o is source[index[o]] * (1 - weight[o]) + source[index[o] + 1] * weight[o], with the border counted.

    period: (outputs, sources) after which the indices, which are one apart between, begin anew; or None.
    """

    index: Tensor  # int64 [out]
    weight: Tensor  # float32 [out]
    period: tuple[int, int] | None


@functools.lru_cache(maxsize=64)
def taps_on(device: torch.device, source: int, target: int) -> Taps:
    """Two taps per output for a side that grows from `source` to `target`, on `device`."""
    taps = _taps(source, target)
    return Taps(taps.index.to(device), taps.weight.to(device), taps.period)


def _taps(source: int, target: int) -> Taps:
    """Taken from the antialiasing kernel itself, applied to the unit vectors: its float32 weights differ from exact
    ones by 1e-5, which would show in one of a hundred pixels at a sharp edge."""
    weights = interpolate(
        torch.eye(source).unsqueeze(0).unsqueeze(0), size=(source, target), mode="bilinear", antialias=True
    )[0, 0]
    used = weights > 0
    if int(used.sum(0).max()) > 2:
        raise ValueError(f"a side cannot be stretched from {source} to {target} pixels: it gets shorter")
    last = (
        source - 1 - used.flip(0).to(torch.uint8).argmax(0)
    )  # row of the last tap; with the border its pair begins there
    weight = weights.gather(0, last.unsqueeze(0))[0]
    # The last row alone is also the pair of itself and the border behind it, which is what a period goes on to.
    behind = (last == source - 1) & (used.sum(0) == 1)
    return _with_period(torch.where(behind, source, last), torch.where(behind, 0.0, weight), source, target)


def _with_period(index: Tensor, weight: Tensor, source: int, target: int) -> Taps:
    common = math.gcd(source, target)
    outputs, sources = target // common, source // common
    regular = torch.arange(outputs) + torch.arange(0, source, sources)[:, None]
    same = sources == outputs - 1 and torch.equal(index, regular.flatten())
    return Taps(index, weight, (outputs, sources) if same else None)


def _stretch(levels: Tensor, taps: Taps, dim: int, out: Tensor) -> Tensor:
    """Stretch dimension `dim` of contiguous bordered levels into the contiguous `out` by `taps`."""
    shape = [1, 1, 1, 1]
    shape[dim] = -1
    if taps.period is None:
        first, second = levels.index_select(dim, taps.index), levels.index_select(dim, taps.index + 1)
        return torch.lerp(first, second, taps.weight.view(shape), out=out)
    # Within a period neighbouring outputs have neighbouring sources: a view with overlapping periods, and no copies.
    outputs, sources = taps.period
    periods = out.shape[dim] // outputs
    size = [*out.shape[:dim], periods, outputs, *out.shape[dim + 1 :]]
    stride = list(levels.stride())
    stride = [*stride[:dim], sources * stride[dim], stride[dim], *stride[dim + 1 :]]
    first = levels.as_strided(size, stride, 0)
    second = levels.as_strided(size, stride, levels.stride(dim))
    weight = taps.weight.view([*shape[:dim], periods, outputs, *shape[dim + 1 :]])
    torch.lerp(first, second, weight, out=out.view(size))
    return out
