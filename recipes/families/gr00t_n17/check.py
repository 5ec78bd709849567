"""What in the `model` section does not fit: architecture, weights, processor, embodiments, precision, adapters."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.check_data import parsed_size
from recipes.checkpoint_source import is_remote
from recipes.families.gr00t_n17.check_checkpoint import architecture_problems, processor_problems, processor_settings
from recipes.families.gr00t_n17.slots import model, slot
from recipes.parse import misfits
from recipes.parts import key, parts
from recipes.schema import Recipe

if TYPE_CHECKING:
    from models.gr00t_n17.config import GR00TN17Config

_FROZEN_BY_ADAPTERS = {
    "llm": ("tune_llm", "tune_top_llm_layers"),
    "vision": ("tune_visual",),
    "dit": ("tune_diffusion_model",),
}


def model_problems(recipe: Recipe) -> list[str]:
    """Problems of the `model` section, by itself and beside a checkpoint that lies on this machine."""
    from models.gr00t_n17.config import GR00TN17Config
    from recipes.families.gr00t_n17.build import model_config

    problems = [*_idle_keys(recipe), *_weights(recipe), *processor_problems(recipe)]
    wrong = misfits(GR00TN17Config, recipe.model.config, "model.config") or architecture_problems(recipe)
    if wrong:
        return [*problems, *wrong]
    try:
        config = model_config(recipe)
    except (TypeError, ValueError, OSError) as error:
        return [*problems, *(f"model.config: {line}" for line in str(error).splitlines())]
    return [
        *problems,
        *_horizon(recipe, config),
        *_slots(recipe, config),
        *_precision(recipe, config),
        *_lora(recipe, config),
        *_feature_cache(recipe, config),
    ]


def data_problems(recipe: Recipe, ranks: int) -> list[str]:
    """Keys outside of `model` that GR00T cannot do."""
    problems = []
    if model(recipe).flow_draws < 1:
        problems.append(f"model.flow_draws: {model(recipe).flow_draws} is not positive and finite")
    if recipe.data.pack_tokens is not None:
        problems.append("data.pack_tokens: gr00t_n17 takes batches of so many samples; give data.batch_size alone")
    return problems


def _idle_keys(recipe: Recipe) -> list[str]:
    """Fields of a checkpoint's config that change nothing here; the processor has some under the same name."""
    from models.gr00t_n17.config import KEPT_ONLY
    from models.gr00t_n17.inputs.settings import ProcessorConfig

    own = {field.name for field in dataclasses.fields(ProcessorConfig)}
    return [
        f"model.config.{name}: has no effect" + (f"; give model.processor.{name}" if name in own else "")
        for name in recipe.model.config
        if name in KEPT_ONLY
    ]


def _weights(recipe: Recipe) -> list[str]:
    """Paths that do not exist; whether a hub id or an object store has something is known when it is fetched."""
    given = {"weights": recipe.model.weights, "backbone_weights": model(recipe).backbone_weights}
    return [
        f"model.{name}: {path!r} does not exist"
        for name, path in given.items()
        if path is not None and not is_remote(path) and not Path(path).exists()
    ]


def _horizon(recipe: Recipe, config: "GR00TN17Config") -> list[str]:
    if recipe.data.horizon <= config.action_horizon:
        return []
    return [f"data.horizon: {recipe.data.horizon} is more than the model's action_horizon = {config.action_horizon}"]


def _slots(recipe: Recipe, config: "GR00TN17Config") -> list[str]:
    """Embodiments that are unknown, whose slot the model does not have, or that one slot for all would overrule."""
    problems = []
    if model(recipe).embodiment_id is not None and recipe.model.size != "tiny":
        problems += [
            f"data.mixture[{number}].embodiment: {part.embodiment} would be overruled by model.embodiment_id = "
            f"{model(recipe).embodiment_id}, one slot for every part; give embodiment_id in the part, or none at all"
            for number, part in enumerate(recipe.data.mixture or ())
            if part.embodiment is not None and part.embodiment_id is None
        ]
    for number, part in enumerate(parts(recipe)):
        try:
            row = slot(recipe, part)
        except ValueError as error:
            problems.append(f"{key(recipe, number, 'embodiment')}: {error}")
            continue
        if not 0 <= row < config.max_num_embodiments:
            problems.append(
                f"{key(recipe, number, 'embodiment_id')}: {row} is not a slot; "
                f"allowed: 0 to {config.max_num_embodiments - 1}"
            )
    return problems


def _precision(recipe: Recipe, config: "GR00TN17Config") -> list[str]:
    mode = model(recipe).precision
    if mode != "stock" and recipe.precision == "fp32":
        return [f"model.precision: {mode} computes under bfloat16 autocast; give precision=bf16-mixed, or stock"]
    return []


def _lora(recipe: Recipe, config: "GR00TN17Config") -> list[str]:
    lora = model(recipe).lora
    if lora is None:
        return []
    problems = []
    if importlib.util.find_spec("peft") is None:
        problems.append("model.lora: needs the package peft; install the extra: pip install -e '.[lora]'")
    if not lora.targets:
        problems.append(
            "model.lora.targets: the list is empty; name at least one of llm, vision, dit, vl_self_attention"
        )
    for name in ("rank", "alpha"):
        if not getattr(lora, name) > 0:
            problems.append(f"model.lora.{name}: {getattr(lora, name)} is not positive")
    if twice := sorted({target for target in lora.targets if lora.targets.count(target) > 1}):
        problems.append(f"model.lora.targets: {twice[0]!r} stands there twice")
    problems += [
        f"model.config.{name}: has no effect, adapters on {target} freeze what it tunes; leave one of them out"
        for target, names in _FROZEN_BY_ADAPTERS.items()
        for name in names
        if target in lora.targets and recipe.model.config.get(name)
    ]
    if not 0 <= lora.dropout < 1:
        problems.append(f"model.lora.dropout: {lora.dropout} is not in [0, 1)")
    return problems


def _feature_cache(recipe: Recipe, config: "GR00TN17Config") -> list[str]:
    try:
        limit = parsed_size(model(recipe).feature_cache)
    except ValueError as error:
        return [f"model.feature_cache: {error}"]
    if not limit:
        return []
    trained = [name for name in ("tune_llm", "tune_visual", "tune_top_llm_layers") if getattr(config, name)]
    problems = [
        f"model.feature_cache: the backbone changes with model.config.{name}={getattr(config, name)}; give 0"
        for name in trained
    ]
    lora = model(recipe).lora
    if lora is not None and {"llm", "vision"} & set(lora.targets):
        problems.append("model.feature_cache: the backbone changes with adapters on llm or vision; give 0")
    return problems + _random_images(recipe, config)


def _random_images(recipe: Recipe, config: "GR00TN17Config") -> list[str]:
    from models.gr00t_n17.inputs.image_settings import ImageSettings
    from models.gr00t_n17.inputs.settings import ProcessorConfig

    try:
        settings = ImageSettings.of(ProcessorConfig(**processor_settings(recipe)), config.backbone.vision)
    except (TypeError, ValueError, OSError):
        return []  # reported with the processor
    if not settings.is_random:
        return []
    return [
        f"model.feature_cache: every pass sees other images ({settings.describe()}); give "
        "model.processor.random_crop=false and neither rotation nor colour jitter, or 0"
    ]
