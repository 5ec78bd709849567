"""What does not fit together in a recipe of the Cosmos-3 policy, in `model`, beside other sections and the dataset."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.checkpoint_source import is_remote
from recipes.families.cosmos3_policy.build import model, model_config, stored_config
from recipes.families.cosmos3_policy.check_inputs import named_problems, sound_settings
from recipes.load import flatten
from recipes.parse import misfits
from recipes.schema import Recipe

if TYPE_CHECKING:
    from models.cosmos3_policy.config import Cosmos3PolicyConfig
    from models.cosmos3_policy.inputs.settings import ProcessorConfig

# Fields of config.json that change no shape of the weights.
_FREE = ("base_fps", "enable_fps_modulation", "unified_3d_mrope_temporal_modality_margin")
# Those of the action heads, which have no stored weights where they are fresh.
_HEADS = ("action_gen", "action_dim", "num_embodiment_domains")


def model_problems(recipe: Recipe) -> list[str]:
    """Problems of the `model` section, by itself and beside a checkpoint that lies on this machine."""
    from models.cosmos3_policy.config import Cosmos3PolicyConfig

    settings, inputs = sound_settings(recipe)
    problems = [*_weights(recipe), *_vae(recipe), *inputs, *named_problems(recipe, settings)]
    wrong = misfits(Cosmos3PolicyConfig, recipe.model.config, "model.config") or _architecture(recipe)
    if wrong:
        return [*problems, *wrong]
    try:
        config = model_config(recipe)
    except (TypeError, ValueError, OSError) as error:
        lines = str(error).splitlines()
        return [*problems, *(f"model.config: {line.strip()}" for line in lines[len(lines) > 1 :])]
    return [*problems, *_slots(config, settings)]


def data_problems(recipe: Recipe, ranks: int) -> list[str]:
    """Keys of other sections that this model cannot do."""
    data, problems = recipe.data, []
    if data.mixture is not None:
        problems.append("data.mixture: cosmos3_policy trains on one dataset; give data.uri")
    if data.modality is not None:
        problems.append("data.modality: has no effect, cosmos3_policy takes whole columns; leave it out")
    if data.cache.decoded:
        problems.append("data.cache.decoded: clips are not kept decoded, give 0")
    if data.pack_tokens is not None:
        if data.pack_tokens < 1:
            problems.append(f"data.pack_tokens: {data.pack_tokens} is not positive and finite")
        if data.order != "exact":
            problems.append("data.pack_tokens: packs are runs of the exact order; give data.order=exact, or null")
        if data.global_batch_size is not None:
            problems.append(
                "data.global_batch_size: a pack holds as many samples as fit; with data.pack_tokens give "
                "data.batch_size, the most that a rank's pack may hold"
            )
    if data.transport != "rgb24" and recipe.model.processor.get("augment_on") == "cpu":
        problems.append(
            f"data.transport: {data.transport} becomes RGB on the device only; give rgb24, or "
            "model.processor.augment_on=device"
        )
    if recipe.evaluation is not None:
        problems.append("evaluation: cosmos3_policy has no world to act in; leave it out, see validation")
    if recipe.run.first is not None:
        problems.append("run.first: cosmos3_policy has no stage before it; leave it out")
    if recipe.run.stage != "policy":
        problems.append(f"run.stage: cosmos3_policy has no {recipe.run.stage} stage; give policy")
    return problems


def option_problems(recipe: Recipe, ranks: int) -> list[str]:
    """Training options that do nothing here, or that changing packs do not allow."""
    problems = []
    if recipe.graphs != "none":
        problems.append(f"graphs: {recipe.graphs} is of models whose batches have one shape; give none")
    if recipe.compile.scope == "model":
        problems.append("compile.scope: model would compile every pack of other lengths anew; give blocks")
    if recipe.compile.scope == "blocks" and recipe.compile.dynamic is False:
        problems.append("compile.dynamic: false would compile every pack of other lengths anew; give true")
    if recipe.compile.scope != "none" and recipe.compile.mode in ("reduce-overhead", "max-autotune"):
        problems.append(
            f"compile.mode: {recipe.compile.mode} captures CUDA graphs, which packs of changing lengths do not allow; "
            "give default or max-autotune-no-cudagraphs"
        )
    return problems


def trained_blocks(recipe: Recipe) -> dict[str, int]:
    """The layers of the generation tower, all of them trained."""
    return {"layers": model_config(recipe).num_hidden_layers}


def _weights(recipe: Recipe) -> list[str]:
    """Files that are not there; whether a hub id or an object store has something is known when it is fetched."""
    own = model(recipe)
    if own.weights is None:
        return ["model.keep_action_heads: has no effect without model.weights"] if own.keep_action_heads else []
    if is_remote(own.weights):
        return []
    if not own.weights or not Path(own.weights).exists():
        return [
            f"model.weights: {own.weights!r} does not exist; give a folder, a hub id OWNER/NAME or s3://bucket/prefix, "
            "or null for random weights"
        ]
    from models.common.weight_files import weight_files
    from models.cosmos3_policy.checkpoint.folder import CheckpointFolder

    try:
        folder = CheckpointFolder(own.weights)
        folder.check_index()
        if not folder.is_distributed:
            weight_files(folder.weights)
    except (ValueError, OSError) as error:
        return [f"model.weights: {error}"]
    return []


def _vae(recipe: Recipe) -> list[str]:
    own, problems = model(recipe), []
    if importlib.util.find_spec("diffusers") is None:
        problems.append(
            "model.vae: the video encoder needs the package diffusers; install the extra: pip install -e '.[cosmos3]'"
        )
    if own.vae is not None:
        if not is_remote(own.vae) and not any(
            own.vae and Path(own.vae, *inner, "config.json").is_file() for inner in ((), ("vae",))
        ):
            problems.append(f"model.vae: {own.vae!r} is no folder of a video encoder, which holds a config.json")
    elif own.weights is None and own.size == "released":
        problems.append("model.vae: a released network needs a video encoder; give model.weights or model.vae")
    elif own.weights and Path(own.weights).exists():
        from models.cosmos3_policy.checkpoint.folder import CheckpointFolder

        if CheckpointFolder(own.weights).vae is None:
            problems.append(f"model.vae: {own.weights} has no vae/; name the folder of a video encoder")
    return problems


def _architecture(recipe: Recipe) -> list[str]:
    """Sizes that are not those of the checkpoint's weights."""
    try:
        stored = stored_config(recipe)
    except (ValueError, OSError) as error:
        return [f"model.weights: {error}"]
    if stored is None:
        return []
    if recipe.model.size != type(recipe.model).size:
        return [f"model.size: {recipe.model.size} has no effect beside the checkpoint's config.json; leave it out"]
    free = _FREE if model(recipe).keep_action_heads else (*_FREE, *_HEADS)
    return [
        f"model.config.{name}: {value!r} is not the checkpoint's {stored[name]!r}, whose weights have that shape; "
        "leave it out"
        for name, value in flatten(dict(recipe.model.config)).items()
        if name in stored and name not in free and value != stored[name]
    ]


def _slots(config: "Cosmos3PolicyConfig", settings: "ProcessorConfig") -> list[str]:
    problems = []
    if settings.domain >= config.num_embodiment_domains:
        problems.append(
            f"model.processor.domain: {settings.domain} is no slot; allowed: 0 to {config.num_embodiment_domains - 1}"
        )
    if not config.action_gen:
        problems.append("model.config.action_gen: false leaves out the action heads, and with them the policy")
    return problems


def clip_frames(recipe: Recipe) -> int:
    """Frames of each camera in one sample."""
    return recipe.data.horizon + 1
