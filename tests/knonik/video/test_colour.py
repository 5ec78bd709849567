"""Planes become RGB on the device exactly as libswscale makes them RGB on the CPU."""

import numpy as np
import pytest
import torch

from knonik.video.colour import ColourSpec, Planes, black_planes, plane_bytes, reproducible, to_rgb
from knonik.video.decode import FrameTags, swscale_rgb

SPECS = [
    ColourSpec(matrix=matrix, full_range=full)
    for matrix in ("bt601", "bt709", "bt2020", "fcc", "smpte240m")
    for full in (False, True)
]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def names(spec: ColourSpec) -> str:
    return f"{spec.matrix}-{'full' if spec.full_range else 'limited'}"


def tags_of(spec: ColourSpec) -> list[FrameTags]:
    return sorted(spec.tags, key=lambda tags: (tags.pix_fmt, tags.matrix, tags.range))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", SPECS, ids=names)
def test_all_colours_equal_swscale(spec: ColourSpec, device: str) -> None:
    """All 2^24 triples: in each picture every U meets every V, each pair over four of the 256 luma levels."""
    tags, chroma = tags_of(spec)[0], np.arange(256, dtype=np.uint8)
    pairs = np.concatenate([chroma.repeat(256), np.tile(chroma, 256)])
    for first in range(0, 256, 4):
        luma = np.tile(np.array([[first, first + 1], [first + 2, first + 3]], np.uint8), (256, 256))
        planes = np.concatenate([luma.reshape(-1), pairs])
        ours = to_rgb(torch.from_numpy(planes).to(device), 512, 512, spec).cpu().numpy()
        np.testing.assert_array_equal(ours, swscale_rgb(planes, 512, 512, tags))


@pytest.mark.parametrize("spec", SPECS, ids=names)
def test_every_tag_that_maps_to_a_spec(spec: ColourSpec) -> None:
    random = np.random.default_rng(1)
    planes = random.integers(0, 256, plane_bytes(34, 66), np.uint8)
    ours = to_rgb(torch.from_numpy(planes), 34, 66, spec).numpy()
    found = tags_of(spec)
    assert found
    for tags in found:
        assert ColourSpec.of(tags) == spec
        np.testing.assert_array_equal(ours, swscale_rgb(planes, 34, 66, tags), err_msg=str(tags))


@pytest.mark.parametrize("spec", SPECS, ids=names)
def test_black_is_black(spec: ColourSpec) -> None:
    assert to_rgb(black_planes(6, 9, spec), 6, 9, spec).tolist() == np.zeros((6, 9, 3), int).tolist()


@pytest.mark.parametrize("height", [2, 6, 180])
@pytest.mark.parametrize("width", [*range(1, 36), 63, 65, 319, 322, 641])
def test_all_widths(height: int, width: int) -> None:
    """swscale converts the last columns by other code than the rest; odd widths end in half a chroma block."""
    spec = ColourSpec(matrix="bt601", full_range=False)
    planes = np.random.default_rng(width).integers(0, 256, plane_bytes(height, width), np.uint8)
    ours = to_rgb(torch.from_numpy(planes), height, width, spec).numpy()
    np.testing.assert_array_equal(ours, swscale_rgb(planes, height, width, tags_of(spec)[0]))


def test_odd_heights_are_refused_because_they_differ() -> None:
    assert not reproducible(33, 64)
    with pytest.raises(ValueError, match=r"33x64.*transport='rgb24'"):
        to_rgb(torch.zeros(plane_bytes(33, 64), dtype=torch.uint8), 33, 64, SPECS[0])


@pytest.mark.parametrize(
    "tags",
    [
        FrameTags(pix_fmt="yuv444p", matrix=2, range=1),
        FrameTags(pix_fmt="yuv422p", matrix=2, range=1),
        FrameTags(pix_fmt="yuv420p10le", matrix=1, range=1),
        FrameTags(pix_fmt="yuv420p", matrix=8, range=1),
        FrameTags(pix_fmt="yuv420p", matrix=10, range=1),
        FrameTags(pix_fmt="gray", matrix=2, range=2),
    ],
)
def test_other_storage_has_no_spec(tags: FrameTags) -> None:
    assert ColourSpec.of(tags) is None


def test_planes_keep_batch_and_time_and_do_not_depend_on_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, size = ColourSpec(matrix="bt709", full_range=True), (16, 18)
    data = torch.from_numpy(np.random.default_rng(3).integers(0, 256, (7, 2, plane_bytes(*size)), np.uint8))
    monkeypatch.setattr("knonik.video.colour._PIECE_BYTES", 4 * 8 * 16 * 18)  # four pictures at a time
    rgb = Planes(data=data, height=size[0], width=size[1], spec=spec).to("cpu").rgb()
    assert rgb.shape == (7, 2, *size, 3)
    assert rgb.dtype == torch.uint8
    for place in np.ndindex(7, 2):
        assert torch.equal(rgb[place], to_rgb(data[place], *size, spec))


def test_wrong_sizes_are_named() -> None:
    with pytest.raises(ValueError, match=r"uint8 \[\.\.\., 24\] for 4x4"):
        to_rgb(torch.zeros(3, 23, dtype=torch.uint8), 4, 4, SPECS[0])
    with pytest.raises(ValueError, match="matrix='rgb'"):
        ColourSpec(matrix="rgb", full_range=False)
