"""Normalisation of state and action groups with the rounding of the released processor, and its inverse.

Every map keeps the precision it is given: measured values are float32, relative actions float64. Its numbers are
float64, so differences and quotients are formed in float64 and rounded to the values' precision before the next step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

FIELDS = ("min", "max", "mean", "std", "q01", "q99")
Values = NDArray[np.floating]
Numbers = dict[str, NDArray[np.float64]]
"""Statistics of one group by name, each [D]; of relative actions [horizon, D]."""


class GroupNormalizer(Protocol):
    """Robot units to network inputs and back. dim: width of the group; width: of what the network sees of it."""

    dim: int
    width: int

    def forward(self, values: Values) -> Values:
        """[..., dim] in robot units -> [..., width], same precision."""

    def inverse(self, values: Values) -> Values:
        """[..., width] -> [..., dim] in robot units, float64 where the bounds say so."""


class Normalizer:
    """Linear map of [low, high] to [-1, 1]; elements of no extent become 0.

    Args:
        statistics: min and max, or q01 and q99, as [D] or per action step as [steps, D].
        use_percentiles: bounds are q01 and q99 instead of min and max.
        clip: keep results of `forward` in [-1, 1].
    """

    def __init__(self, statistics: Mapping[str, Any], *, use_percentiles: bool, clip: bool) -> None:
        names = ("q01", "q99") if use_percentiles else ("min", "max")
        self.low, self.high = (np.atleast_1d(np.asarray(statistics[name], dtype=np.float64)) for name in names)
        # The tolerance is relative to the second argument, so the order of the two is part of the arithmetic.
        self.flat = np.isclose(self.high, self.low)
        self.clip = clip
        self.dim = self.width = self.low.shape[-1]

    def forward(self, values: Values) -> Values:
        """The quotient is formed in float64 and rounded to the values' precision before it is stretched."""
        extent = np.where(self.flat, 1.0, self.high - self.low)
        share = ((values - self.low) / extent).astype(values.dtype)
        out = np.where(self.flat, values.dtype.type(0), 2 * share - 1)
        return np.clip(out, -1, 1) if self.clip else out

    def inverse(self, values: Values) -> Values:
        """[..., D] -> float64 [..., D] in robot units; values outside [-1, 1] are clipped first."""
        return (np.clip(values, -1, 1) + 1) / 2 * (self.high - self.low) + self.low


class MeanStd:
    """(x - mean) / std; elements of no deviation stay as they are. Only actions are clipped, if at all."""

    def __init__(self, statistics: Mapping[str, Any], *, clip: bool) -> None:
        self.mean, self.std = (np.atleast_1d(np.asarray(statistics[n], dtype=np.float64)) for n in ("mean", "std"))
        self.flat = self.std == 0
        self.clip = clip
        self.dim = self.width = self.mean.shape[-1]

    def forward(self, values: Values) -> Values:
        scaled = ((values - self.mean) / np.where(self.flat, 1.0, self.std)).astype(values.dtype)
        out = np.where(self.flat, values, scaled)
        return np.clip(out, -1, 1) if self.clip else out

    def inverse(self, values: Values) -> Values:
        return np.where(self.flat, values, (values * self.std + self.mean).astype(values.dtype))


class SinCos:
    """Angles in radians to sines followed by cosines: twice the width, and no way back."""

    def __init__(self, dim: int) -> None:
        self.dim, self.width = dim, 2 * dim

    def forward(self, values: Values) -> Values:
        return np.concatenate([np.sin(values), np.cos(values)], axis=-1)

    def inverse(self, values: Values) -> Values:
        raise ValueError("sine and cosine are not turned back into angles")


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics of one embodiment: group -> {min, max, mean, std, q01, q99}.

    state, action: each [D]. relative_action: of the differences to the state, each [horizon, D], for relative groups.
    """

    state: Mapping[str, Numbers] = field(default_factory=dict)
    action: Mapping[str, Numbers] = field(default_factory=dict)
    relative_action: Mapping[str, Numbers] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Self:
        """One tag of statistics.json; sections and numbers that nothing here reads are left out."""
        sections = {
            section: {
                group: {
                    name: np.atleast_1d(np.asarray(numbers[name], np.float64)) for name in FIELDS if name in numbers
                }
                for group, numbers in values.get(section, {}).items()
            }
            for section in ("state", "action", "relative_action")
        }
        return cls(**sections)

    def to_dict(self) -> dict[str, dict[str, dict[str, Any]]]:
        """One tag of statistics.json; `relative_action` only where there is one."""
        out = {}
        for section in ("state", "action", "relative_action"):
            groups = getattr(self, section)
            if groups or section != "relative_action":
                out[section] = {g: {name: v.tolist() for name, v in numbers.items()} for g, numbers in groups.items()}
        return out


def merged(statistics: Sequence[Statistics], weights: Sequence[float]) -> Statistics:
    """Statistics of several datasets of one embodiment, as the released trainer merges them.

    Extremes and percentiles are the outermost ones; mean and deviation are those of the mixture with these weights.
    All must have the same groups.
    """
    share = np.asarray(weights, np.float64) / np.sum(weights)

    def one(numbers: Sequence[Numbers]) -> Numbers:
        outer = {name: np.min([n[name] for n in numbers], axis=0) for name in ("min", "q01")}
        outer |= {name: np.max([n[name] for n in numbers], axis=0) for name in ("max", "q99")}
        mean, square = np.zeros_like(numbers[0]["mean"]), np.zeros_like(numbers[0]["mean"])
        for weight, n in zip(share, numbers, strict=True):
            mean, square = mean + weight * n["mean"], square + weight * (n["std"] ** 2 + n["mean"] ** 2)
        found = {**outer, "mean": mean, "std": np.sqrt(np.maximum(square - mean**2, 0))}
        return {name: found[name] for name in FIELDS}

    return Statistics(
        **{
            section: {
                group: one([getattr(each, section)[group] for each in statistics])
                for group in getattr(statistics[0], section)
            }
            for section in ("state", "action", "relative_action")
        }
    )
