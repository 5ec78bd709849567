"""Open-loop evaluation: a policy predicts from recorded observations and is compared with what was recorded next.

The policy is asked as a server would ask it, through `GR00TPolicy.get_action`.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from knonik import Batch, Dataset
    from models.gr00t_n17.inputs.modality import Modalities
    from models.gr00t_n17.policy import GR00TPolicy


def action_errors(
    policy: "GR00TPolicy", batches: "Iterable[Batch]", modalities: "Modalities", *, steps: int, seed: int
) -> dict[str, Any]:
    """Mean squared and absolute error of predicted actions in robot units.

    Args:
        policy: for the embodiment of the dataset.
        batches: recorded observations with the action chunks after them; raw, not prepared.
        modalities: the policy's groups as they lie in the dataset's columns, and its cameras as the batches name them.
        steps: leading steps of a chunk that are compared; those behind the end of an episode are left out.
        seed: of the sampler's start, which depends on it and on the sample.

    Returns:
        `action_mse` and `action_mae` over all entries, with `_GROUP` behind over those of one group; `predictions`.
    """
    import numpy as np

    sums = {group.name: np.zeros(3) for group in modalities.action}
    predictions = 0
    for batch in batches:
        predicted, _ = policy.get_action(_observation(batch, modalities), {"noise": _noise(policy, batch, seed)})
        recorded = {name: values.numpy() for name, values in batch.action.items()}
        real = ~batch.action_is_pad.numpy()[:, :steps]
        for group in modalities.action:
            difference = predicted[group.name].astype(np.float64)[:, :steps] - group.of(recorded)[:, :steps]
            difference = difference[real]
            sums[group.name] += (np.square(difference).sum(), np.abs(difference).sum(), difference.size)
        predictions += len(batch)
    total = np.sum(list(sums.values()), axis=0)
    result: dict[str, Any] = {"predictions": predictions}
    for place, name in enumerate(("action_mse", "action_mae")):
        result[name] = float(total[place] / total[2])
        result |= {f"{name}_{group}": float(of[place] / of[2]) for group, of in sums.items()}
    return result


def _observation(batch: "Batch", modalities: "Modalities") -> dict[str, Any]:
    state = {name: values.numpy() for name, values in batch.state.items()}
    return {
        "video": {name: batch.images[camera].numpy() for name, camera in modalities.video},
        "state": {group.name: group.of(state) for group in modalities.state},
        "language": {modalities.language: [[text] for text in batch.text]},
    }


def _noise(policy: "GR00TPolicy", batch: "Batch", seed: int) -> Any:
    from models.common import draws
    from models.common.held_out import sample_keys

    config = policy.policy.network.config
    shape = (config.action_horizon, config.max_action_dim)
    return draws.normal(seed, "validation.sample", sample_keys(batch), shape)


def joined(dataset: "Dataset", modality: Mapping[str, Any] | None, asked: "Modalities") -> "Modalities":
    """A policy's groups as they lie in a dataset's columns, by the names of its modality.json or of its columns.

    Raises:
        ValueError: the dataset lacks a group or a camera; names those it has.
    """
    import math

    from models.gr00t_n17.inputs.modality_sources import DEFAULT_COLUMNS, resolve

    config = asked.to_config()
    widths: dict[str, dict[str, int]] = {}
    for section in ("state", "action"):
        named = ((modality or {}).get(section) or {}).values()
        columns = {(said or {}).get("original_key") or DEFAULT_COLUMNS[section] for said in named}
        columns |= {
            name for name in dataset.features if name.removeprefix("observation.") in config[section]["modality_keys"]
        }
        widths[section] = {
            name: math.prod(dataset.features[name]["shape"]) for name in sorted(columns) if name in dataset.features
        }
    return resolve(
        cameras=dataset.cameras,
        state=widths["state"],
        action=widths["action"],
        horizon=asked.horizon,
        modality=modality,
        checkpoint=config,
    )
