"""What only makes sense together: every cross-field and dataset problem of a recipe, before anything is started.

Nothing here touches a process group or a device. A dataset is opened, which reads its metadata and, when there is no
index yet, the headers of its videos.
"""

import dataclasses
import math
import os
import re
from pathlib import Path

from recipes.check_data import data_problems
from recipes.check_dataset import dataset_problems
from recipes.check_options import option_problems
from recipes.check_validation import validation_problems
from recipes.family import family
from recipes.load import RecipeError, examine, find
from recipes.parse import nearest
from recipes.ranks import ranks_per_node, world_size
from recipes.run_folder import RunFolder
from recipes.schema import Recipe

ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")  # what Lightning knows and the data layer can feed


def checked(name: str, overrides: list[str], *, allow_drift: bool = False, ranks: int | None = None) -> Recipe:
    """The recipe, after all checks.

    Args:
        ranks: that the run will have; None means those of this process.

    Raises:
        RecipeError: with every problem found, unknown keys and wrong types together with what does not fit together.
    """
    recipe, problems = examine(name, overrides)
    problems += check(recipe, world_size=ranks or world_size(), told=problems)
    if not problems:
        problems += RunFolder(recipe.run.dir).fixed(recipe)
    if not problems and not allow_drift:
        drift = RunFolder(recipe.run.dir).drift(recipe)
        if drift:
            drift.append("to continue with these all the same pass --allow-drift, or give a new run.dir")
        problems += drift
    if problems:
        raise RecipeError(problems)
    return recipe


def batch_size_per_rank(recipe: Recipe, ranks: int) -> int:
    """Samples per rank and micro-batch."""
    if recipe.data.batch_size is not None:
        return recipe.data.batch_size
    assert recipe.data.global_batch_size is not None
    return recipe.data.global_batch_size // ranks


def check(recipe: Recipe, *, world_size: int, told: list[str] | None = None) -> list[str]:
    """All problems of a recipe whose keys and types are already known to be right.

    Args:
        recipe: as loaded.
        world_size: ranks the run will have.
        told: problems already reported; a key named there is not reported again.
    """
    reported = {line.split(":", 1)[0] for line in told or []}
    if reported & {"model", "model.name"}:
        # Of a model that nobody knows: what any would say of the other sections would be a guess.
        found = [*_batch(recipe, world_size), *_run_folder(recipe), *validation_problems(recipe)]
        return [line for line in found if not _told(line, reported)]
    own = family(recipe)
    refused = [line for line in own.data_problems(recipe, world_size) if line.startswith("data.mixture:")]
    if refused and recipe.data.mixture is not None:
        # What is refused as a whole has no problems of its own; the rest is looked at as if it were not there.
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, mixture=None))
        reported |= set() if recipe.data.uri else {"data.uri"}
        return refused + [line for line in check(recipe, world_size=world_size, told=told) if not _told(line, reported)]
    problems = [*_values(recipe), *_batch(recipe, world_size), *own.model_problems(recipe), *_run_folder(recipe)]
    problems += own.data_problems(recipe, world_size)
    problems += option_problems(recipe, world_size)
    problems += data_problems(recipe)
    problems += validation_problems(recipe)
    problems += dataset_problems(recipe, world_size)
    if any(key.startswith("data.mixture[") for key in reported):
        reported.add("data.uri")  # a part that could not be read left no mixture at all
    return [line for line in problems if not _told(line, reported)]


def _told(line: str, reported: set[str]) -> bool:
    """Whether the key of a problem, or a section it lies in, has been reported: what stands there is a stand-in."""
    key = line.split(":", 1)[0]
    return any(key == other or key.startswith((f"{other}.", f"{other}[")) for other in reported)


def _values(recipe: Recipe) -> list[str]:
    problems = []
    positive = {
        "trainer.max_steps": recipe.trainer.max_steps,
        "trainer.num_nodes": recipe.trainer.num_nodes,
        "trainer.accumulate_grad_batches": recipe.trainer.accumulate_grad_batches,
        "trainer.log_every_n_steps": recipe.trainer.log_every_n_steps,
        "checkpoint.every_n_steps": recipe.checkpoint.every_n_steps,
        "data.horizon": recipe.data.horizon,
        "optimizer.lr": recipe.optimizer.lr,
        "optimizer.eps": recipe.optimizer.eps,
    }
    if recipe.evaluation is not None:
        positive["evaluation.layouts"] = recipe.evaluation.layouts
        positive["evaluation.execute_steps"] = recipe.evaluation.execute_steps
    if recipe.data.generate is not None:
        positive["data.generate.layouts"] = recipe.data.generate.layouts
    for key, optional in (
        ("data.decode_threads", recipe.data.decode_threads),
        ("data.ring_batches", recipe.data.ring_batches),
        ("data.block_window", recipe.data.block_window),
        ("run.torch_threads", recipe.run.torch_threads),
        ("data.batch_size", recipe.data.batch_size),
        ("data.global_batch_size", recipe.data.global_batch_size),
        ("metrics.peak_tflops", recipe.metrics.peak_tflops),
    ):
        if optional is not None:
            positive[key] = optional
    if recipe.trainer.gradient_clip_val is not None:
        positive["trainer.gradient_clip_val"] = recipe.trainer.gradient_clip_val
    problems += [
        f"{key}: {value} is not positive and finite" for key, value in positive.items() if not 0 < value < math.inf
    ]
    if recipe.data.generate is not None and (recipe.data.uri or "").startswith("s3://"):
        problems.append(f"data.uri: {recipe.data.uri} lies on S3; data.generate writes to a local folder only")
    if not 0 <= recipe.seed < 2**32:
        problems.append(f"seed: {recipe.seed} is not in 0 to {2**32 - 1}")
    max_time = recipe.trainer.max_time
    if max_time is not None and not re.fullmatch(r"\d+:\d+:\d+:\d+", max_time):
        problems.append(f"trainer.max_time: {max_time!r} is not of the form DD:HH:MM:SS, days first")
    if recipe.trainer.accelerator not in ACCELERATORS:
        allowed = nearest(recipe.trainer.accelerator, ACCELERATORS)
        problems.append(f"trainer.accelerator: {recipe.trainer.accelerator!r} is unknown{allowed}")
    if recipe.checkpoint.keep < -1 or recipe.checkpoint.keep == 0:
        problems.append(f"checkpoint.keep: {recipe.checkpoint.keep} keeps nothing; give 1 or more, or -1 for all")
    if any(not 0 <= beta < 1 for beta in recipe.optimizer.betas):
        problems.append(f"optimizer.betas: {list(recipe.optimizer.betas)} are not both in [0, 1)")
    known = family(recipe).PARAMETER_GROUPS
    for name, multiplier in recipe.optimizer.lr_multipliers.items():
        if name not in known:
            problems.append(
                f"optimizer.lr_multipliers.{name}: {recipe.model.name} has no such part{nearest(name, known)}"
            )
        elif not 0 < multiplier < math.inf:
            problems.append(f"optimizer.lr_multipliers.{name}: {multiplier} is not positive and finite")
    problems += _schedule(recipe)
    if recipe.optimizer.fold_clip and not recipe.optimizer.fused:
        problems.append("optimizer.fold_clip: true, but only the fused update clips; set optimizer.fused to true")
    if recipe.optimizer.fold_clip and recipe.run.stage == "grounding":
        problems.append("optimizer.fold_clip: true, which the grounding stage does not read; leave it out")
    if recipe.optimizer.weight_decay < 0:
        problems.append(f"optimizer.weight_decay: {recipe.optimizer.weight_decay} is negative")
    if recipe.run.stage == "grounding" and (recipe.data.batch_size is None or recipe.data.batch_size % 2):
        problems.append(f"data.batch_size: {recipe.data.batch_size} of a grounding stage must be even")
    if recipe.evaluation is not None and recipe.evaluation.execute_steps > recipe.data.horizon:
        problems.append(
            f"evaluation.execute_steps: {recipe.evaluation.execute_steps} is more than the chunk, "
            f"data.horizon = {recipe.data.horizon}"
        )
    if recipe.run.first is not None:
        try:
            find(recipe.run.first)
        except RecipeError as error:
            problems += [f"run.first: {line}" for line in error.problems]
    return problems


def _schedule(recipe: Recipe) -> list[str]:
    schedule, steps, problems = recipe.schedule, recipe.trainer.max_steps, []
    if not 0 <= schedule.warmup_ratio < 1:
        problems.append(f"schedule.warmup_ratio: {schedule.warmup_ratio} is not in [0, 1)")
    if schedule.warmup_steps is not None and not 0 <= schedule.warmup_steps < steps:
        problems.append(f"schedule.warmup_steps: {schedule.warmup_steps} is not below trainer.max_steps = {steps}")
    if schedule.kind == "linear":
        given = {"warmup_steps": schedule.warmup_steps, "warmup_ratio": schedule.warmup_ratio}
        idle = {"warmup_steps": (None, 0), "warmup_ratio": (type(schedule).warmup_ratio,)}
        problems += [
            f"schedule.{name}: kind=linear has no warm-up; leave warmup_steps and warmup_ratio out"
            for name, value in given.items()
            if value not in idle[name]
        ]
    if schedule.kind != "linear" and schedule.cycle_steps is not None:
        problems.append(f"schedule.cycle_steps: has no effect with kind={schedule.kind}; give kind=linear, or null")
    elif schedule.cycle_steps is not None and schedule.cycle_steps < steps:
        problems.append(
            f"schedule.cycle_steps: {schedule.cycle_steps} ends before trainer.max_steps = {steps}, and the learning "
            "rate with it"
        )
    return problems


def _batch(recipe: Recipe, ranks: int) -> list[str]:
    nodes, per_node = recipe.trainer.num_nodes, ranks_per_node()
    if "LOCAL_WORLD_SIZE" in os.environ and nodes * per_node != ranks:
        return [f"trainer.num_nodes: {nodes} nodes of {per_node} ranks are not the {ranks} ranks that torchrun started"]
    if nodes > ranks:  # nobody would come to the meeting that these nodes are called to
        return [
            f"trainer.num_nodes: {nodes} nodes need {nodes} ranks or more, and there is {ranks}: start torchrun on "
            "every node, or give trainer.num_nodes=1"
        ]
    if recipe.run.stage == "grounding" and ranks > 1:
        return [f"run.stage: a grounding stage runs in one process, torchrun started {ranks}"]
    per_rank, total = recipe.data.batch_size, recipe.data.global_batch_size
    if (per_rank is None) == (total is None):
        what = "neither" if per_rank is None else "both; set one of them to null"
        return [f"data.batch_size: give it or data.global_batch_size; the recipe gives {what}"]
    if total is not None and total % ranks:
        lower, upper = total // ranks * ranks, (total // ranks + 1) * ranks
        allowed = f"{lower} or {upper}" if lower else str(upper)
        return [f"data.global_batch_size: {total} is not divisible by the {ranks} ranks; the nearest is {allowed}"]
    return []


def _run_folder(recipe: Recipe) -> list[str]:
    """A folder that cannot be made: the nearest thing that exists on the way to it is no folder, or not ours."""
    folder = Path(recipe.run.dir).absolute()
    exists = next(path for path in (folder, *folder.parents) if path.exists())
    if not exists.is_dir():
        return [f"run.dir: {recipe.run.dir} cannot be a folder, {exists} is a file"]
    if not os.access(exists, os.W_OK | os.X_OK):
        return [f"run.dir: {recipe.run.dir} cannot be written, {exists} allows it to others only"]
    return []
