"""Rows of the action stream: the robot's state, then the commands; raw robot units, the gripper turned round.

Nothing is normalised. The network counts the gripper the other way round than DROID's columns: both ways are in this
file, so that a predicted command goes back the way its column came.
"""

import logging
import re
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

logger = logging.getLogger(__name__)

Columns = Mapping[str, Tensor | NDArray[np.float32]]

_ONE_VALUE = re.compile(r"^(?P<column>.+)\[(?P<place>-?\d+)\]$")
# Speeds below which a step counts as standing still, and how many of them must follow each other.
_STILL_JOINT_PER_S = 5e-3
_STILL_GRIPPER = 1e-2
_STILL_STREAK = 3


class ActionLayout:
    """Where the columns of state and action stand in the rows.

    Args:
        state, action: {column: values}, in the order they are put one after another.
        gripper: columns, or single values as `action[6]`, that become 1 - value.
        width: values of a row of the network; what the columns leave free is zero.

    Attributes:
        action_dim: values of an action row.

    Raises:
        ValueError: a gripper column is not there, rows of state and action differ, or they are wider than `width`.
    """

    def __init__(
        self, state: Mapping[str, int], action: Mapping[str, int], *, gripper: Sequence[str], width: int
    ) -> None:
        self.state, self.action, self.width = dict(state), dict(action), width
        state_dim, self.action_dim = sum(state.values()), sum(action.values())
        problems = []
        if not action:
            problems.append("data.action is empty; the policy needs at least one column of commands")
        if state_dim != self.action_dim:
            problems.append(
                f"the state has {state_dim} values ({', '.join(state)}), the action {self.action_dim} "
                f"({', '.join(action)}); the state is the action stream's first row and must be like the others: name "
                "matching columns in data.state and data.action"
            )
        if self.action_dim > width:
            problems.append(f"an action has {self.action_dim} values, the network's rows have {width}")
        flipped: dict[str, list[int]] = {}
        known = {**self.state, **self.action}
        for name in gripper:
            match = None if name in known else _ONE_VALUE.match(name)
            column, places = name, list(range(known.get(name, 0)))
            if match is not None:
                column = match["column"]
                place, size = int(match["place"]), known.get(column, 0)
                places = [place % size] if -size <= place < size else []
            if not places:
                problems.append(f"gripper names {name!r}; there are {', '.join(f'{k}[{n}]' for k, n in known.items())}")
            flipped.setdefault(column, []).extend(places)
        if problems:
            raise ValueError("processor does not fit the data: " + "; ".join(problems))
        self._state_flips, self._action_flips = _places(self.state, flipped), _places(self.action, flipped)
        if self._state_flips != self._action_flips:
            # Right where a data set counts its state's gripper the other way round than its action's, and nowhere else.
            logger.warning(
                "gripper=%s turns round values %s of the state's row and %s of the commands: both stand in one stream, "
                "so name the columns of both unless the data set counts them in opposite ways",
                list(gripper), self._state_flips, self._action_flips,
            )  # fmt: skip

    def rows(self, state: Columns, action: Columns) -> NDArray[np.float32]:
        """[B, 1 + H, action_dim] of state columns [B, 1, D] (or [B, D]) and action columns [B, H, D]."""
        first = self.state_row(state)
        commands = _joined(action, self.action)
        return np.concatenate([first, _flip(commands, self._action_flips)], axis=1)

    def state_row(self, state: Columns) -> NDArray[np.float32]:
        """[B, 1, action_dim] of state columns [B, 1, D] or [B, D]."""
        values = _joined(state, self.state)
        if values.ndim == 2:
            values = values[:, None]
        if values.shape[1] != 1:
            raise ValueError(f"the state has {values.shape[1]} time steps, one is read; use window [0] for it")
        return _flip(values, self._state_flips)

    def padded(self, rows: NDArray[np.float32]) -> Tensor:
        """float32 [B, R, width] with zeros behind the values."""
        out = torch.zeros(*rows.shape[:2], self.width)
        out[:, :, : rows.shape[2]] = torch.from_numpy(rows)
        return out

    def idle_steps(self, rows: NDArray[np.float32], fps: float) -> NDArray[np.int64]:
        """[B] rows of each chunk in which neither joints nor gripper move, runs of less than three not counted.

        rows: [B, R, action_dim] in robot units; a row is compared with the one before it.
        """
        moved = np.abs(np.diff(rows, axis=1, prepend=rows[:, :1]))
        is_gripper = np.zeros(self.action_dim, np.bool_)
        is_gripper[self._action_flips] = True
        limit = np.where(is_gripper, _STILL_GRIPPER, _STILL_JOINT_PER_S / fps).astype(np.float32)
        still = (moved < limit).all(axis=2)
        return _in_streaks(still)

    def to_robot(self, rows: Tensor) -> dict[str, NDArray[np.float32]]:
        """Predicted rows [B, H, width or action_dim] -> {action column: [B, H, D]} in the data set's own units."""
        values = rows.detach().to("cpu", torch.float32).numpy()[:, :, : self.action_dim].copy()
        values = _flip(values, self._action_flips)
        out, begin = {}, 0
        for column, size in self.action.items():
            out[column] = values[:, :, begin : begin + size]
            begin += size
        return out


def _places(columns: Mapping[str, int], flipped: Mapping[str, Sequence[int]]) -> list[int]:
    places, begin = [], 0
    for column, size in columns.items():
        places += [begin + place for place in sorted(set(flipped.get(column, ())))]
        begin += size
    return places


def _joined(values: Columns, columns: Mapping[str, int]) -> NDArray[np.float32]:
    parts = []
    for column, size in columns.items():
        part = np.asarray(values[column], np.float32)
        if part.shape[-1] != size:
            raise ValueError(f"column {column} has {part.shape[-1]} values, the processor was made for {size}")
        parts.append(part)
    return np.concatenate(parts, axis=-1)


def _flip(rows: NDArray[np.float32], places: Sequence[int]) -> NDArray[np.float32]:
    rows[..., places] = np.float32(1) - rows[..., places]
    return rows


def _in_streaks(still: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[B] rows of [B, R] that lie in a streak; of all samples at once, since packing asks for those of every rank."""
    counted = np.zeros_like(still)
    begins = still.shape[1] - _STILL_STREAK + 1
    if begins > 0:
        streaks = np.lib.stride_tricks.sliding_window_view(still, _STILL_STREAK, axis=1).all(axis=2)
        for place in range(_STILL_STREAK):
            counted[:, place : place + begins] |= streaks
    return counted.sum(axis=1)
