"""Processors from a recipe: one for its dataset, or one for each part of its mixture."""

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from recipes.families.gr00t_n17.build import model_config
from recipes.families.gr00t_n17.check_checkpoint import processor_settings
from recipes.families.gr00t_n17.slots import DEFAULT_EMBODIMENT, checkpoint_folder
from recipes.families.gr00t_n17.statistics import relative_statistics
from recipes.parts import parts
from recipes.schema import Recipe
from recipes.schema_data import PartConfig
from recipes.schema_model import ModalityConfig
from recipes.sources import batch_cameras, modality, own_cameras, span

if TYPE_CHECKING:
    from knonik import Dataset
    from models.gr00t_n17.inputs.processor import Processor

logger = logging.getLogger(__name__)


def build_processor(recipe: Recipe, datasets: "list[Dataset]") -> Any:
    """`Processor` with the dataset's own statistics, or `MixedProcessor` of several; what the recipe leaves open is the
    checkpoint's.

    Args:
        recipe: with its weights named by their folder.
        datasets: what is trained on of each part.
    """
    words = tokenizer(recipe, datasets)
    names = batch_cameras(recipe, datasets)
    built = [
        _of_part(recipe, part, dataset, own_cameras(part, dataset, names), words)
        for part, dataset in zip(parts(recipe), datasets, strict=True)
    ]
    logger.info(built[0].image_settings.describe())
    if recipe.data.mixture is None:
        return built[0]
    from models.gr00t_n17.inputs.mixed import MixedProcessor

    weights = [
        part.weight or len(dataset.anchors(span(recipe, dataset)))
        for part, dataset in zip(parts(recipe), datasets, strict=True)
    ]
    return MixedProcessor(built, weights)


def tokenizer(recipe: Recipe, datasets: "list[Dataset]") -> Any:
    """For `tokenizer: words` the vocabulary of the datasets' own texts; None leaves it to the processor.

    Words that the weights were trained with keep their ids.
    """
    settings = processor_settings(recipe)
    if settings.get("tokenizer") != "words":
        return None
    from models.gr00t_n17.inputs.processor_sources import Stored
    from models.gr00t_n17.inputs.settings import ProcessorConfig
    from models.gr00t_n17.inputs.text import WordTokenizer

    stored = Stored.read(checkpoint_folder(recipe), parts(recipe)[0].embodiment or DEFAULT_EMBODIMENT).tokenizer
    return WordTokenizer.from_texts(
        [text for dataset in datasets for text in dataset.tasks.values()],
        backbone=model_config(recipe).backbone,
        formalize_language=ProcessorConfig(**settings).formalize_language,
        known=(stored or {}).get("words"),
    )


def group_settings(groups: ModalityConfig | None) -> dict[str, Any] | None:
    """The recipe's groups as the models take them: what is null is left out."""
    if groups is None:
        return None
    return {name: value for name, value in dataclasses.asdict(groups).items() if value is not None}


def _of_part(
    recipe: Recipe, part: PartConfig, dataset: "Dataset", cameras: tuple[str, ...], tokenizer: Any
) -> "Processor":
    from models.gr00t_n17.inputs.processor import DatasetParts, Processor

    return Processor.for_dataset(
        model_config(recipe),
        recipe.model.processor,
        DatasetParts(
            cameras=cameras,
            state=part.state,
            action=part.action,
            statistics={name: dataset.statistics(name) for name in (*part.state, *part.action)},
            modality=modality(part, dataset),
            groups=group_settings(part.groups),
            relative=lambda modalities: relative_statistics(dataset, modalities, fps=recipe.data.fps),
        ),
        horizon=part.horizon,
        embodiment=part.embodiment,
        embodiment_id=part.embodiment_id,
        checkpoint=checkpoint_folder(recipe),
        tokenizer=tokenizer,
        seed=recipe.seed,
    )
