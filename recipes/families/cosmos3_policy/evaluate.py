"""The Cosmos-3 policy beside recorded episodes: chunks it predicts from recorded moments, and what was done then."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.evaluate import device
from recipes.families.cosmos3_policy.build import build_vae
from recipes.held_out import every_step, first_episodes
from recipes.load import from_dict
from recipes.parts import parts
from recipes.sources import held_out_part, open_part

if TYPE_CHECKING:
    import torch

    from knonik import Batch, Dataset
    from models.cosmos3_policy.policy import Policy
    from recipes.trained import TrainedRun

BATCH = 8


def evaluate_run(trained: "TrainedRun", *, uri: str | None, stride: int | None, limit: int | None) -> dict[str, Any]:
    """Open-loop figures on the episodes that the run held out, or on all of another dataset."""
    from models.cosmos3_policy.policy import Policy

    recipe = trained.recipe
    (part,) = parts(recipe)
    if uri is None and not recipe.data.validation and recipe.data.validation_episodes is None:
        return {}
    policy = Policy(trained.network, build_vae(recipe).to(device()), trained.processor, seed=recipe.seed)
    if uri is not None:
        return _on_dataset(policy, uri, stride, limit)
    with open_part(recipe, part) as dataset:
        held_out = held_out_part(recipe, dataset)
        assert held_out is not None
        return {"uri": part.uri, **compare(policy, held_out, stride, limit, fps=recipe.data.fps)}


def evaluate_folder(folder: Path, uri: str, *, stride: int | None = None, limit: int | None = None) -> dict[str, Any]:
    """As `recipes.evaluate.evaluate_folder`."""
    import knonik

    with knonik.open(uri):  # what is not there is told before weights are read
        pass
    from models.cosmos3_policy.checkpoint.export import RECIPE_FILE
    from models.cosmos3_policy.policy import Policy

    file = folder / RECIPE_FILE
    recipe = from_dict(json.loads(file.read_text())) if file.is_file() else None
    encoder = None
    if not (folder / "vae").is_dir() and recipe is not None:
        # a run that took its encoder from elsewhere, or a tiny one with a random encoder
        encoder = build_vae(recipe).to(device())
    # As a run is evaluated: with noise of its seed, and in float32 where its weights were written so.
    seed, dtype = 0 if recipe is None else recipe.seed, _stored_dtype(folder)
    policy = Policy.from_pretrained(folder, encoder=encoder, device=device(), dtype=dtype, seed=seed)
    return _on_dataset(policy, uri, stride, limit)


def _stored_dtype(folder: Path) -> "torch.dtype":
    """float32 where most tensors of a checkpoint are, else bfloat16."""
    import torch

    from models.cosmos3_policy.checkpoint.weights import open_weights

    with open_weights(folder) as stored:
        dtypes = list(stored.dtypes.values())
    return torch.float32 if 2 * dtypes.count(torch.float32) > len(dtypes) else torch.bfloat16


def _on_dataset(policy: "Policy", uri: str, stride: int | None, limit: int | None) -> dict[str, Any]:
    import knonik

    with knonik.open(uri) as dataset:
        # a chunk's steps are those of its training, whatever clock the dataset has
        return {"uri": uri, **compare(policy, dataset, stride, limit, fps=policy.processor.settings.fps)}


def compare(
    policy: "Policy", dataset: "Dataset", stride: int | None, limit: int | None, *, fps: float | None = None
) -> dict[str, Any]:
    """Errors of chunks predicted at every `stride`-th step, by default one chunk after the other.

    Args:
        limit: so many episodes at most.
        fps: of the steps; None counts the dataset's own rows.

    Raises:
        ValueError: the stride is longer than a chunk, or the dataset lacks a camera or column of the policy.
    """
    processor = policy.processor
    steps = processor.horizon if stride is None else stride
    if not 1 <= steps <= processor.horizon:
        raise ValueError(f"--stride {steps} is not in 1 to {processor.horizon}, the steps of a predicted chunk")
    missing = [name for name in processor.cameras if name not in dataset.cameras]
    missing += [name for name in (*processor.state_keys, *processor.action_keys) if name not in dataset.features]
    if missing:
        raise ValueError(f"the policy reads {missing}, which this dataset has not; it has {sorted(dataset.features)}")
    view = dataset if limit is None else first_episodes(dataset, limit)
    batches = every_step(
        view,
        {
            **dict.fromkeys(processor.cameras, range(1)),
            **dict.fromkeys(processor.action_keys, range(processor.horizon)),
        },
        cameras=processor.cameras,
        state=processor.state_keys,
        action=processor.action_keys,
        stride=steps,
        batch_size=BATCH,
        fps=fps,
    )
    return {"episodes_compared": len(view.episodes), **action_errors(policy, batches, steps=steps)}


def action_errors(policy: "Policy", batches: "Iterable[Batch]", *, steps: int) -> dict[str, Any]:
    """Mean squared and absolute error of predicted actions in robot units.

    Args:
        batches: recorded moments with the action chunks after them; raw, not prepared. The noise that a chunk starts
            from depends on the policy's seed and the moment's place among them.
        steps: leading steps of a chunk that are compared; those behind the end of an episode are left out.

    Returns:
        `action_mse` and `action_mae` over all entries, with `_COLUMN` behind over those of one of several columns;
        `predictions`.
    """
    from models.cosmos3_policy.validation import error_sums

    columns = policy.processor.action_keys
    sums, predictions = error_sums(policy, batches, steps=steps)
    total = sums.sum(0)
    result: dict[str, Any] = {"predictions": predictions}
    for place, name in enumerate(("action_mse", "action_mae")):
        result[name] = float(total[place] / total[2])
        if len(columns) > 1:
            result |= {f"{name}_{column}": float(of[place] / of[2]) for column, of in zip(columns, sums, strict=True)}
    return result
