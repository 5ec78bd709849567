"""Samples of the held-out episodes, for measurements during training and after it: the same ones every time."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recipes.check_data import size
from recipes.family import family
from recipes.parts import parts
from recipes.schema import Recipe
from recipes.sources import (
    batch_cameras,
    batch_columns,
    own_cameras,
    part_source,
    rows_of,
    source,
    span,
)

if TYPE_CHECKING:
    from torch import Tensor

    from knonik import Batch, Dataset, Loader, Mixture


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The first `count` samples of one loader.

    loader: options of a `knonik.Loader` but for its share. part: place of its only dataset in the recipe's mixture,
    None where the loader reads all of them. black: (height, width) of the cameras that this one lacks.
    """

    count: int
    loader: dict[str, Any]
    part: int | None = None
    black: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """This rank's share of fixed samples, each once, as prepared batches on the CPU; iterate again and again.

    A loader is opened for each pass and closed after it, so that nothing is held in between. What is left of whole
    batches over all ranks is dealt in parts, the last ranks may get none. batch_size is the most a rank gets at once.
    """

    readings: tuple[Reading, ...]
    prepare: "Callable[[Batch], dict[str, Tensor]]"
    batch_size: int
    rank: int
    world_size: int

    def __iter__(self) -> "Iterator[Batch]":
        for reading in self.readings:
            whole, rest = divmod(reading.count, self.batch_size * self.world_size)
            if whole:
                with self._open(reading, self.batch_size, self.rank, self.world_size) as loader:
                    for _ in range(whole):
                        yield self._prepared(next(loader), reading)
            share = -(-rest // self.world_size)
            own = min(share, rest - self.rank * share)
            if own > 0:
                with self._open(reading, own, 0, 1) as loader:
                    position = whole * self.batch_size * self.world_size + self.rank * share
                    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "position": position})
                    yield self._prepared(next(loader), reading)

    @contextlib.contextmanager
    def _open(self, reading: Reading, batch_size: int, rank: int, world_size: int) -> "Iterator[Loader]":
        import knonik

        loader = knonik.Loader(**reading.loader, batch_size=batch_size, rank=rank, world_size=world_size)
        with contextlib.closing(loader):
            yield loader

    def _prepared(self, batch: "Batch", reading: Reading) -> "Batch":
        if reading.part is not None:
            batch = dataclasses.replace(batch, dataset=batch.dataset.new_full(batch.dataset.shape, reading.part))
        for camera, (height, width) in reading.black.items():
            frames = next(iter(batch.images.values()))
            batch.images[camera] = frames.new_zeros((*frames.shape[:2], height, width, 3))
        return dataclasses.replace(batch, inputs=self.prepare(batch))


def loss_samples(
    recipe: Recipe,
    datasets: "list[Dataset]",
    processor: Any,
    count: int,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
) -> Samples:
    """`count` samples over all ranks, drawn by the seed; all there are where these are fewer."""
    anchors = sum(len(dataset.anchors(span(recipe, dataset))) for dataset in datasets)
    data = source(recipe, datasets)
    steps = family(recipe).sample_options(recipe, datasets, processor)["windows"]
    loader = _options(recipe, data, batch_cameras(recipe, datasets), steps) | {
        "edge": recipe.data.edge,
        "shuffle": True,
    }
    return Samples(
        readings=(Reading(count=min(anchors, count), loader=loader),),
        prepare=processor.prepare,
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
    )


def open_loop_samples(
    recipe: Recipe,
    datasets: "list[Dataset]",
    processor: Any,
    stride: int,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    windows: Mapping[str, Sequence[int]] | None = None,
) -> Samples:
    """Every `stride`-th step of every episode; a chunk at the end of one is compared as far as the episode goes.

    Args:
        windows: steps around the anchor by camera and column; None reads those of training.
    """
    readings, cameras, whole = [], batch_cameras(recipe, datasets), source(recipe, datasets)
    if windows is None:
        windows = family(recipe).sample_options(recipe, datasets, processor)["windows"]
    for number, dataset in enumerate(datasets):
        view = _anchored(dataset, stride, recipe.data.fps)
        # one part at a time: a mixture deals its parts in shares, which would not end with all of them
        own, alone = own_cameras(parts(recipe)[number], dataset, cameras), part_source(recipe, number, view)
        readings.append(
            Reading(
                count=len(view.anchors(1)),
                loader=_options(recipe, alone, own, windows) | {"edge": "repeat", "shuffle": False},
                part=number,
                black={camera: whole.image_shape(camera) for camera in cameras if camera not in own},
            )
        )
    return Samples(
        readings=tuple(readings),
        prepare=processor.prepare,
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
    )


def every_step(
    dataset: "Dataset",
    windows: Mapping[str, Sequence[int]],
    *,
    cameras: Sequence[str],
    state: Sequence[str],
    action: Sequence[str],
    stride: int,
    batch_size: int,
    fps: float | None = None,
) -> "Iterator[Batch]":
    """Every `stride`-th step of every episode, raw, in the dataset's own names.

    Args:
        windows: steps around the anchor by camera and column.
        fps: steps are 1 / fps seconds, as a mixture's may be; None counts the dataset's own rows.
    """
    view = _anchored(dataset, stride, fps)
    loader = {
        "source": view,
        "windows": {name: rows_of(steps, dataset, fps) for name, steps in windows.items()},
        "cameras": tuple(cameras),
        "state": tuple(state),
        "action": tuple(action),
        "edge": "repeat",
        "shuffle": False,
    }
    readings = (Reading(count=len(view.anchors(1)), loader=loader),)
    return iter(Samples(readings=readings, prepare=lambda batch: {}, batch_size=batch_size, rank=0, world_size=1))


def _anchored(dataset: "Dataset", stride: int, fps: float | None) -> "Dataset":
    """A view whose anchors are every `stride`-th step of its episodes."""
    every = max(1, rows_of([stride], dataset, fps)[0])
    length = dict(zip(dataset.episodes.ids.tolist(), dataset.episodes.length.tolist(), strict=True))
    return dataset.subset(
        ranges={episode: [(frame, frame + 1) for frame in range(0, rows, every)] for episode, rows in length.items()}
    )


def first_episodes(dataset: "Dataset", count: int) -> "Dataset":
    """A view of the first episodes, by their ids."""
    return dataset.subset(sorted(dataset.episodes.ids.tolist())[:count])


def _options(
    recipe: Recipe, data: "Dataset | Mixture", cameras: tuple[str, ...], steps: Mapping[str, Any]
) -> dict[str, Any]:
    options = {
        "source": data,
        "seed": recipe.seed,
        "windows": {name: steps[name] for name in (*cameras, *batch_columns(recipe, "action")) if name in steps},
        "cameras": cameras,
        "state": batch_columns(recipe, "state"),
        "action": batch_columns(recipe, "action"),
        "decode_threads": recipe.data.decode_threads,
        "ram_bytes": size(recipe, "ram"),
        "disk_bytes": size(recipe, "disk"),
    }
    return {name: value for name, value in options.items() if value is not None}
