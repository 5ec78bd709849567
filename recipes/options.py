"""Training options applied to a built network, and what they report when the run is over."""

import logging
from typing import Any

from recipes.family import family
from recipes.schema import Recipe

logger = logging.getLogger(__name__)


def prepare_blocks(recipe: Recipe, network: Any) -> None:
    """Let the chosen blocks recompute, then compile, in place. Sharding comes after both, with the strategy.

    Raises:
        ValueError: what `check` could not see while the checkpoint lay elsewhere.
    """
    own = family(recipe)
    if recipe.checkpointing.mode != "none":
        own.checkpoint_blocks(network, recipe.checkpointing)
    if recipe.compile.scope != "none":
        own.compile_network(network, recipe.compile)


def option_figures(recipe: Recipe, network: Any) -> dict[str, Any]:
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
