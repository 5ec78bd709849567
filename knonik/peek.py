"""Contact sheet of samples: pictures of all cameras, instruction, and the episode's states and actions as curves.

To look at what a model will be fed: are cameras and instruction of the same step, is the gripper where its value says.
"""

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from knonik.dataset import Dataset

_MARGIN = 16
_LINE = 20  # pixels from one line of text to the next
_PICTURE = 220  # height of pictures
_PLOT = 150  # height of plots with their captions
_NARROWEST = 2 * _MARGIN + 900
_MOST_ACROSS = 1600  # pictures go on a further row beyond it
_DEFAULT_CURVES = 4  # columns plotted when none are named
_GUTTER = 52  # for the ends of a plot's scale
_INK, _MUTED, _RULE, _PAPER, _WARNING = "#1b1f24", "#656d76", "#d0d7de", "#ffffff", "#cf222e"
_FINER = 3  # curves are drawn this much larger and scaled down, which smooths them


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A row of the dataset, by episode id and frame inside the episode."""

    episode: int
    frame: int


def random_samples(dataset: Dataset, count: int, seed: int = 0) -> list[Sample]:
    """`count` different rows of the episodes in use, or all of them if there are fewer, in stored order."""
    table = dataset.episodes
    total = int(table.length.sum())
    chosen = np.sort(np.random.default_rng(seed).choice(total, min(count, total), replace=False))
    ends = np.cumsum(table.length)
    place = np.searchsorted(ends, chosen, side="right")
    frames = chosen - (ends - table.length)[place]
    return [Sample(episode=e, frame=f) for e, f in zip(table.ids[place].tolist(), frames.tolist(), strict=True)]


def contact_sheet(
    dataset: Dataset,
    samples: Sequence[Sample],
    *,
    cameras: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
) -> NDArray[np.uint8]:
    """The sheet as uint8 [H, W, 3], one block per sample below the other.

    Args:
        cameras: None = all. A picture that cannot be had is replaced by the reason.
        columns: numeric columns to plot; None = the first four with floating-point values.

    Raises:
        KeyError: an unknown camera, column or episode.
    """
    cameras = [*dataset.cameras, *dataset.depth_cameras] if cameras is None else list(cameras)
    if unknown := set(cameras) - dataset.episodes.cameras.keys():
        raise KeyError(f"cameras {sorted(unknown)} are unknown; the dataset has {', '.join(dataset.episodes.cameras)}")
    columns = _curves(dataset) if columns is None else list(columns)
    if unknown := set(columns) - dataset.features.keys():
        raise KeyError(f"columns {sorted(unknown)} are unknown; the dataset has {', '.join(dataset.features)}")
    dataset.columns([*columns, *([dataset.text_column] if dataset.tasks else [])])  # in one pass over the data files
    blocks = [_block(dataset, sample, cameras, columns) for sample in samples]
    sheet = Image.new(
        "RGB", (max((b.width for b in blocks), default=_NARROWEST), sum(b.height for b in blocks) or 1), _PAPER
    )
    top = 0
    for block in blocks:
        sheet.paste(block, (0, top))
        top += block.height
    return np.asarray(sheet)


def png(sheet: NDArray[np.uint8], path: str) -> None:
    """Write a sheet to a PNG file."""
    Image.fromarray(sheet).save(path, "PNG", optimize=True)


def _curves(dataset: Dataset) -> list[str]:
    names = [key for key, feature in dataset.features.items() if feature["dtype"].startswith("float")]
    return [key for key in names if key != "timestamp"][:_DEFAULT_CURVES]


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _block(dataset: Dataset, sample: Sample, cameras: Sequence[str], columns: Sequence[str]) -> Image.Image:
    length = int(dataset.episodes.length[dataset.episodes.position(sample.episode)])
    if not 0 <= sample.frame < length:
        raise KeyError(f"episode {sample.episode} has frames 0..{length - 1}, frame {sample.frame} was asked for")
    rows = _shelves([_captioned(dataset, sample, camera) for camera in cameras])
    inner = max([_NARROWEST - 2 * _MARGIN, *(sum(p.width for p in row) + _MARGIN * (len(row) - 1) for row in rows)])
    across = min(2, max(1, len(columns)))
    width = (inner - _MARGIN * (across - 1)) // across
    plots = [_plot(dataset, sample, column, length, width) for column in columns]
    rows += [plots[begin : begin + across] for begin in range(0, len(plots), across)]

    text = dataset.texts(np.array([sample.episode]), np.array([sample.frame]))[0] if dataset.tasks else ""
    task = _wrapped(text or "(no instruction)", _font(16), inner)
    height = _MARGIN + _LINE + 4 + _LINE * len(task) + 8 + sum(max(p.height for p in row) + 8 for row in rows) + _MARGIN
    block = Image.new("RGB", (inner + 2 * _MARGIN, height), _PAPER)
    draw = ImageDraw.Draw(block)
    seconds = sample.frame / dataset.fps
    title = f"episode {sample.episode}   frame {sample.frame} of {length}   {seconds:.2f} s"
    draw.text((_MARGIN, _MARGIN), title, _MUTED, _font(14))
    top = _MARGIN + _LINE + 4
    for line in task:
        draw.text((_MARGIN, top), line, _INK, _font(16))
        top += _LINE
    top += 8
    for row in rows:
        left = _MARGIN
        for part in row:
            block.paste(part, (left, top))
            left += part.width + _MARGIN
        top += max(part.height for part in row) + 8
    draw.line([(_MARGIN, height - 1), (block.width - _MARGIN, height - 1)], _RULE)
    return block


def _shelves(pictures: Sequence[Image.Image]) -> list[list[Image.Image]]:
    rows: list[list[Image.Image]] = []
    used = 0
    for picture in pictures:
        if not rows or used + _MARGIN + picture.width > _MOST_ACROSS:
            rows.append([])
            used = -_MARGIN
        rows[-1].append(picture)
        used += _MARGIN + picture.width
    return rows


def _captioned(dataset: Dataset, sample: Sample, camera: str) -> Image.Image:
    try:
        pixels = dataset.frame(episode=sample.episode, camera=camera, frame=sample.frame)
    except (ValueError, RuntimeError, OSError) as error:
        return _reason(camera, str(error))
    caption = f"{camera}   {pixels.shape[1]}x{pixels.shape[0]}"
    if pixels.dtype == np.uint16:
        low, high = int(pixels.min()), int(pixels.max())
        caption += f"   {low}..{high} mm"
        shades = (pixels[..., 0].astype(np.float64) - low) / max(1, high - low)
        pixels = np.rint(255 * (1 - shades)).astype(np.uint8)  # near is bright
    picture = Image.fromarray(pixels).convert("RGB")
    picture = picture.resize((max(1, round(picture.width * _PICTURE / picture.height)), _PICTURE))
    width = max(picture.width, round(_font(12).getlength(caption)) + 4)
    whole = Image.new("RGB", (width, _LINE + _PICTURE), _PAPER)
    ImageDraw.Draw(whole).text((0, 2), caption, _MUTED, _font(12))
    whole.paste(picture, (0, _LINE))
    return whole


def _reason(camera: str, text: str) -> Image.Image:
    whole = Image.new("RGB", (_PICTURE * 4 // 3, _LINE + _PICTURE), _PAPER)
    draw = ImageDraw.Draw(whole)
    draw.text((0, 2), camera, _MUTED, _font(12))
    draw.rectangle([(0, _LINE), (whole.width - 1, whole.height - 1)], "#f6f8fa", _RULE)
    for number, line in enumerate(_wrapped(text, _font(12), whole.width - 16)[: _PICTURE // 16 - 1]):
        draw.text((8, _LINE + 8 + 16 * number), line, _WARNING, _font(12))
    return whole


def _plot(dataset: Dataset, sample: Sample, column: str, length: int, width: int) -> Image.Image:
    rows = dataset.rows(np.full(length, sample.episode), np.arange(length))
    values = np.asarray(dataset.column(column)[rows], np.float64)
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    whole = Image.new("RGB", (width, _PLOT), _PAPER)
    draw = ImageDraw.Draw(whole)
    now = ", ".join(map(_number, values[sample.frame][:8].tolist()))
    caption = f"{column} [{values.shape[1]}]   at the cursor: {now}{', ...' if values.shape[1] > 8 else ''}"
    draw.text((0, 2), _cut(caption, _font(12), width), _MUTED, _font(12))
    size = width - _GUTTER, _PLOT - _LINE
    area = Image.new("RGB", (size[0] * _FINER, size[1] * _FINER), _PAPER)
    pen, pad = ImageDraw.Draw(area), 4 * _FINER
    x = pad + np.arange(length) / max(1, length - 1) * (area.width - 2 * pad - 1)
    y = area.height - pad - 1 - (values - low) / ((high - low) or 1.0) * (area.height - 2 * pad - 1)
    pen.line([(x[sample.frame], 0), (x[sample.frame], area.height)], _INK, _FINER)
    for number in range(values.shape[1]):
        hue = colorsys.hsv_to_rgb(number / max(values.shape[1], 6), 0.75, 0.75)
        points = [(a, b) for a, b in zip(x.tolist(), y[:, number].tolist(), strict=True) if np.isfinite(b)]
        ink = tuple(round(255 * part) for part in hue)
        pen.line(points if len(points) > 1 else points * 2, ink, 4 * _FINER // 3, "curve")
    whole.paste(area.resize(size, Image.Resampling.LANCZOS), (_GUTTER, _LINE))
    draw.rectangle([(_GUTTER, _LINE), (width - 1, _PLOT - 1)], None, _RULE)
    draw.text((_GUTTER - 6, _LINE), _number(high), _MUTED, _font(11), "ra")
    draw.text((_GUTTER - 6, _PLOT - 1), _number(low), _MUTED, _font(11), "rd")
    return whole


def _number(value: float) -> str:
    """Three digits, and all of them before the point where that is still short."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def _wrapped(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> list[str]:
    lines: list[str] = []
    for word in text.split():
        if lines and font.getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return [_cut(line, font, width) for line in lines] or [""]


def _cut(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}...") > width:
        text = text[:-1]
    return f"{text}..."
