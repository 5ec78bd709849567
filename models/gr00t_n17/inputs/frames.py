"""The images of a batch as the host sees them: which there are, their sizes, and how many tokens they become."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from models.common.batch import Batch
from models.gr00t_n17.inputs.image_settings import ImageSettings
from models.gr00t_n17.inputs.images import plan_cameras


def check_images(batch: Batch, cameras: Sequence[str], deltas: Sequence[int]) -> None:
    """Raise ValueError unless a batch has the cameras, each with a frame for every step that is read."""
    if missing := [camera for camera in cameras if camera not in batch.images]:
        raise ValueError(f"cameras {missing} are not in the batch, which has {sorted(batch.images)}")
    for camera in cameras:
        if (times := num_times(batch.images[camera])) != len(deltas):
            raise ValueError(
                f"{camera} has {times} frames per sample, the modality config reads {len(deltas)}, at the steps "
                f"{list(deltas)} around the anchor: these are the camera's window"
            )


def image_tokens(settings: ImageSettings, images: Sequence[Any]) -> list[int]:
    """Tokens of each image of a sample, time-major and then in the order of the cameras' frames [B, T, ...]."""
    plans = plan_cameras(settings, [frame_size(frames) for frames in images])
    return [plan.tokens for plan in plans] * num_times(images[0])


def frame_size(images: Any) -> tuple[int, int]:
    """(height, width) of frames uint8 [B, T, H, W, 3], or of colour planes that say their size."""
    if isinstance(images, Tensor):
        return images.shape[2], images.shape[3]
    return images.height, images.width


def num_times(images: Any) -> int:
    """T of frames or colour planes [B, T, ...]."""
    shape = images.shape if isinstance(images, Tensor) else images.data.shape
    return int(shape[1])
