"""The image path: sizes, equality with the reference libraries, replay of crops, order and layout of patches."""

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from models.common import draws
from models.common.color_jitter import JitterDraws, color_jitter, draw_jitter
from models.common.resample import bicubic_by_taps, multiple_size, resize_bicubic
from models.common.resize_area import resize_area, resize_area_frames
from models.gr00t_n17.inputs.images import ImageSettings, ImageTransform, patchify, plan_cameras, plan_image

GOLDEN = Path(__file__).parent / "golden" / "image_golden.npz"
RELEASED = ImageSettings(
    shortest_image_edge=256,
    crop_fraction=0.95,
    color_jitter=None,
    min_pixels=65536,
    max_pixels=16777216,
    patch_size=16,
    merge_size=2,
    temporal_patch_size=2,
    duplicate_frames=True,
)
SMALL = dataclasses.replace(RELEASED, shortest_image_edge=64, min_pixels=1024)
PLAIN = dataclasses.replace(SMALL, shortest_image_edge=None, crop_fraction=None)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as stored:
        return dict(stored)


def frame(height: int, width: int) -> Tensor:
    """The frame of golden/make_image_golden.py, uint8 [1, 3, H, W]."""
    y, x = np.mgrid[:height, :width].astype(np.int64)
    channels = [(3 * x + y) % 256, (x * y // 7) % 256, ((x // 9 + y // 5) % 2) * 200 + (x * 31 + y * 17) % 56]
    return torch.from_numpy(np.stack(channels)[None].astype(np.uint8))


def noise(batch: int, height: int, width: int, times: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(height * width)
    return torch.randint(0, 256, (batch, times, height, width, 3), dtype=torch.uint8, generator=generator)


def images_of(pixel_values: Tensor, grid: tuple[int, int]) -> Tensor:
    """Inverse of patchify for one grid: levels [N, 3, H, W]."""
    gh, gw = grid
    blocks = pixel_values.view(-1, gh // 2, gw // 2, 2, 2, 3, 2, 16, 16)[:, :, :, :, :, :, 0]
    frames = blocks.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, 3, gh * 16, gw * 16)
    return (frames * 127.5 + 127.5).round().to(torch.uint8)


def test_worked_example_of_the_released_settings() -> None:
    plan = plan_image(RELEASED, 480, 640)
    assert plan.resized == (256, 341)
    assert plan.cropped == (243, 323)
    assert plan.restored == (256, 340)
    assert plan.final == (256, 352)
    assert plan.grid == (16, 22)
    assert plan.tokens == 88
    pixel_values, grids = ImageTransform(RELEASED, seed=0)(
        {"top": noise(1, 480, 640)}, ["top"], torch.tensor([0]), augment=False
    )
    assert pixel_values.shape == (352, 1536)
    assert grids.tolist() == [[1, 16, 22]]


def test_smart_resize_keeps_the_area_in_bounds() -> None:
    assert multiple_size(64, 64, factor=32, min_pixels=65536, max_pixels=2**24) == (256, 256)
    assert multiple_size(256, 340, factor=32, min_pixels=65536, max_pixels=2**24) == (256, 352)
    assert multiple_size(1000, 1000, factor=32, min_pixels=1024, max_pixels=65536) == (256, 256)
    with pytest.raises(ValueError, match="200 times"):
        multiple_size(10, 4000, factor=32, min_pixels=1024, max_pixels=65536)


@pytest.mark.parametrize("name", ["48x64_26x34", "24x32_26x34", "48x64_24x32", "40x60_20x20"])
def test_area_resize_equals_the_reference(golden: dict[str, np.ndarray], name: str) -> None:
    source, target = (tuple(map(int, part.split("x"))) for part in name.split("_"))
    result = resize_area(frame(*source), *target)[0].permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(result, golden[f"area_{name}"])


def test_evaluation_path_equals_the_reference_at_full_size(golden: dict[str, np.ndarray]) -> None:
    """Shortest edge 256, centre crop, shortest edge 256 of a 480x640 frame: every one of 261,120 levels."""
    plan = plan_image(RELEASED, 480, 640)
    resized = resize_area(frame(480, 640), *plan.resized)
    top, left = plan.spare[0] // 2, plan.spare[1] // 2
    cropped = resized[..., top : top + plan.cropped[0], left : left + plan.cropped[1]].contiguous()
    levels = resize_area(cropped, *plan.restored)[0].permute(1, 2, 0).contiguous().numpy()
    assert hashlib.sha256(levels.tobytes()).hexdigest() == str(golden["eval_480x640_sha256"])
    # The transform does these steps: undo its last resize's blur by comparing after the same one.
    whole, _ = ImageTransform(RELEASED, seed=0)(
        {"a": frame(480, 640).permute(0, 2, 3, 1)[:, None]}, ["a"], torch.tensor([0]), augment=False
    )
    expected = resize_bicubic(torch.from_numpy(levels).permute(2, 0, 1)[None].contiguous(), *plan.final)
    assert torch.equal(images_of(whole, plan.grid), expected)


@pytest.mark.parametrize("sizes", [(64, 85, 64, 88), (50, 45, 48, 48), (75, 50, 80, 56), (37, 50, 64, 64)])
def test_bicubic_resize_equals_torch_uint8_kernel(sizes: tuple[int, int, int, int]) -> None:
    height, width, *target = sizes
    images = noise(2, height, width)[:, 0].permute(0, 3, 1, 2).contiguous()
    expected = torch.nn.functional.interpolate(images, size=target, mode="bicubic", antialias=True)
    assert torch.equal(resize_bicubic(images, *target), expected)
    assert torch.equal(bicubic_by_taps(images, *target), expected)


@pytest.mark.parametrize("kind", ["noise", "two levels", "steps"])
@pytest.mark.parametrize(
    "sizes",
    [
        *[(480, 640, 256, 341), (480, 640, 256, 256), (360, 640, 256, 455), (512, 683, 256, 341), (512, 512, 256, 256)],
        *[(300, 400, 256, 341), (97, 131, 64, 88), (64, 90, 64, 60), (33, 600, 33, 33), (768, 768, 256, 256)],
        (40, 60, 50, 60),
    ],
)
def test_frames_shrink_to_the_levels_of_planes(sizes: tuple[int, int, int, int], kind: str) -> None:
    """The CPU's order of sums against the reference's, also where most means fall on a half."""
    height, width, *target = sizes
    frames = noise(2, height, width)[:, 0]
    if kind == "two levels":
        frames = frames // 128 * 255
    elif kind == "steps":
        frames = (torch.arange(height)[:, None, None] + torch.arange(width)[:, None]).expand(2, -1, -1, 3) % 256
        frames = frames.to(torch.uint8)
    expected = resize_area(frames.permute(0, 3, 1, 2).contiguous(), *target).permute(0, 2, 3, 1)
    assert torch.equal(resize_area_frames(frames, *target), expected)


def test_color_jitter_equals_the_reference(golden: dict[str, np.ndarray]) -> None:
    factor, order = torch.from_numpy(golden["jitter_factor"]), torch.from_numpy(golden["jitter_order"])
    images = frame(24, 32)[None].expand(len(factor), 1, -1, -1, -1).contiguous()
    result = color_jitter(images, JitterDraws(factor, order))[:, 0].permute(0, 2, 3, 1).numpy()
    np.testing.assert_array_equal(result, golden["jitter"])


def test_color_jitter_of_strength_zero_changes_nothing() -> None:
    images = noise(3, 16, 16).permute(0, 1, 4, 2, 3).contiguous()
    assert torch.equal(color_jitter(images, draw_jitter(0, torch.arange(3), (0.0, 0.0, 0.0, 0.0))), images)


def test_jitter_draws_lie_in_their_ranges() -> None:
    factor, order = draw_jitter(0, torch.arange(5000), (0.3, 0.4, 1.5, 0.08))
    low, high = torch.tensor([0.7, 0.6, 0.0, -0.08]), torch.tensor([1.3, 1.4, 2.5, 0.08])
    assert ((factor >= low) & (factor <= high)).all()
    assert ((factor.amin(0) - low) < 0.01 * (high - low)).all()
    assert ((high - factor.amax(0)) < 0.01 * (high - low)).all()
    assert len(torch.unique(order, dim=0)) == 24


def test_training_crop_is_one_box_for_all_cameras_and_times() -> None:
    """With an edge equal to the frame the first resize is the identity, so crops can be cut by hand."""
    settings = dataclasses.replace(SMALL, crop_fraction=0.8)
    images = {"a": noise(4, 64, 80, times=2), "b": noise(4, 64, 80, times=2).flip(3)}
    position = torch.tensor([3, 11, 12, 400])
    pixel_values, _ = ImageTransform(settings, seed=5)(images, ["a", "b"], position, augment=True)
    plan = plan_image(settings, 64, 80)
    result = images_of(pixel_values, plan.grid).view(4, 2, 2, 3, *plan.final)
    u = draws.uniform(5, "crop", position, (2,))
    offsets = set()
    for b in range(4):
        top, left = int(u[b, 0] * (plan.spare[0] + 1)), int(u[b, 1] * (plan.spare[1] + 1))
        offsets.add((top, left))
        for t in range(2):
            for v, camera in enumerate(("a", "b")):
                box = images[camera][b, t, top : top + plan.cropped[0], left : left + plan.cropped[1]]
                levels = resize_area(box.permute(2, 0, 1)[None].contiguous(), *plan.restored)
                assert torch.equal(result[b, t, v], resize_bicubic(levels, *plan.final)[0])
    assert len(offsets) > 1


def test_augmentation_depends_on_position_not_on_the_batch() -> None:
    settings = dataclasses.replace(SMALL, color_jitter=(0.3, 0.4, 0.5, 0.08))
    transform, images = ImageTransform(settings, seed=1), {"a": noise(3, 48, 64)}
    position = torch.tensor([7, 8, 9])
    whole, _ = transform(images, ["a"], position, augment=True)
    single, _ = transform({"a": images["a"][1:2]}, ["a"], position[1:2], augment=True)
    per_image = len(single)
    assert torch.equal(whole[per_image : 2 * per_image], single)
    other, _ = transform({"a": images["a"][1:2]}, ["a"], torch.tensor([10]), augment=True)
    assert not torch.equal(other, single)


def test_cameras_of_different_size_share_the_box_where_it_fits() -> None:
    large, same, narrow = plan_cameras(SMALL, [(64, 80), (128, 180), (64, 64)])
    assert large.cropped == same.cropped == (60, 76)
    assert same.spare == large.spare  # pixel coordinates of the first camera, not a fraction of its own width
    assert narrow.cropped == (60, 60)
    images = {"a": noise(2, 64, 80), "b": noise(2, 64, 64), "c": noise(2, 64, 80)}
    transform = ImageTransform(SMALL, seed=0)
    pixel_values, grids = transform(images, ["a", "b", "c"], torch.arange(2), augment=True)
    assert grids.tolist() == [[1, 4, 6], [1, 4, 4], [1, 4, 6]] * 2
    start = 0
    for b in range(2):  # sample by sample, cameras in order
        for camera, patches in (("a", 24), ("b", 16), ("c", 24)):
            alone, _ = ImageTransform(SMALL, seed=0)(
                {camera: images[camera][b : b + 1]}, [camera], torch.tensor([b]), augment=True
            )
            assert torch.equal(pixel_values[start : start + patches], alone)
            start += patches
    assert start == len(pixel_values)


def test_frames_of_the_right_size_only_change_their_layout() -> None:
    images = {"a": noise(2, 64, 96, times=2), "b": noise(2, 64, 96, times=2).flip(2)}
    pixel_values, grids = ImageTransform(PLAIN, seed=0)(images, ["a", "b"], torch.arange(2), augment=True)
    frames = images_of(pixel_values, (4, 6)).view(2, 2, 2, 3, 64, 96)
    for v, camera in enumerate(("a", "b")):
        assert torch.equal(frames[:, :, v].permute(0, 1, 3, 4, 2), images[camera])
    assert grids.tolist() == [[1, 4, 6]] * 8
    assert pixel_values.min() == -1
    assert pixel_values.max() == 1


def test_patches_equal_the_image_processor_of_transformers(golden: dict[str, np.ndarray]) -> None:
    pixel_values = patchify(frame(64, 96), PLAIN)[0]
    levels = (pixel_values * 127.5 + 127.5).round().to(torch.uint8).numpy()
    assert levels.shape == (24, 1536)
    assert hashlib.sha256(levels.tobytes()).hexdigest() == str(golden["patches_64x96_sha256"])


def test_still_frames_leave_out_the_copy_in_time() -> None:
    images = noise(2, 32, 32)[:, 0].permute(0, 3, 1, 2).contiguous()
    twice = patchify(images, PLAIN).view(2, 4, 3, 2, 256)
    once = patchify(images, dataclasses.replace(PLAIN, duplicate_frames=False)).view(2, 4, 3, 256)
    assert torch.equal(twice[:, :, :, 0], once)
    assert torch.equal(twice[:, :, :, 1], once)
