"""What must exist before a run can train: its demonstrations, when it makes them itself, and its first stage."""

import dataclasses
import logging
import time
from pathlib import Path
from typing import Any

from recipes.load import RecipeError, load
from recipes.run_folder import RunFolder
from recipes.schema import Recipe
from recipes.schema_model import GR00TN17ModelConfig

logger = logging.getLogger(__name__)

BACKBONE_FILE = "backbone.safetensors"


def dataset_to_come(recipe: Recipe) -> bool:
    """Whether the dataset does not exist yet and the recipe says how to make it."""
    return recipe.data.generate is not None and recipe.data.uri is not None and not Path(recipe.data.uri).exists()


def first_stage(recipe: Recipe) -> Recipe | None:
    """The recipe of the stage before this one, on the same data, model and seed; its run lies beside this run's."""
    if recipe.run.first is None:
        return None
    model = recipe.model
    assert isinstance(model, GR00TN17ModelConfig), "`check` has seen to it"
    first = load(recipe.run.first, [f"seed={recipe.seed}"])
    return dataclasses.replace(
        first,
        run=dataclasses.replace(first.run, dir=str(Path(recipe.run.dir).parent / first.run.name)),
        data=dataclasses.replace(
            first.data,
            uri=recipe.data.uri,
            generate=recipe.data.generate,
            cameras=recipe.data.cameras,
            horizon=recipe.data.horizon,
            cache=recipe.data.cache,
        ),
        model=dataclasses.replace(model, flow_draws=1, precision="stock", lora=None, feature_cache=0),
    )


def to_do(recipe: Recipe) -> list[str]:
    """What is missing before the run can train, one line each; empty when nothing is."""
    missing = []
    if dataset_to_come(recipe):
        missing.append(f"data.uri: {recipe.data.uri} does not exist yet and is made by a single process")
    first = first_stage(recipe)
    if first is not None and not (Path(first.run.dir) / BACKBONE_FILE).is_file():
        missing.append(f"run.first: stage {recipe.run.first} has not run (no {first.run.dir}/{BACKBONE_FILE})")
    return missing


def make_dataset(recipe: Recipe) -> None:
    """Generate the demonstrations when they do not exist; an existing dataset is left as it is."""
    if recipe.data.generate is None:
        return
    assert recipe.data.uri is not None, "`check` has seen to it"
    where = Path(recipe.data.uri)
    if where.exists():
        logger.info("demonstrations: using %s", where)
        return
    from recipes.tabletop.demos import generate_demonstrations

    began = shown = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if done == total or now - shown > 5:
            shown = now
            left = (now - began) / max(done, 1) * (total - done)
            logger.info("demonstrations: %d/%d episodes, %.0f s left", done, total, left)

    logger.info("demonstrations: making %d layouts in %s", recipe.data.generate.layouts, where)
    where.parent.mkdir(parents=True, exist_ok=True)
    generate_demonstrations(
        where,
        layouts=recipe.data.generate.layouts,
        seed=recipe.data.generate.seed,
        codec=recipe.data.generate.codec,
        progress=progress,
    )


def with_first_stage(recipe: Recipe, started_at: float) -> Recipe:
    """Run the stage before this one if it has not run, and let this run start from its backbone."""
    first = first_stage(recipe)
    if first is None:
        return recipe
    backbone = Path(first.run.dir) / BACKBONE_FILE
    if backbone.is_file():
        if drift := RunFolder(first.run.dir).drift(first):
            way_out = f"run.first: remove {first.run.dir}, or give another run.dir, beside which the stage runs anew"
            raise RecipeError([*(f"run.first: {recipe.run.first}: {line}" for line in drift), way_out])
        logger.info("first stage %s: using %s", recipe.run.first, backbone)
    else:
        logger.info("first stage %s: %d steps", recipe.run.first, first.trainer.max_steps)
        train_grounding(first, started_at)
    assert isinstance(recipe.model, GR00TN17ModelConfig), "`first_stage` has seen to it"
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, backbone_weights=str(backbone)))


def train_grounding(recipe: Recipe, started_at: float) -> dict[str, Any]:
    """Train the backbone of a tiny model to find the block a text names; saves the backbone, returns the summary.

    The stage takes about a minute and is not resumed: stopped half way, it starts over.
    """
    from callbacks.step_clock import StepClock
    from models.gr00t_n17.checkpoint.weights import save_weights
    from recipes.build import build_network, build_processor, optimizer, schedule
    from recipes.run import Run
    from recipes.sources import batch_cameras, open_all, training_part
    from recipes.tabletop.grounding import GroundingSettings, build_grounding

    (dataset,) = datasets = open_all(recipe)
    processor = build_processor(recipe, [training_part(recipe, dataset)])
    network = build_network(recipe)
    assert recipe.data.batch_size is not None, "`check` has seen to it"
    settings = GroundingSettings(
        seed=recipe.seed,
        layouts_per_batch=recipe.data.batch_size // 2,
        optimizer=optimizer(recipe),
        schedule=schedule(recipe),
    )
    module, loader = build_grounding(
        network, processor, settings, cameras=batch_cameras(recipe, datasets), horizon=recipe.data.horizon
    )
    folder = RunFolder(recipe.run.dir)
    folder.create(recipe)
    run = Run(recipe, folder, StepClock(started_at), samples_per_epoch=0, resumable=False)
    run.fit(module, train_dataloaders=loader)
    summary = {"steps": recipe.trainer.max_steps, **run.figures()}
    save_weights(network, folder.path / BACKBONE_FILE, prefix="backbone.")
    run.record.write_summary(summary)
    dataset.close()
    return summary
