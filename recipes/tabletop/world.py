"""A small tabletop: two coloured blocks, one gripper, one sentence. Physics in NumPy for many tables at once.

The table is the square [-1, 1] x [-1, 1], heights run to 0.9; both are plain units, not metres. One step is 0.2 s.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Split = Literal["train", "held_out", "grounding"]

COLOURS = ("red", "green", "blue")
SPLITS: tuple[Split, ...] = ("train", "held_out", "grounding")
STATE_NAMES = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
ACTION_NAMES = ("dx", "dy", "dz", "droll", "dpitch", "dyaw", "gripper_command")

FPS = 5
MAX_STEPS = 60
BLOCK_HALF = 0.16
CENTRE_LIMIT = 0.75
LIFT_HEIGHT = 0.2

_MIN_DISTANCE = 0.55
_MAX_MOVE = 0.09
_MAX_GRIPPER_MOVE = 0.5
_GRASP_REACH = 0.17
_GRASP_HEIGHT = 0.14
_FLOOR, _CEILING = 0.02, 0.9
_CELL = 0.1
_HELD_OUT_SHARE = 4  # one arrangement cell in four is never used for training


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """B starting tables: block centres [B, 2, 2], colour numbers [B, 2] (into `COLOURS`), gripper position [B, 3]."""

    blocks: Floats
    colours: Ints
    gripper: Floats

    def __len__(self) -> int:
        return len(self.blocks)

    def take(self, rows: Ints) -> "Layouts":
        """The tables at these row numbers, repeats allowed."""
        return Layouts(blocks=self.blocks[rows], colours=self.colours[rows], gripper=self.gripper[rows])


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is on N tables: gripper [N, 3], opening [N] (1 open, 0 closed), block centres [N, 2, 3], colours [N, 2]."""

    gripper: Floats
    opening: Floats
    blocks: Floats
    colours: Ints

    def __len__(self) -> int:
        return len(self.gripper)


def instruction(colours: Iterable[int]) -> list[str]:
    """The sentence for each colour number."""
    return [f"pick up the {COLOURS[colour]} block" for colour in colours]


def arrangement_is_held_out(blocks: Floats) -> bool:
    """Whether this pair of block centres [2, 2] belongs to the held-out part of the space of arrangements.

    Centres are put in cells 0.1 wide; the unordered pair of cells is hashed, and one pair in four is held out. So no
    training arrangement shares its pair of cells with a held-out one, whatever the seed.
    """
    cells = np.floor((blocks + 1.0) / _CELL).astype(np.int64)
    low, high = sorted(int(x) * 64 + int(y) for x, y in cells)
    mixed = ((low * 4096 + high) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    return (mixed >> 40) % _HELD_OUT_SHARE == 0


def draw_layouts(seed: int, split: Split, indices: Iterable[int]) -> Layouts:
    """The tables number `indices` of a split; each is a function of (seed, split, index) alone.

    Half of the grippers start anywhere, half above a random block: without the second half a policy can learn to take
    the block that is nearest instead of the one that is named.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; allowed: {', '.join(SPLITS)}")
    drawn = [_draw_one(np.random.default_rng([seed, SPLITS.index(split), index]), split) for index in indices]
    blocks, colours, gripper = zip(*drawn, strict=True)
    return Layouts(blocks=np.stack(blocks), colours=np.stack(colours), gripper=np.stack(gripper))


def _draw_one(rng: np.random.Generator, split: Split) -> tuple[Floats, Ints, Floats]:
    while True:
        blocks = rng.uniform(-CENTRE_LIMIT, CENTRE_LIMIT, (2, 2))
        apart = float(np.hypot(*(blocks[0] - blocks[1]))) >= _MIN_DISTANCE
        if apart and arrangement_is_held_out(blocks) == (split == "held_out"):
            break
    colours = rng.permutation(len(COLOURS))[:2].astype(np.int64)
    if rng.random() < 0.5:
        xy = rng.uniform(-CENTRE_LIMIT, CENTRE_LIMIT, 2)
    else:
        xy = np.clip(blocks[rng.integers(2)] + rng.normal(0.0, 0.12, 2), -0.9, 0.9)
    return blocks, colours, np.array([xy[0], xy[1], rng.uniform(0.25, 0.7)])


class TabletopWorld:
    """B tables that move one step at a time.

    `lifted` [B] is the number of the block that was first held above `LIFT_HEIGHT`, -1 before; `held` [B] likewise
    for the block in the gripper now. Whether that was the block asked for is the caller's question.
    """

    def __init__(self, layouts: Layouts) -> None:
        count = len(layouts)
        self.gripper: Floats = layouts.gripper.copy()
        self.opening: Floats = np.ones(count)
        self.blocks: Floats = np.concatenate([layouts.blocks, np.zeros((count, 2, 1))], axis=2)
        self.colours: Ints = layouts.colours
        self.held: Ints = np.full(count, -1, dtype=np.int64)
        self.lifted: Ints = np.full(count, -1, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.gripper)

    def scene(self, rows: Ints) -> Scene:
        """A copy of what is on these tables now."""
        return Scene(
            gripper=self.gripper[rows],
            opening=self.opening[rows],
            blocks=self.blocks[rows],
            colours=self.colours[rows],
        )

    def state(self, rows: Ints) -> NDArray[np.float32]:
        """Robot state [N, 7]: x, y, z, three angles that stay 0, gripper opening."""
        state = np.zeros((len(rows), len(STATE_NAMES)), dtype=np.float32)
        state[:, :3] = self.gripper[rows]
        state[:, 6] = self.opening[rows]
        return state

    def step(self, action: NDArray[np.floating], rows: Ints) -> None:
        """Moves the tables `rows` (unique) by one action [N, 7] each; the others stand still.

        The gripper moves by at most 0.09 per axis and closes or opens by at most half of its way. A nearly closed,
        closing gripper that is low enough takes the nearest block within 0.17; it lets go when opened past 0.7.
        """
        wanted = np.asarray(action, dtype=np.float64)
        if wanted.shape != (len(rows), len(ACTION_NAMES)):
            raise ValueError(f"action has shape {wanted.shape}; expected {(len(rows), len(ACTION_NAMES))}")
        if not np.isfinite(wanted).all():
            raise ValueError("action holds NaN or infinite values; look at the policy that made it")
        position = self.gripper[rows] + np.clip(wanted[:, :3], -_MAX_MOVE, _MAX_MOVE)
        position[:, :2] = np.clip(position[:, :2], -1.0, 1.0)
        position[:, 2] = np.clip(position[:, 2], _FLOOR, _CEILING)
        command = np.clip(wanted[:, 6], 0.0, 1.0)
        opening = self.opening[rows]
        opening = opening + np.clip(command - opening, -_MAX_GRIPPER_MOVE, _MAX_GRIPPER_MOVE)

        blocks = self.blocks[rows]
        distance = np.linalg.norm(blocks[:, :, :2] - position[:, None, :2], axis=2)
        nearest = distance.argmin(axis=1)
        held = self.held[rows]
        grasps = (held < 0) & (opening < 0.55) & (command < 0.5) & (position[:, 2] < _GRASP_HEIGHT)
        grasps &= distance.min(axis=1) < _GRASP_REACH
        dropped = (held >= 0) & (opening > 0.7)
        blocks[dropped, held[dropped], 2] = 0.0
        held = np.where(grasps, nearest, np.where(dropped, -1, held))
        holding = np.flatnonzero(held >= 0)
        blocks[holding, held[holding]] = position[holding]

        lifted = self.lifted[rows]
        up = (lifted < 0) & (held >= 0) & (position[:, 2] > LIFT_HEIGHT)
        self.gripper[rows], self.opening[rows], self.blocks[rows] = position, opening, blocks
        self.held[rows], self.lifted[rows] = held, np.where(up, held, lifted)
