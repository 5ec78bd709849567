"""Points as a picture: SVG text, without a script, that takes its colours and letter sizes from the page's style."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from recipes.report.curves import Line
from recipes.report.reading import Column

WIDTH, HEIGHT = 600, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 14, 34, 52
STYLES = 6  # colours and dashes in the page's style; further runs begin again


@dataclass(frozen=True, kw_only=True)
class Axes:
    """What stands around the lines."""

    title: str
    x: str
    y: str
    log_x: bool = False
    from_zero: bool = True
    """The vertical axis begins at zero; else it is logarithmic where the values span much."""
    percent: bool = False


@dataclass(frozen=True)
class _Scale:
    """Values of one axis to places on it."""

    low: float
    high: float
    log: bool
    begin: float
    end: float

    def __call__(self, values: Column) -> Column:
        if self.log:
            share = np.log(np.maximum(values, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (values - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Round values within the range."""
        if self.log:
            found: list[float] = []
            for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8)):
                exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
                found = [m * 10.0**e for e in exponents for m in steps if self.low <= m * 10.0**e <= self.high]
                if len(found) >= 3:
                    break
            return found[:: max(1, math.ceil(len(found) / 6))]
        step = round_step((self.high - self.low) / 4)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [count * step for count in range(first, last + 1)]


def round_step(about: float) -> float:
    """1, 2, 2.5 or 5 times a power of ten, not below `about`."""
    power = 10.0 ** math.floor(math.log10(about))
    return next((m * power for m in (1, 2, 2.5, 5) if m * power >= about * 0.999), 10 * power)


def plot(lines: Sequence[Line], axes: Axes) -> str:
    """One picture; lines without a finite point are left out."""
    lines = [line for line in lines if np.isfinite(line.y).any()]
    x_scale = _scale(
        [line.x for line in lines], log=axes.log_x, zero=False, begin=_LEFT, end=WIDTH - _RIGHT, whole=True
    )
    heights = [part for line in lines for part in (line.y, *([line.dots[1]] if line.dots else []))]
    log_y = not axes.from_zero and _spans_much(heights)
    y_scale = _scale(heights, log=log_y, zero=axes.from_zero, begin=HEIGHT - _BOTTOM, end=_TOP, whole=False)
    parts = [
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(axes.title)}">',
        *_grid(x_scale, y_scale, axes),
    ]
    for line in lines:
        style = line.run % STYLES
        if line.low is not None and line.high is not None and len(line.x) > 1:
            parts.append(f'<path class="band f{style}" d="{_band(line, x_scale, y_scale)}"/>')
    for line in lines:
        style = line.run % STYLES
        parts.append(f'<path class="line s{style}" d="{_path(line, x_scale, y_scale)}"/>')
        if line.dots is not None:
            x, y = x_scale(line.dots[0]), y_scale(line.dots[1])
            parts += [
                f'<circle class="dot f{style}" cx="{a:.1f}" cy="{b:.1f}" r="4"/>' for a, b in zip(x, y, strict=True)
            ]
    return "\n".join([*parts, "</svg>"])


def number(value: float) -> str:
    """A tick's label: short, without a trailing zero."""
    if value == 0:
        return "0"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.4g}{unit}"
    return f"{value:.1e}" if abs(value) < 1e-3 else f"{value:.4g}"


def _scale(columns: Sequence[Column], *, log: bool, zero: bool, begin: float, end: float, whole: bool) -> _Scale:
    """Range of all values, with some room above and below where the range is not to be kept exact."""
    values = np.concatenate([column[np.isfinite(column)] for column in columns])
    if log:
        values = values[values > 0]
    low, high = float(values.min()), float(values.max())
    if zero:
        low = min(0.0, low)
    if high <= low:
        room = abs(high) * 0.05 or 1.0
        low, high = (low / 1.1, high * 1.1) if log else (low if zero else low - room, high + room)
    elif not whole:
        room = (high / low) ** 0.04 if log else (high - low) * 0.05
        low, high = (low / room, high * room) if log else (low if zero else low - room, high + room)
    return _Scale(low, high, log, begin, end)


def _spans_much(columns: Sequence[Column]) -> bool:
    values = np.concatenate([column[np.isfinite(column)] for column in columns])
    return bool(values.min() > 0 and values.max() / values.min() > 20)


def _grid(x_scale: _Scale, y_scale: _Scale, axes: Axes) -> list[str]:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    parts = []
    for value in y_scale.ticks():
        at = float(y_scale(np.array(value)))
        label = f"{number(value * 100)} %" if axes.percent else number(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at:.1f}" dy="0.35em" text-anchor="end">{label}</text>')
    for value in x_scale.ticks():
        at = float(x_scale(np.array(value)))
        anchor = "end" if at > right - 14 else "middle"
        parts.append(f'<line class="tick" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 5}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 8}" dy="0.8em" text-anchor="{anchor}">{number(value)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(f'<text class="name" x="{right}" y="{HEIGHT - 5}" text-anchor="end">{escape(axes.x)}</text>')
    parts.append(f'<text class="name" x="{_LEFT}" y="4" dy="0.8em">{escape(axes.y)}</text>')
    return parts


def _path(line: Line, x_scale: _Scale, y_scale: _Scale) -> str:
    """Straight from point to point, interrupted where a value is not finite."""
    x, y = x_scale(line.x), y_scale(line.y)
    if line.steps:
        x, y = np.repeat(x, 2)[1:], np.repeat(y, 2)[:-1]
    return _moves(x, y, lambda place: bool(np.isfinite(y[place])))


def _moves(x: Column, y: Column, known: Callable[[int], bool]) -> str:
    parts, pen = [], "M"
    for place in range(len(x)):
        if not known(place):
            pen = "M"
            continue
        parts.append(f"{pen}{x[place]:.1f} {y[place]:.1f}")
        pen = "L"
    if len(parts) == 1:
        parts.append("h0.1")  # with round ends: a dot
    return "".join(parts)


def _band(line: Line, x_scale: _Scale, y_scale: _Scale) -> str:
    """From the least to the largest value behind each point, cut at the plot's edges."""
    assert line.low is not None
    assert line.high is not None
    kept = np.isfinite(line.low) & np.isfinite(line.high)
    x = x_scale(line.x[kept])
    low, high = (y_scale(values[kept]).clip(_TOP, HEIGHT - _BOTTOM) for values in (line.low, line.high))
    points = [*zip(x, high, strict=True), *zip(x[::-1], low[::-1], strict=True)]
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points) + "Z"
