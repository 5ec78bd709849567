"""Closed-loop evaluation of a policy in the world its recipe names."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.build import build_network, load_trained, with_local_weights
from recipes.build_processor import build_processor
from recipes.load import from_dict
from recipes.run_folder import RunFolder
from recipes.schema import Recipe
from recipes.sources import open_all, training_part

if TYPE_CHECKING:
    from models.gr00t_n17.inputs.processor import Processor
    from models.gr00t_n17.network import GR00TN17

logger = logging.getLogger(__name__)


def closed_loop(
    recipe: Recipe, network: "GR00TN17", processor: "Processor", *, swap_instruction: bool = False
) -> dict[str, Any]:
    """Let the policy act on held-out layouts.

    Args:
        recipe: with an `evaluation` section.
        network: the policy's network, in the state to be judged.
        processor: the policy's processor.
        swap_instruction: tell the policy the other block's name, but judge by the original one: a policy that follows
            the text then fails, one that goes for the nearest block does not notice.

    Returns:
        `success_rate`, `wrong_block_rate`, `followed_text_rate` (the block that the text told it was lifted) and
        `episodes_evaluated`.
    """
    import torch

    from models.gr00t_n17.policy import Policy
    from recipes.tabletop.closed_loop import evaluate

    assert recipe.evaluation is not None
    policy = Policy(network, processor)
    config = network.config
    # the sampler starts from the same noise in every evaluation with this seed
    generator = torch.Generator().manual_seed(recipe.evaluation.seed)

    def act(images: Any, state: Any, text: Any) -> Any:
        noise = torch.randn(len(text), config.action_horizon, config.max_action_dim, generator=generator)
        return policy.act(images, state, text, noise=noise)

    result = evaluate(
        act,
        cameras=processor.cameras,
        layouts=recipe.evaluation.layouts,
        seed=recipe.evaluation.seed,
        execute_steps=recipe.evaluation.execute_steps,
        swap_instruction=swap_instruction,
    )
    return {
        "success_rate": result.success_rate,
        "wrong_block_rate": result.wrong_block_rate,
        "followed_text_rate": result.followed_text_rate,
        "episodes_evaluated": result.episodes,
    }


def swapped(result: dict[str, Any]) -> dict[str, Any]:
    """The figures of an evaluation with swapped instructions, under their names in `summary.json`."""
    return {
        "success_rate_swapped": result["success_rate"],
        "followed_text_rate_swapped": result["followed_text_rate"],
    }


def evaluate_run(run: Path) -> dict[str, Any]:
    """Evaluate the newest checkpoint of a run folder.

    Raises:
        ValueError: when the folder is no run, has no checkpoint, or its recipe names no world to act in.
    """
    folder = RunFolder(run)
    stored = folder.recipe
    if stored is None:
        raise ValueError(f"{run} is no run folder: it holds no recipe.json")
    recipe = from_dict(stored)
    checkpoint = folder.latest_checkpoint()
    if checkpoint is None:
        raise ValueError(f"{run} has no checkpoint yet (looked in {folder.checkpoints})")
    if recipe.evaluation is None:
        raise ValueError(f"{run}: its recipe has no `evaluation` section, so there is no world to act in")
    recipe = with_local_weights(recipe)
    datasets = open_all(recipe)
    processor = build_processor(recipe, [training_part(recipe, dataset) for dataset in datasets])
    network = build_network(recipe)
    load_trained(network, checkpoint[0])
    result = {"step": checkpoint[1], **closed_loop(recipe, network, processor)}
    result |= swapped(closed_loop(recipe, network, processor, swap_instruction=True))
    for dataset in datasets:
        dataset.close()
    return result
