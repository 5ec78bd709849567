"""The data of the loader benchmarks: 60 generated episodes of 3 cameras 480x640 at 5 fps, in four LeRobot datasets.

    python benchmarks/loader_data.py [FOLDER] [--only av1g2/v30 ...]

Made once into FOLDER, $ROBOT_RECIPES_BENCH, or the user's cache folder, and reused. All show the same pictures:

    av1g2/v30 and av1g2/v21   AV1, a key frame every 2 frames, crf 30: what LeRobot records
    h264g2/v30                H.264, a key frame every 2 frames, crf 30
    h264g250/v30              H.264 with B-frames, crf 23, an episode is one GOP: what many published sets are

The pictures are rich textures under a drifting camera, four moving objects and fresh sensor noise in every frame, so
that neither size nor decode time is that of a clean rendering; an episode has 30 to 52 steps, as BridgeV2's have.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from knonik.write.lerobot import EpisodeData, write_lerobot

HEIGHT, WIDTH, FPS, EPISODES = 480, 640, 5, 60
CAMERAS = tuple(f"observation.images.image_{number}" for number in range(3))
TASKS = tuple(
    f"put the {colour} {thing} {place}"
    for colour in ("red", "blue", "green")
    for thing in ("cup", "spoon")
    for place in ("into the sink", "into the pot", "on the drawer")
)
# What GR00T asks of a dataset: names for slices of the vectors and for the cameras.
MODALITY = {
    "state": {"arm": {"start": 0, "end": 6}, "gripper": {"start": 6, "end": 7}},
    "action": {"arm": {"start": 0, "end": 6}, "gripper": {"start": 6, "end": 7}},
    "video": {camera.rsplit(".", 1)[1]: {"original_key": camera} for camera in CAMERAS},
    "annotation": {"human.action.task_description": {"original_key": "task_index"}},
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How one dataset is stored."""

    version: str
    codec: str
    gop: int
    crf: int
    bframes: int = 0


VARIANTS = {
    "av1g2/v30": Variant(version="v3.0", codec="av1", gop=2, crf=30),
    "av1g2/v21": Variant(version="v2.1", codec="av1", gop=2, crf=30),
    "h264g2/v30": Variant(version="v3.0", codec="h264", gop=2, crf=30),
    "h264g250/v30": Variant(version="v3.0", codec="h264", gop=250, crf=23, bframes=3),
}


def default_folder() -> Path:
    """$ROBOT_RECIPES_BENCH, else a folder of the user's cache."""
    if given := os.environ.get("ROBOT_RECIPES_BENCH"):
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "robot-recipes" / "bench"


def ensure(name: str, folder: Path | None = None, *, episodes: int = EPISODES, workers: int = 2) -> Path:
    """The folder of variant `name`, made now if it is not there."""
    target = (folder or default_folder()) / name
    if target.exists():
        return target
    variant = VARIANTS[name]
    begin = time.perf_counter()
    target.parent.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"bframes": variant.bframes} if variant.bframes else {}
    write_lerobot(
        target,
        generate(episodes),
        fps=FPS,
        robot_type="widowx",
        version=variant.version,
        codec=variant.codec,
        gop=variant.gop,
        crf=variant.crf,
        workers=workers,
        **options,
    )
    (target / "meta" / "modality.json").write_text(json.dumps(MODALITY, indent=4))
    size = sum(path.stat().st_size for path in target.rglob("*.mp4"))
    frames = sum(lengths(episodes)) * len(CAMERAS)
    print(f"{name}: {size / frames / 1e3:.1f} KB a frame, {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    return target


def lengths(episodes: int) -> list[int]:
    """Steps of each episode."""
    return [int(steps) for steps in np.random.default_rng(0).integers(30, 53, episodes)]


def generate(episodes: int) -> Iterator[EpisodeData]:
    """The episodes, the same ones every time."""
    for number, steps in enumerate(lengths(episodes)):
        rng = np.random.default_rng([number, 7])
        columns = {
            "observation.state": np.cumsum(rng.normal(0, 0.02, (steps, 7)), axis=0).astype(np.float32),
            "action": rng.normal(0, 0.1, (steps, 7)).astype(np.float32),
        }
        frames = {camera: Scene([number, eye]).film(steps) for eye, camera in enumerate(CAMERAS)}
        yield EpisodeData(columns=columns, frames=frames, task=TASKS[number % len(TASKS)])


class Scene:
    """One camera's view of one episode."""

    _MARGIN = 48  # pixels the camera can drift
    _NOISE_SIDE = 96  # the noise field is larger than the picture by this and lies elsewhere in every frame

    def __init__(self, seed: list[int]) -> None:
        self._rng = rng = np.random.default_rng(seed)
        self._table = texture(rng, HEIGHT + self._MARGIN, WIDTH + self._MARGIN)
        field = (HEIGHT + self._NOISE_SIDE, WIDTH + self._NOISE_SIDE, 3)
        self._noise = rng.normal(0, 2.5, field).round().astype(np.int16)
        self._objects = [self._object(side) for side in rng.integers(48, 144, 4).tolist()]
        self._path = rng.uniform(0, 2 * np.pi, (len(self._objects) + 1, 2))
        self._speed = rng.uniform(0.06, 0.24, (len(self._objects), 2))

    def film(self, steps: int) -> NDArray[np.uint8]:
        """uint8 [steps, H, W, 3]."""
        return np.stack([self._frame(step) for step in range(steps)])

    def _frame(self, step: int) -> NDArray[np.uint8]:
        swing = 0.09 * step + self._path[-1]
        top, left = (self._MARGIN / 2 + 5 * np.sin(swing)).astype(int)
        picture = self._table[top : top + HEIGHT, left : left + WIDTH].astype(np.int16)
        for (pixels, inside), speed, phase in zip(self._objects, self._speed, self._path, strict=False):
            share = 0.5 + 0.45 * np.sin(speed * step + phase)
            y, x = (share * (np.array([HEIGHT, WIDTH]) - len(pixels))).astype(int)
            place = picture[y : y + len(pixels), x : x + len(pixels)]
            np.copyto(place, pixels, where=inside, casting="unsafe")
        y, x = self._rng.integers(0, self._NOISE_SIDE, 2)
        picture += self._noise[y : y + HEIGHT, x : x + WIDTH]
        return picture.clip(0, 255).astype(np.uint8)

    def _object(self, side: int) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        y, x = np.mgrid[-1 : 1 : side * 1j, -1 : 1 : side * 1j]
        inside = y**2 + (x * self._rng.uniform(1, 1.7)) ** 2 < 1
        return texture(self._rng, side, side), inside[..., None]


def texture(rng: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    """Random detail at six scales, coarse ones strongest, uint8 [height, width, 3]."""
    total = np.zeros((height, width, 3), np.float32)
    for octave, cells in enumerate((4, 9, 20, 45, 100, 220)):
        grid = rng.uniform(-1, 1, (3, cells, cells)).astype(np.float32)
        layers = [
            np.asarray(Image.fromarray(layer).resize((width, height), Image.Resampling.BICUBIC)) for layer in grid
        ]
        total += 92 * 0.64**octave * np.stack([np.asarray(layer) for layer in layers], axis=-1)
    return (total + rng.uniform(95, 155, 3)).clip(0, 255).astype(np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=default_folder(), help="where the datasets go")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--episodes", type=int, default=EPISODES)
    parser.add_argument("--workers", type=int, default=2, help="encoding threads")
    args = parser.parse_args()
    for name in args.only:
        print(ensure(name, args.folder, episodes=args.episodes, workers=args.workers))


if __name__ == "__main__":
    main()
