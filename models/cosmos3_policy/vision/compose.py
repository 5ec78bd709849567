"""Views of a sample to one picture on its canvas: the wrist camera on top, two halved cameras side by side below it.

`compose_videos` does whole batches on their device; `models.cosmos3_policy.vision.reference` is the same a frame at a
time. Without augmentation their levels are equal, with it they differ by at most one level in a few of 100,000 values.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from models.cosmos3_policy.inputs.settings import AugmentConfig
from models.cosmos3_policy.vision.augment import DEVICE_BYTES, Augmentations, ClipAugmenter
from models.cosmos3_policy.vision.canvas import Canvas, choose_canvas, empty_canvas, pad, place


def content_size(sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(height, width) of the picture of one camera, or of wrist, left and right, with frames of (height, width)."""
    if len(sizes) not in (1, 3):
        raise ValueError(f"a picture is made of 1 camera, or of 3 (wrist, left, right), not of {len(sizes)}")
    if len(set(sizes)) != 1:
        raise ValueError(
            f"the cameras have frames of {', '.join(f'{h}x{w}' for h, w in sizes)}; those of one picture need one size "
            "(model.processor.views, or resize the dataset)"
        )
    height, width = sizes[0]
    if len(sizes) == 1:
        return height, width
    if width % 2:
        raise ValueError(f"frames {width} pixels wide cannot be halved side by side; the width must be even")
    return height + height // 2, width


def plan_canvas(tier: str, sizes: Sequence[tuple[int, int]]) -> Canvas:
    """The canvas of `tier` for cameras with frames of these (height, width)."""
    return choose_canvas(tier, *content_size(sizes))


@torch.no_grad()
def compose_videos(
    views: Sequence[Tensor],
    canvas: Canvas,
    drawn: Augmentations | None = None,
    config: AugmentConfig | None = None,
    *,
    max_bytes: int = DEVICE_BYTES,
) -> Tensor:
    """uint8 [N, F, H, W, 3] of one camera or of wrist, left and right -> uint8 [N, 3, F, *canvas.size].

    With `drawn` and the `config` it was drawn with the frames are cropped, resized back and jittered before they are
    put together. `max_bytes` bounds the working memory beside the result; on a CPU it is a frame's anyway.
    """
    count, frames, height, width, _ = views[0].shape
    if canvas.source != content_size([(view.shape[2], view.shape[3]) for view in views]):
        raise ValueError(f"the canvas is for a picture of {canvas.source}, the cameras make another")
    if drawn is not None and (config is None or len(drawn) != count):
        raise ValueError(f"draws of {len(drawn)} samples for {count}; give the config they were drawn with beside them")
    direct = canvas.content == canvas.source
    whole = canvas if direct else None
    out = empty_canvas(count, frames, whole or _bare(canvas), views[0].device)
    augmenter = None
    if drawn is not None and config is not None:
        augmenter = ClipAugmenter(config, (height, width), views[0].device, max_bytes=max_bytes)
    for sample in range(count):
        for view, target, halved in zip(views, _targets(out[sample], height, width, len(views)), _HALVED, strict=False):
            if augmenter is None or drawn is None:
                target.copy_(_plain(view[sample], halved))
                continue
            for start, levels in augmenter(view[sample], drawn[sample]):
                part = target[:, start : start + levels.shape[1]]
                part.copy_(truncate(mean_of_four(levels) if halved else levels))
    if not direct:
        return torch.stack([place(video, canvas) for video in out])
    pad(out, canvas)
    return out


_HALVED = (False, True, True)


def _targets(video: Tensor, height: int, width: int, views: int) -> list[Tensor]:
    """Where each view lies in [3, F, H, W]."""
    bottom, middle = height + height // 2, width // 2
    places = [video[..., :height, :width], video[..., height:bottom, :middle], video[..., height:bottom, middle:width]]
    return places[:views]


def _bare(canvas: Canvas) -> Canvas:
    """The picture without padding, where it is still to be made smaller."""
    return Canvas(source=canvas.source, content=canvas.source, size=canvas.source, aspect=canvas.aspect)


def _plain(frames: Tensor, halved: bool) -> Tensor:
    """uint8 [F, H, W, 3] -> uint8 [3, F, h, w] not augmented; in [0, 1] on the way, as the reference is."""
    planes = frames.permute(3, 0, 1, 2)
    if not halved:
        return planes  # division by 255 and back keeps all 256 levels
    return truncate(halve(planes.contiguous().to(torch.float32).div_(255.0)).mul_(255.0))


def halve(levels: Tensor) -> Tensor:
    """float32 [3, F, H, W] -> [3, F, H // 2, W // 2], bilinear: the mean of 2x2 in the order the reference adds in."""
    height, width = levels.shape[-2:]
    if height % 2 or width % 2:
        return interpolate(levels, size=(height // 2, width // 2), mode="bilinear", align_corners=False)
    out = levels[..., ::2, ::2] + levels[..., ::2, 1::2]
    return out.add_(levels[..., 1::2, ::2]).add_(levels[..., 1::2, 1::2]).mul_(0.25)


def mean_of_four(levels: Tensor) -> Tensor:
    """`halve` but for the last bits of float32: whole rows are added first, which takes half the time."""
    height, width = levels.shape[-2:]
    if height % 2 or width % 2:
        return halve(levels)
    rows = levels.unflatten(2, (height // 2, 2))
    both = rows[:, :, :, 0] + rows[:, :, :, 1]
    return both[..., ::2].add(both[..., 1::2]).mul_(0.25)


def truncate(levels: Tensor) -> Tensor:
    """float32 levels in [0, 255] -> uint8, towards 0; by way of int16, which a CPU converts many at a time."""
    return levels.to(torch.int16).to(torch.uint8)
