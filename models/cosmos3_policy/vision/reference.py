"""The picture path a frame at a time on the CPU, by the plain operations: what the device path is held against.

Also the stock way to augment in the loader (`augment_on: cpu`): one clip costs seconds of a core at 640x360. Pixels are
float32 in [0, 1]; operations, their order and their clamps are those of torchvision's v2 transforms on float tensors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from models.cosmos3_policy.inputs.settings import AugmentConfig
from models.cosmos3_policy.vision.augment import Augmentation, crop_box
from models.cosmos3_policy.vision.jitter import BRIGHTNESS, CONTRAST, GREY, SATURATION, Jitter


@torch.no_grad()
def compose_clip(views: Sequence[Tensor], drawn: Augmentation | None, config: AugmentConfig | None) -> Tensor:
    """uint8 [F, H, W, 3] of one camera or of wrist, left and right -> uint8 [3, F, H', W] of the picture, unpadded."""
    out = []
    for frames in zip(*views, strict=True):
        pictures = [frame.permute(2, 0, 1).contiguous().to(torch.float32).div_(255.0) for frame in frames]
        if drawn is not None and config is not None:
            pictures = [jitter_frame(crop_frame(picture, drawn, config.crop), drawn.jitter) for picture in pictures]
        top, *below = pictures
        if below:
            size = (top.shape[1] // 2, top.shape[2] // 2)
            row = torch.cat([_resize(picture, size, antialias=False) for picture in below], dim=2)
            top = torch.cat([top, row], dim=1)
        out.append(top.mul(255.0).clamp_(0, 255).to(torch.uint8))
    return torch.stack(out, dim=1)


def crop_frame(picture: Tensor, drawn: Augmentation, share: float) -> Tensor:
    """[3, H, W] -> its box, resized back to [3, H, W]."""
    size = (picture.shape[1], picture.shape[2])
    top, left, height, width = crop_box(share, *size, drawn)
    box = picture[:, top : top + height, left : left + width]
    return picture if (height, width) == size else _resize(box, size, antialias=True)


def jitter_frame(picture: Tensor, jitter: Jitter) -> Tensor:
    """[3, H, W] in [0, 1] through the four operations in the order drawn."""
    for operation in jitter.order:
        if operation == BRIGHTNESS:
            picture = picture.mul(jitter.brightness).clamp_(0, 1)
        elif operation == CONTRAST:
            picture = _blend(picture, _grey(picture).mean(), jitter.contrast)
        elif operation == SATURATION:
            picture = _blend(picture, _grey(picture), jitter.saturation)
        else:
            picture = turn_hue(picture, jitter.hue)
    return picture


def _resize(picture: Tensor, size: tuple[int, int], *, antialias: bool) -> Tensor:
    return interpolate(picture[None], size=size, mode="bilinear", align_corners=False, antialias=antialias)[0]


def _blend(picture: Tensor, other: Tensor, factor: float) -> Tensor:
    return picture.mul(factor).add_(other, alpha=1.0 - factor).clamp_(0, 1)


def _grey(picture: Tensor) -> Tensor:
    red, green, blue = picture
    return red.mul(GREY[0]).add_(green, alpha=GREY[1]).add_(blue, alpha=GREY[2])


def turn_hue(picture: Tensor, shift: float) -> Tensor:
    """[3, H, W] to hue, saturation and value, the hue turned by `shift` turns, and back."""
    red, green, blue = picture
    value, low = picture.amax(0), picture.amin(0)
    spread = value - low
    grey = spread == 0
    saturation = spread / torch.where(grey, 1.0, value)
    divisor = torch.where(grey, 1.0, spread)
    sixths = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, 2.0 + (blue - red) / divisor, 4.0 + (red - green) / divisor),
    )
    hue = (torch.where(grey, 0.0, sixths) / 6.0 + shift).remainder_(1.0)
    position = hue * 6.0
    sector = position.floor()
    fraction = position - sector
    down = value * (1.0 - saturation)
    falling = value * (1.0 - saturation * fraction)
    rising = value * (1.0 - saturation * (1.0 - fraction))
    sector = sector.to(torch.int64).remainder_(6)
    # Which of the four each channel is, by sector: red falls in the second, rises in the fifth, and so on around.
    choices = torch.stack([value, down, falling, rising])
    table = torch.tensor([[0, 2, 1, 1, 3, 0], [3, 0, 0, 2, 1, 1], [1, 1, 3, 0, 0, 2]])
    return choices.gather(0, table[:, sector]).clamp_(0, 1)
