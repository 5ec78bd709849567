"""The whole image path against albumentations, OpenCV and transformers on 240 generated samples (golden files)."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.common.color_jitter import JitterDraws
from models.common.resample import bicubic_by_taps
from models.common.resize_area import resize_area
from models.gr00t_n17.inputs import images as images_module
from models.gr00t_n17.inputs.image_settings import ImageSettings
from models.gr00t_n17.inputs.images import (
    NO_AUGMENTATION,
    Augmentation,
    FirstResize,
    ImagePlan,
    ImageTransform,
    plan_cameras,
    plan_image,
)

GOLDEN = Path(__file__).parent / "golden" / "image_samples.json"
SAMPLES: list[dict[str, Any]] = json.loads(GOLDEN.read_text())
EXACT = [sample for sample in SAMPLES if sample["factors"] is None]
JITTERED = [(i, sample) for i, sample in enumerate(SAMPLES) if sample["factors"] is not None]


def frame(height: int, width: int, kind: int, salt: int) -> Tensor:
    """The frame of golden/make_image_samples.py, uint8 [height, width, 3]."""
    y, x = np.arange(height)[:, None], np.arange(width)
    if kind == 0:
        channels = [x + 3 * y + salt, 2 * x + y + salt, x + 5 * y]
    elif kind == 1:
        channels = [((x * 7919 + y * 104729 + c * 1299709 + salt * 15485863) * 2654435761) >> 13 for c in range(3)]
    else:
        lit = [((x // (5 + c) + y // 7 + salt) & 1) * 255 for c in range(3)]
        channels = [np.minimum(value + (x // 16 + c) % 4 * (1 - x // (5 + c) % 2), 255) for c, value in enumerate(lit)]
    return torch.from_numpy(np.stack([value.astype(np.uint8) for value in channels], axis=-1))


def images_of(sample: dict[str, Any]) -> dict[str, Tensor]:
    """{camera: uint8 [1, T, H, W, 3]}."""
    times = range(sample["times"])
    return {
        f"camera{view}": torch.stack([frame(*size, sample["kind"], 3 * view + time) for time in times])[None]
        for view, size in enumerate(sample["cameras"])
    }


def drawn_in(sample: dict[str, Any], transform: ImageTransform) -> Augmentation:
    """The reference's draws in the form of ours."""
    if not sample["train"]:
        return NO_AUGMENTATION
    spare = plan_image(transform.settings, *sample["cameras"][0]).spare
    crop = torch.tensor([[(o + 0.5) / (s + 1) for o, s in zip(sample["offset"], spare, strict=True)]])
    degrees = None if sample["degrees"] is None else torch.tensor([sample["degrees"]], dtype=torch.float64)
    jitter = None
    if sample["factors"] is not None:
        jitter = JitterDraws(torch.tensor([sample["factors"]]), torch.tensor([sample["order"]]))
    return Augmentation(crop, degrees, jitter)


def transform_of(sample: dict[str, Any]) -> ImageTransform:
    return ImageTransform(ImageSettings.from_processor_kwargs(sample["settings"]), seed=0)


def levels_of(sample: dict[str, Any], images: dict[str, Tensor]) -> list[Tensor]:
    """uint8 [H, W, 3] of every image before the backbone's own resize, time-major and then camera by camera."""
    transform = transform_of(sample)
    plans = plan_cameras(transform.settings, [tuple(size) for size in sample["cameras"]])
    drawn = drawn_in(sample, transform)
    views = [transform.augmented(x, plan, drawn)[0] for x, plan in zip(images.values(), plans, strict=True)]
    return [levels[time].permute(1, 2, 0) for time in range(sample["times"]) for levels in views]


def digest(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()[:16]


def test_there_are_enough_samples_of_every_kind() -> None:
    assert len(SAMPLES) >= 200
    for recipe in ("A", "B"):
        for box in (False, True):
            for train in (False, True):
                found = [
                    sample
                    for sample in EXACT
                    if transform_of(sample).settings.recipe == recipe
                    and sample["settings"]["letter_box_transform"] == box
                    and sample["train"] == train
                ]
                assert len(found) >= 3, (recipe, box, train)
    assert sum(sample["degrees"] is not None for sample in EXACT) >= 40
    assert sum(len({tuple(size) for size in sample["cameras"]}) > 1 for sample in EXACT) >= 20


@pytest.mark.parametrize("part", range(6))
def test_levels_and_patches_equal_the_reference(part: int) -> None:
    """Bars, area resize, crop, rotation, bicubic resize, normalisation and patch order: every value is equal."""
    for sample in EXACT[part::6]:
        transform, images = transform_of(sample), images_of(sample)
        pixel_values, grids = transform.apply(images, list(images), drawn_in(sample, transform))
        assert grids.tolist() == sample["grids"], sample
        if digest(pixel_values) != sample["pixel_values"]:  # equal patches come from equal levels; say where it began
            assert [digest(image) for image in levels_of(sample, images)] == sample["levels"], sample
            pytest.fail(f"levels are equal, patches are not: {sample}")


def test_the_path_of_other_devices_gives_the_same_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU three steps take shorter ways; here they take those of a GPU."""

    def shrunk(frames: Tensor, height: int, width: int) -> Tensor:
        return resize_area(frames.permute(0, 3, 1, 2).contiguous(), height, width).permute(0, 2, 3, 1)

    def cropped(planes: Tensor, plan: ImagePlan, share: Tensor | None) -> Tensor:
        if share is None:
            return images_module.centre_box(planes, plan)
        spare = torch.tensor(plan.spare) + 1
        top, left = (share * spare).long().unbind(1)
        return images_module.gathered_boxes(planes, top, left, *plan.cropped)

    monkeypatch.setattr(images_module, "resize_area_frames", shrunk)
    monkeypatch.setattr(images_module, "resize_bicubic", bicubic_by_taps)
    monkeypatch.setattr(images_module, "crop", cropped)
    for sample in EXACT[::9]:
        transform, images = transform_of(sample), images_of(sample)
        pixel_values, _ = transform.apply(images, list(images), drawn_in(sample, transform))
        assert digest(pixel_values) == sample["pixel_values"], sample


@pytest.mark.parametrize("part", range(3))
def test_kept_first_steps_change_nothing(part: int) -> None:
    """What a data layer keeps ahead of the path gives the same patches, for both recipes and behind bars."""
    for sample in EXACT[part::12]:
        transform = transform_of(sample)
        prefix = FirstResize.of(transform.settings)
        assert prefix is not None
        images = {name: prefix(x[0])[None] for name, x in images_of(sample).items()}
        pixel_values, _ = transform.apply(images, list(images), drawn_in(sample, transform))
        assert digest(pixel_values) == sample["pixel_values"], sample


def test_colour_jitter_equals_the_reference() -> None:
    """All four operations in random order behind resize and crop, on images of any width: every level is equal."""
    with np.load(GOLDEN.with_suffix(".npz")) as stored:
        golden = dict(stored)
    total = 0
    for index, sample in JITTERED:
        for place, image in enumerate(levels_of(sample, images_of(sample))):
            expected = torch.from_numpy(golden[f"{index}_{place}"])
            assert torch.equal(image.reshape(-1, 3)[::3], expected), sample
            total += expected.numel()
    assert total > 200_000


def test_hash_that_other_ports_pin() -> None:
    """The synthetic frame of LeRobot's test of its upstream equality, released settings without draws."""
    y, x = np.indices((480, 640), dtype=np.uint16)
    image = np.stack(((x + 3 * y) % 256, (2 * x + y) % 256, (x + 5 * y) % 256), axis=-1).astype(np.uint8)
    kwargs = {
        "image_crop_size": [230, 230],
        "image_target_size": [256, 256],
        "shortest_image_edge": 256,
        "crop_fraction": 0.95,
        "use_albumentations": True,
    }
    transform = ImageTransform(ImageSettings.from_processor_kwargs(kwargs), seed=0)
    levels = transform.augmented(
        torch.from_numpy(image)[None, None], plan_image(transform.settings, 480, 640), NO_AUGMENTATION
    )
    levels = levels[0, 0].permute(1, 2, 0).contiguous()
    assert levels.shape == (256, 340, 3)
    assert hashlib.sha256(levels.numpy().tobytes()).hexdigest().startswith("c17e47af")


def test_recipe_is_chosen_by_the_file_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    released = {
        "shortest_image_edge": 256,
        "crop_fraction": 0.95,
        "image_target_size": [256, 256],
        "image_crop_size": [230, 230],
        "color_jitter_params": {"brightness": 0.3, "hue": 0.08},
    }
    with caplog.at_level("INFO"):
        a = ImageSettings.from_processor_kwargs(released)
        b = ImageSettings.from_processor_kwargs({**released, "shortest_image_edge": None, "crop_fraction": None})
    assert (a.recipe, a.fraction) == ("A", 0.95)
    assert a.color_jitter == (0.3, 0.0, 0.0, 0.08)
    assert (b.recipe, b.fraction) == ("B", 230 / 256)
    assert plan_image(b, 480, 640).tokens == 64
    assert "image recipe A: shorter side to 256" in caplog.text
    assert "image recipe B: squashed to 256x256" in caplog.text
    with pytest.raises(ValueError, match="use_albumentations"):
        ImageSettings.from_processor_kwargs({**released, "use_albumentations": False})
    with pytest.raises(ValueError, match="image_target_size"):
        ImageSettings.from_processor_kwargs({"shortest_image_edge": None})
    with pytest.raises(ValueError, match="crop_fraction"):
        ImageSettings.from_processor_kwargs({"crop_fraction": None, "image_target_size": [256, 256]})


@pytest.mark.parametrize(
    ("change", "random"),
    [
        ({}, True),
        ({"random_crop": False}, False),
        ({"random_crop": False, "random_rotation_angle": 5.0}, True),
        ({"random_crop": False, "color_jitter": (0.1, 0.0, 0.0, 0.0)}, True),
        ({"crop_fraction": 1.0}, False),
    ],
)
def test_random_settings_are_known(change: dict[str, Any], random: bool) -> None:
    """What `is_random` denies has no draws: two positions give equal patches."""
    settings = dataclasses.replace(ImageSettings.from_processor_kwargs({}, min_pixels=1024), **change)
    settings = dataclasses.replace(settings, shortest_image_edge=64)
    assert settings.is_random is random
    images = {"a": frame(96, 128, 1, 0)[None, None].expand(2, 1, -1, -1, -1)}
    pixel_values, _ = ImageTransform(settings, seed=0)(images, ["a"], torch.tensor([0, 1]), augment=True)
    first, second = pixel_values.chunk(2)
    assert torch.equal(first, second) is not random
