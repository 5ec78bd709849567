"""Frames and draws of the jitter's golden pictures, by integer arithmetic alone; read by the test and by the maker."""

import torch
from torch import Tensor

SIZE = (40, 64)
FRAMES = 2
BOX = (38, 60)  # int(0.95 * 40), int(0.95 * 64)


def frames(seed: int) -> Tensor:
    """uint8 [FRAMES, 40, 64, 3]: slopes, edges, greys, white, black and noise."""
    f, y, x, c = torch.meshgrid(*[torch.arange(n) for n in (FRAMES, *SIZE, 3)], indexing="ij")
    noise = ((f * 7919 + y * 104729 + x * 1299709 + c * 15485863 + seed * 32452843) ** 2 // 977) % 256
    slope = (x * 4 * (c + 1) + y * 3 * (3 - c) + f * 9 + seed * 31) % 256
    out = torch.where(
        y < 20, torch.where(x < 32, slope, noise), torch.where(x < 32, (x // 4 * 32 + f * 5) % 256, slope // 2)
    )
    out = torch.where((y >= 30) & (x >= 48), 255 * ((x // 2 + y // 2 + seed) % 2), out)
    return out.to(torch.uint8)


def views() -> list[Tensor]:
    """Wrist, left, right."""
    return [frames(seed) for seed in (1, 2, 3)]


def _case(index: int, order: tuple[int, ...]) -> dict:
    share = [(index * step % 17) / 16 for step in (5, 7, 11, 13, 3, 9)]
    return {
        "order": order,
        "brightness": 0.7 + 0.6 * share[0],
        "contrast": 0.6 + 0.8 * share[1],
        "saturation": 0.5 + 1.0 * share[2],
        "hue": -0.08 + 0.16 * share[3],
        "top": share[4] * 0.999,
        "left": share[5] * 0.999,
        "box": (int(share[4] * 0.999 * 3), int(share[5] * 0.999 * 5), *BOX),
    }


ORDERS = (
    (0, 1, 2, 3),
    (3, 2, 1, 0),
    (1, 3, 0, 2),
    (2, 0, 3, 1),
    (3, 1, 2, 0),
    (1, 0, 2, 3),
    (2, 3, 1, 0),
    (0, 3, 2, 1),
)
CASES = [_case(index + 1, order) for index, order in enumerate(ORDERS)]
