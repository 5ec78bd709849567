"""The device path gives the pictures of the frame-by-frame reference, and that those of torchvision's v2 transforms."""

import colorsys
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from models.cosmos3_policy.inputs.settings import AugmentConfig
from models.cosmos3_policy.vision.augment import (
    Augmentation,
    Augmentations,
    ClipAugmenter,
    crop_box,
    draw_augmentations,
)
from models.cosmos3_policy.vision.compose import compose_videos, plan_canvas
from models.cosmos3_policy.vision.jitter import Jitter, JitterWork, jitter_
from models.cosmos3_policy.vision.reference import compose_clip, jitter_frame
from models.cosmos3_policy.vision.stretch import Stretch, taps_on

sys.path.insert(0, str(Path(__file__).parent / "golden"))
import jitter_case

CPU = torch.device("cpu")
CONFIG = AugmentConfig()
ALLOWED_SHARE = 1e-3


def clip(seed: int, frames: int, height: int, width: int) -> Tensor:
    """uint8 [F, H, W, 3]: smooth colours, hard edges, patches of white, black and grey, and noise on some of it."""
    draw = torch.Generator().manual_seed(seed)
    coarse = torch.rand(frames, 3, 5, 7, generator=draw) * 1.4 - 0.2
    smooth = interpolate(coarse, size=(height, width), mode="bilinear", align_corners=False)
    blocks = torch.rand(frames, 3, 9, 11, generator=draw)
    blocks[:, 1:, ::3] = blocks[:, :1, ::3]  # grey
    hard = interpolate(blocks, size=(height, width), mode="nearest")
    noise = torch.rand(frames, 3, height, width, generator=draw)
    mixed = torch.where(torch.arange(width) < width // 2, smooth, 0.7 * hard + 0.3 * noise * (hard > 0.5))
    return (mixed.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def differences(ours: Tensor, reference: Tensor) -> tuple[int, float]:
    """(largest difference in levels, share of values that differ)."""
    difference = (ours.to(torch.int16) - reference.to(torch.int16)).abs()
    return int(difference.max()), float((difference > 0).to(torch.float32).mean())


@pytest.mark.parametrize(("height", "width", "clips"), [(180, 320, 200), (360, 640, 12)])
def test_200_clips_differ_by_at_most_one_level_in_few_places(height: int, width: int, clips: int) -> None:
    canvas = plan_canvas("fit", [(height, width)])
    drawn = draw_augmentations(CONFIG, 3, range(clips))
    shares = []
    for n in range(clips):
        frames = clip(n, 1, height, width)
        ours = compose_videos([frames[None]], canvas, Augmentations(drawn[n : n + 1]), CONFIG)[0]
        largest, share = differences(ours[..., :height, :width], compose_clip([frames], drawn[n], CONFIG))
        assert largest <= 1
        shares.append(share)
    assert sum(shares) / clips < ALLOWED_SHARE
    assert max(shares) < 10 * ALLOWED_SHARE


def test_the_three_views_of_the_reference_recipe() -> None:
    height, width = 360, 640
    canvas = plan_canvas("480", [(height, width)] * 3)
    views = [clip(view, 1, height, width) for view in range(3)]
    drawn = draw_augmentations(CONFIG, 3, [77])
    ours = compose_videos([view[None] for view in views], canvas, drawn, CONFIG)[0]
    assert ours.shape == (3, 1, 544, 736)
    largest, share = differences(ours[..., :540, :640], compose_clip(views, drawn[0], CONFIG))
    assert largest <= 1
    assert share < ALLOWED_SHARE
    assert torch.equal(ours[..., 640:], ours[..., 543:639].flip(-1))  # mirrored after the jitter


def golden() -> tuple[Tensor, list[tuple[Augmentation, tuple[int, ...]]]]:
    pictures = np.load(Path(jitter_case.__file__).with_name("jitter.npz"), allow_pickle=False)["pictures"]
    drawn = []
    for case in jitter_case.CASES:
        factors = {name: case[name] for name in ("order", "brightness", "contrast", "saturation", "hue")}
        drawn.append((Augmentation(top=case["top"], left=case["left"], jitter=Jitter(**factors)), case["box"]))
    return torch.from_numpy(pictures), drawn


def test_golden_pictures_of_torchvision() -> None:
    pictures, drawn = golden()
    views = jitter_case.views()
    height, width = jitter_case.SIZE
    canvas = plan_canvas("fit", [jitter_case.SIZE] * 3)
    for picture, (one, box) in zip(pictures, drawn, strict=True):
        assert crop_box(CONFIG.crop, height, width, one) == box
        reference = compose_clip(views, one, CONFIG)
        ours = compose_videos([view[None] for view in views], canvas, Augmentations([one]), CONFIG)[0]
        for made in (reference, ours[..., : height * 3 // 2, :width]):
            largest, share = differences(made, picture)
            assert largest <= 1
            assert share < ALLOWED_SHARE


def test_golden_pictures_tell_a_wrong_order_of_operations() -> None:
    pictures, drawn = golden()
    for picture, (one, _) in zip(pictures, drawn, strict=True):
        turned = Jitter(**{**vars(one.jitter), "order": one.jitter.order[::-1]})
        made = compose_clip(jitter_case.views(), Augmentation(top=one.top, left=one.left, jitter=turned), CONFIG)
        assert differences(made, picture)[1] > 10 * ALLOWED_SHARE


@pytest.mark.parametrize(("height", "width"), [(36, 64), (45, 80)])
def test_without_augmentation_all_levels_are_the_reference(height: int, width: int) -> None:
    views = [clip(view, 2, height, width) for view in range(3)]
    canvas = plan_canvas("256", [(height, width)] * 3)
    ours = compose_videos([view[None] for view in views], canvas)[0]
    content = ours[..., : canvas.content[0], : canvas.content[1]]
    assert torch.equal(content, compose_clip(views, None, None))
    assert torch.equal(content[:, :, :height], views[0].permute(3, 0, 1, 2))


def test_one_camera_is_the_whole_picture() -> None:
    frames = clip(0, 5, 40, 60)
    canvas = plan_canvas("fit", [(40, 60)])
    drawn = draw_augmentations(CONFIG, 0, [4])
    ours = compose_videos([frames[None]], canvas, drawn, CONFIG)[0]
    largest, share = differences(ours[..., :40, :60], compose_clip([frames], drawn[0], CONFIG))
    assert largest <= 1
    assert share < ALLOWED_SHARE


def test_a_sample_does_not_depend_on_its_batch_or_on_the_size_of_chunks() -> None:
    views = [torch.stack([clip(10 * view + n, 5, 36, 64) for n in range(3)]) for view in range(3)]
    canvas = plan_canvas("256", [(36, 64)] * 3)
    drawn = draw_augmentations(CONFIG, 1, [7, 8, 9])
    whole = compose_videos(views, canvas, drawn, CONFIG)
    alone = compose_videos([view[1:2] for view in views], canvas, Augmentations(drawn[1:2]), CONFIG)
    assert torch.equal(whole[1:2], alone)
    by_one = torch.cat([levels.clone() for _, levels in ClipAugmenter(CONFIG, (36, 64), CPU)(views[0][0], drawn[0])], 1)
    for size in (2, 5):
        augmenter = ClipAugmenter(CONFIG, (36, 64), CPU, chunk_frames=size)
        chunks = [(start, levels.clone()) for start, levels in augmenter(views[0][0], drawn[0])]
        assert [start for start, _ in chunks] == list(range(0, 5, size))
        torch.testing.assert_close(torch.cat([levels for _, levels in chunks], dim=1), by_one, rtol=0, atol=1e-3)


def test_blocks_of_a_frame_change_nothing_but_where_work_is_cut() -> None:
    levels = clip(5, 2, 30, 50).permute(3, 0, 1, 2).flatten(2).to(torch.float32).contiguous()
    for one in draw_augmentations(CONFIG, 2, range(6)):
        whole = jitter_(levels.clone(), one.jitter, JitterWork(2, 1500, CPU))
        cut = jitter_(levels.clone(), one.jitter, JitterWork(2, 128, CPU))
        torch.testing.assert_close(cut, whole, rtol=0, atol=1e-3)


@pytest.mark.parametrize("shift", [-0.5, -0.31, -0.08, 0.0, 0.05, 0.17, 0.5])
def test_any_turn_of_the_hue_is_that_of_the_hsv_cone(shift: float) -> None:
    colours = torch.randint(0, 256, (3, 1, 400)).to(torch.float32)
    colours[:, 0, :30] = torch.randint(0, 2, (3, 30)) * 255.0  # corners of the cube: all six pure hues, white, black
    turned = colours.clone()
    jitter = Jitter(order=(3, 0, 1, 2), brightness=1.0, contrast=1.0, saturation=1.0, hue=shift)
    jitter_(turned, jitter, JitterWork(1, 400, CPU))
    for before, after in zip((colours / 255)[:, 0].T.tolist(), (turned / 255)[:, 0].T.tolist(), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*before)
        assert after == pytest.approx(colorsys.hsv_to_rgb((hue + shift) % 1.0, saturation, value), abs=2e-6)
    frame = jitter_frame((colours / 255).view(3, 20, 20), jitter)
    torch.testing.assert_close(frame.view(3, 1, 400) * 255, turned, rtol=0, atol=1e-3)


def test_every_frame_is_blended_with_its_own_grey() -> None:
    levels = torch.stack([torch.full((3, 8), 40.0), torch.full((3, 8), 200.0)], dim=1)
    levels[:, :, 0] += 20
    jitter = Jitter(order=(1, 0, 2, 3), brightness=1.0, contrast=0.0, saturation=1.0, hue=0.0)
    out = jitter_(levels, jitter, JitterWork(2, 8, CPU))
    expected = torch.tensor([42.5, 202.5])[None, :, None].expand(3, 2, 8) * 0.9999
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("source", "target"), [(342, 360), (608, 640), (243, 256), (805, 848), (19, 20), (7, 13)])
def test_resized_rows_are_those_of_the_antialiasing_kernel(source: int, target: int) -> None:
    box = torch.randint(0, 256, (3, 1, source, 11), dtype=torch.uint8)
    ours = Stretch(1, (source, 11), (target, 12), CPU)(box)
    expected = interpolate(box[:, 0].float()[None], size=(target, 12), mode="bilinear", antialias=True)[0]
    torch.testing.assert_close(ours[:, 0], expected, rtol=0, atol=1e-3)
    assert (taps_on(CPU, source, target).period is not None) == ((source, target) in {(342, 360), (608, 640), (19, 20)})


def test_a_side_is_not_made_shorter() -> None:
    with pytest.raises(ValueError, match="360 pixels cannot be stretched to 342"):
        taps_on(CPU, 360, 342)


def test_draws_are_functions_of_seed_and_position() -> None:
    drawn = draw_augmentations(CONFIG, 5, torch.tensor([11, 12, 13]))
    assert draw_augmentations(CONFIG, 5, [12]) == drawn[1:2]
    assert draw_augmentations(CONFIG, 6, [12]) != drawn[1:2]
    assert drawn.to("meta", non_blocking=True) is drawn.pin_memory() is drawn


def test_draws_are_uniform_and_the_order_is_any_permutation() -> None:
    drawn = draw_augmentations(CONFIG, 0, range(4800))
    for name, low, high in (
        ("brightness", 0.7, 1.3),
        ("contrast", 0.6, 1.4),
        ("saturation", 0.5, 1.5),
        ("hue", -0.08, 0.08),
    ):
        values = np.array([getattr(one.jitter, name) for one in drawn])
        assert low <= values.min()
        assert values.max() <= high
        assert np.quantile(values, [0.25, 0.5, 0.75]) == pytest.approx(
            [low + share * (high - low) for share in (0.25, 0.5, 0.75)], abs=0.03 * (high - low)
        )
    orders = [one.jitter.order for one in drawn]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 24
    assert 140 < min(counts) <= max(counts) < 265  # five standard deviations about 200
    boxes = {crop_box(0.95, 360, 640, one)[:2] for one in drawn}
    assert {top for top, _ in boxes} == set(range(19))
    assert {left for _, left in boxes} == set(range(33))
    assert crop_box(0.95, 360, 640, drawn[0])[2:] == (342, 608)


def test_views_of_different_sizes_and_draws_of_other_batches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"36x64, 36x64, 18x32.*one size"):
        plan_canvas("256", [(36, 64), (36, 64), (18, 32)])
    with pytest.raises(ValueError, match=r"1 camera, or of 3 .* not of 2"):
        plan_canvas("256", [(36, 64)] * 2)
    with pytest.raises(ValueError, match="must be even"):
        plan_canvas("256", [(36, 65)] * 3)
    frames = clip(0, 1, 36, 64)[None]
    canvas = plan_canvas("256", [(36, 64)])
    with pytest.raises(ValueError, match="draws of 2 samples for 1"):
        compose_videos([frames], canvas, draw_augmentations(CONFIG, 0, [0, 1]), CONFIG)
    with pytest.raises(ValueError, match="cameras make another"):
        compose_videos([frames] * 3, canvas)
