"""The scripted expert, and demonstrations of it: clean actions recorded, slightly wrong ones executed."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recipes.tabletop.world import ACTION_NAMES, MAX_STEPS, Floats, Ints, Layouts, Scene, TabletopWorld

_HOVER, _CARRY_HEIGHT = 0.05, 0.5
_GAIN_XY, _GAIN_Z = 0.18, 0.3
_MAX_SPEED = 0.07


def expert_action(scene: Scene, held: Ints, target: Ints) -> Floats:
    """Clean action [N, 7] toward block `target` [N], given which block is held (-1: none).

    Goes to the block in a straight line with a gain low enough that the speed tells the distance, comes down as it
    gets near, closes, lifts. Held blocks are lifted whichever they are.
    """
    rows = np.arange(len(scene))
    error = scene.blocks[rows, target, :2] - scene.gripper[:, :2]
    distance = np.linalg.norm(error, axis=1)
    z = scene.gripper[:, 2]

    move = _GAIN_XY * error
    speed = np.linalg.norm(move, axis=1, keepdims=True)
    move *= np.minimum(1.0, _MAX_SPEED / np.maximum(speed, 1e-9))
    far_height = _HOVER + np.minimum(0.4, 1.2 * (distance - 0.10) + 0.12)
    wanted_z = np.where(distance < 0.12, _HOVER, far_height)
    down = np.clip(_GAIN_Z * (wanted_z - z), -_MAX_SPEED, _MAX_SPEED)

    closing = (distance < 0.10) & (z < 0.11)
    holding = held >= 0
    action = np.zeros((len(scene), len(ACTION_NAMES)))
    action[:, :2] = np.where(holding[:, None], 0.0, move)
    lift = 0.9 * np.clip(_CARRY_HEIGHT - z, -_MAX_SPEED, _MAX_SPEED)
    action[:, 2] = np.where(holding, lift, np.where(closing, 0.0, down))
    action[:, 6] = np.where(holding | closing, 0.0, 1.0)
    return action


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """One episode of N steps: state [N, 7] and clean action [N, 7] as float32, and the N scenes they belong to."""

    state: NDArray[np.float32]
    action: NDArray[np.float32]
    scene: Scene
    succeeded: bool


def demonstrate(layouts: Layouts, target: Ints, *, seed: int, first: int = 0) -> list[Demonstration]:
    """Runs the expert on every table (B) until two steps after success, at most `MAX_STEPS`.

    The executed action carries N(0, 0.015) noise on x and y and half of that on z, so that the record shows how to
    come back from small errors. The noise of table b is a function of (seed, first + b).
    """
    world = TabletopWorld(layouts)
    rows = np.arange(len(world))
    noise = np.stack([_noise(seed, first + row) for row in range(len(world))])  # [B, MAX_STEPS, 7]
    states, actions, grippers, openings, blocks = [], [], [], [], []
    length = np.full(len(world), MAX_STEPS)
    for step in range(MAX_STEPS):
        scene = world.scene(rows)
        action = expert_action(scene, world.held, target)
        states.append(world.state(rows))
        actions.append(action.astype(np.float32))
        grippers.append(scene.gripper)
        openings.append(scene.opening)
        blocks.append(scene.blocks)
        world.step(action + noise[:, step], rows)
        # Two more steps after the one that lifted: the policy should go on lifting, not stop at the threshold.
        length = np.where(world.lifted >= 0, np.minimum(length, step + 3), length)
        if (length <= step + 1).all():
            break
    return [
        Demonstration(
            state=np.stack([state[row] for state in states[:count]]),
            action=np.stack([action[row] for action in actions[:count]]),
            scene=Scene(
                gripper=np.stack([gripper[row] for gripper in grippers[:count]]),
                opening=np.stack([opening[row] for opening in openings[:count]]),
                blocks=np.stack([block[row] for block in blocks[:count]]),
                colours=np.broadcast_to(layouts.colours[row], (count, 2)),
            ),
            succeeded=bool(world.lifted[row] == target[row]),
        )
        for row, count in enumerate(int(value) for value in length)
    ]


def _noise(seed: int, index: int) -> Floats:
    noise = np.zeros((MAX_STEPS, len(ACTION_NAMES)))
    drawn = np.random.default_rng([seed, 101, index]).normal(0.0, 0.015, (MAX_STEPS, 3))
    noise[:, :3] = drawn * np.array([1.0, 1.0, 0.5])
    return noise
