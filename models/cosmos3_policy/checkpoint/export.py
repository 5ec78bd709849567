"""A trained network in Diffusers' layout, for any reader of it: Diffusers, the framework's server, this repository."""

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.common.shards import SHARD_BYTES, new_folder, save_checkpoint_weights
from models.common.weight_files import DIFFUSERS_STEM
from models.cosmos3_policy.checkpoint.folder import CONFIG_FILE, PROCESSOR_FILE, TRANSFORMER, VAE, CheckpointFolder
from models.cosmos3_policy.checkpoint.names import is_framework
from models.cosmos3_policy.checkpoint.weights import by_name, open_weights
from models.cosmos3_policy.network import Cosmos3Policy

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
RECIPE_FILE, CARD_FILE = "training_recipe.json", "README.md"
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".ckpt")


def export(
    network: Cosmos3Policy,
    folder: str | Path,
    *,
    dtype: str = "bfloat16",
    base: CheckpointFolder | None = None,
    vae: Path | None = None,
    processor: Mapping[str, Any] | None = None,
    recipe: Mapping[str, Any] | None = None,
    card: str | None = None,
    shard_bytes: float = SHARD_BYTES,
) -> None:
    """Write a repository: transformer, and what else the base has (vae, scheduler, tokenizer), all of it or nothing.

    For the averages of a run put them into the network first, as `models.common.trained.load_trained` does with the
    prefix `ema.`. What the training left as it was is written as the base stores it, bit for bit where the dtype is the
    same. Parts of the base's transformer that the policy has not, sound heads, are kept.

    Args:
        network: on any device, not sharded.
        folder: must not exist, or be empty.
        dtype: of the transformer's tensors, "bfloat16" as released or "float32".
        base: the checkpoint the training started from. Its other parts are copied, and its config's unknown keys kept.
        vae: folder of the video encoder where it is not the base's.
        processor: settings of the processor, written as processor.json.
        recipe: the resolved recipe, stored as it is.
        card: text of the model card, see `models.cosmos3_policy.checkpoint.model_card`.
        shard_bytes: size of one weights file.

    Raises:
        ValueError: dtype unknown.
        FileExistsError: `folder` holds something.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: one of {', '.join(DTYPES)}")
    files = {PROCESSOR_FILE: processor, RECIPE_FILE: recipe}
    with new_folder(folder) as temporary:
        if base is not None:
            _copy_parts(base, temporary)
        if vae is not None:
            shutil.rmtree(temporary / VAE, ignore_errors=True)
            shutil.copytree(vae, temporary / VAE)
        transformer = temporary / TRANSFORMER
        transformer.mkdir()
        values = {**((base.config_values if base else None) or {}), **network.config.to_dict()}
        (transformer / CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n")
        for name, content in files.items():
            if content is not None:
                (temporary / name).write_text(json.dumps(content, indent=2) + "\n")
        if card is not None:
            (temporary / CARD_FILE).write_text(card)
        options: dict[str, Any] = {"dtype": DTYPES[dtype], "shard_bytes": shard_bytes, "stem": DIFFUSERS_STEM}
        save_checkpoint_weights(_tensors(network, base), transformer, **options)
    logger.info("exported %s, %s", folder, dtype)


def _copy_parts(base: CheckpointFolder, target: Path) -> None:
    """Everything of a repository beside the transformer, its card and weights or an index at its top."""
    if base.weights != base.path / TRANSFORMER:
        return  # a transformer alone, or the framework's folder: there is nothing beside it
    for item in sorted(base.path.iterdir()):
        if item.name.startswith(".") or item.name in (TRANSFORMER, CARD_FILE, PROCESSOR_FILE, RECIPE_FILE):
            continue
        if item.is_dir():
            shutil.copytree(item, target / item.name)
        elif not item.name.endswith(_WEIGHTS):
            shutil.copyfile(item, target / item.name)


def _tensors(network: Cosmos3Policy, base: CheckpointFolder | None) -> Iterator[tuple[str, Tensor]]:
    """The network's tensors; the base's own bytes where training changed nothing, and what it has besides."""
    own = network.state_dict()
    if base is None:
        yield from own.items()
        return
    with open_weights(base.path) as stored:
        found, unknown = by_name(stored)
        for name, tensor in own.items():
            yield name, _kept_or_own(stored.tensor(found[name]), tensor) if name in found else tensor
        if not base.is_distributed:
            known = {*found.values(), *unknown}
            yield from ((name, stored.tensor(name)) for name in stored if name not in known and not is_framework(name))


def _kept_or_own(kept: Tensor, own: Tensor) -> Tensor:
    """The stored tensor where the network's is no other, compared in the network's dtype: it may hold fewer bits."""
    same = kept.shape == own.shape and torch.equal(kept.to(own.dtype), own.detach().cpu())
    return kept if same else own
