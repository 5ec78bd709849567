"""Evaluation of a trained policy: in the world its recipe names, and beside recorded episodes."""

from pathlib import Path
from typing import Any

from recipes.family import family, family_of
from recipes.schema import Recipe


def closed_loop(recipe: Recipe, network: Any, processor: Any, *, swap_instruction: bool = False) -> dict[str, Any]:
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
    return family(recipe).closed_loop(recipe, network, processor, swap_instruction=swap_instruction)


def swapped(result: dict[str, Any]) -> dict[str, Any]:
    """The figures of an evaluation with swapped instructions, under their names in `summary.json`."""
    return {
        "success_rate_swapped": result["success_rate"],
        "followed_text_rate_swapped": result["followed_text_rate"],
    }


def evaluate_run(
    run: Path, *, step: int | None = None, uri: str | None = None, stride: int | None = None, limit: int | None = None
) -> dict[str, Any]:
    """Evaluate a checkpoint of a run folder: in closed loop where its recipe names a world to act in, and in open loop
    on the episodes it held out.

    Args:
        run: run folder.
        step: which of its checkpoints; None takes the newest.
        uri: compare with all episodes of this dataset instead, and act in no world.
        stride: steps between two predictions, and steps of a chunk that are compared; None means a whole chunk.
        limit: compare with so many episodes of each dataset at most.

    Raises:
        ValueError: the folder is no run or has no such checkpoint, or there is nothing to evaluate on.
    """
    from recipes.trained import load_run

    _check_choice(stride, limit)
    trained = load_run(run, step=step)
    recipe = trained.recipe
    network = trained.network.to(device())
    result: dict[str, Any] = {"step": trained.step}
    if recipe.evaluation is not None and uri is None:
        processor = getattr(trained.processor, "parts", [trained.processor])[0]
        result |= closed_loop(recipe, network, processor)
        result |= swapped(closed_loop(recipe, network, processor, swap_instruction=True))
    result |= family(recipe).evaluate_run(trained, uri=uri, stride=stride, limit=limit)
    if len(result) == 1:
        raise ValueError(
            f"{run}: its recipe has no `evaluation` section, so there is no world to act in, and held out no episodes; "
            "give a dataset with --uri"
        )
    return result


def evaluate_folder(
    folder: Path, uri: str, *, embodiment: str | None = None, stride: int | None = None, limit: int | None = None
) -> dict[str, Any]:
    """Evaluate a checkpoint folder in the released layout in open loop, on all episodes of a dataset.

    Args:
        embodiment: tag of the dataset's robot; None takes the only one that the folder knows.
        others: as for `evaluate_run`.

    Raises:
        ValueError: the folder does not know the embodiment, or the dataset lacks what it reads.
    """
    _check_choice(stride, limit)
    return family_of(folder).evaluate_folder(folder, uri, embodiment=embodiment, stride=stride, limit=limit)


def _check_choice(stride: int | None, limit: int | None) -> None:
    """Raise ValueError for numbers that no evaluation has, before anything is read."""
    given = {"stride": stride, "episodes": limit}
    wrong = [f"--{name} {n}: give 1 or more" for name, n in given.items() if n is not None and n < 1]
    if wrong:
        raise ValueError("\n".join(wrong))


def device() -> str:
    """Where evaluation runs."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
