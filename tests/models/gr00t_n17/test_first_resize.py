"""The first resize done ahead and kept: the network sees the same values, and less is decoded and moved."""

import dataclasses

import pytest
import torch

from models.gr00t_n17.inputs.images import FirstResize, ImageSettings, ImageTransform

SETTINGS = ImageSettings(
    shortest_image_edge=64,
    crop_fraction=0.95,
    color_jitter=(0.3, 0.4, 0.5, 0.08),
    min_pixels=1024,
    max_pixels=16777216,
    patch_size=16,
    merge_size=2,
    temporal_patch_size=2,
    duplicate_frames=True,
)


def noise(height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(height * width)
    return torch.randint(0, 256, (3, 1, height, width, 3), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("sizes", [[(120, 160)], [(120, 160), (90, 70)], [(128, 128), (48, 80)]])
def test_the_network_sees_the_same_values(sizes: list[tuple[int, int]], augment: bool) -> None:
    frames = {f"cam{i}": noise(*size) for i, size in enumerate(sizes)}
    prefix = FirstResize(64)
    ahead = {name: prefix(images.flatten(0, 1)).unflatten(0, (3, 1)) for name, images in frames.items()}
    transform = ImageTransform(SETTINGS, seed=5)
    position = torch.tensor([4, 19, 77])
    wanted = transform(frames, list(frames), position, augment=augment)
    found = transform(ahead, list(ahead), position, augment=augment)
    assert torch.equal(wanted[0], found[0])
    assert torch.equal(wanted[1], found[1])


@pytest.mark.parametrize("size", [(480, 640), (256, 341), (240, 320), (1, 9)])
def test_the_size_is_known_before(size: tuple[int, int]) -> None:
    frames = noise(*size)[0]
    prefix = FirstResize(256)
    out = prefix(frames)
    assert out.dtype == torch.uint8
    assert tuple(out.shape[1:3]) == prefix.shape(*size)
    assert out.numel() <= frames.numel()
    assert out.is_contiguous()


def test_the_key_tells_the_sizes_apart() -> None:
    assert FirstResize(256).key != FirstResize(224).key


def test_without_a_first_resize_there_is_no_prefix() -> None:
    settings = dataclasses.replace(SETTINGS, shortest_image_edge=None)
    assert settings.shortest_image_edge is None  # `Processor.frame_prefix` reads this very field
