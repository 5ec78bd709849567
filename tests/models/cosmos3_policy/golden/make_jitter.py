"""Golden pictures of torchvision's v2 transforms for the crop, the resize, the colour jitter and the composed view.

    python3 -m venv oracle && oracle/bin/pip install torch==2.11.0 torchvision==0.26.0 numpy
    PYTHONPATH=. oracle/bin/python tests/models/cosmos3_policy/golden/make_jitter.py

Each case states its draws, so that only arithmetic is compared. Frames come from `jitter_case.py`.
"""

from pathlib import Path

import numpy as np
import torch
from jitter_case import CASES, FRAMES, SIZE, views
from torchvision.transforms.v2 import functional as F


def golden(case: dict) -> np.ndarray:
    """uint8 [3, F, H * 3 / 2, W] of one case."""
    height, width = SIZE
    stacked = torch.cat([view.permute(0, 3, 1, 2).to(torch.float32) / 255 for view in views()])
    top, left, box_height, box_width = case["box"]
    stacked = F.resize(F.crop(stacked, top, left, box_height, box_width), [height, width], antialias=True)
    for operation in case["order"]:
        if operation == 0:
            stacked = F.adjust_brightness(stacked, case["brightness"])
        elif operation == 1:
            stacked = F.adjust_contrast(stacked, case["contrast"])
        elif operation == 2:
            stacked = F.adjust_saturation(stacked, case["saturation"])
        else:
            stacked = F.adjust_hue(stacked, case["hue"])
    wrist, left_view, right_view = stacked.split(FRAMES)
    halved = [
        torch.nn.functional.interpolate(view, size=(height // 2, width // 2), mode="bilinear", align_corners=False)
        for view in (left_view, right_view)
    ]
    picture = torch.cat([wrist, torch.cat(halved, dim=3)], dim=2)
    return (picture * 255).clamp(0, 255).to(torch.uint8).permute(1, 0, 2, 3).numpy()


if __name__ == "__main__":
    torch.set_num_threads(1)
    np.savez_compressed(Path(__file__).with_name("jitter.npz"), pictures=np.stack([golden(case) for case in CASES]))
