"""The random part of the picture path on the device: one crop and one colour jitter per sample, for all its frames.

Frames come as they were decoded and leave as float32 levels, in chunks that bound the memory: on a CPU so few that its
caches hold what the next pass reads, elsewhere as many as fit in a given number of bytes. The
draws are host values, so that neither the order of the operations nor the place of the crop waits for the device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.common import draws
from models.cosmos3_policy.inputs.settings import AugmentConfig
from models.cosmos3_policy.vision.jitter import SCRATCH_PLANES, Jitter, JitterWork, draw_jitter, jitter_
from models.cosmos3_policy.vision.stretch import Stretch

CPU_BLOCK = 2**18
"""Pixels that are jittered at a time on a CPU: eight planes of them are 8 MiB, which stays in a third-level
cache. Smaller blocks, for the second level, cost more in calls than they save."""

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
        self,
        config: AugmentConfig,
        size: tuple[int, int],
        device: torch.device,
        *,
        max_bytes: int = DEVICE_BYTES,
        chunk_frames: int | None = None,
    ) -> None:
        """`max_bytes` bounds the buffers on a device that is no CPU; `chunk_frames` sets a chunk's frames itself."""
        self.config = config
        self.size = height, width = size
        pixels = height * width
        on_cpu = device.type == "cpu"
        fitting = CPU_BLOCK // pixels if on_cpu else max_bytes // _frame_bytes(height, width)
        self.chunk_frames = chunk_frames or max(1, fitting)
        self.work = JitterWork(self.chunk_frames, min(CPU_BLOCK, pixels) if on_cpu else pixels, device)
        self._stretches: dict[int, Stretch] = {}
        self._device = device

    def __call__(self, frames: Tensor, drawn: Augmentation) -> Iterator[tuple[int, Tensor]]:
        """uint8 [F, H, W, 3] -> (first frame, float32 levels [3, f, H, W]) chunk by chunk.

        A chunk is good until the next one is asked for. Levels lie in [0, 255] but for the last bits of float32.
        """
        top, left, height, width = crop_box(self.config.crop, *self.size, drawn)
        planes = frames[:, top : top + height, left : left + width].permute(3, 0, 1, 2)
        for start in range(0, len(frames), self.chunk_frames):
            chunk = planes[:, start : start + self.chunk_frames]
            count = chunk.shape[1]
            if count not in self._stretches:  # two of them at most: the last chunk may be shorter
                self._stretches[count] = Stretch(count, (height, width), self.size, self._device)
            levels = self._stretches[count](chunk)
            jitter_(levels.view(3, count, -1), drawn.jitter, self.work)
            yield start, levels


def _frame_bytes(height: int, width: int) -> int:
    """Working memory of one frame: three float32 planes at four stages, one of uint8, and the jitter's scratch."""
    return height * width * (3 * 4 * 4 + 3 + SCRATCH_PLANES * 4)
