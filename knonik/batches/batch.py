"""The batch a loader yields: a plain container of tensors on one device."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from knonik.video.colour import Planes


@dataclass(frozen=True, kw_only=True)
class Batch:
    """B samples, each an anchor step with its windows.

    Attributes:
        images: camera to uint8 [B, T, H, W, 3], the stock rgb frames (or what the loader's prefix made of them); to
            `Planes` under the transport yuv420p; to uint16 [B, T, H, W, 1] millimetres for depth.
        state: key to float32 [B, T, D].
        action: key to float32 [B, H, D]; steps beyond the episode repeat its last row.
        action_is_pad: bool [B, H], True for those repeated steps; empty [B, 0] without actions.
        text: instruction of each sample.
        dataset: int64 [B], index of the dataset the sample is from.
        episode: int64 [B], episode id.
        frame: int64 [B], anchor step inside the episode.
        position: int64 [B], place in the endless global order (epoch * epoch length + index in the epoch).
        begin: global position of the first sample of the batch over all ranks; names the batch.
        end: global position at which the next batch begins.
        inputs: what the loader's `transform` made of this batch; values that are no tensors stay on the host.
    """

    images: dict[str, Any]  # torch.Tensor or Planes
    state: dict[str, torch.Tensor]
    action: dict[str, torch.Tensor]
    action_is_pad: torch.Tensor
    text: list[str]
    dataset: torch.Tensor
    episode: torch.Tensor
    frame: torch.Tensor
    position: torch.Tensor
    begin: int = 0
    end: int = 0
    inputs: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.text)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The same batch on `device`; a CUDA copy is asynchronous only from pinned memory."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """A copy in page-locked memory."""
        return self._map(lambda tensor: tensor.pin_memory())

    def rgb(self) -> "Batch":
        """The batch with rgb tensors in place of `Planes`, converted where they lie."""
        images = {camera: image.rgb() if isinstance(image, Planes) else image for camera, image in self.images.items()}
        return replace(self, images=images)

    def _map(self, move: Callable[[Any], Any]) -> "Batch":
        changed: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, torch.Tensor):
                changed[item.name] = move(value)
            elif isinstance(value, dict):
                changed[item.name] = {
                    key: move(each) if isinstance(each, torch.Tensor | Planes) else each for key, each in value.items()
                }
        return replace(self, **changed)
