"""What a deployed policy is given: observations in upstream's two forms, checked, and its modality config."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.gr00t_n17.inputs.modality import Modalities

# Simulated environments of upstream give the instruction of a policy with the key "task" under this one.
_TASK, _TASK_IN_SIMULATION = "task", "annotation.human.coarse_action"


@dataclass(frozen=True, kw_only=True)
class ModalityConfig:
    """One modality of a policy: the steps around now that it reads or predicts, and its keys in order."""

    delta_indices: list[int]
    modality_keys: list[str]


@dataclass(frozen=True, kw_only=True)
class Observed:
    """video: {key: uint8 [B, T, H, W, 3]}; state: {key: float32 [B, T, D]}; text: B instructions; flat: its form."""

    video: Mapping[str, NDArray[np.uint8]]
    state: Mapping[str, NDArray[np.float32]]
    text: Sequence[str]
    flat: bool


def modality_config(modalities: Modalities) -> dict[str, ModalityConfig]:
    """Keys and steps by modality: video, state, action, language."""
    return {
        "video": _config(modalities.video_deltas, [name for name, _ in modalities.video]),
        "state": _config(modalities.state_deltas, [group.name for group in modalities.state]),
        "action": _config(modalities.action_deltas, [group.name for group in modalities.action]),
        "language": _config((0,), [modalities.language]),
    }


def read_observation(observation: Mapping[str, Any], modalities: Modalities) -> Observed:
    """An observation in the nested form of upstream's policy, or in the flat one of its simulation wrapper.

    Nested: {"video": {key: uint8 [B, T, H, W, 3]}, "state": {key: float [B, T, D]}, "language": {key: [[text]]}}.
    Flat: {"video.key": ..., "state.key": ..., language key: [text]}. Keys that the policy does not know are ignored.

    Raises:
        ValueError: with every problem at once: missing keys, types, shapes, batch sizes.
    """
    flat = not any(section in observation for section in ("video", "state", "language"))
    problems: list[str] = []
    video = {
        name: _array(_get(observation, "video", name, flat), f"video.{name}", 5, problems)
        for name, _ in modalities.video
    }
    state = {
        group.name: _array(_get(observation, "state", group.name, flat), f"state.{group.name}", 3, problems)
        for group in modalities.state
    }
    text = _text(observation, modalities.language, flat, problems)
    for name, frames in video.items():
        if frames is not None and (frames.dtype != np.uint8 or frames.shape[-1] != 3):
            problems.append(f"video.{name} is {frames.dtype} {list(frames.shape)}; it must be uint8 [B, T, H, W, 3]")
        elif frames is not None and frames.shape[1] != len(modalities.video_deltas):
            problems.append(
                f"video.{name} has {frames.shape[1]} frames; the policy reads {len(modalities.video_deltas)}"
            )
    for group in modalities.state:
        values, steps = state[group.name], len(modalities.state_deltas)
        if values is not None and (values.dtype.kind not in "fiu" or values.shape[1:] != (steps, group.dim)):
            form = f"float32 [B, {steps}, {group.dim}]"
            problems.append(f"state.{group.name} is {values.dtype} {list(values.shape)}; it must be {form}")
        elif values is not None and not np.isfinite(values).all():
            problems.append(f"state.{group.name} holds values that are not finite; so would be the actions")
    sizes = {f"video.{n}": len(v) for n, v in video.items() if v is not None}
    sizes |= {f"state.{n}": len(v) for n, v in state.items() if v is not None}
    sizes |= {modalities.language: len(text)} if text is not None else {}
    if len(set(sizes.values())) > 1 or 0 in sizes.values():
        problems.append(f"batch sizes differ, or there is nothing to act on: {sizes}")
    if problems or text is None:
        raise ValueError("observation does not fit the policy:\n  " + "\n  ".join(problems))
    return Observed(
        video={name: frames for name, frames in video.items() if frames is not None},
        state={name: values.astype(np.float32) for name, values in state.items() if values is not None},
        text=text,
        flat=flat,
    )


def _config(deltas: Sequence[int], keys: list[str]) -> ModalityConfig:
    return ModalityConfig(delta_indices=list(deltas), modality_keys=keys)


def _get(observation: Mapping[str, Any], section: str, name: str, flat: bool) -> Any:
    if flat:
        return observation.get(f"{section}.{name}")
    values = observation.get(section)
    return values.get(name) if isinstance(values, Mapping) else None


def _array(value: Any, key: str, ndim: int, problems: list[str]) -> NDArray[Any] | None:
    if value is None:
        problems.append(f"{key} is missing")
        return None
    array = np.asarray(value)
    if array.ndim != ndim:
        problems.append(f"{key} has the shape {list(array.shape)}; it must have {ndim} axes, batch and time first")
        return None
    return array


def _text(observation: Mapping[str, Any], key: str, flat: bool, problems: list[str]) -> list[str] | None:
    if flat:
        value = observation.get(key)
        if value is None and key == _TASK:
            value = observation.get(_TASK_IN_SIMULATION)
        rows = [[item] for item in value] if isinstance(value, list | tuple) else value
    else:
        rows = _get(observation, "language", key, flat)
    form = "a list of B texts" if flat else "a list of B lists with one text each"
    if rows is None:
        problems.append(f"language {key!r} is missing")
        return None
    if not isinstance(rows, list | tuple) or not all(
        isinstance(row, list | tuple) and len(row) == 1 and isinstance(row[0], str) for row in rows
    ):
        problems.append(f"language {key!r} must be {form}")
        return None
    return [row[0] for row in rows]
