"""Opens the datasets of a recipe and says what is trained on and what is held out."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.family import family
from recipes.parts import parts
from recipes.schema import Recipe
from recipes.schema_data import PartConfig

if TYPE_CHECKING:  # importing these takes seconds; `show` and configuration errors must not wait for them
    from knonik import Dataset, Mixture, Part

SPLIT_SEED = 0  # which episodes are held out depends on their ids alone, also between runs of different seeds


def open_part(recipe: Recipe, part: PartConfig) -> "Dataset":
    """Open a dataset where it lies; builds its index when there is none yet."""
    import knonik

    return knonik.open(
        part.uri,
        cache_dir=recipe.data.cache.dir,
        episodes=list(part.episodes) if part.episodes is not None else None,
        ranges=part.ranges,
        match=recipe.data.match,
    )


def open_all(recipe: Recipe) -> "list[Dataset]":
    """All datasets of the recipe, in its order; none stays open when one cannot be."""
    opened: list[Dataset] = []
    try:
        for part in parts(recipe):
            opened.append(open_part(recipe, part))
    except BaseException:
        for dataset in opened:
            dataset.close()
        raise
    return opened


def training_part(recipe: Recipe, dataset: "Dataset") -> "Dataset":
    """The dataset without its held-out episodes; a view that ends with the dataset."""
    chosen = recipe.data.validation_episodes
    if chosen is not None:
        return dataset.subset([episode for episode in dataset.episodes.ids.tolist() if episode not in chosen])
    return dataset.split(recipe.data.validation, SPLIT_SEED)[0] if recipe.data.validation else dataset


def held_out_part(recipe: Recipe, dataset: "Dataset") -> "Dataset | None":
    """The episodes kept out of training; None when none are."""
    if recipe.data.validation_episodes is not None:
        return dataset.subset(list(recipe.data.validation_episodes))
    return dataset.split(recipe.data.validation, SPLIT_SEED)[1] if recipe.data.validation else None


def batch_cameras(recipe: Recipe, datasets: "list[Dataset]") -> tuple[str, ...]:
    """Names of the cameras in a batch, in the recipe's order, or in that of the datasets."""
    names: dict[str, None] = {}
    for part, dataset in zip(parts(recipe), datasets, strict=True):
        names |= dict.fromkeys(dataset.cameras if part.cameras is None else part.cameras)
    return tuple(names)


def own_cameras(part: PartConfig, dataset: "Dataset", names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the batch's cameras that a part has."""
    own = dataset.cameras if part.cameras is None else part.cameras
    return tuple(name for name in names if name in own)


def batch_columns(recipe: Recipe, section: str) -> tuple[str, ...]:
    """Columns of a batch's `state` or `action`: all that a part reads, under the datasets' own names."""
    return tuple(dict.fromkeys(name for part in parts(recipe) for name in getattr(part, section)))


def source(recipe: Recipe, datasets: "list[Dataset]") -> "Dataset | Mixture":
    """What the loader reads: the only dataset as it is, several as a mixture.

    A part that lacks a column of another one shows its own first column in that place. Nobody reads it there: every
    part's processor takes the columns which its part names.
    """
    if recipe.data.mixture is None:
        return datasets[0]
    return _mixture(recipe, [_part(recipe, number, dataset) for number, dataset in enumerate(datasets)])


def part_source(recipe: Recipe, number: int, dataset: "Dataset") -> "Dataset | Mixture":
    """One dataset of the recipe alone, its batches with the names that those of `source` have."""
    return dataset if recipe.data.mixture is None else _mixture(recipe, [_part(recipe, number, dataset)])


def _mixture(recipe: Recipe, of: "list[Part]") -> "Mixture":
    from knonik import Mixture

    return Mixture(of, fps=recipe.data.fps, pad="zero", missing_cameras=recipe.data.missing_cameras)


def _part(recipe: Recipe, number: int, dataset: "Dataset") -> "Part":
    from knonik import Part

    part = parts(recipe)[number]
    columns = {
        name: getattr(part, section)[0]
        for section in ("state", "action")
        for name in batch_columns(recipe, section)
        if name not in getattr(part, section)
    }
    return Part(dataset=dataset, weight=part.weight, cameras=part.cameras, columns=columns)


def num_anchors(recipe: Recipe, datasets: "list[Dataset]") -> int:
    """Samples of an epoch."""
    return sum(len(dataset.anchors(span(recipe, dataset))) for dataset in datasets)


def span(recipe: Recipe, dataset: "Dataset") -> int:
    """Rows of a dataset that a chunk, or the clip beside it, must find before the episode's end."""
    if recipe.data.edge != "inside":
        return 1
    steps = max(horizon_of(recipe), family(recipe).clip_frames(recipe))
    return 1 + rows_of([steps - 1], dataset, recipe.data.fps)[0]


def rows_of(steps: Sequence[int], dataset: "Dataset", fps: float | None) -> list[int]:
    """Steps of 1 / fps seconds as rows of a dataset; None counts its own rows."""
    if fps is None:
        return list(steps)
    # the rule of knonik's mixture: the nearest row, the later one of two
    return [math.floor(step * dataset.fps / fps + 0.5 + 1e-6) for step in steps]


def horizon_of(recipe: Recipe) -> int:
    """Steps of the longest chunk of any part: what the loader reads."""
    return max(part.horizon or recipe.data.horizon for part in parts(recipe))


def modality(part: PartConfig, dataset: "Dataset") -> Mapping[str, Any] | None:
    """Content of modality.json for a part: the recipe's own, or the dataset's; None where there is neither.

    Its cameras go by their names in a batch.

    Raises:
        ValueError: the recipe's file cannot be read.
    """
    content = _modality(part, dataset)
    if content is None or not part.cameras or not isinstance(content.get("video"), dict):
        return content
    in_batch = {own: name for name, own in part.cameras.items()}
    video = {name: dict(said or {}) for name, said in content["video"].items()}
    for name, said in video.items():
        own = said.get("original_key") or name
        said["original_key"] = in_batch.get(own, own)
    return {**content, "video": video}


def _modality(part: PartConfig, dataset: "Dataset") -> Mapping[str, Any] | None:
    if part.modality is None:
        return dataset.modality.details if dataset.modality is not None else None
    if not isinstance(part.modality, str):
        return part.modality
    try:
        content = json.loads(Path(part.modality).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{part.modality} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{part.modality} holds no JSON object")
    return content
