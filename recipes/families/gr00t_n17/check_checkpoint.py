"""Settings that a checkpoint on this machine overrules: those of a recipe that could only be ignored are problems."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.families.gr00t_n17.slots import DEFAULT_EMBODIMENT, checkpoint_folder
from recipes.load import flatten
from recipes.parse import misfits
from recipes.parts import parts
from recipes.schema import Recipe
from recipes.schema_model import ModelConfig

# Fields of config.json that change how a network is trained or sampled, and no shape of its weights.
_FREE = (
    "tune_llm",
    "tune_visual",
    "tune_top_llm_layers",
    "tune_projector",
    "tune_diffusion_model",
    "tune_vlln",
    "diffusion_model_cfg.dropout",
    "diffusion_model_cfg.final_dropout",
    "vl_self_attention_cfg.dropout",
    "vl_self_attention_cfg.final_dropout",
    "num_inference_timesteps",
    "noise_beta_alpha",
    "noise_beta_beta",
    "noise_s",
    "state_dropout_prob",
    "strict_action_padding_mask",
)


def processor_settings(recipe: Recipe, tag: str | None = None) -> dict[str, Any]:
    """Fields of the processor config: the checkpoint's for an embodiment, the recipe's over them.

    Raises:
        ValueError: a file of the checkpoint is not what it should be.
    """
    from models.gr00t_n17.inputs.processor_sources import Stored

    stored = Stored.read(checkpoint_folder(recipe), tag or parts(recipe)[0].embodiment or DEFAULT_EMBODIMENT)
    return {**stored.settings, **recipe.model.processor}


def architecture_problems(recipe: Recipe) -> list[str]:
    """Sizes that are not those of the checkpoint's weights, and files of its that are absent or damaged."""
    if problems := _weight_files(recipe):
        return problems
    try:
        folder = checkpoint_folder(recipe)
        if folder is None:
            return []
        if recipe.model.size != ModelConfig.size:
            return [f"model.size: {recipe.model.size} has no effect beside the checkpoint's config.json; leave it out"]
        stored = flatten(folder.config.to_dict())
    except (ValueError, OSError) as error:
        return [f"model.weights: {error}"]
    return [
        f"model.config.{name}: {value!r} is not the checkpoint's {stored[name]!r}, whose weights have that shape; "
        "leave it out"
        for name, value in flatten(dict(recipe.model.config)).items()
        if name in stored and name not in _FREE and value != stored[name]
    ]


def _weight_files(recipe: Recipe) -> list[str]:
    """Local files or folders without readable weights."""
    from models.common.weight_files import weight_files

    problems = []
    for name in ("weights", "backbone_weights"):
        source = getattr(recipe.model, name)
        if source is None or not Path(source).exists():
            continue  # reported already, or to be fetched
        try:
            weight_files(Path(source))
        except (ValueError, OSError) as error:
            problems.append(f"model.{name}: {error}")
    return problems


def processor_problems(recipe: Recipe) -> list[str]:
    """Unknown and impossible settings of `model.processor`, and those that do nothing beside the checkpoint's."""
    from models.gr00t_n17.inputs.settings import ProcessorConfig

    problems = misfits(ProcessorConfig, recipe.model.processor, "model.processor")
    if problems:
        return problems
    try:
        settings = processor_settings(recipe)
        ProcessorConfig(**settings)
    except (TypeError, ValueError, OSError) as error:
        return [f"model.processor: {error}"]
    return _idle(recipe, settings)


def _idle(recipe: Recipe, settings: Mapping[str, Any]) -> list[str]:
    given, problems = recipe.model.processor, []
    for name, over in (("image_target_size", "shortest_image_edge"), ("image_crop_size", "crop_fraction")):
        value = settings.get(over, 256)
        if given.get(name) is not None and value is not None:
            origin = "" if over in given else ", which is the checkpoint's"
            problems.append(
                f"model.processor.{name}: has no effect with {over}={value}{origin}; give model.processor.{over}=null"
            )
    return problems
