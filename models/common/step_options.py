"""What may be said about the averaged weights: values only, nothing here imports torch.

`models.common.ema` applies them. The other two options of a step are single words: `Lookahead` of
`models.common.lookahead` and `Graphs` of `models.common.graphs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

EmaKind = Literal["power", "constant"]
Lookahead = Literal["none", "stream"]
"""`stream` (exact): the frozen part of the next micro-batch runs beside the trained part of this one."""
Graphs = Literal["none", "head"]
"""`head` (exact): one CUDA graph of the trained head for each shape; without a GPU it changes nothing and says so."""

# Wider than this, the profile of a power average would fall towards the present.
MAX_RATE = 0.288


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    """Average of the trained weights over the steps. Exact: training itself is the same with and without it.

    Raises:
        ValueError: naming everything that is wrong.
    """

    kind: EmaKind = "power"
    """`power`: always over the same share of the run so far, so that its beginning is forgotten; `constant`: over the
    same number of steps throughout."""
    rate: float | None = None
    """Kind `power`: width of the average as a share of the run so far, 0.1 when null."""
    decay: float | None = None
    """Kind `constant`: what a step leaves of the average, 0.999 when null, which averages over 1000 steps."""

    def __post_init__(self) -> None:
        problems = []
        if self.kind not in get_args(EmaKind):
            problems.append(f"kind={self.kind!r}: one of {', '.join(get_args(EmaKind))}")
        for name, owner in (("rate", "power"), ("decay", "constant")):
            if getattr(self, name) is not None and self.kind in get_args(EmaKind) and self.kind != owner:
                problems.append(f"{name} is read with kind={owner} only, and kind={self.kind}: set it to null")
        if self.rate is not None and not _between(self.rate, MAX_RATE):
            problems.append(f"rate={self.rate!r}: a number above 0 and at most {MAX_RATE} is needed")
        if self.decay is not None and not (_between(self.decay, 1.0) and self.decay < 1):
            problems.append(f"decay={self.decay!r}: a number above 0 and below 1 is needed")
        if problems:
            raise ValueError("ema: " + "; ".join(problems))


def _between(value: object, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= most
