"""Makes the tabletop dataset: paired expert demonstrations, rendered and written as a LeRobot dataset."""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from knonik.write.lerobot import EpisodeData, write_lerobot
from recipes.tabletop.expert import Demonstration, demonstrate
from recipes.tabletop.render import CAMERAS, render
from recipes.tabletop.world import FPS, draw_layouts, instruction

log = logging.getLogger(__name__)

_CHUNK = 50  # layouts simulated together; bounds the memory held, changes nothing in the data


def generate_demonstrations(
    dest: Path,
    *,
    layouts: int = 600,
    seed: int = 0,
    version: Literal["v3.0", "v2.1"] = "v3.0",
    codec: Literal["av1", "h264"] = "h264",
    gop: int = 2,
    episodes_per_file: int = 100,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Writes 2 x `layouts` episodes to the new folder `dest` and returns their number.

    Every training layout is demonstrated once per block from the same start, so that only the sentence tells the two
    episodes apart; with one episode per layout a policy can learn the target from the layout. Keys: `observation.state`
    [7], `action` [7], three cameras 64x64, 5 frames a second. States, actions and rendered frames are a function of
    (seed, layout number). `progress` is called with (episodes done, episodes in all) after each one.

    Raises:
        ValueError: no layouts asked for.
        FileExistsError: `dest` exists.
    """
    if layouts < 1:
        raise ValueError(f"layouts is {layouts}; the dataset needs at least 1")
    total = 2 * layouts
    started = time.perf_counter()

    def episodes() -> Iterator[EpisodeData]:
        for done, episode in enumerate(demonstration_episodes(layouts=layouts, seed=seed), start=1):
            yield episode
            if progress is not None:
                progress(done, total)

    write_lerobot(
        dest,
        episodes(),
        fps=FPS,
        robot_type="tabletop",
        version=version,
        codec=codec,
        gop=gop,
        episodes_per_file=episodes_per_file,
    )
    log.info("%d demonstrations of %d layouts in %.1f s: %s", total, layouts, time.perf_counter() - started, dest)
    return total


def demonstration_episodes(*, layouts: int, seed: int) -> Iterator[EpisodeData]:
    """The episodes of `generate_demonstrations` in order, with frames as rendered (no codec between)."""
    for first in range(0, layouts, _CHUNK):
        tables = draw_layouts(seed, "train", range(first, min(first + _CHUNK, layouts)))
        pairs = tables.take(np.repeat(np.arange(len(tables)), 2))
        target = np.tile(np.array([0, 1], dtype=np.int64), len(tables))
        texts = instruction(pairs.colours[np.arange(len(pairs)), target])
        for demonstration, text in zip(demonstrate(pairs, target, seed=seed, first=2 * first), texts, strict=True):
            yield _episode(demonstration, text)


def _episode(demonstration: Demonstration, text: str) -> EpisodeData:
    assert demonstration.succeeded, "the expert failed: world and expert no longer fit together"
    return EpisodeData(
        columns={"observation.state": demonstration.state, "action": demonstration.action},
        frames=render(demonstration.scene, CAMERAS),
        task=text,
    )
