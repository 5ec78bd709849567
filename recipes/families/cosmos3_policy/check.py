"""What does not fit together in a recipe of the Cosmos-3 policy, in `model`, beside other sections and the dataset."""

import importlib.util
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.checkpoint_source import is_remote
from recipes.families.cosmos3_policy.build import (
    model,
    model_config,
    processor_config,
    stored_config,
)
from recipes.load import flatten
from recipes.parse import misfits
from recipes.parts import key
from recipes.schema import Recipe
from recipes.schema_data import PartConfig

if TYPE_CHECKING:
    from knonik import Dataset
    from models.cosmos3_policy.config import Cosmos3PolicyConfig
    from models.cosmos3_policy.inputs.settings import ProcessorConfig

# Fields of config.json that change no shape of the weights.
_FREE = ("base_fps", "enable_fps_modulation", "unified_3d_mrope_temporal_modality_margin")
# Those of the action heads, which have no stored weights where they are fresh.
_HEADS = ("action_gen", "action_dim", "num_embodiment_domains")
VIEWS = (1, 3)  # cameras of a picture: one by itself, or a wrist camera above two of the scene


def model_problems(recipe: Recipe) -> list[str]:
    """Problems of the `model` section, by itself and beside a checkpoint that lies on this machine."""
    from models.cosmos3_policy.config import Cosmos3PolicyConfig

    problems = [*_weights(recipe), *_vae(recipe)]
    settings = _processor(recipe, problems)
    wrong = misfits(Cosmos3PolicyConfig, recipe.model.config, "model.config") or _architecture(recipe)
    if wrong:
        return [*problems, *wrong]
    try:
        config = model_config(recipe)
    except (TypeError, ValueError, OSError) as error:
        lines = str(error).splitlines()
        return [*problems, *(f"model.config: {line.strip()}" for line in lines[len(lines) > 1 :])]
    return problems if settings is None else [*problems, *_slots(recipe, config, settings)]


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
    if recipe.compile.scope != "none" and recipe.compile.mode in ("reduce-overhead", "max-autotune"):
        problems.append(
            f"compile.mode: {recipe.compile.mode} captures CUDA graphs, which packs of changing lengths do not allow; "
            "give default or max-autotune-no-cudagraphs"
        )
    return problems


def trained_blocks(recipe: Recipe) -> dict[str, int]:
    """The layers of the generation tower, all of them trained."""
    return {"layers": model_config(recipe).num_hidden_layers}


def part_problems(recipe: Recipe, number: int, part: PartConfig, dataset: "Dataset") -> list[str]:
    """Cameras, clock and widths of the dataset's columns beside what the policy reads."""
    try:
        config, settings = model_config(recipe), processor_config(recipe)
    except (TypeError, ValueError, OSError):
        return []  # reported with the model
    problems = []
    if abs(dataset.fps - settings.fps) > 1e-3:
        problems.append(
            f"model.processor.fps: {settings.fps:g} is not the {dataset.fps:g} frames a second of {part.uri}; give "
            f"model.processor.fps={dataset.fps:g}, which the positions of the clip follow"
        )
    problems += _cameras(recipe, number, settings, dataset) or _picture(recipe, number, config, settings, dataset)
    return problems + _columns(recipe, config, settings, part, dataset)


def _weights(recipe: Recipe) -> list[str]:
    """Files that are not there; whether a hub id or an object store has something is known when it is fetched."""
    own = model(recipe)
    if own.weights is None:
        return ["model.keep_action_heads: has no effect without model.weights"] if own.keep_action_heads else []
    if is_remote(own.weights):
        return []
    if not Path(own.weights).exists():
        return [f"model.weights: {own.weights!r} does not exist"]
    from models.common.weight_files import weight_files
    from models.cosmos3_policy.checkpoint.folder import CheckpointFolder

    try:
        folder = CheckpointFolder(own.weights)
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
        if not is_remote(own.vae) and not Path(own.vae).is_dir():
            problems.append(f"model.vae: {own.vae!r} is no folder of a video encoder")
    elif own.weights is None and own.size == "released":
        problems.append("model.vae: a released network needs a video encoder; give model.weights or model.vae")
    elif own.weights is not None and Path(own.weights).exists():
        from models.cosmos3_policy.checkpoint.folder import CheckpointFolder

        if CheckpointFolder(own.weights).vae is None:
            problems.append(f"model.vae: {own.weights} has no vae/; name the folder of a video encoder")
    return problems


def _processor(recipe: Recipe, problems: list[str]) -> "ProcessorConfig | None":
    """The input path's choices; None, and its problems, where they are wrong."""
    from models.cosmos3_policy.inputs.settings import ProcessorConfig

    given = recipe.model.processor
    found = misfits(ProcessorConfig, {k: v for k, v in given.items() if k != "augment"}, "model.processor")
    if isinstance(given.get("augment"), dict):
        from models.cosmos3_policy.inputs.settings import AugmentConfig

        found += misfits(AugmentConfig, given["augment"], "model.processor.augment")
    if "horizon" in given:
        found.append("model.processor.horizon: is that of the data section; give data.horizon")
    if given.get("tokenizer") is None and recipe.model.weights is None:
        found.append(
            "model.processor.tokenizer: null takes the one beside model.weights, and there are none; give words, or a "
            "hub id or folder"
        )
    problems += found
    if found:
        return None
    try:
        settings = processor_config(recipe)
    except (TypeError, ValueError) as error:
        text = str(error).removeprefix("processor settings: ")
        begins = "|".join(("augment.", *ProcessorConfig.names()))  # a problem begins with the name of its setting
        lines = re.split(rf"; (?=(?:{begins})\b)", text)
        problems += [f"model.processor.{line}" for line in lines if not line.startswith("horizon=")]
        if recipe.data.horizon % 4:
            problems.append(f"data.horizon: {recipe.data.horizon} is no multiple of 4, the frames of one latent frame")
        return None
    if settings.augment is None and settings.augment_on != "device":
        problems.append("model.processor.augment_on: has no effect without model.processor.augment")
    return settings


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


def _slots(recipe: Recipe, config: "Cosmos3PolicyConfig", settings: "ProcessorConfig") -> list[str]:
    problems = []
    if settings.domain >= config.num_embodiment_domains:
        problems.append(
            f"model.processor.domain: {settings.domain} is no slot; allowed: 0 to {config.num_embodiment_domains - 1}"
        )
    if not config.action_gen:
        problems.append("model.config.action_gen: false leaves out the action heads, and with them the policy")
    return problems


def _cameras(recipe: Recipe, number: int, settings: "ProcessorConfig", dataset: "Dataset") -> list[str]:
    from models.cosmos3_policy.vision.canvas import FIT, TIERS

    problems = []
    if settings.tier != FIT and settings.tier not in TIERS:
        problems.append(f"model.processor.tier: {settings.tier!r} is unknown; allowed: {', '.join([*TIERS, FIT])}")
    cameras = tuple(recipe.data.cameras or dataset.cameras)
    if settings.views is not None:
        unknown = [camera for camera in settings.views.values() if camera not in cameras]
        problems += [
            f"model.processor.views: {camera!r} is none of the cameras that are read, {list(cameras)}"
            for camera in unknown
        ]
        unused = [camera for camera in cameras if camera not in settings.views.values()]
        if unused and not unknown:
            problems.append(
                f"{key(recipe, number, 'cameras')}: {unused} are read and decoded, but are no view; leave them out"
            )
        return problems
    if len(cameras) not in VIEWS:
        problems.append(
            f"{key(recipe, number, 'cameras')}: a picture is made of one camera, or of a wrist camera and two of the "
            f"scene; {len(cameras)} are read: {list(cameras)}"
        )
    return problems


def _picture(
    recipe: Recipe, number: int, config: "Cosmos3PolicyConfig", settings: "ProcessorConfig", dataset: "Dataset"
) -> list[str]:
    """Frames of which no picture can be made, and packs too small for a single clip of them."""
    from models.cosmos3_policy.vision.canvas import latent_frames
    from models.cosmos3_policy.vision.compose import plan_canvas

    views = tuple(recipe.data.cameras or dataset.cameras)
    if settings.views is not None:
        views = tuple(settings.views.values())
    if any(camera not in dataset.cameras for camera in views):
        return []  # reported with the dataset
    try:
        canvas = plan_canvas(settings.tier, [dataset.image_shape(camera) for camera in views])
    except ValueError as error:
        return [f"{key(recipe, number, 'cameras')}: {error}"]
    rows, columns = (-(-side // config.latent_patch_size) for side in canvas.cropped_latent_size)
    least = (
        latent_frames(settings.num_frames) * rows * columns + settings.num_frames + 1
    )  # and a caption, however short
    budget = recipe.data.pack_tokens
    if budget is not None and 0 < budget < least:
        return [f"data.pack_tokens: {budget} holds no sample: clip, state and actions are {least - 1}; give more"]
    return []


def _columns(
    recipe: Recipe, config: "Cosmos3PolicyConfig", settings: "ProcessorConfig", part: PartConfig, dataset: "Dataset"
) -> list[str]:
    from models.cosmos3_policy.inputs.actions import ActionLayout

    def widths(names: tuple[str, ...]) -> dict[str, int]:
        features: Any = dataset.features
        return {name: math.prod(features[name]["shape"]) for name in names}

    try:
        ActionLayout(widths(part.state), widths(part.action), gripper=tuple(settings.gripper), width=config.action_dim)
    except ValueError as error:
        text = str(error).removeprefix("processor does not fit the data: ")
        return [
            f"model.processor.{line}" if line.startswith("gripper") else f"data.action: {line}"
            for line in text.split("; there are")[0].split("; ")
        ]
    return []


def clip_frames(recipe: Recipe) -> int:
    """Frames of each camera in one sample."""
    return recipe.data.horizon + 1
