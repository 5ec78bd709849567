"""GR00T's policy in the tabletop world, and beside recorded episodes."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.gr00t_n17.policy import GR00TPolicy, Policy
from recipes.evaluate import device
from recipes.families.gr00t_n17.open_loop import action_errors, joined
from recipes.families.gr00t_n17.slots import DEFAULT_EMBODIMENT
from recipes.held_out import every_step, first_episodes
from recipes.parts import parts
from recipes.schema import Recipe
from recipes.schema_data import PartConfig
from recipes.sources import held_out_part, open_part

if TYPE_CHECKING:
    from knonik import Dataset
    from models.gr00t_n17.inputs.modality import Modalities
    from models.gr00t_n17.inputs.processor import Processor
    from models.gr00t_n17.network import GR00TN17
    from recipes.trained import TrainedRun


def closed_loop(
    recipe: Recipe, network: "GR00TN17", processor: "Processor", *, swap_instruction: bool = False
) -> dict[str, Any]:
    """As `recipes.evaluate.closed_loop`."""
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


def evaluate_run(trained: "TrainedRun", *, uri: str | None, stride: int | None, limit: int | None) -> dict[str, Any]:
    """Open-loop figures on the episodes that the run held out, or on all of another dataset."""
    recipe, network = trained.recipe, trained.network
    processors: list[Processor] = list(getattr(trained.processor, "parts", [trained.processor]))
    if uri is not None:
        if len(processors) > 1:
            run = recipe.run.dir
            raise ValueError(f"{run} was trained on several robots; export it, evaluate the folder with --embodiment")
        return _on_dataset(GR00TPolicy(network, processors[0]), uri, stride, limit, recipe.seed)
    compared = []
    for part, own in zip(parts(recipe), processors, strict=True):
        if recipe.data.validation or recipe.data.validation_episodes is not None:
            with open_part(recipe, part) as dataset:
                held_out = held_out_part(recipe, dataset)
                assert held_out is not None
                policy, names, fps = GR00TPolicy(network, own), _own_names(part, own), recipe.data.fps
                found = _compare(policy, held_out, names, stride, limit, recipe.seed, fps)
                compared.append({"uri": part.uri, "embodiment": own.embodiment, **found})
    if len(compared) > 1:
        return {"parts": compared}
    return compared[0] if compared else {}


def evaluate_folder(
    folder: Path, uri: str, *, embodiment: str | None = None, stride: int | None = None, limit: int | None = None
) -> dict[str, Any]:
    """As `recipes.evaluate.evaluate_folder`."""
    tag = embodiment or _embodiment(folder)
    policy = GR00TPolicy.from_pretrained(folder, embodiment=tag, device=device())
    return {"embodiment": tag, **_on_dataset(policy, uri, stride, limit, seed=0)}


def _embodiment(folder: Path) -> str:
    from models.gr00t_n17.checkpoint.folder import CheckpointFolder

    known = list((CheckpointFolder(folder).processor or {}).get("modality_configs", {}))
    return known[0] if len(known) == 1 else DEFAULT_EMBODIMENT


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
    state = tuple(dict.fromkeys(group.column for group in modalities.state))
    action = tuple(dict.fromkeys(group.column for group in modalities.action))
    batches = every_step(
        view,
        {
            **dict.fromkeys(modalities.cameras, modalities.video_deltas),
            **dict.fromkeys(action, range(modalities.horizon)),
        },
        cameras=modalities.cameras,
        state=state,
        action=action,
        stride=steps,
        batch_size=16,
        fps=fps,
    )
    return {
        "episodes_compared": len(view.episodes),
        **action_errors(policy, batches, modalities, steps=steps, seed=seed),
    }
