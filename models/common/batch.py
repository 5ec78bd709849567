"""The shape of a batch that the models read: the data layer meets the models here, without an import either way."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor


class Batch(Protocol):
    """A batch of B samples.

    images: {camera: uint8 [B, T, H, W, 3]}, RGB. In `prepare` they may be colour planes [B, T, ...] still, with
    `height` and `width`; on the device they are RGB.
    state: {key: float32 [B, T, D]} in robot units; action: {key: float32 [B, H, D]} in robot units.
    action_is_pad: bool [B, H], True where the window runs past the end of the episode (the last action repeats).
    text: B instructions. position: int64 [B], the sample's place in the whole run; random draws are functions of it.
    inputs: what the processor's `prepare` returned for this batch, on the batch's device.
    """

    @property
    def images(self) -> Mapping[str, Tensor]: ...

    @property
    def state(self) -> Mapping[str, Tensor]: ...

    @property
    def action(self) -> Mapping[str, Tensor]: ...

    @property
    def action_is_pad(self) -> Tensor: ...

    @property
    def text(self) -> Sequence[str]: ...

    @property
    def position(self) -> Tensor: ...

    @property
    def inputs(self) -> Mapping[str, Tensor]: ...


class MixedBatch(Batch, Protocol):
    """A batch whose samples are from several datasets. dataset: int64 [B], which one."""

    @property
    def dataset(self) -> Tensor: ...
