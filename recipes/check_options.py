"""Training options that do not go together, or would do nothing: ranks, precision, compiling, recomputing, streams."""

import dataclasses
import math

from recipes.family import family
from recipes.parse import nearest
from recipes.schema import Recipe

_FUSION = "triton.mix_order_reduction"
_OF_POLICY_TRAINING = ("parallel", "compile", "checkpointing", "lookahead", "graphs", "ema")


def option_problems(recipe: Recipe, ranks: int) -> list[str]:
    """Problems of the training options with each other, with the ranks and with what the model trains."""
    if recipe.run.stage != "policy":
        return _idle_in_stage(recipe)
    problems = [*_parallel(recipe, ranks), *_graphs(recipe), *_compile(recipe)]
    own = family(recipe)
    try:
        own.model_config(recipe)
    except (TypeError, ValueError, OSError):
        return problems  # the sizes themselves are wrong, which is told with the model
    return [*problems, *_checkpointing(recipe, own.trained_blocks(recipe)), *own.option_problems(recipe, ranks)]


def _idle_in_stage(recipe: Recipe) -> list[str]:
    plain = {field.name: field for field in dataclasses.fields(Recipe)}
    defaults = Recipe(run=recipe.run, data=recipe.data, trainer=recipe.trainer)
    return [
        f"{name}: has no effect in a {recipe.run.stage} stage; leave it out"
        for name in _OF_POLICY_TRAINING
        if name in plain and getattr(recipe, name) != getattr(defaults, name)
    ]


def _parallel(recipe: Recipe, ranks: int) -> list[str]:
    problems = []
    try:
        recipe.parallel.sizes(ranks)
    except ValueError as error:
        fitting = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        problems.append(
            f"parallel: {error}; with replicate null, shard can be {fitting}; or start {recipe.parallel.least_ranks} "
            "ranks with torchrun, a multiple where replicate or shard is null"
        )
    sharded = recipe.parallel.shards(ranks) > 1
    if recipe.precision == "fsdp-bf16" and not sharded:
        problems.append(
            "precision: fsdp-bf16 is about how sharded weights are gathered, and parallel.shard is 1; give bf16-mixed, "
            "or parallel.shard above 1"
        )
    bucket = recipe.parallel.bucket_mb
    if bucket is not None and not 0 < bucket < math.inf:
        problems.append(f"parallel.bucket_mb: {bucket} is not positive and finite")
    elif bucket is not None and sharded:
        problems.append(
            "parallel.bucket_mb: has no effect with parallel.shard above 1, where each block's gradients are exchanged "
            "together; leave it out"
        )
    if sharded and recipe.compile.scope == "model":
        problems.append(
            "compile.scope: model leaves no block to gather by itself when parallel.shard is above 1; give blocks"
        )
    return problems


def _graphs(recipe: Recipe) -> list[str]:
    if recipe.graphs == "none":
        return []
    problems = []
    if (recipe.parallel.shard or 1) > 1:
        problems.append("graphs: head cannot hold the gathers of sharded weights; give parallel.shard=1, or none")
    if recipe.compile.scope != "none" and recipe.compile.mode in ("reduce-overhead", "max-autotune"):
        problems.append(
            f"graphs: head and compile.mode={recipe.compile.mode} both capture CUDA graphs; give compile.mode=default "
            "or max-autotune-no-cudagraphs, or graphs=none"
        )
    return problems


def _compile(recipe: Recipe) -> list[str]:
    """Unknown inductor options; only a recipe that names some has to wait for the library that knows them."""
    fusion = recipe.compile.inductor.get(_FUSION, False)
    if not isinstance(fusion, bool):
        return [f"compile.inductor.{_FUSION}: {fusion!r} is neither true nor false"]
    if recipe.compile.scope == "none" or not set(recipe.compile.inductor) - {_FUSION}:
        return []
    from models.common.compile import inductor_options

    try:
        inductor_options(recipe.compile)
    except ValueError as error:
        return str(error).splitlines()
    return []


def _checkpointing(recipe: Recipe, counts: dict[str, int]) -> list[str]:
    chosen = recipe.checkpointing
    if chosen.mode == "none":
        return []
    keeping = {part: count for part, count in counts.items() if count}
    problems = []
    for part in chosen.parts or ():
        if part not in counts:
            problems.append(f"checkpointing.parts: {part!r} is no part of the model{nearest(part, counts)}")
        elif part not in keeping:
            problems.append(
                f"checkpointing.parts: {part} runs without gradients and keeps nothing; those that keep are "
                f"{', '.join(keeping)}"
            )
    meant = {part: keeping[part] for part in chosen.parts or keeping if part in keeping}
    if not meant:
        return problems
    sizes = ", ".join(f"{part} {count}" for part, count in meant.items())
    for name in ("last_k", "every_k"):
        if (getattr(chosen, name) or 0) > max(meant.values()):
            problems.append(f"checkpointing.{name}: {getattr(chosen, name)} is more than the blocks there are: {sizes}")
    beyond = [i for i in chosen.layers or () if not -min(meant.values()) <= i < min(meant.values())]
    if beyond:
        problems.append(
            f"checkpointing.layers: not all parts have a block {', '.join(map(str, beyond))} ({sizes}); "
            "checkpointing.parts limits the parts that are meant"
        )
    if chosen.save is not None:
        problems += _patterns(chosen.save)
    return problems


def _patterns(save: tuple[str, ...]) -> list[str]:
    """Names that are no operation; only a recipe that gives some has to wait for the library that knows them."""
    from models.common.checkpointing import resolve

    try:
        resolve(save)
    except ValueError as error:
        return [str(error)]
    return []
