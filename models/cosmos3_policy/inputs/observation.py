"""What a robot shows its policy: one moment of B robots, checked together before anything is computed with it."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from models.common.observation import Observation
from models.cosmos3_policy.inputs.processor import Cosmos3Processor


def observe(
    processor: Cosmos3Processor,
    images: Mapping[str, np.ndarray | Tensor],
    state: Mapping[str, np.ndarray | Tensor],
    text: Sequence[str],
    keys: Tensor,
) -> Observation:
    """An observation of B robots; what the processor does not read is left out.

    Args:
        images: {camera: uint8 [B, H, W, 3]}.
        state: {column: [B, D]} in robot units.
        text: B instructions.
        keys: int64 [B], the names of the robots' draws.

    Raises:
        ValueError: with every problem.
    """
    problems = []
    if isinstance(text, str):
        problems.append(f"text is one string, {text!r}; give a list with a sentence for each robot")
    robots = len(text)
    if robots == 0:
        problems.append("text is empty; a chunk is for at least one robot")
    frames: dict[str, Tensor] = {}
    for camera in processor.cameras:
        if camera not in images:
            problems.append(f"images has {sorted(images)}, the policy needs {processor.cameras}")
            continue
        frames[camera] = torch.as_tensor(images[camera])
        shape = list(frames[camera].shape)
        if frames[camera].dtype != torch.uint8:
            # Levels in 0..1 would become black pictures.
            problems.append(f"images[{camera!r}] is {frames[camera].dtype}; it must be uint8, 0 to 255")
        if len(shape) != 4 or shape[0] != robots or shape[3] != 3:
            problems.append(f"images[{camera!r}] has the shape {shape}; it must be [{robots}, height, width, 3]")
    rows: dict[str, Tensor] = {}
    for column, width in processor.layout.state.items():
        if column not in state:
            problems.append(f"state has {sorted(state)}, the policy needs {processor.state_keys}")
            continue
        rows[column] = torch.as_tensor(state[column]).to("cpu", torch.float32)
        shape = list(rows[column].shape)
        if shape != [robots, width]:
            problems.append(f"state[{column!r}] has the shape {shape}; it must be [{robots}, {width}]")
        elif not rows[column].isfinite().all():
            problems.append(f"state[{column!r}] holds values that are no numbers")
    if list(keys.shape) != [robots]:
        problems.append(f"keys has the shape {list(keys.shape)}; it must be [{robots}]")
    if problems:
        raise ValueError("observation: " + "; ".join(dict.fromkeys(problems)))
    return Observation(
        images={camera: value.unsqueeze(1) for camera, value in frames.items()},
        state={name: value.unsqueeze(1) for name, value in rows.items()},
        text=list(text),
        position=keys,
    )
