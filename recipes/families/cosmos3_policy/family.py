"""The Cosmos-3 policy as `recipes.family.Family` asks for it."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.families.cosmos3_policy.build import (
    build_module,
    build_network,
    build_processor,
    model_config,
    sample_options,
)
from recipes.families.cosmos3_policy.check import (
    clip_frames,
    data_problems,
    model_problems,
    option_problems,
    trained_blocks,
)
from recipes.families.cosmos3_policy.check_inputs import part_problems
from recipes.schema import Recipe
from recipes.schema_data import PartConfig

if TYPE_CHECKING:
    from knonik import Dataset
    from models.common.block_options import CheckpointingConfig, CompileConfig
    from recipes.trained import TrainedRun

__all__ = [
    "HORIZON_STEP",
    "LAYOUTS",
    "PARAMETER_GROUPS",
    "build_module",
    "build_network",
    "build_processor",
    "build_validation",
    "checkpoint_blocks",
    "clip_frames",
    "closed_loop",
    "compile_network",
    "data_problems",
    "evaluate_folder",
    "evaluate_run",
    "export",
    "frame_prefix",
    "load_processor",
    "load_trained",
    "memory_table",
    "model_config",
    "model_problems",
    "option_problems",
    "part_problems",
    "sample_options",
    "trained_blocks",
]

PARAMETER_GROUPS: tuple[str, ...] = ("action_heads",)
HORIZON_STEP = 4  # frames of one latent frame
LAYOUTS: tuple[str, ...] = ("released", "framework")


def frame_prefix(recipe: Recipe, part: PartConfig) -> Any:
    """Clips are not kept decoded."""
    return None


def memory_table(recipe: Recipe, ranks: int) -> str:
    from recipes.families.cosmos3_policy.memory import memory_table as table

    return table(recipe, ranks)


def checkpoint_blocks(network: Any, config: "CheckpointingConfig") -> Any:
    from models.cosmos3_policy import parallelize

    return parallelize.checkpoint_blocks(network, config)


def compile_network(network: Any, config: "CompileConfig") -> Any:
    from models.cosmos3_policy import parallelize

    return parallelize.compile_network(network, config)


def build_validation(
    recipe: Recipe,
    datasets: "list[Dataset]",
    processor: Any,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
) -> Any:
    from recipes.families.cosmos3_policy import validation

    share = {"batch_size": batch_size, "rank": rank, "world_size": world_size}
    return validation.build_validation(recipe, datasets, processor, **share)


def load_processor(values: dict[str, Any]) -> Any:
    from models.cosmos3_policy.inputs.processor import Cosmos3Processor

    return Cosmos3Processor.from_dict(values)


def load_trained(network: Any, stored: Mapping[str, Any], *, averaged: bool) -> None:
    from models.common import trained

    trained.load_trained(network, stored, prefix="ema." if averaged else "network.")


def closed_loop(recipe: Recipe, network: Any, processor: Any, *, swap_instruction: bool = False) -> dict[str, Any]:
    raise AssertionError("`check` has refused an `evaluation` section")


def evaluate_run(trained: "TrainedRun", *, uri: str | None, stride: int | None, limit: int | None) -> dict[str, Any]:
    from recipes.families.cosmos3_policy import evaluate

    return evaluate.evaluate_run(trained, uri=uri, stride=stride, limit=limit)


def evaluate_folder(
    folder: Path, uri: str, *, embodiment: str | None, stride: int | None, limit: int | None
) -> dict[str, Any]:
    from recipes.families.cosmos3_policy import evaluate

    if embodiment is not None:
        raise ValueError("--embodiment: a Cosmos-3 policy is of one robot; leave it out")
    return evaluate.evaluate_folder(folder, uri, stride=stride, limit=limit)


def export(trained: "TrainedRun", out: Path, *, run: Path, dtype: str, layout: str, stored: dict[str, Any]) -> None:
    from recipes.families.cosmos3_policy.export import export_trained

    export_trained(trained, out, run=run, dtype=dtype, layout=layout, stored=stored)
