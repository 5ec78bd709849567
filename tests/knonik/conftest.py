"""Generated datasets for tests that need no real data."""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from knonik.stores.base import LocalStore
from knonik.write.lerobot import EpisodeData, write_lerobot

MakeSet = Callable[..., Path]


def episode(index: int, length: int, cameras: int, size: tuple[int, int]) -> EpisodeData:
    """Every frame, row and camera differs from every other."""
    height, width = size
    y, x = np.mgrid[:height, :width]
    frames = {}
    for camera in range(cameras):
        shift = 23 * index + 101 * camera
        frames[f"observation.images.cam{camera}"] = np.stack(
            [np.stack([x * 2 + 9 * i + shift, y * 3 + 5 * i, x + y + shift], axis=-1) % 256 for i in range(length)]
        ).astype(np.uint8)
    steps = np.arange(length, dtype=np.float32)[:, None]
    state = np.concatenate([np.full_like(steps, index), steps, steps * 0.5], axis=1)
    action = np.concatenate([steps + 1000 * index, -steps], axis=1)
    return EpisodeData(
        columns={"observation.state": state, "action": action}, frames=frames, task=f"do thing {index % 3} ✓"
    )


def episodes(lengths: Sequence[int], cameras: int = 2, size: tuple[int, int] = (32, 48)) -> Iterator[EpisodeData]:
    for index, length in enumerate(lengths):
        yield episode(index, length, cameras, size)


@pytest.fixture(scope="session")
def make_set(tmp_path_factory: pytest.TempPathFactory) -> MakeSet:
    """Write a set once per distinct request: make_set(lengths, version=..., cameras=..., **options) -> folder."""
    made: dict[str, Path] = {}

    def make(
        lengths: Sequence[int],
        *,
        version: str = "v3.0",
        cameras: int = 2,
        size: tuple[int, int] = (32, 48),
        **options: object,
    ) -> Path:
        name = repr((tuple(lengths), version, cameras, size, sorted(options.items())))
        if name not in made:
            folder = tmp_path_factory.mktemp("sets") / "set"
            defaults = {"fps": 10, "robot_type": "none", "codec": "h264", "episodes_per_file": 3}
            made[name] = write_lerobot(
                folder, episodes(lengths, cameras, size), version=version, **{**defaults, **options}
            )
        return made[name]

    return make


class RemoteStore(LocalStore):
    """A folder that passes for a distant store: notes reads and their threads, can hold them up or let them fail.

    gate: cleared, reads that have begun wait. begun: one release for each read that has begun. broken: (key, byte) that
    cannot be read.
    """

    is_local = False

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.ranges: list[tuple[str, int, int]] = []
        self.readers: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Semaphore(0)
        self.broken: set[tuple[str, int]] = set()
        self.error: type[OSError] = OSError

    def read_range(self, key: str, offset: int, length: int, *, version: str | None = None) -> bytes:
        assert version, "a read that would not notice that the object has changed"
        self.ranges.append((key, offset, length))
        self.readers.append(threading.current_thread().name)
        self.begun.release()
        self.gate.wait()
        if any(key == name and offset <= byte < offset + length for name, byte in self.broken):
            raise self.error(f"cannot read {key} bytes {offset}-{offset + length - 1}: out of order")
        return super().read_range(key, offset, length, version=version)

    @property
    def num_bytes(self) -> int:
        """Bytes of all range reads."""
        return sum(length for _, _, length in self.ranges)


@pytest.fixture
def remote_store() -> type[RemoteStore]:
    """The class, for tests that put it in the place of a dataset's store."""
    return RemoteStore
