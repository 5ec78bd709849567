"""Make image_golden.npz, the reference results of the image path, with the libraries the released processor uses.

Run in an environment of its own:
    python -m venv golden
    golden/bin/pip install "albumentations==1.4.18" "opencv-python-headless<5" "transformers==5.24.*"
    golden/bin/python tests/models/gr00t_n17/golden/make_image_golden.py
"""

import hashlib
from pathlib import Path

import albumentations
import albumentations.augmentations.functional as F
import cv2
import numpy as np
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

OUT = Path(__file__).with_name("image_golden.npz")


def frame(height: int, width: int) -> np.ndarray:
    """A frame with smooth parts, hard edges and noise, the same in the test (integer arithmetic only)."""
    y, x = np.mgrid[:height, :width].astype(np.int64)
    channels = [(3 * x + y) % 256, (x * y // 7) % 256, ((x // 9 + y // 5) % 2) * 200 + (x * 31 + y * 17) % 56]
    return np.stack(channels, axis=-1).astype(np.uint8)


def smallest(image: np.ndarray, edge: int) -> np.ndarray:
    return albumentations.SmallestMaxSize(edge, interpolation=cv2.INTER_AREA)(image=image)["image"]


def eval_path(image: np.ndarray) -> np.ndarray:
    image = smallest(image, 256)
    height, width = int(image.shape[0] * 0.95), int(image.shape[1] * 0.95)
    top, left = (image.shape[0] - height) // 2, (image.shape[1] - width) // 2
    return smallest(image[top : top + height, left : left + width], 256)


def jitter(image: np.ndarray, factors: np.ndarray, order: np.ndarray) -> np.ndarray:
    steps = [
        F.adjust_brightness_torchvision,
        F.adjust_contrast_torchvision,
        F.adjust_saturation_torchvision,
        F.adjust_hue_torchvision,
    ]
    for step in order:
        image = steps[step](image, float(factors[step]))
    return image


def main() -> None:
    results: dict[str, np.ndarray] = {}
    for source, target in [((48, 64), (26, 34)), ((24, 32), (26, 34)), ((48, 64), (24, 32)), ((40, 60), (20, 20))]:
        image = frame(*source)
        name = f"area_{source[0]}x{source[1]}_{target[0]}x{target[1]}"
        results[name] = cv2.resize(image, target[::-1], interpolation=cv2.INTER_AREA)
    generator = np.random.default_rng(0)
    factors, orders, images = [], [], []
    for index in range(12):
        factor = np.r_[generator.uniform([0.7, 0.6, 0.5], [1.3, 1.4, 1.5]), generator.uniform(-0.08, 0.08)]
        factors.append(factor.astype(np.float32))
        orders.append(np.roll(np.arange(4), index) if index < 8 else generator.permutation(4))
        images.append(jitter(frame(24, 32), factors[-1], orders[-1]))
    results |= {"jitter_factor": np.stack(factors), "jitter_order": np.stack(orders), "jitter": np.stack(images)}
    processor = Qwen2VLImageProcessorPil(
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        do_resize=False,
    )
    patches = processor(images=[frame(64, 96)], return_tensors="np")
    assert patches["image_grid_thw"].tolist() == [[1, 4, 6]]
    levels = np.round(patches["pixel_values"] * 127.5 + 127.5).astype(np.uint8)
    results["patches_64x96_sha256"] = np.array(hashlib.sha256(levels.tobytes()).hexdigest())
    whole = eval_path(frame(480, 640))
    assert whole.shape == (256, 340, 3)
    results["eval_480x640_sha256"] = np.array(hashlib.sha256(whole.tobytes()).hexdigest())
    np.savez_compressed(OUT, **results)


if __name__ == "__main__":
    main()
