"""Three 64x64 cameras over the tabletop, drawn as hard-edged rectangles for many scenes at once.

Frames are painted as colour numbers [N, H, W] first and looked up in a palette last, so one rectangle costs one masked
assignment for the whole batch. The background is mid grey: after x / 127.5 - 1 "nothing there" is close to zero.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from recipes.tabletop.world import BLOCK_HALF, Floats, Scene

Frames = NDArray[np.uint8]
Numbers = NDArray[np.uint8]

IMAGE_SIZE = 64
CAMERAS = ("observation.images.top", "observation.images.wrist", "observation.images.side")

_TABLE, _BEYOND, _FINGER, _PALM = 0, 1, 2, 3
_BLOCK, _BLOCK_FACE = 4, 7  # three colours each: the top of a block, and its darker front face
_PALETTE: Frames = np.array(
    [
        (128, 128, 128),
        (112, 112, 112),
        (30, 30, 30),
        (70, 70, 70),
        (240, 20, 20),
        (20, 220, 30),
        (30, 40, 245),
        (168, 14, 14),
        (14, 154, 21),
        (21, 28, 172),
    ],
    dtype=np.uint8,
)


def render(scene: Scene, cameras: Sequence[str] = CAMERAS) -> dict[str, Frames]:
    """Frames uint8 [N, 64, 64, 3] of every scene for each camera named."""
    views = dict(zip(CAMERAS, (_top, _wrist, _side), strict=True))
    unknown = [camera for camera in cameras if camera not in views]
    if unknown:
        raise ValueError(f"unknown cameras {unknown}; the tabletop has {', '.join(CAMERAS)}")
    # `take` with the numbers already in range skips the bounds check, which is most of the cost of a look-up here.
    return {camera: _PALETTE.take(views[camera](scene), axis=0, mode="clip") for camera in cameras}


def _top(scene: Scene) -> Numbers:
    """Orthographic from above, H / 2.1 pixels per unit, y upward."""
    count, scale = len(scene), IMAGE_SIZE / 2.1
    canvas = np.full((count, IMAGE_SIZE, IMAGE_SIZE), _TABLE, dtype=np.uint8)
    for column, row, half, number in _blocks(scene, np.zeros((count, 2)), np.full((count, 2), scale)):
        _paint(canvas, column, row, half, half, _BLOCK + number)
    column, row = _centre(scene.gripper[:, 0] * scale), _centre(-scene.gripper[:, 1] * scale)
    _paint_fingers(canvas, column, row, scene.opening, scale)
    return canvas


def _wrist(scene: Scene) -> Numbers:
    """Looks down from the gripper and moves with it; H / (1.2 + height above the thing) pixels per unit."""
    count = len(scene)
    scale = IMAGE_SIZE / (1.2 + scene.gripper[:, 2])
    canvas = np.full((count, IMAGE_SIZE, IMAGE_SIZE), _BEYOND, dtype=np.uint8)
    offset = -scene.gripper[:, :2]
    _paint(canvas, _centre(offset[:, 0] * scale), _centre(-offset[:, 1] * scale), scale, scale, _TABLE)
    # A held block is nearer to the camera than one on the table, so it has its own scale.
    distance = np.maximum(scene.gripper[:, 2:] - scene.blocks[:, :, 2], 0.0)
    for column, row, half, number in _blocks(scene, scene.gripper[:, :2], IMAGE_SIZE / (1.2 + distance)):
        _paint(canvas, column, row, half, half, _BLOCK + number)
    middle = np.full(count, IMAGE_SIZE / 2)
    _paint_fingers(canvas, middle, middle, scene.opening, IMAGE_SIZE / 1.4)
    return canvas


def _side(scene: Scene) -> Numbers:
    """Oblique from the front: x to the right, depth and height upward."""
    count = len(scene)
    across, depth, up = IMAGE_SIZE / 2.5, IMAGE_SIZE / 5.0, IMAGE_SIZE / 2.6
    base = IMAGE_SIZE * 0.72

    def row_of(y: Floats, z: Floats) -> Floats:
        return base - y * depth - z * up

    zeros, ones = np.zeros(count), np.ones(count)
    canvas = np.full((count, IMAGE_SIZE, IMAGE_SIZE), _BEYOND, dtype=np.uint8)
    _paint(canvas, _centre(zeros), row_of(zeros, zeros), ones * across, ones * depth, _TABLE)
    everyone = np.arange(count)
    far_first = np.argsort(-scene.blocks[:, :, 1], axis=1)
    top_half, face_half = ones * BLOCK_HALF * depth, ones * BLOCK_HALF * up * 0.8
    for turn in range(2):
        which = far_first[:, turn]
        x, y, z = scene.blocks[everyone, which].T
        number = scene.colours[everyone, which].astype(np.uint8)
        column, front = _centre(x * across), row_of(y - BLOCK_HALF, z) - face_half
        _paint(canvas, column, front, ones * BLOCK_HALF * across, face_half, _BLOCK_FACE + number)
        lid = front - face_half - top_half
        _paint(canvas, column, lid, ones * BLOCK_HALF * across, top_half, _BLOCK + number)
    x, y, z = scene.gripper.T
    column, row = _centre(x * across), row_of(y, z)
    gap = (0.06 + 0.14 * scene.opening) * across
    for side in (-1.0, 1.0):
        _paint(canvas, column + side * gap, row - 5.0, ones, ones * 4.0, _FINGER)
    _paint(canvas, column, row - 10.0, gap + 1.0, ones, _PALM)
    return canvas


def _centre(offset: Floats) -> Floats:
    return offset + IMAGE_SIZE / 2


def _blocks(scene: Scene, origin: Floats, scale: Floats) -> Iterator[tuple[Floats, Floats, Floats, Numbers]]:
    """Column, row, half size and colour number of the lower block, then of the higher: a carried one hides the other.

    `origin` [N, 2] is the point in the middle of the picture, `scale` [N, 2] the pixels per unit for each block.
    """
    everyone = np.arange(len(scene))
    low_first = np.argsort(scene.blocks[:, :, 2], axis=1, kind="stable")
    for turn in range(2):
        which = low_first[:, turn]
        size = scale[everyone, which]
        xy = (scene.blocks[everyone, which, :2] - origin) * size[:, None]
        number = scene.colours[everyone, which].astype(np.uint8)
        yield _centre(xy[:, 0]), _centre(-xy[:, 1]), BLOCK_HALF * size, number


def _paint_fingers(canvas: Numbers, column: Floats, row: Floats, opening: Floats, scale: float) -> None:
    """Two fingers left and right of a point, as far apart as the gripper is open."""
    ones = np.ones(len(canvas))
    gap = (0.10 + 0.12 * opening) * scale
    for side in (-1.0, 1.0):
        _paint(canvas, column + side * gap, row, ones, ones * 0.08 * scale, _FINGER)


def _paint(
    canvas: Numbers, column: Floats, row: Floats, half_width: Floats, half_height: Floats, number: int | Numbers
) -> None:
    """Fills one rectangle per frame [N]: centre and half sizes in pixels; parts outside the frame are cut off."""
    pixels = np.arange(IMAGE_SIZE) + 0.5
    rows = np.abs(pixels - row[:, None]) <= half_height[:, None]
    columns = np.abs(pixels - column[:, None]) <= half_width[:, None]
    colour = np.broadcast_to(np.asarray(number, dtype=np.uint8).reshape(-1, 1, 1), (len(canvas), 1, 1))
    np.copyto(canvas, colour, where=rows[:, :, None] & columns[:, None, :])
