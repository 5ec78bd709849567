"""Evaluation of a trained policy: in the world its recipe names, and beside recorded episodes."""

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.gr00t_n17.policy import GR00TPolicy, Policy
from recipes.held_out import every_step, first_episodes
from recipes.open_loop import action_errors, joined
from recipes.parts import parts
from recipes.schema import Recipe
from recipes.schema_data import PartConfig
from recipes.sources import held_out_part, open_part

if TYPE_CHECKING:
    from knonik import Dataset
    from models.gr00t_n17.inputs.modality import Modalities
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

    trained = load_run(run, step=step)
    recipe, network = trained.recipe, trained.network.to(_device())
    processors: list[Processor] = list(getattr(trained.processor, "parts", [trained.processor]))
    result: dict[str, Any] = {"step": trained.step}
    if recipe.evaluation is not None and uri is None:
        result |= closed_loop(recipe, network, processors[0])
        result |= swapped(closed_loop(recipe, network, processors[0], swap_instruction=True))
    if uri is not None:
        if len(processors) > 1:
            raise ValueError(f"{run} was trained on several robots; export it, evaluate the folder with --embodiment")
        return result | _on_dataset(GR00TPolicy(network, processors[0]), uri, stride, limit, recipe.seed)
    compared = []
    for part, own in zip(parts(recipe), processors, strict=True):
        if recipe.data.validation or recipe.data.validation_episodes is not None:
            with open_part(recipe, part) as dataset:
                held_out = held_out_part(recipe, dataset)
                assert held_out is not None
                policy, names, fps = GR00TPolicy(network, own), _own_names(part, own), recipe.data.fps
                found = _compare(policy, held_out, names, stride, limit, recipe.seed, fps)
                compared.append({"uri": part.uri, "embodiment": own.embodiment, **found})
    if len(compared) == 1:
        result |= compared[0]
    elif compared:
        result["parts"] = compared
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
        embodiment: tag of the dataset's robot; None takes the only one that the folder knows, or `new_embodiment`.
        others: as for `evaluate_run`.

    Raises:
        ValueError: the folder does not know the embodiment, or the dataset lacks what it reads.
    """
    tag = embodiment or _embodiment(folder)
    policy = GR00TPolicy.from_pretrained(folder, embodiment=tag, device=_device())
    return {"embodiment": tag, **_on_dataset(policy, uri, stride, limit, seed=0)}


def _embodiment(folder: Path) -> str:
    from models.gr00t_n17.checkpoint.folder import CheckpointFolder
    from recipes.parts import DEFAULT_EMBODIMENT

    known = list((CheckpointFolder(folder).processor or {}).get("modality_configs", {}))
    return known[0] if len(known) == 1 else DEFAULT_EMBODIMENT


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _on_dataset(policy: Any, uri: str, stride: int | None, limit: int | None, seed: int) -> dict[str, Any]:
    import knonik

    with knonik.open(uri) as dataset:
        modality = dataset.modality.details if dataset.modality is not None else None
        modalities = joined(dataset, modality, policy.policy.processor.modalities)
        return {"uri": uri, **_compare(policy, dataset, modalities, stride, limit, seed)}


def _own_names(part: PartConfig, processor: "Processor") -> "Modalities":
    """A run's modalities with its cameras under the dataset's own names."""
    own = part.cameras or {}
    video = tuple((name, own.get(camera, camera)) for name, camera in processor.modalities.video)
    return dataclasses.replace(processor.modalities, video=video)


def _compare(
    policy: Any,
    dataset: "Dataset",
    modalities: "Modalities",
    stride: int | None,
    limit: int | None,
    seed: int,
    fps: float | None = None,
) -> dict[str, Any]:
    steps = stride or modalities.horizon
    if not 1 <= steps <= modalities.horizon:
        raise ValueError(f"--stride {steps} is not in 1 to {modalities.horizon}, the steps of a predicted chunk")
    view = dataset if limit is None else first_episodes(dataset, limit)
    batches = every_step(view, modalities, steps, batch_size=16, fps=fps)
    return {
        "episodes_compared": len(view.episodes),
        **action_errors(policy, batches, modalities, steps=steps, seed=seed),
    }
