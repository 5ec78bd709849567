"""Actions relative to the state at the anchor, the way back, and their statistics per step of the chunk; in float64."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.common.rotations import (
    Array,
    matrix_from_rot6d,
    matrix_from_rotvec,
    product,
    rot6d_from_matrix,
    rotvec_from_matrix,
)
from models.gr00t_n17.inputs.modality import ActionGroup, Group

_BLOCK_ROWS = 1 << 16  # windows looked at together: their matrices take some ten times the memory of their values

_REDUCTIONS: dict[str, Callable[[NDArray[np.float32]], NDArray[np.floating]]] = {
    "min": lambda x: x.min(axis=0),
    "max": lambda x: x.max(axis=0),
    # Summed in double precision: float32 sums over millions of rows lose digits.
    "mean": lambda x: x.mean(axis=0, dtype=np.float64),
    "std": lambda x: x.std(axis=0, dtype=np.float64),
    "q01": lambda x: np.quantile(x, 0.01, axis=0),
    "q99": lambda x: np.quantile(x, 0.99, axis=0),
}


def to_relative(action: NDArray[np.floating], reference: NDArray[np.floating], group: ActionGroup) -> Array:
    """Absolute actions [B, H, D] and raw states [B, D] -> differences float64 [B, H, D].

    NON_EEF: action - state. EEF: the rigid motion from the state's frame to the action's, inverse(T_state) T_action.
    """
    if group.type == "NON_EEF":
        return action.astype(np.float64) - reference.astype(np.float64)[:, None]
    base, origin = _pose(reference[:, None], group.format)
    rotation, place = _pose(action, group.format)
    turned = product(base, rotation, "ji...,jk...->ik...")  # by the inverse, which is the transpose
    moved = _applied(base, place, "ji...,j...->i...") - _applied(base, origin, "ji...,j...->i...")
    return _written(turned, moved, group.format)


def to_absolute(relative: NDArray[np.floating], reference: NDArray[np.floating], group: ActionGroup) -> Array:
    """Inverse of `to_relative`."""
    if group.type == "NON_EEF":
        return reference.astype(np.float64)[:, None] + relative.astype(np.float64)
    base, origin = _pose(reference[:, None], group.format)
    rotation, place = _pose(relative, group.format)
    return _written(product(base, rotation), _applied(base, place, "ij...,j...->i...") + origin, group.format)


def relative_statistics(
    state: NDArray[Any],
    action: NDArray[Any],
    *,
    first_row: NDArray[np.int64],
    length: NDArray[np.int64],
    group: ActionGroup,
    reference: Group,
    deltas: Sequence[int],
) -> dict[str, Array]:
    """Statistics of one relative group over every full window of every episode, float64 [horizon, D] by name.

    Differences are rounded to float32 before they are counted, as the reference does. Only `min` and `max` normalise
    such a group, whatever use_percentiles says; the others complete statistics.json.

    Args:
        state, action: the columns, [rows of the dataset, D].
        first_row, length: [episodes], where the episodes in use lie.
        deltas: action steps around the anchor; the state is that of the anchor.

    Raises:
        ValueError: no episode is as long as a chunk, or a value is not finite.
    """
    usable = np.maximum(length - max(deltas), 0)
    if not usable.sum():
        raise ValueError(
            f"no episode has {max(deltas) + 1} steps: there is no full chunk for the statistics of {group.name}; "
            "lower data.horizon"
        )
    anchors = np.repeat(first_row, usable) + np.arange(usable.sum()) - np.repeat(np.cumsum(usable) - usable, usable)
    steps: dict[str, list[NDArray[np.floating]]] = {name: [] for name in _REDUCTIONS}
    for delta in deltas:
        values = np.empty((len(anchors), group.dim), np.float32)
        for begin in range(0, len(anchors), _BLOCK_ROWS):
            rows = anchors[begin : begin + _BLOCK_ROWS]
            ahead = action[rows + delta, group.start : group.stop].astype(np.float32, copy=False)
            base = state[rows, reference.start : reference.stop].astype(np.float32, copy=False)
            values[begin : begin + len(rows)] = to_relative(ahead[:, None], base, group)[:, 0]
        if not np.all(np.isfinite(values)):
            raise ValueError(
                f"relative actions of {group.name} are not finite: {group.column} or {reference.column} hold such "
                "values, or rotations of length zero"
            )
        for name, reduced in steps.items():
            reduced.append(_REDUCTIONS[name](values))
    return {name: np.stack(reduced).astype(np.float64) for name, reduced in steps.items()}


def _pose(values: NDArray[np.floating], form: str) -> tuple[Array, Array]:
    """Rotation matrices [..., 3, 3] and places [..., 3] of written poses."""
    read = matrix_from_rot6d if form == "XYZ_ROT6D" else matrix_from_rotvec
    return read(values[..., 3:]), values[..., :3].astype(np.float64)


def _written(rotation: Array, place: Array, form: str) -> Array:
    numbers = rot6d_from_matrix(rotation) if form == "XYZ_ROT6D" else rotvec_from_matrix(rotation)
    return np.concatenate([place, numbers], axis=-1)


def _applied(matrix: Array, vector: Array, indices: str) -> Array:
    """Products of matrices [..., 3, 3] and vectors [..., 3]."""
    planes = np.ascontiguousarray(np.moveaxis(matrix, (-2, -1), (0, 1))), np.moveaxis(vector, -1, 0)
    return np.moveaxis(np.einsum(indices, *planes), 0, -1)
