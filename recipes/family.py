"""Which model a recipe trains, as the rest of the package sees it: one room of `families/` for each `model.name`.

All else in `recipes` asks the functions of a room and knows no model. A room's `family` module answers at once; what
needs the model's code is imported inside its functions.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from recipes.schema import Recipe
from recipes.schema_data import PartConfig

if TYPE_CHECKING:  # importing these takes seconds; `show` and configuration errors must not wait for them
    from lightning.pytorch import LightningModule
    from torch import nn

    from knonik import Dataset
    from models.common.block_options import CheckpointingConfig, CompileConfig
    from recipes.trained import TrainedRun


class Family(Protocol):
    """What a room's `family` module offers. `config`, `network`, `processor` are the model's own classes."""

    PARAMETER_GROUPS: tuple[str, ...]
    """Names that `optimizer.lr_multipliers` may have."""
    LAYOUTS: tuple[str, ...]
    """Kinds of folders that `export` writes."""
    HORIZON_STEP: int
    """A chunk has a multiple of so many steps."""

    # what `check` asks, before anything is built

    def model_config(self, recipe: Recipe) -> Any:
        """Sizes of the network: those of a checkpoint on this machine or of the named size, and the recipe's over both.

        Raises:
            ValueError: unknown fields, or sizes that do not fit together.
        """

    def model_problems(self, recipe: Recipe) -> list[str]:
        """Problems of the `model` section, by itself and beside a checkpoint that lies on this machine."""

    def data_problems(self, recipe: Recipe, ranks: int) -> list[str]:
        """Keys of other sections that this model cannot do, or whose values do not go with it."""

    def part_problems(self, recipe: Recipe, number: int, part: PartConfig, dataset: "Dataset") -> list[str]:
        """Problems of one dataset's columns with the model; the columns are known to be there."""

    def option_problems(self, recipe: Recipe, ranks: int) -> list[str]:
        """Training options that do not go with what the model trains."""

    def trained_blocks(self, recipe: Recipe) -> dict[str, int]:
        """Blocks that run with gradients, by part: those that keep anything to recompute."""

    def frame_prefix(self, recipe: Recipe, part: PartConfig) -> Any:
        """The model's first resize of a frame, kept by `data.cache.decoded`; None where it has none."""

    def clip_frames(self, recipe: Recipe) -> int:
        """Frames of each camera in one sample, from the anchor on."""

    def memory_table(self, recipe: Recipe, ranks: int) -> str:
        """Memory of one of `ranks` ranks by part, as text."""

    # what a run is built of

    def build_processor(self, recipe: Recipe, datasets: "list[Dataset]") -> Any:
        """The processor for what is trained on of each part."""

    def build_network(self, recipe: Recipe) -> Any:
        """The network with its starting weights; `model.weights` is a folder of this machine."""

    def build_module(
        self, recipe: Recipe, network: Any, *, processor: Any = None, fingerprint: str = "", device_type: str = "cpu"
    ) -> "LightningModule":
        """The Lightning module around a network whose blocks are prepared.

        Args:
            processor, fingerprint, device_type: of the run, for what depends on the data or the device.
        """

    def sample_options(self, recipe: Recipe, datasets: "list[Dataset]", processor: Any) -> dict[str, Any]:
        """`windows`, `transform`, `device_transform` and whatever else of a `knonik.DataModule` the model decides."""

    def checkpoint_blocks(self, network: Any, config: "CheckpointingConfig") -> Any:
        """Let the chosen blocks recompute, in place; returns the report."""

    def compile_network(self, network: Any, config: "CompileConfig") -> Any:
        """Compile the chosen parts, in place; returns the report."""

    def build_validation(
        self,
        recipe: Recipe,
        datasets: "list[Dataset]",
        processor: Any,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
    ) -> Any:
        """What `validation` measures: what the module's `held_out_figures` takes and gives metrics by name for.

        Args:
            datasets: each with all its episodes, those held out among them.
            batch_size: samples of a rank that go through the network together.
        """

    # what comes after

    def load_processor(self, values: dict[str, Any]) -> Any:
        """The processor of a run from its processor.json."""

    def load_trained(self, network: "nn.Module", stored: Mapping[str, Any], *, averaged: bool) -> None:
        """Put a checkpoint's weights, or their averages, into a network; adapters are merged."""

    def closed_loop(
        self, recipe: Recipe, network: Any, processor: Any, *, swap_instruction: bool = False
    ) -> dict[str, Any]:
        """Figures of the policy acting in the recipe's world; see `recipes.evaluate.closed_loop`."""

    def evaluate_run(
        self, trained: "TrainedRun", *, uri: str | None, stride: int | None, limit: int | None
    ) -> dict[str, Any]:
        """Open-loop figures of a run; see `recipes.evaluate.evaluate_run`."""

    def evaluate_folder(
        self, folder: Path, uri: str, *, embodiment: str | None, stride: int | None, limit: int | None
    ) -> dict[str, Any]:
        """Open-loop figures of a checkpoint folder; see `recipes.evaluate.evaluate_folder`."""

    def export(
        self, trained: "TrainedRun", out: Path, *, run: Path, dtype: str, layout: str, stored: dict[str, Any]
    ) -> None:
        """Write a checkpoint folder in one of the model's `LAYOUTS`.

        Args:
            run: the run folder. stored: the recipe it was started with, as plain values.
        """


def family(recipe: Recipe) -> Family:
    """The room of a recipe's model."""
    if recipe.model.name == "cosmos3_policy":
        from recipes.families.cosmos3_policy import family as cosmos3_policy

        return cosmos3_policy
    from recipes.families.gr00t_n17 import family as gr00t_n17

    return gr00t_n17


def family_of(folder: Path) -> Family:
    """The room of a checkpoint folder in a released layout."""
    if (folder / "transformer").is_dir():
        from recipes.families.cosmos3_policy import family as cosmos3_policy

        return cosmos3_policy
    from recipes.families.gr00t_n17 import family as gr00t_n17

    return gr00t_n17
