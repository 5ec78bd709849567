"""The main job: prepare, evaluate, train, evaluate again, and leave a complete run folder."""

import json
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from callbacks.run_record import write_atomically
from callbacks.step_clock import StepClock
from models.common.digest import weights_digest
from models.common.mesh import gathered, whole_tensors
from recipes.build import build_datamodule, build_module, build_network, build_processor, with_local_weights
from recipes.check import batch_size_per_rank
from recipes.check_dataset import dataset_problems
from recipes.evaluate import closed_loop, swapped
from recipes.family import family
from recipes.load import RecipeError
from recipes.options import option_figures
from recipes.parts import parts
from recipes.ranks import is_first, rank, world_size
from recipes.run import Run, set_torch_threads
from recipes.run_folder import RunFolder
from recipes.schema import Recipe
from recipes.sources import num_anchors, open_all, source, training_part
from recipes.stages import dataset_to_come, make_dataset, to_do, train_grounding, with_first_stage
from recipes.stock_start import read_rows

if TYPE_CHECKING:
    from knonik import Dataset

logger = logging.getLogger(__name__)

UNTRAINED_FILE = "evaluation_untrained.json"
PROCESSOR_FILE = "processor.json"


def train(recipe: Recipe, started_at: float) -> tuple[dict[str, Any] | None, int]:
    """Train a checked recipe to its last step, or continue where its run folder stands.

    Args:
        recipe: as `recipes.check.checked` returns it.
        started_at: `time.perf_counter()` of the program's start.

    Returns:
        (summary, 0), or (None, 128 + signal) when a signal stopped the run; ranks other than 0 have no summary.
    """
    set_torch_threads(recipe.run.torch_threads)
    folder = RunFolder(recipe.run.dir)
    if is_first():
        folder.claim()
    missing = to_do(recipe)
    assert not missing or world_size() == 1, "stages are made by one process; `launch` has seen to it"
    unseen = dataset_to_come(recipe)
    make_dataset(recipe)
    if unseen and (problems := dataset_problems(recipe)):
        raise RecipeError(problems)
    if recipe.run.stage == "grounding":
        return train_grounding(recipe, started_at), 0
    started = with_local_weights(with_first_stage(recipe, started_at))
    if missing:
        started_at = time.perf_counter()  # the stages before are not this run's start-up
    held = [read_rows(part.uri) for part in parts(recipe)] if recipe.data.startup == "rows" else []
    with ExitStack() as stack:
        stack.callback(held.clear)
        whole = open_all(recipe)
        for dataset in whole:
            stack.callback(dataset.close)
        return _train_policy(started, recipe, folder, whole, started_at)


def _train_policy(
    started: Recipe, recipe: Recipe, folder: RunFolder, whole: "list[Dataset]", started_at: float
) -> tuple[dict[str, Any] | None, int]:
    """Train on opened datasets; `started` is the recipe with the weights it starts from named by their files."""
    datasets = [training_part(recipe, dataset) for dataset in whole]
    fingerprint = source(recipe, datasets).fingerprint
    processor = build_processor(started, datasets)
    network = build_network(started)
    untrained: dict[str, Any] = {}
    if is_first():
        _report_changes(folder, recipe)
        folder.create(recipe)
        write_atomically(folder.path / PROCESSOR_FILE, json.dumps(processor.to_dict()) + "\n")
        if recipe.evaluation is not None:
            untrained = _once(
                folder.path / UNTRAINED_FILE,
                lambda: {"success_rate_untrained": closed_loop(recipe, network, processor)["success_rate"]},
            )
    batch_size = batch_size_per_rank(recipe, world_size())
    data = build_datamodule(recipe, datasets, processor, batch_size)
    measure: Callable[[Any], dict[str, float]] | None = None
    if recipe.validation is not None:
        share = {"rank": rank(), "world_size": world_size()}
        validation = family(recipe).build_validation(recipe, whole, processor, batch_size=batch_size, **share)

        def measure(module: Any) -> dict[str, float]:
            # averaged weights are put in shard by shard; gathered, as ranks may have different numbers of batches
            with module.averaged(), gathered(module.network):
                figures: dict[str, float] = module.held_out_figures(validation)
                return figures

    run = Run(
        recipe,
        folder,
        StepClock(started_at),
        samples_per_epoch=num_anchors(recipe, datasets),
        gauges=data.gauges,
        stages=data.stages,
        measure=measure,
    )
    if is_first():
        held_out = [
            sorted(set(all_of.episodes.ids.tolist()) - set(dataset.episodes.ids.tolist()))
            for all_of, dataset in zip(whole, datasets, strict=True)
        ]
        ids = held_out[0] if recipe.data.mixture is None else held_out
        about = {"fingerprint": fingerprint, "world_size": world_size(), "episodes_held_out": ids}
        environment = run.record.write_environment(about)
        if recipe.logger == "wandb":
            from recipes.wandb_run import describe

            describe(run.trainer.loggers, environment)
    device_type = run.trainer.strategy.root_device.type
    module: Any = build_module(recipe, network, processor=processor, fingerprint=fingerprint, device_type=device_type)
    run.fit(module, datamodule=data)
    if run.stopped_by is not None:
        return None, 128 + run.stopped_by
    run.save_final()
    weights = whole_tensors({n: p for n, p in network.named_parameters() if p.requires_grad}, keep=is_first())
    with module.averaged():
        evaluated = {} if recipe.evaluation is None else _evaluated(recipe, network, processor)
    if not is_first():
        return None, 0
    summary = {
        "steps": run.trainer.global_step,
        "fingerprint": fingerprint,
        "weights_digest": weights_digest(weights),
        **run.figures(),
        **option_figures(recipe, network),
        **module.option_figures(),
        "loader_stages": data.stages(),
        "loader_gauges": data.gauges(),
        **untrained,
        **evaluated,
    }
    run.record.write_summary(summary)
    return summary, 0


def _evaluated(recipe: Recipe, network: Any, processor: Any) -> dict[str, Any]:
    """Closed-loop results of the trained policy, found by the first rank; all take part where weights are sharded."""
    assert recipe.evaluation is not None
    with gathered(network):
        if not is_first():
            return {}
        logger.info("evaluating the trained policy on %d held-out layouts", recipe.evaluation.layouts)
        figures = closed_loop(recipe, network, processor)
        return figures | swapped(closed_loop(recipe, network, processor, swap_instruction=True))


def _once(path: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A result measured before training, kept so that a run that continues does not measure its trained self."""
    if path.is_file():
        stored: dict[str, Any] = json.loads(path.read_text())
        return stored
    result = measure()
    write_atomically(path, json.dumps(result) + "\n")
    return result


def _report_changes(folder: RunFolder, recipe: Recipe) -> None:
    for key, (old, new) in folder.changes(recipe).items():
        logger.info("changed since the run began: %s was %r, now %r", key, old, new)
