"""GR00T N1.7 as `recipes.family.Family` asks for it."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.families.gr00t_n17.build import build_module, build_network, model_config, sample_options
from recipes.families.gr00t_n17.check import data_problems, model_problems
from recipes.families.gr00t_n17.check_checkpoint import processor_settings
from recipes.families.gr00t_n17.check_groups import group_problems as part_problems
from recipes.families.gr00t_n17.check_options import option_problems, trained_blocks
from recipes.families.gr00t_n17.memory import memory_table
from recipes.families.gr00t_n17.processor import build_processor
from recipes.families.gr00t_n17.validation import build_validation
from recipes.schema import Recipe
from recipes.schema_data import PartConfig

if TYPE_CHECKING:
    from models.common.block_options import CheckpointingConfig, CompileConfig
    from models.gr00t_n17.network import GR00TN17
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

PARAMETER_GROUPS: tuple[str, ...] = ()
HORIZON_STEP = 1
LAYOUTS: tuple[str, ...] = ("released",)


def frame_prefix(recipe: Recipe, part: PartConfig) -> Any:
    """The first resize of a frame, as an embodiment's settings have it."""
    from models.gr00t_n17.inputs.images import FirstResize
    from models.gr00t_n17.inputs.settings import ProcessorConfig

    return FirstResize.of(ProcessorConfig(**processor_settings(recipe, part.embodiment)))


def clip_frames(recipe: Recipe) -> int:
    """The frame of now; what a checkpoint reads of the past is known when its processor is built."""
    return 1


def checkpoint_blocks(network: "GR00TN17", config: "CheckpointingConfig") -> Any:
    from models.gr00t_n17 import parallelize

    return parallelize.checkpoint_blocks(network, config)


def compile_network(network: "GR00TN17", config: "CompileConfig") -> Any:
    from models.gr00t_n17 import parallelize

    return parallelize.compile_network(network, config)


def load_processor(values: dict[str, Any]) -> Any:
    from models.gr00t_n17.inputs import mixed

    return mixed.load_processor(values)


def load_trained(network: Any, stored: Mapping[str, Any], *, averaged: bool) -> None:
    from models.common import trained
    from models.gr00t_n17.lora import merge_lora

    trained.load_trained(network, stored, prefix="ema." if averaged else "network.")
    merge_lora(network)


def closed_loop(
    recipe: Recipe, network: "GR00TN17", processor: Any, *, swap_instruction: bool = False
) -> dict[str, Any]:
    from recipes.families.gr00t_n17 import evaluate

    return evaluate.closed_loop(recipe, network, processor, swap_instruction=swap_instruction)


def evaluate_run(trained: "TrainedRun", *, uri: str | None, stride: int | None, limit: int | None) -> dict[str, Any]:
    from recipes.families.gr00t_n17 import evaluate

    return evaluate.evaluate_run(trained, uri=uri, stride=stride, limit=limit)


def evaluate_folder(
    folder: Path, uri: str, *, embodiment: str | None, stride: int | None, limit: int | None
) -> dict[str, Any]:
    from recipes.families.gr00t_n17 import evaluate

    return evaluate.evaluate_folder(folder, uri, embodiment=embodiment, stride=stride, limit=limit)


def export(trained: "TrainedRun", out: Path, *, run: Path, dtype: str, layout: str, stored: dict[str, Any]) -> None:
    from recipes.families.gr00t_n17.export import export_trained

    export_trained(trained, out, run=run, dtype=dtype, stored=stored)
