"""Training options that do not go together, or would do nothing: ranks, precision, compiling, recomputing, streams."""

import dataclasses
from typing import TYPE_CHECKING

from recipes.parse import nearest
from recipes.schema import Recipe

if TYPE_CHECKING:
    from models.gr00t_n17.config import GR00TN17Config

# What trains the backbone from its first layers on.
_FIRST_LAYERS = ("tune_visual", "tune_llm")
_OF_POLICY_TRAINING = ("parallel", "compile", "checkpointing", "lookahead", "graphs", "ema")


def option_problems(recipe: Recipe, ranks: int) -> list[str]:
    """Problems of the training options with each other, with the ranks and with what the model trains."""
    if recipe.run.stage != "policy":
        return _idle_in_stage(recipe)
    problems = [*_parallel(recipe, ranks), *_graphs(recipe), *_compile(recipe)]
    config = _config(recipe)
    if config is not None:
        problems += [*_checkpointing(recipe, config), *_lookahead(recipe, config)]
    return problems


def _idle_in_stage(recipe: Recipe) -> list[str]:
    plain = {field.name: field for field in dataclasses.fields(Recipe)}
    defaults = Recipe(run=recipe.run, data=recipe.data, trainer=recipe.trainer)
    return [
        f"{name}: has no effect in a {recipe.run.stage} stage; leave it out"
        for name in _OF_POLICY_TRAINING
        if name in plain and getattr(recipe, name) != getattr(defaults, name)
    ]


def _config(recipe: Recipe) -> "GR00TN17Config | None":
    """Sizes of the network; None where they are wrong themselves, which is told with the model."""
    from recipes.build import model_config

    try:
        return model_config(recipe)
    except (TypeError, ValueError, OSError):
        return None


def shards(recipe: Recipe, ranks: int) -> int:
    """Ranks that hold one copy of what is trained."""
    try:
        return recipe.parallel.sizes(ranks)[1]
    except ValueError:
        return recipe.parallel.shard or 1


def _parallel(recipe: Recipe, ranks: int) -> list[str]:
    problems = []
    try:
        recipe.parallel.sizes(ranks)
    except ValueError as error:
        fitting = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        problems.append(f"parallel: {error}; with replicate null, shard can be {fitting}")
    sharded = shards(recipe, ranks) > 1
    if recipe.precision == "fsdp-bf16" and not sharded:
        problems.append(
            "precision: fsdp-bf16 is about how sharded weights are gathered, and parallel.shard is 1; give bf16-mixed, "
            "or parallel.shard above 1"
        )
    if sharded and recipe.model.precision == "bf16":
        problems.append(
            "model.precision: bf16 keeps half of each weight in an optimizer that does not shard; give lean, or "
            "parallel.shard=1"
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
    if recipe.compile.scope == "none" or not set(recipe.compile.inductor) - {"triton.mix_order_reduction"}:
        return []
    from models.common.compile import inductor_options

    try:
        inductor_options(recipe.compile)
    except ValueError as error:
        return str(error).splitlines()
    return []


def trained_blocks(recipe: Recipe, config: "GR00TN17Config") -> dict[str, int]:
    """Blocks that run with gradients, by part: those that keep anything to recompute."""
    targets = set() if recipe.model.lora is None else set(recipe.model.lora.targets)
    vision = config.tune_visual or "vision" in targets
    llm = config.select_layer if vision or config.tune_llm or "llm" in targets else config.tune_top_llm_layers
    adapter = bool(vision or llm) or config.tune_vlln or "vl_self_attention" in targets
    return {
        "vision": config.backbone.vision.depth if vision else 0,
        "llm": llm,
        "vl_self_attention": config.vl_self_attention_cfg.num_layers if adapter else 0,
        "dit": config.diffusion_model_cfg.num_layers,
    }


def _checkpointing(recipe: Recipe, config: "GR00TN17Config") -> list[str]:
    chosen = recipe.checkpointing
    if chosen.mode == "none":
        return []
    counts = trained_blocks(recipe, config)
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


def _lookahead(recipe: Recipe, config: "GR00TN17Config") -> list[str]:
    if recipe.lookahead == "none":
        return []
    targets = set() if recipe.model.lora is None else set(recipe.model.lora.targets)
    trained = [f"model.config.{name}={getattr(config, name)}" for name in _FIRST_LAYERS if getattr(config, name)]
    if config.tune_top_llm_layers >= config.select_layer:
        trained.append(f"model.config.tune_top_llm_layers={config.tune_top_llm_layers}")
    trained += [f"adapters on {part}" for part in ("vision", "llm") if part in targets]
    if trained:
        return [f"lookahead: stream runs frozen layers ahead, and {' and '.join(trained)} leaves none; give none"]
    if config.tune_top_llm_layers > 0 and recipe.compile.scope == "model":
        return [
            f"lookahead: stream has to cut the backbone below its {config.tune_top_llm_layers} trained layers, and "
            "compile.scope=model makes one graph of it; give blocks, or lookahead=none"
        ]
    return []
