"""What a run has trained: its network with the weights of one of its checkpoints, and its processor."""

import dataclasses
import json
import logging
import re
import zipfile
from pathlib import Path
from typing import Any

from recipes.family import family
from recipes.load import from_dict
from recipes.run_folder import RunFolder
from recipes.schema import Recipe
from recipes.schema_model import GR00TN17ModelConfig

logger = logging.getLogger(__name__)

PROCESSOR_FILE = "processor.json"
_STEP = re.compile(r"step[-=](\d+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """recipe: as the run was started, its weights named by local files. network: on the CPU, adapters merged.

    averaged: its weights are averages over the steps.
    """

    recipe: Recipe
    network: Any
    processor: Any
    checkpoint: Path
    step: int
    averaged: bool = False


def load_run(
    run: Path, *, step: int | None = None, checkpoint: Path | None = None, averaged: bool = False
) -> TrainedRun:
    """Build a run's network on the CPU and put a checkpoint into it; no dataset is opened.

    Args:
        run: run folder.
        step: which of its checkpoints; None takes the newest.
        checkpoint: a checkpoint by its path instead: a file, or the folder of a sharded one.
        averaged: take the averages of the weights over the steps that the checkpoint holds beside them.

    Raises:
        ValueError: no run folder, no such checkpoint, or one that does not fit its recipe or holds no averages.
    """
    from recipes.build import build_network, with_local_weights

    recipe = _recipe(run)
    path = checkpoint or find_checkpoint(run, step)
    file = run / PROCESSOR_FILE
    if not file.is_file():
        raise ValueError(f"{run} has no {PROCESSOR_FILE}; a run writes it before its first step")
    processor = family(recipe).load_processor(json.loads(file.read_text()))
    recipe = with_local_weights(_with_backbone(recipe))
    network = build_network(recipe)
    stored = read_checkpoint(path)
    if averaged and not any(name.startswith("ema.") for name in stored["state_dict"]):
        raise ValueError(f"{path} holds no averaged weights: the run was started without `ema`")
    family(recipe).load_trained(network, stored, averaged=averaged)
    return TrainedRun(
        recipe=recipe,
        network=network,
        processor=processor,
        checkpoint=path,
        step=_step(path, stored),
        averaged=averaged,
    )


def find_checkpoint(run: Path, step: int | None = None) -> Path:
    """The newest whole checkpoint of a run, or that of a step.

    Raises:
        ValueError: there is none; names those that there are.
    """
    folder = RunFolder(run).checkpoints
    entries = folder.iterdir() if folder.is_dir() else ()
    found = {int(match[1]): path for path in entries if (match := _STEP.match(path.stem)) and _is_whole(path)}
    if not found:
        raise ValueError(f"{run} has no checkpoint yet (looked in {folder})")
    if step is not None and step not in found:
        raise ValueError(f"{run} has no checkpoint of step {step}; there are {sorted(found)}")
    return found[max(found) if step is None else step]


def read_checkpoint(path: Path) -> dict[str, Any]:
    """`state_dict` and the plain values of a checkpoint that a run has written, tensors on the CPU.

    A file is mapped. Of a folder (torch.distributed.checkpoint) the shards of all ranks are joined here, in one
    process.

    Raises:
        ValueError: neither, or without a state dict.
    """
    import torch

    if path.is_dir():
        return _read_sharded(path)
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is no whole checkpoint")
    stored: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if "state_dict" not in stored:
        raise ValueError(f"{path} has no state_dict; it holds {sorted(stored)}")
    return stored


def _read_sharded(folder: Path) -> dict[str, Any]:
    import torch

    from models.common.dcp_tensors import DcpTensors

    try:
        stored = DcpTensors(folder)
    except FileNotFoundError as error:
        raise ValueError(f"{error}, which is written last") from error
    head = "state_dict."
    state = {name[len(head) :]: stored.tensor(name) for name in stored if name.startswith(head)}
    if not state:
        raise ValueError(f"{folder} has no state_dict; it holds {sorted({name.split('.')[0] for name in stored})}")
    plain = folder / "meta.pt"
    values = torch.load(plain, map_location="cpu", weights_only=True) if plain.is_file() else {}
    return {**values, "state_dict": state}


def _recipe(run: Path) -> Recipe:
    stored = RunFolder(run).recipe
    if stored is None:
        raise ValueError(f"{run} is no run folder: it holds no recipe.json")
    recipe = from_dict(stored)
    # the folder may have moved since; and the weights go to the CPU, whatever trained them
    return dataclasses.replace(
        recipe,
        run=dataclasses.replace(recipe.run, dir=str(run)),
        trainer=dataclasses.replace(recipe.trainer, accelerator="cpu"),
    )


def _with_backbone(recipe: Recipe) -> Recipe:
    """The recipe with the backbone of its first stage, which a run starts from; what is trained hides most of it."""
    from recipes.stages import BACKBONE_FILE, first_stage

    first, model = first_stage(recipe), recipe.model
    if first is None or not isinstance(model, GR00TN17ModelConfig):
        return recipe
    file = Path(first.run.dir) / BACKBONE_FILE
    if not file.is_file():
        logger.warning("the first stage's %s is gone; the digest of the frozen weights tells whether it matters", file)
        return recipe
    return dataclasses.replace(recipe, model=dataclasses.replace(model, backbone_weights=str(file)))


def _is_whole(path: Path) -> bool:
    return (path / ".metadata").is_file() if path.is_dir() else zipfile.is_zipfile(path)


def _step(path: Path, stored: dict[str, Any]) -> int:
    if isinstance(stored.get("global_step"), int):
        return int(stored["global_step"])
    match = _STEP.search(path.stem)
    return int(match[1]) if match else 0
