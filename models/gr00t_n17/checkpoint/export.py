"""A trained network in the layout of the released checkpoint, for any reader of that layout."""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.common.shards import SHARD_BYTES, new_folder, save_checkpoint_weights
from models.common.stored import StoredTensors
from models.gr00t_n17.checkpoint.folder import (
    CONFIG_FILE,
    EMBODIMENTS_FILE,
    PROCESSOR_FILE,
    STATISTICS_FILE,
    CheckpointFolder,
)
from models.gr00t_n17.checkpoint.weights import EMBEDDING_SUFFIX, HEAD_SUFFIX
from models.gr00t_n17.config import BackboneConfig, GR00TN17Config
from models.gr00t_n17.inputs.mixed import MixedProcessor
from models.gr00t_n17.inputs.processor import Processor
from models.gr00t_n17.network import GR00TN17
from models.gr00t_n17.slots import is_slot_tensor, merge_rows

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
RECIPE_FILE = "experiment_cfg/recipe.json"
CARD_FILE = "README.md"
_LATER = {"strict_action_padding_mask": False}  # keys younger than the released file, and what their absence means


def export(
    network: GR00TN17,
    processor: Processor | MixedProcessor,
    folder: str | Path,
    *,
    dtype: str = "bfloat16",
    base: CheckpointFolder | None = None,
    recipe: Mapping[str, Any] | None = None,
    card: str | None = None,
    shard_bytes: float = SHARD_BYTES,
) -> None:
    """Write a checkpoint folder: config.json, weights, processor files, recipe and model card, all of it or nothing.

    What the training left as it was is written as the base checkpoint stores it, bit for bit where the dtype is the
    same. A network with some embodiment slots is merged into the full tensors of the base.

    Args:
        network: on any device; LoRA adapters merged into its weights before.
        processor: its settings, statistics and embodiment go into the three processor files.
        folder: must not exist, or be empty.
        dtype: of all tensors, "bfloat16" as released or "float32".
        base: the checkpoint the training started from: its keys and embodiments that nothing here decides are kept.
        recipe: the resolved recipe, stored as it is.
        card: text of the model card, see `models.gr00t_n17.checkpoint.model_card`.
        shard_bytes: size of one weights file.

    Raises:
        ValueError: dtype unknown, or a network with slots and no base to fill the others.
        FileExistsError: `folder` holds something.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: one of {', '.join(DTYPES)}")
    if network.slots is not None and base is None:
        raise ValueError(
            f"the network holds the embodiment slots {network.slots} alone; the others come from the checkpoint it "
            "started from, and none is given as base"
        )
    files = side_files(network.config, processor, dtype, base)
    if recipe is not None:
        files[RECIPE_FILE] = recipe
    with new_folder(folder) as temporary:
        for name, values in files.items():
            file = temporary / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(values, indent=2) + "\n")
        if card is not None:
            (temporary / CARD_FILE).write_text(card)
        if base is None:
            save_checkpoint_weights(_own(network), temporary, dtype=DTYPES[dtype], shard_bytes=shard_bytes)
        else:
            with StoredTensors(base.path) as stored:
                tensors = _over_base(network, stored, DTYPES[dtype])
                save_checkpoint_weights(tensors, temporary, dtype=DTYPES[dtype], shard_bytes=shard_bytes)
    logger.info("exported %s, %s", folder, dtype)


def side_files(
    config: GR00TN17Config, processor: Processor | MixedProcessor, dtype: str, base: CheckpointFolder | None
) -> dict[str, Mapping[str, Any]]:
    """Content of the JSON files by name."""
    return {
        CONFIG_FILE: config_file(config, dtype, base.config_values if base else None),
        PROCESSOR_FILE: processor.to_file(base.processor_file if base else None),
        STATISTICS_FILE: processor.statistics_file(base.statistics if base else None),
        EMBODIMENTS_FILE: processor.embodiment_file(base.stored_embodiment_ids if base else None),
    }


def config_file(config: GR00TN17Config, dtype: str, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Content of config.json: `base` with the network's own values over it.

    The section `backbone`, which upstream does not have, is left out where `model_name` says its sizes, and so are keys
    of later versions where they change nothing.
    """
    values = config.to_dict()
    own = {"backbone": values["backbone"] if config.backbone == BackboneConfig() else None, **_LATER}
    for key, default in own.items():
        if key not in (base or {}) and values[key] == default:
            del values[key]
    out = _over(dict(base or {"architectures": [config.model_type]}), values)
    return {**out, "dtype": dtype, "torch_dtype": dtype, "model_dtype": dtype}


def _over(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` over `base`, section by section, in the order of `base`."""
    out = dict(base)
    for key, value in values.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _over(out[key], value) if both else value
    return out


def _own(network: GR00TN17) -> Iterator[tuple[str, Tensor]]:
    yield from network.state_dict().items()


def _over_base(network: GR00TN17, stored: StoredTensors, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The network's tensors, in the order of the base's files; the base's own bytes where training changed nothing."""
    tensors = network.state_dict()
    # A base that stores the LM head, which is its token embedding once more, gets it back; nothing here runs it.
    tied = {
        head: name
        for head in stored
        if head.endswith(HEAD_SUFFIX)
        for name in tensors
        if name.endswith(EMBEDDING_SUFFIX) and stored[head].shape == tuple(tensors[name].shape)
    }
    if extra := sorted(stored.keys() - tensors.keys() - tied.keys()):
        logger.info("in the base checkpoint but not in this network, left out: %s", ", ".join(extra))
    for name in stored:
        if name in tensors and network.slots is not None and is_slot_tensor(name):
            yield name, merge_rows(stored.tensor(name).to(dtype), tensors[name].detach().cpu(), network.slots)
        elif name in tensors:
            yield name, _kept_or_own(stored.tensor(name), tensors[name])
        elif name in tied:
            embedding = _kept_or_own(stored.tensor(tied[name]), tensors[tied[name]])
            yield name, embedding if embedding is tensors[tied[name]] else stored.tensor(name)
    yield from ((name, value) for name, value in tensors.items() if name not in stored)


def _kept_or_own(kept: Tensor, own: Tensor) -> Tensor:
    """The stored tensor where the network's is no other, compared in the network's dtype: it may hold fewer bits."""
    same = kept.shape == own.shape and torch.equal(kept.to(own.dtype), own.detach().cpu())
    return kept if same else own
