"""Real-time chunking: a new chunk of actions that goes on where the one under way will have got to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_KEYS = ("action", "action_horizon", "rtc_overlap_steps", "rtc_frozen_steps", "rtc_ramp_rate")


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The end of the previous chunk that the beginning of the next one repeats.

    action: {group: [B, overlap, D]} in robot units. frozen: leading steps that are executed while the policy computes
    and stay as they were. ramp_rate: how fast the steps behind them are let go.
    """

    action: Mapping[str, NDArray[np.float32]]
    frozen: int
    ramp_rate: float

    @classmethod
    def read(
        cls, options: Mapping[str, Any], *, groups: Mapping[str, int], horizon: int, ramp_rate: float
    ) -> Self | None:
        """From upstream's options; None where they ask for none.

        Args:
            options: `action` {group: [B, T, D]}, the previous chunk in robot units; `action_horizon`, its steps that
                count (T if absent); `rtc_overlap_steps`, how many of the last of these begin the new chunk;
                `rtc_frozen_steps`; `rtc_ramp_rate`.
            groups: widths of the policy's action groups.
            horizon: steps of a chunk.
            ramp_rate: the model's own.

        Raises:
            ValueError: an option is missing, or out of its range.
        """
        if misspelt := sorted(key for key in options if key.startswith("rtc_") and key not in _KEYS):
            raise ValueError(f"options: {misspelt} are unknown; allowed are {', '.join(_KEYS)}")
        if not any(key in options for key in _KEYS):
            return None
        missing = [key for key in ("action", "rtc_overlap_steps", "rtc_frozen_steps") if options.get(key) is None]
        if missing:
            raise ValueError(f"options: {missing} are missing; an overlap needs the chunk under way and both counts")
        action = {name: np.asarray(options["action"].get(name), dtype=np.float32) for name in groups}
        wrong = [name for name, width in groups.items() if action[name].ndim != 3 or action[name].shape[-1] != width]
        if wrong:
            raise ValueError(
                f"options: action must be {{group: [B, T, D]}}, of the widths {dict(groups)}; wrong: {wrong}"
            )
        length = int(options.get("action_horizon") or min(len(values[0]) for values in action.values()))
        overlap, frozen = int(options["rtc_overlap_steps"]), int(options["rtc_frozen_steps"])
        if not 0 <= frozen <= overlap <= min(length, horizon) or any(v.shape[1] < length for v in action.values()):
            raise ValueError(
                f"options: rtc_frozen_steps={frozen}, rtc_overlap_steps={overlap}, action_horizon={length}: each at "
                f"most the next, the overlap at most the policy's {horizon} steps, and no more steps than `action` has"
            )
        rate = float(options.get("rtc_ramp_rate") or ramp_rate)
        tail = {name: values[:, length - overlap : length] for name, values in action.items()}
        return cls(action=tail, frozen=frozen, ramp_rate=rate)

    @property
    def steps(self) -> int:
        """Rows of the new chunk that begin as rows of the previous one."""
        return next(iter(self.action.values())).shape[1]

    def columns(self, horizon: int) -> dict[str, Tensor]:
        """A whole chunk {group: [B, horizon, D]} whose first rows are the overlap, to be normalised as any chunk is."""
        return {
            name: torch.from_numpy(np.pad(values, ((0, 0), (0, horizon - self.steps), (0, 0)), mode="edge"))
            for name, values in self.action.items()
        }

    def velocity_scale(self, rows: int) -> Tensor:
        """float32 [rows, 1]: 0 for frozen steps, (1 - exp(-r s)) / (1 - exp(-r)) in the overlap behind them, then 1.

        s runs evenly from 0 to 1 without its ends.
        """
        scale = torch.ones(rows, 1)
        scale[: self.frozen] = 0.0
        ramp = 1 - torch.exp(-self.ramp_rate * torch.linspace(0.0, 1.0, self.steps - self.frozen + 2))
        scale[self.frozen : self.steps, 0] = (ramp / ramp[-1].clamp_min(1e-8))[1:-1]
        return scale
