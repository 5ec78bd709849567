"""Samples of the held-out episodes, for measurements during training and after it: the same ones every time."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recipes.build import windows
from recipes.check_data import size
from recipes.parts import parts
from recipes.schema import Recipe
from recipes.sources import (
    batch_cameras,
    batch_columns,
    held_out_part,
    horizon_of,
    own_cameras,
    part_source,
    rows_of,
    source,
    span,
)

if TYPE_CHECKING:
    from torch import Tensor

    from knonik import Batch, Dataset, Loader, Mixture
    from models.gr00t_n17.inputs.modality import Modalities
    from models.gr00t_n17.inputs.processor import Processor
    from models.gr00t_n17.validation import Validation


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
    batches over all ranks goes to rank 0. batch_size is that of one rank.
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
            if rest and self.rank == 0:
                with self._open(reading, rest, 0, 1) as loader:
                    position = whole * self.batch_size * self.world_size
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


def build_validation(
    recipe: Recipe, datasets: "list[Dataset]", processor: "Processor", *, batch_size: int, rank: int, world_size: int
) -> "Validation":
    """What `validation` measures.

    Args:
        recipe: with a `validation` section.
        datasets: each with all its episodes, those held out among them.
        processor: as in training.
        batch_size: samples of a rank that go through the network together.
        rank, world_size: this process' share.
    """
    from models.gr00t_n17.validation import Validation

    settings = recipe.validation
    assert settings is not None
    held_out = [part for dataset in datasets if (part := held_out_part(recipe, dataset)) is not None]
    assert len(held_out) == len(datasets), "`check` has seen to it"
    share = {"batch_size": batch_size, "rank": rank, "world_size": world_size}
    stride = settings.open_loop_stride or horizon_of(recipe)
    loss = loss_samples(recipe, held_out, processor, settings.batches, **share) if settings.batches else ()
    open_loop: Any = ()
    if settings.open_loop_episodes:
        chosen = [first_episodes(dataset, settings.open_loop_episodes) for dataset in held_out]
        open_loop = open_loop_samples(recipe, chosen, processor, stride, **share)
    return Validation(
        processor,
        seed=recipe.seed,
        loss_batches=loss,
        open_loop_batches=open_loop,
        open_loop_steps=stride,
        flow_draws=recipe.model.flow_draws,
    )


def loss_samples(
    recipe: Recipe,
    datasets: "list[Dataset]",
    processor: "Processor",
    batches: int,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
) -> Samples:
    """Samples of `batches` training batches, drawn by the seed; all there are where these are fewer."""
    anchors = sum(len(dataset.anchors(span(recipe, dataset))) for dataset in datasets)
    data = source(recipe, datasets)
    loader = _options(recipe, data, batch_cameras(recipe, datasets), windows(recipe, datasets, processor)) | {
        "edge": recipe.data.edge,
        "shuffle": True,
    }
    return Samples(
        readings=(Reading(count=min(anchors, batches * batch_size * world_size), loader=loader),),
        prepare=processor.prepare,
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
    )


def open_loop_samples(
    recipe: Recipe,
    datasets: "list[Dataset]",
    processor: "Processor",
    stride: int,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
) -> Samples:
    """Every `stride`-th step of every episode; a chunk at the end of one is compared as far as the episode goes."""
    readings, cameras, whole = [], batch_cameras(recipe, datasets), source(recipe, datasets)
    steps_read = windows(recipe, datasets, processor)
    for number, dataset in enumerate(datasets):
        view = _anchored(dataset, stride, recipe.data.fps)
        # one part at a time: a mixture deals its parts in shares, which would not end with all of them
        own, alone = own_cameras(parts(recipe)[number], dataset, cameras), part_source(recipe, number, view)
        readings.append(
            Reading(
                count=len(view.anchors(1)),
                loader=_options(recipe, alone, own, steps_read) | {"edge": "repeat", "shuffle": False},
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
    dataset: "Dataset", modalities: "Modalities", stride: int, *, batch_size: int, fps: float | None = None
) -> "Iterator[Batch]":
    """Every `stride`-th step of every episode with what a policy's modalities read, raw, in the dataset's own names.

    fps: steps are 1 / fps seconds, as a mixture's may be; None counts the dataset's own rows.
    """
    view = _anchored(dataset, stride, fps)
    state = tuple(dict.fromkeys(group.column for group in modalities.state))
    action = tuple(dict.fromkeys(group.column for group in modalities.action))
    loader = {
        "source": view,
        "windows": {
            **dict.fromkeys(modalities.cameras, rows_of(modalities.video_deltas, dataset, fps)),
            **dict.fromkeys(action, rows_of(range(modalities.horizon), dataset, fps)),
        },
        "cameras": modalities.cameras,
        "state": state,
        "action": action,
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
    recipe: Recipe, data: "Dataset | Mixture", cameras: tuple[str, ...], steps: dict[str, Any]
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
