"""Lets a policy act on held-out tables and counts how often it lifts the block it was told to lift."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recipes.tabletop.render import CAMERAS, Frames, render
from recipes.tabletop.world import MAX_STEPS, TabletopWorld, draw_layouts, instruction

Policy = Callable[
    [Mapping[str, Frames], Mapping[str, NDArray[np.float32]], Sequence[str]], Mapping[str, NDArray[np.floating]]
]
"""(images {camera: uint8 [B, H, W, 3]}, state {key: float32 [B, 7]}, text) -> {"action": [B, horizon, 7]}."""


@dataclass(frozen=True, kw_only=True)
class ClosedLoopResult:
    """Shares of the episodes. `wrong_block_rate`: the block that was not the target was lifted, which ends an episode.

    With a swapped instruction the target stays the block named originally, so a policy that follows the text has a
    success rate near 0. `followed_text_rate` counts the block named in the text the policy was given; without the swap
    it is the success rate.
    """

    success_rate: float
    wrong_block_rate: float
    followed_text_rate: float
    episodes: int
    mean_steps: float
    swapped_instruction: bool


def evaluate(
    policy: Policy,
    *,
    layouts: int = 120,
    seed: int = 0,
    execute_steps: int = 2,
    swap_instruction: bool = False,
    batch: int | None = None,
    cameras: Sequence[str] = CAMERAS,
    progress: Callable[[int, int], None] | None = None,
) -> ClosedLoopResult:
    """Runs one episode on each of `layouts` held-out tables, at most 60 steps each.

    The policy sees the tables still running, `batch` at most at a time (None: all at once), and is asked again after
    `execute_steps` of the actions it gave. An even-numbered table asks for its first block, an odd one for its second.
    The result is a function of (policy, layouts, seed, batch); a policy that samples must draw its noise from a
    seeded source. `progress` is called with (episodes finished, episodes in all).

    Raises:
        ValueError: counts below 1, or a policy answer of the wrong shape.
    """
    for name, value in (
        ("layouts", layouts),
        ("execute_steps", execute_steps),
        ("batch", layouts if batch is None else batch),
    ):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    tables = draw_layouts(seed, "held_out", range(layouts))
    rows = np.arange(layouts)
    target = rows % 2
    named = 1 - target if swap_instruction else target
    texts = instruction(tables.colours[rows, named])
    world = TabletopWorld(tables)
    steps = np.zeros(layouts, dtype=np.int64)

    for first in range(0, layouts, batch or layouts):
        active = rows[first : first + (batch or layouts)]
        while len(active):
            images = render(world.scene(active), cameras)
            answer = policy(images, {"observation.state": world.state(active)}, [texts[row] for row in active])
            plan = np.asarray(answer["action"])
            if plan.ndim != 3 or plan.shape[0] != len(active) or plan.shape[1] < execute_steps:
                raise ValueError(
                    f"the policy gave actions of shape {plan.shape}; expected [{len(active)}, >= {execute_steps}, 7]: "
                    "execute_steps may not exceed the model's action horizon"
                )
            for step in range(execute_steps):
                running = np.flatnonzero((world.lifted[active] < 0) & (steps[active] < MAX_STEPS))
                world.step(plan[running, step], active[running])
                steps[active[running]] += 1
            active = active[(world.lifted[active] < 0) & (steps[active] < MAX_STEPS)]
            if progress is not None:
                progress(min(first + (batch or layouts), layouts) - len(active), layouts)

    return ClosedLoopResult(
        success_rate=float((world.lifted == target).mean()),
        wrong_block_rate=float((world.lifted == 1 - target).mean()),
        followed_text_rate=float((world.lifted == named).mean()),
        episodes=layouts,
        mean_steps=float(steps.mean()),
        swapped_instruction=swap_instruction,
    )
