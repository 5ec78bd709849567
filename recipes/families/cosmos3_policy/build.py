"""The Cosmos-3 policy's network, video encoder, module and samples from a recipe's values."""

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.build import device, optimizer, schedule
from recipes.load import RecipeError
from recipes.parse import nearest
from recipes.schema import Recipe
from recipes.schema_model import Cosmos3PolicyModelConfig
from recipes.sources import batch_cameras, batch_columns, horizon_of

if TYPE_CHECKING:  # importing these takes seconds; `show` and configuration errors must not wait for them
    from knonik import Dataset
    from models.cosmos3_policy.config import Cosmos3PolicyConfig
    from models.cosmos3_policy.inputs.settings import ProcessorConfig
    from models.cosmos3_policy.module import Cosmos3PolicyModule
    from models.cosmos3_policy.network import Cosmos3Policy
    from models.cosmos3_policy.objective import ObjectiveConfig


def model(recipe: Recipe) -> Cosmos3PolicyModelConfig:
    """The `model` section, known to be this family's."""
    assert isinstance(recipe.model, Cosmos3PolicyModelConfig)
    return recipe.model


def model_config(recipe: Recipe) -> "Cosmos3PolicyConfig":
    """Sizes of the network: those of `transformer/config.json` beside the weights where they lie on this machine, else
    the named size; the recipe's own fields over both.

    Raises:
        ValueError: for unknown fields or sizes that do not fit together.
    """
    from models.cosmos3_policy.config import Cosmos3PolicyConfig

    own = model(recipe)
    names = [field.name for field in dataclasses.fields(Cosmos3PolicyConfig) if field.name != "extra"]
    unknown = [key for key in own.config if key not in names]
    if unknown:
        raise ValueError("\n".join(f"unknown key {key!r}{nearest(key, names)}" for key in unknown))
    if (stored := stored_config(recipe)) is not None:
        # Fresh heads stand on a base that has none, too.
        heads = {} if own.keep_action_heads else {"action_gen": True}
        return Cosmos3PolicyConfig.from_dict({**stored, **heads, **own.config})
    if own.size == "tiny":
        return Cosmos3PolicyConfig.tiny(**own.config)
    return Cosmos3PolicyConfig(**own.config)


def stored_config(recipe: Recipe) -> dict[str, Any] | None:
    """Values of the config.json beside the weights; None where there is none, or none on this machine.

    Raises:
        ValueError: it holds no JSON object.
    """
    from models.cosmos3_policy.checkpoint.folder import CheckpointFolder

    source = recipe.model.weights
    return CheckpointFolder(source).config_values if source is not None and Path(source).exists() else None


def processor_config(recipe: Recipe) -> "ProcessorConfig":
    """Choices of the input path: the recipe's `model.processor`, and the chunk's length from `data`.

    Raises:
        ValueError: values that do not go together.
    """
    from models.cosmos3_policy.inputs.settings import ProcessorConfig

    return ProcessorConfig(**{**recipe.model.processor, "horizon": horizon_of(recipe)})


def build_processor(recipe: Recipe, datasets: "list[Dataset]") -> Any:
    """The processor of the recipe's only dataset, its tokenizer beside the weights or made of the dataset's words.

    Raises:
        RecipeError: a pack has no room for the dataset's longest caption, which only the tokenizer shows.
    """
    from models.cosmos3_policy.inputs.processor import Cosmos3Processor

    (dataset,) = datasets
    cameras = batch_cameras(recipe, datasets)

    def widths(section: str) -> dict[str, int]:
        return {name: math.prod(dataset.features[name]["shape"]) for name in batch_columns(recipe, section)}

    texts = list(dataset.tasks.values())
    processor = Cosmos3Processor.for_dataset(
        model_config(recipe),
        processor_config(recipe),
        cameras=cameras,
        state=widths("state"),
        action=widths("action"),
        texts=texts,
        checkpoint=recipe.model.weights,
        image_size=dataset.image_shape(cameras[0]),
        known=known_words(recipe),
        seed=recipe.seed,
    )
    budget = recipe.data.pack_tokens
    if budget is not None and (found := processor.beyond(texts, budget)) is not None:
        tokens, prompt = found
        raise RecipeError(
            [
                f"data.pack_tokens: {budget} does not hold a sample of {tokens} tokens, the prompt {prompt[-200:]!r} "
                "among them; give more"
            ]
        )
    return processor


def known_words(recipe: Recipe) -> dict[str, int] | None:
    """Ids of the words that the weights were trained with, where they have such a vocabulary."""
    from models.cosmos3_policy.checkpoint.folder import CheckpointFolder

    source = recipe.model.weights
    stored = None if source is None or not Path(source).exists() else CheckpointFolder(source).processor
    words: dict[str, int] | None = ((stored or {}).get("tokenizer") or {}).get("words")
    return words


def build_network(recipe: Recipe) -> "Cosmos3Policy":
    """The network with its starting weights: a checkpoint's, or random ones that depend on the seed alone."""
    import torch

    from models.cosmos3_policy.network import Cosmos3Policy

    own = model(recipe)
    with torch.device("meta"):  # no time or memory for an initialisation that is overwritten below
        network = Cosmos3Policy(model_config(recipe))
    if own.weights is None:
        network.to_empty(device="cpu")
        network.init_weights(recipe.seed)
        return network
    from models.cosmos3_policy.checkpoint.weights import load_weights

    load_weights(
        network,
        own.weights,
        device=device(recipe),
        keep_action_heads=own.keep_action_heads,
        seed=recipe.seed,
        frozen_dtype=torch.float32 if recipe.precision == "fp32" else torch.bfloat16,
    )
    return network


def build_vae(recipe: Recipe) -> Any:
    """The frozen video encoder: `model.vae`, or that beside the weights, or a small random one."""
    from models.cosmos3_policy.vision.vae import load_vae, tiny_vae

    own = model(recipe)
    if own.vae is None and own.weights is None:
        return tiny_vae(model_config(recipe), seed=recipe.seed, samples_at_once=8)
    from models.cosmos3_policy.checkpoint.folder import CheckpointFolder
    from recipes.checkpoint_source import local_checkpoint

    if own.vae is not None:
        return load_vae(local_checkpoint(own.vae, recipe.data.cache.dir))
    folder = CheckpointFolder(own.weights or "").vae
    if folder is None:
        raise ValueError(f"model.vae: {own.weights} has no video encoder; name the folder of one")
    return load_vae(folder)


def build_module(
    recipe: Recipe,
    network: "Cosmos3Policy",
    *,
    processor: Any = None,
    fingerprint: str = "",
    device_type: str = "cpu",
) -> "Cosmos3PolicyModule":
    """The Lightning module around network and video encoder."""
    from models.cosmos3_policy.module import Cosmos3PolicyModule

    vae = build_vae(recipe)
    return Cosmos3PolicyModule(
        network,
        vae.compile() if model(recipe).compile_vae else vae,
        seed=recipe.seed,
        optimizer=optimizer(recipe),
        schedule=schedule(recipe),
        lookahead=recipe.lookahead,
        ema=recipe.ema,
        objective=objective(recipe),
    )


def objective(recipe: Recipe) -> "ObjectiveConfig":
    """Noise levels for the size of the pictures, and the weights of the two losses."""
    from models.cosmos3_policy.objective import ObjectiveConfig, shift_of

    return ObjectiveConfig(shift=shift_of(processor_config(recipe).tier))


def sample_options(recipe: Recipe, datasets: "list[Dataset]", processor: Any) -> dict[str, Any]:
    """A clip of one frame more than the chunk has actions, and the packs that samples come in."""
    frames, chunk = range(horizon_of(recipe) + 1), range(horizon_of(recipe))
    options: dict[str, Any] = {
        "windows": {
            **dict.fromkeys(batch_cameras(recipe, datasets), frames),
            **dict.fromkeys(batch_columns(recipe, "action"), chunk),
        },
        "transform": processor.prepare,
        "device_transform": lambda batch: processor.to_network(batch, augment=True),
    }
    if recipe.data.pack_tokens is not None:
        options |= {"pack_tokens": recipe.data.pack_tokens, "pack_cost": processor.cost}
    return options
