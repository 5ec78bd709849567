"""Canvas sizes, padding and the latents that are picture: the numbers of the reference recipe and of the small one."""

import pytest
import torch
from torch.nn.functional import pad as torch_pad

from models.cosmos3_policy.vision.canvas import FIT, TIERS, Canvas, choose_canvas, crop_latents, latent_frames, place
from models.cosmos3_policy.vision.compose import content_size, plan_canvas


def test_the_reference_recipe() -> None:
    """Three cameras of 640x360 at tier 480: 736x544, latents 48 x 9 x 34 x 46, of which 33 x 40 are picture."""
    assert content_size([(360, 640)] * 3) == (540, 640)
    canvas = plan_canvas("480", [(360, 640)] * 3)
    assert canvas.size == (544, 736)
    assert canvas.aspect == "4,3"
    assert canvas.image_size == (544, 736, 540, 640)
    assert (latent_frames(33), *canvas.latent_size) == (9, 34, 46)
    assert crop_latents(torch.empty(1, 48, 9, 34, 46), canvas.content).shape == (1, 48, 9, 33, 40)
    assert canvas.cropped_latent_size == (33, 40)
    rows, columns = (-(-side // 2) for side in canvas.cropped_latent_size)  # an odd row is filled up to a patch
    assert 9 * rows * columns == 3060


def test_small_cameras_take_the_same_canvas_at_the_tier_and_a_small_one_below() -> None:
    canvas = plan_canvas("480", [(180, 320)] * 3)
    assert canvas.image_size == (544, 736, 270, 320)
    assert canvas.cropped_latent_size == (16, 20)
    assert plan_canvas("256", [(180, 320)] * 3).image_size == (256, 320, 256, 303)
    assert plan_canvas(FIT, [(180, 320)] * 3).image_size == (272, 320, 270, 320)


@pytest.mark.parametrize("tier", TIERS)
def test_the_nearest_shape_is_taken_and_every_canvas_is_whole_latents(tier: str) -> None:
    for aspect, (height, width) in TIERS[tier].items():
        assert choose_canvas(tier, height, width).aspect == aspect
        assert choose_canvas(tier, height, width).content == (height, width)
        assert height % 16 == width % 16 == 0
        columns, rows = (int(part) for part in aspect.split(","))
        assert height / width == pytest.approx(rows / columns, rel=0.11)


def video(height: int, width: int) -> torch.Tensor:
    return torch.randint(0, 256, (2, 3, 2, height, width), dtype=torch.uint8)


def test_padding_mirrors_at_the_edge() -> None:
    canvas = Canvas(source=(20, 30), content=(20, 30), size=(32, 48), aspect="4,3")
    picture = video(20, 30)
    expected = torch_pad(picture.flatten(0, 2).float(), (0, 18, 0, 12), mode="reflect").to(torch.uint8)
    assert torch.equal(place(picture, canvas).flatten(0, 2), expected)


@pytest.mark.parametrize("size", [(32, 64), (48, 48)])
def test_padding_as_wide_as_the_picture_repeats_the_edge_on_both_sides(size: tuple[int, int]) -> None:
    canvas = Canvas(source=(20, 30), content=(20, 30), size=size, aspect="4,3")
    picture = video(20, 30)
    expected = torch_pad(picture.flatten(0, 2).float(), (0, size[1] - 30, 0, size[0] - 20), mode="replicate")
    assert torch.equal(place(picture, canvas).flatten(0, 2), expected.to(torch.uint8))


def test_the_small_set_at_the_large_tier_repeats_the_edge() -> None:
    placed = place(video(270, 320), plan_canvas("480", [(180, 320)] * 3))
    assert torch.equal(placed[..., 320:], placed[..., 319:320].expand(-1, -1, -1, -1, 416))
    assert torch.equal(placed[..., 270:, :], placed[..., 269:270, :].expand(-1, -1, -1, 274, -1))


def test_a_large_picture_is_made_smaller_and_keeps_its_shape() -> None:
    canvas = choose_canvas("256", 540, 640)
    assert canvas.image_size == (256, 320, 256, 303)
    picture = torch.arange(640).mul(255 / 639).to(torch.uint8).expand(1, 3, 1, 540, 640).contiguous()
    placed = place(picture, canvas)
    assert placed.shape == (1, 3, 1, 256, 320)
    row = placed[0, 0, 0, 7].to(torch.int16)
    assert int(row[0]) <= 1
    assert int(row[302]) >= 254
    assert bool((row[1:303] >= row[:302]).all())
    assert torch.equal(row[303:], row[302 - 17 : 302].flip(0))


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ValueError, match=r"'481'; allowed are 256, 480, 704, 720, fit \(model.processor.tier\)"):
        choose_canvas("481", 540, 640)
    with pytest.raises(ValueError, match="smaller than one latent"):
        choose_canvas("480", 10, 640)
    with pytest.raises(ValueError, match="content_size is not of this canvas"):
        crop_latents(torch.empty(1, 4, 3, 5, 6), (96, 96))
    with pytest.raises(ValueError, match="32 frames does not divide"):
        latent_frames(32)
