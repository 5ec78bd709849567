"""The low-dimensional part of a batch: state, action and text gathered from mapped columns, all samples at once."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from knonik.batches.batch import Batch
from knonik.columns.arrays import Column
from knonik.dataset import Dataset
from knonik.order.mixture import Mixture, Part
from knonik.order.plan import BatchPlan, Offsets


class Gather:
    """Turns a plan and its images into a batch.

    Args:
        source: a dataset or a mixture.
        windows: key to step offsets from the anchor, for every key of `state` and `action`.
        state, action: column keys; the windows of all action keys are equal.

    Attributes:
        widths: [parts] key to number of values of each part's own column. With pad="zero" the batch has the greatest,
            and the rest of a narrower part's vectors is zero.

    Raises:
        ValueError: the widths of a column differ and the mixture's policy does not allow it; names parts and argument.
        knonik.metadata.lerobot.MetadataError: a part lacks a column.
    """

    def __init__(
        self, source: Dataset | Mixture, *, windows: Mapping[str, Offsets], state: Sequence[str], action: Sequence[str]
    ) -> None:
        mixture = source if isinstance(source, Mixture) else Mixture([Part(dataset=source)])
        self._datasets = [part.dataset for part in mixture.parts]
        self._state, self._action = list(state), list(action)
        keys = [*state, *action]
        self._windows = [
            {key: mixture.offsets(number, windows[key]) for key in keys} for number in range(len(mixture.parts))
        ]
        self._columns: list[dict[str, Column]] = []
        for part in mixture.parts:
            # One pass over the data files for all of them; the text column is kept by the dataset.
            found = part.dataset.columns([*map(part.column, keys), part.dataset.text_column])
            self._columns.append({key: found[part.column(key)] for key in keys})
        self.widths = [{key: column.shape[1] for key, column in columns.items()} for columns in self._columns]
        for key in keys:
            each = [widths[key] for widths in self.widths]
            if mixture.pad == "error" and len(set(each)) > 1:
                raise ValueError(
                    f"column {key} has {each} values in parts 0 to {len(each) - 1}; give pad='zero' to fill up with "
                    "zeros, or name other columns in Part.columns"
                )

    def batch(self, plan: BatchPlan, images: Mapping[str, Any]) -> Batch:
        """The batch of a plan; `images` go into it as they are."""
        members = [np.flatnonzero(plan.datasets == number) for number in range(len(self._datasets))]
        state = {key: torch.from_numpy(self._window(plan, members, key)[0]) for key in self._state}
        is_pad = np.zeros((len(plan.positions), 0), np.bool_)
        action = {}
        for key in self._action:
            values, is_pad = self._window(plan, members, key)
            action[key] = torch.from_numpy(values)
        text = [""] * len(plan.positions)
        for dataset, chosen in zip(self._datasets, members, strict=True):
            if len(chosen):
                own = dataset.texts(plan.episodes[chosen], plan.frames[chosen])
                for place, said in zip(chosen.tolist(), own, strict=True):
                    text[place] = said
        return Batch(
            images=dict(images),
            state=state,
            action=action,
            action_is_pad=torch.from_numpy(is_pad),
            text=text,
            dataset=torch.from_numpy(plan.datasets),
            episode=torch.from_numpy(plan.episodes),
            frame=torch.from_numpy(plan.frames),
            position=torch.from_numpy(plan.positions),
            begin=plan.begin,
            end=plan.end,
        )

    def close(self) -> None:
        """Let go of the mapped columns."""
        self._columns = []

    def _window(
        self, plan: BatchPlan, members: list[NDArray[np.int64]], key: str
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Values [B, T, D] of a column around the anchors, and which steps lie outside their episode, [B, T]."""
        steps = len(self._windows[0][key])
        values = np.zeros((len(plan.positions), steps, max(widths[key] for widths in self.widths)), np.float32)
        is_pad = np.zeros((len(plan.positions), steps), np.bool_)
        for number, (dataset, chosen) in enumerate(zip(self._datasets, members, strict=True)):
            if not len(chosen):
                continue
            episodes = plan.episodes[chosen]
            frames, is_pad[chosen] = dataset.window(episodes, plan.frames[chosen], self._windows[number][key])
            values[chosen, :, : self.widths[number][key]] = self._columns[number][key][dataset.rows(episodes, frames)]
        return values, is_pad
