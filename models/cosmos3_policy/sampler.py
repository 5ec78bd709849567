"""From noise to data along the velocity field: noise levels of a few steps, Euler's method and UniPC.

The path is x = (1 - sigma) * data + sigma * noise with velocity noise - data, so x - sigma * velocity is the predicted
data. Solvers work on several tensors at once that share their noise level; what has velocity zero stays.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Velocity = Callable[[list[Tensor], float], list[Tensor]]
"""(x, sigma) -> velocity of each tensor; sigma is rounded down to thousandths, as servers of the model tell it."""

TIMESTEPS = 1000


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How an action chunk is sampled; the values of the released DROID policy's server.

    Attributes:
        solver: `unipc` (second order, with its corrector) or `euler`.
        steps: evaluations of the network for each chunk; guidance doubles them.
        guidance: velocity = empty prompt's + guidance * (prompt's - empty prompt's); 1 leaves the empty prompt out.
        shift: of the noise levels, s * t / (1 + (s - 1) * t), as in training.
        grid: of t before the shift. `server`: steps + 1 even values from 0.999 to 0, as the policy server spaces them;
            `diffusers`: from 1 to 0.001, as that library's scheduler does. The last level is 0 in both.
    """

    solver: Literal["unipc", "euler"] = "unipc"
    steps: int = 4
    guidance: float = 3.0
    shift: float = 5.0
    grid: Literal["server", "diffusers"] = "server"

    def __post_init__(self) -> None:
        problems = []
        if self.solver not in ("unipc", "euler"):
            problems.append(f"solver={self.solver!r}: unipc or euler")
        if self.grid not in ("server", "diffusers"):
            problems.append(f"grid={self.grid!r}: server or diffusers")
        if self.steps < 1:
            problems.append(f"steps={self.steps}: at least 1 is needed")
        if not self.shift > 0:
            problems.append(f"shift={self.shift}: it must be above 0")
        if not math.isfinite(self.guidance):
            problems.append(f"guidance={self.guidance}: a finite number; 1 means none")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def sigmas(self) -> tuple[float, ...]:
        """Noise levels before and after each step, falling to 0; rounded to float32 as schedulers keep them."""
        first, last = (1.0 - 1.0 / TIMESTEPS, 0.0) if self.grid == "server" else (1.0, 1.0 / TIMESTEPS)
        levels = []
        for k in range(self.steps):
            even = first + (last - first) * k / self.steps
            sigma = self.shift * even / (1.0 + (self.shift - 1.0) * even)
            # at 1 there is no data in x, and the logarithm of its share has no value
            levels.append(min(sigma, 1.0 - 1e-6))
        return (*torch.tensor(levels, dtype=torch.float32).tolist(), 0.0)

    def solve(self, velocity: Velocity, start: Sequence[Tensor]) -> list[Tensor]:
        """Data that the velocity field makes of the noise in `start`, float32."""
        return (unipc if self.solver == "unipc" else euler)(velocity, start, self.sigmas)


def told(sigma: float) -> float:
    """The level that the network is told: whole timesteps of 1000, rounded down."""
    return math.floor(sigma * TIMESTEPS) / TIMESTEPS


def euler(velocity: Velocity, start: Sequence[Tensor], sigmas: Sequence[float]) -> list[Tensor]:
    """One evaluation for each step, straight on: x + (sigma' - sigma) * velocity."""
    x = list(start)
    for sigma, following in itertools.pairwise(sigmas):
        x = [value + (following - sigma) * speed for value, speed in zip(x, velocity(x, told(sigma)), strict=True)]
    return x


def unipc(velocity: Velocity, start: Sequence[Tensor], sigmas: Sequence[float]) -> list[Tensor]:
    """UniPC of order 2 with B(h) = exp(h) - 1 on predicted data (Zhao et al. 2023, arXiv:2302.04867).

    Each evaluation first corrects the point it was made at and then predicts the next one, so that a step costs one
    evaluation. First and last prediction are of order 1: the last one lands on the predicted data.
    """
    x = list(start)
    corrected: list[Tensor] = []  # the point before
    data: list[list[Tensor]] = []  # predicted at the last two points, newest last
    order = 0
    for k in range(len(sigmas) - 1):
        speed = velocity(x, told(sigmas[k]))
        predicted = [value - sigmas[k] * part for value, part in zip(x, speed, strict=True)]
        if k > 0:
            x = _correct(corrected, data, predicted, sigmas[k - order : k + 1])
        data = [*data[-1:], predicted]
        corrected = x
        order = min(2, k + 1, len(sigmas) - 1 - k)
        x = _predict(corrected, data, sigmas[k + 1 - order : k + 2])
    return x


def _predict(x: list[Tensor], data: list[list[Tensor]], sigmas: Sequence[float]) -> list[Tensor]:
    """The next point. sigmas: of the order's points before, the present and the next one."""
    keep, gain, _ = _exponential(sigmas[-2], sigmas[-1])
    result = [keep * value + gain * at for value, at in zip(x, data[-1], strict=True)]
    if len(sigmas) == 3:
        weight = -gain * 0.5 / _ratio(sigmas)
        result = [value + weight * (at - before) for value, at, before in zip(result, data[-1], data[-2], strict=True)]
    return result


def _correct(
    x: list[Tensor], data: list[list[Tensor]], predicted: list[Tensor], sigmas: Sequence[float]
) -> list[Tensor]:
    """The present point again, from the one before (`x`), now that data are predicted at the present one too."""
    keep, gain, h = _exponential(sigmas[-2], sigmas[-1])
    newest, older = 0.5, 0.0
    if len(sigmas) == 3:
        # weights that make the rule exact for data that are linear in the logarithm of signal over noise, and squared
        ratio, b = _ratio(sigmas), math.expm1(-h)
        first = b / -h - 1.0
        second = first / -h - 0.5
        older = (first - 2.0 * second) / b / (1.0 - ratio)
        newest = first / b - older
        older /= ratio
    result = []
    for part, (value, at, new) in enumerate(zip(x, data[-1], predicted, strict=True)):
        change = newest * (new - at)
        if older:
            change = change + older * (data[-2][part] - at)
        result.append(keep * value + gain * (at + change))
    return result


def _exponential(sigma: float, following: float) -> tuple[float, float, float]:
    """(factor of x, factor of the data, step in log signal over noise) between two levels."""
    h = _log_ratio(following) - _log_ratio(sigma)
    return following / sigma, -(1.0 - following) * math.expm1(-h), h


def _ratio(sigmas: Sequence[float]) -> float:
    """How far the point before lies, in units of the step and negative."""
    before, present, following = (_log_ratio(sigma) for sigma in sigmas)
    return (before - present) / (following - present)


def _log_ratio(sigma: float) -> float:
    return math.inf if sigma == 0.0 else math.log1p(-sigma) - math.log(sigma)
