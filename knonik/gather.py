"""The low-dimensional part of a batch: state, action and text gathered from mapped columns, all samples at once."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from knonik.batch import Batch
from knonik.columns import Column
from knonik.dataset import Dataset
from knonik.plan import BatchPlan, Offsets


class Gather:
    """Turns a plan and its images into a batch.

    Args:
        source: an opened dataset.
        windows: key to step offsets from the anchor, for every key of `state` and `action`.
        state, action: column keys; the windows of all action keys are equal.
    """

    def __init__(
        self, source: Dataset, *, windows: Mapping[str, Offsets], state: Sequence[str], action: Sequence[str]
    ) -> None:
        self._dataset, self._windows = source, windows
        self._state, self._action = list(state), list(action)
        self._columns: dict[str, Column] = dict(source.columns([*state, *action, "task_index"]))

    def batch(self, plan: BatchPlan, images: dict[str, torch.Tensor]) -> Batch:
        """The batch of a plan; `images` go into it as they are."""
        state = {key: self._window(plan, key)[0] for key in self._state}
        is_pad = torch.zeros((len(plan.positions), 0), dtype=torch.bool)
        action = {}
        for key in self._action:
            action[key], is_pad = self._window(plan, key)
        return Batch(
            images=images,
            state=state,
            action=action,
            action_is_pad=is_pad,
            text=self._dataset.texts(plan.episodes, plan.frames),
            dataset=torch.from_numpy(plan.datasets),
            episode=torch.from_numpy(plan.episodes),
            frame=torch.from_numpy(plan.frames),
            position=torch.from_numpy(plan.positions),
            begin=plan.begin,
        )

    def close(self) -> None:
        """Let go of the mapped columns."""
        self._columns = {}

    def _window(self, plan: BatchPlan, key: str) -> tuple[torch.Tensor, torch.Tensor]:
        frames, is_pad = self._dataset.window(plan.episodes, plan.frames, self._windows[key])
        rows = self._dataset.rows(plan.episodes, frames)
        values = np.ascontiguousarray(self._columns[key][rows], dtype=np.float32)
        return torch.from_numpy(values), torch.from_numpy(is_pad)
