"""The last steps of a batch: its pictures under their names, its rows, what the loader's transform makes of it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from knonik.batches.batch import Batch
from knonik.batches.gather import Gather
from knonik.batches.parts import PictureSpec
from knonik.order.plan import BatchPlan
from knonik.video.colour import Planes

Transform = Callable[[Batch], dict[str, Any]]


class Finish:
    """Holds no reference to the loader, whose threads would otherwise keep it alive."""

    def __init__(self, gather: Gather, specs: Mapping[str, PictureSpec], transform: Transform | None) -> None:
        self._gather, self._specs, self._transform = gather, specs, transform

    def batch(self, plan: BatchPlan, images: Mapping[str, torch.Tensor]) -> Batch:
        """The batch of a plan and the pictures that were made for it."""
        named: dict[str, Any] = {camera: self._named(camera, data) for camera, data in images.items()}
        return self._gather.batch(plan, named)

    def _named(self, camera: str, data: torch.Tensor) -> torch.Tensor | Planes:
        spec = self._specs[camera]
        if spec.colour is None:
            return data
        return Planes(data=data, height=spec.size[0], width=spec.size[1], spec=spec.colour)

    def inputs(self, batch: Batch) -> Batch:
        """With what the transform makes of it."""
        return batch if self._transform is None else replace(batch, inputs=self._transform(batch))

    def pinned(self, batch: Batch) -> Batch:
        """The same, in page-locked memory."""
        return self.inputs(batch).pin_memory()
