"""Training options beside what GR00T trains: which blocks keep anything, what is frozen and can run ahead."""

from typing import TYPE_CHECKING

from recipes.families.gr00t_n17.build import model_config
from recipes.families.gr00t_n17.slots import model
from recipes.schema import Recipe

if TYPE_CHECKING:
    from models.gr00t_n17.config import GR00TN17Config

# What trains the backbone from its first layers on.
_FIRST_LAYERS = ("tune_visual", "tune_llm")


def option_problems(recipe: Recipe, ranks: int) -> list[str]:
    """Options that do not go with the model's precision or with what it trains."""
    return [*_split_weights(recipe, ranks), *_lookahead(recipe, model_config(recipe))]


def trained_blocks(recipe: Recipe) -> dict[str, int]:
    """Blocks that run with gradients, by part: those that keep anything to recompute."""
    config = model_config(recipe)
    targets = _adapted(recipe)
    vision = config.tune_visual or "vision" in targets
    llm = config.select_layer if vision or config.tune_llm or "llm" in targets else config.tune_top_llm_layers
    adapter = bool(vision or llm) or config.tune_vlln or "vl_self_attention" in targets
    return {
        "vision": config.backbone.vision.depth if vision else 0,
        "llm": llm,
        "vl_self_attention": config.vl_self_attention_cfg.num_layers if adapter else 0,
        "dit": config.diffusion_model_cfg.num_layers,
    }


def _adapted(recipe: Recipe) -> set[str]:
    """Parts with adapters."""
    lora = model(recipe).lora
    return set() if lora is None else set(lora.targets)


def _split_weights(recipe: Recipe, ranks: int) -> list[str]:
    if recipe.parallel.shards(ranks) == 1 or model(recipe).precision != "bf16":
        return []
    return [
        "model.precision: bf16 keeps half of each weight in an optimizer that does not shard; give lean, or "
        "parallel.shard=1"
    ]


def _lookahead(recipe: Recipe, config: "GR00TN17Config") -> list[str]:
    if recipe.lookahead == "none":
        return []
    targets = _adapted(recipe)
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
