"""Training options applied to a built network, and what they report when the run is over."""

import logging
from typing import TYPE_CHECKING, Any

from recipes.schema import Recipe

if TYPE_CHECKING:
    from models.gr00t_n17.network import GR00TN17

logger = logging.getLogger(__name__)


def prepare_blocks(recipe: Recipe, network: "GR00TN17") -> None:
    """Let the chosen blocks recompute, then compile, in place. Sharding comes after both, with the strategy.

    Raises:
        ValueError: what `check` could not see while the checkpoint lay elsewhere.
    """
    from models.gr00t_n17.parallelize import checkpoint_blocks, compile_network

    if recipe.checkpointing.mode != "none":
        checkpoint_blocks(network, recipe.checkpointing)
    if recipe.compile.scope != "none":
        compile_network(network, recipe.compile)


def option_figures(recipe: Recipe, network: "GR00TN17") -> dict[str, Any]:
    """Entries of summary.json about what was compiled and recomputed; none for a plain run."""
    figures: dict[str, Any] = {}
    if recipe.checkpointing.mode != "none":
        checkpointing: Any = network.checkpointing
        figures["recomputed_blocks"] = {part: list(blocks) for part, blocks in checkpointing.recomputed.items()}
        if checkpointing.extra_flops is not None:
            figures["recompute_flops_per_micro_batch"] = checkpointing.extra_flops
    if recipe.compile.scope != "none":
        compiled: Any = network.compiled
        logger.info("%s", compiled.summary())
        figures |= {
            "compile_s": compiled.seconds,
            "compile_graphs": compiled.graphs,
            "compile_recompiles": compiled.recompiles,
            "compile_failures": dict(compiled.failures),
        }
    return figures
