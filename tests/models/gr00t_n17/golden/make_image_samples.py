"""Make image_samples.json and image_samples.npz: the whole image path of the released processor on generated samples.

Every sample is one `ReplayCompose` of albumentations over all of its cameras and times, as the released processor
builds it, followed by the Qwen image processor of transformers. What was drawn is read from the replay and stored,
so that the test can give the same draws to our path. Samples without colour jitter keep hashes, those with it every
third pixel.

Run in an environment of its own (x86; OpenCV rounds area sums another way on other processors):
    python -m venv golden
    golden/bin/pip install "albumentations==1.4.18" "opencv-python-headless==4.13.*"
    golden/bin/pip install "transformers==5.5.4" torch torchvision
    golden/bin/python tests/models/gr00t_n17/golden/make_image_samples.py
"""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import albumentations
import cv2
import numpy as np
import torch
from transformers import Qwen2VLImageProcessor

OUT = Path(__file__).with_name("image_samples.json")
SIZES = [(480, 640), (240, 320), (360, 640), (720, 1280), (256, 256), (512, 683), (600, 800), (224, 224), (96, 128)]
EXACT, JITTERED = 180, 60


def frame(height: int, width: int, kind: int, salt: int) -> np.ndarray:
    """uint8 [height, width, 3] by integer arithmetic: 0 smooth, 1 noise, 2 flat blocks (their means fall on halves)."""
    y, x = np.arange(height)[:, None], np.arange(width)
    if kind == 0:
        channels = [x + 3 * y + salt, 2 * x + y + salt, x + 5 * y]
    elif kind == 1:
        channels = [((x * 7919 + y * 104729 + c * 1299709 + salt * 15485863) * 2654435761) >> 13 for c in range(3)]
    else:
        lit = [((x // (5 + c) + y // 7 + salt) & 1) * 255 for c in range(3)]
        channels = [np.minimum(value + (x // 16 + c) % 4 * (1 - x // (5 + c) % 2), 255) for c, value in enumerate(lit)]
    return np.stack([value.astype(np.uint8) for value in channels], axis=-1)


class LetterBox(albumentations.DualTransform):
    """Black bars to a square."""

    def apply(self, img: np.ndarray, **params: Any) -> np.ndarray:
        height, width = img.shape[:2]
        down, right = max(width - height, 0), max(height - width, 0)
        return cv2.copyMakeBorder(
            img, down // 2, down - down // 2, right // 2, right - right // 2, cv2.BORDER_CONSTANT, value=0
        )

    def get_transform_init_args_names(self) -> tuple[str, ...]:
        return ()


class ShareCrop(albumentations.DualTransform):
    """A box of `share` of each side, at a uniform offset or in the centre; a replay keeps its pixel coordinates."""

    def __init__(self, share: float, centred: bool, p: float = 1.0, always_apply: bool | None = None) -> None:
        super().__init__(p, always_apply)
        self.share, self.centred = share, centred

    def apply(self, img: np.ndarray, box: tuple[int, int, int, int], **params: Any) -> np.ndarray:
        top, left, bottom, right = box
        return img[top:bottom, left:right]

    def get_params_dependent_on_data(self, params: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        height, width = params["shape"][:2]
        box = int(height * self.share), int(width * self.share)
        spare = height - box[0], width - box[1]
        offset = [value // 2 if self.centred else np.random.randint(0, value + 1) for value in spare]
        return {"box": (offset[0], offset[1], offset[0] + box[0], offset[1] + box[1])}

    def get_transform_init_args_names(self) -> tuple[str, ...]:
        return ("share", "centred")


def compose(sample: dict[str, Any]) -> albumentations.ReplayCompose:
    settings, target = sample["settings"], sample["settings"]["image_target_size"]

    def resize() -> albumentations.DualTransform:
        if settings["shortest_image_edge"] is None:
            return albumentations.Resize(*target, interpolation=cv2.INTER_AREA)
        return albumentations.SmallestMaxSize(settings["shortest_image_edge"], interpolation=cv2.INTER_AREA)

    share = settings["crop_fraction"] or settings["image_crop_size"][0] / target[0]
    steps = [LetterBox(p=1.0)] if settings["letter_box_transform"] else []
    steps += [resize(), ShareCrop(share, not sample["train"]), resize()]
    if sample["degrees"] is not None:
        steps.append(albumentations.Rotate(limit=(sample["degrees"], sample["degrees"]), p=1.0))
    if sample["factors"] is not None:
        ranges = [(value, value) for value in sample["factors"]]
        names = ("brightness", "contrast", "saturation", "hue")
        steps.append(albumentations.ColorJitter(**dict(zip(names, ranges, strict=True)), p=1.0))
    return albumentations.ReplayCompose(steps)


def plan(index: int, generator: np.random.Generator) -> dict[str, Any]:
    """What a sample is made of; jittered ones are small."""
    jittered = index >= EXACT
    size = SIZES[index % len(SIZES)] if index % 3 else tuple(int(v) for v in generator.integers(70, 500, 2))
    if jittered:
        size = tuple(sorted(int(v) for v in generator.integers(40, 90, 2)))
    recipe, edge = "AAB"[index % 3], int(generator.choice([256, 256, 224, 180]))
    edge = int(generator.choice([48, 64])) if jittered else edge
    settings = {
        "shortest_image_edge": edge if recipe == "A" else None,
        "crop_fraction": float(generator.choice([0.95, 0.95, 0.9, 0.88])) if index % 2 else None,
        "image_target_size": [edge, edge],
        "image_crop_size": [int(edge * 0.9), int(edge * 0.9)],
        "letter_box_transform": index % 5 == 4,
    }
    # Other cameras see what the crop of the first fits into: the same size, or wider and no lower.
    second = [size, (size[0], size[1] + 40), (size[0] * 2, size[1] * 2)][index % 3]
    train = jittered or index % 4 != 0
    draw = generator.uniform
    factors = [draw(0.7, 1.3), draw(0.6, 1.4), draw(0.5, 1.5), draw(-0.08, 0.08)]
    return {
        "settings": settings,
        "cameras": [list(size)] + ([list(second)] if index % 2 and train else []),
        "times": 2 if index % 7 == 0 else 1,
        "kind": index // 2 % 3,
        "train": train,
        "degrees": float(np.float32(draw(-15, 15))) if train and index % 3 == 1 else None,
        "factors": [float(np.float32(value)) for value in factors] if jittered else None,
    }


def run(sample: dict[str, Any]) -> list[np.ndarray]:
    """Levels of all images, time-major and then camera by camera; the draws are added to the sample."""
    transform, replay, views = compose(sample), None, []
    for view, (height, width) in enumerate(sample["cameras"]):
        levels = []
        for time in range(sample["times"]):
            image = frame(height, width, sample["kind"], 3 * view + time)
            if replay is None:
                result = transform(image=image)
                replay = result["replay"]
                for step in replay["transforms"]:
                    params = step["params"] or {}
                    if "box" in params:
                        sample["offset"] = [int(value) for value in params["box"][:2]]
                    if "order" in params:
                        sample["order"] = [int(value) for value in params["order"]]
            else:
                result = transform.replay(replay, image=image)
            levels.append(result["image"])
        views.append(levels)
    return [levels[time] for time in range(sample["times"]) for levels in views]


def digest(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()[:16]


def main() -> None:
    generator = np.random.default_rng(7)
    np.random.seed(7)
    random.seed(7)
    samples, kept = [], {}
    for index in range(EXACT + JITTERED):
        sample = plan(index, generator)
        images = run(sample)
        if sample["factors"] is None:
            processor = Qwen2VLImageProcessor(
                patch_size=16,
                merge_size=2,
                temporal_patch_size=2,
                image_mean=[0.5] * 3,
                image_std=[0.5] * 3,
                size={"shortest_edge": 65536, "longest_edge": 16777216},
            )
            tensors = [torch.from_numpy(image).permute(2, 0, 1).contiguous() for image in images]
            patches = processor(images=tensors, return_tensors="pt")
            sample["levels"] = [digest(image) for image in images]
            sample["grids"] = patches["image_grid_thw"].tolist()
            sample["pixel_values"] = digest(patches["pixel_values"].numpy())
        else:
            for place, image in enumerate(images):
                kept[f"{index}_{place}"] = image.reshape(-1, 3)[::3]
        samples.append(sample)
    OUT.write_text(json.dumps(samples, separators=(",", ":")).replace('},{"settings', '},\n{"settings') + "\n")
    np.savez_compressed(OUT.with_suffix(".npz"), **kept)


if __name__ == "__main__":
    main()
