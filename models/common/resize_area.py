"""OpenCV's INTER_AREA on uint8 levels for whole batches: the same levels on the CPU, on a GPU and in the reference.

Shrinking averages the covered area in float32 and rounds once. As soon as one axis grows OpenCV falls back to its
11-bit fixed-point linear interpolation, with its truncations. Both are reproduced.

Frames on the CPU are shrunk in another order, down before across, with fused sums: a quarter of the time. Such sums
differ from the reference's in their last bits, which shows only where they end beside a half. Those few levels are
found by a bound on the difference and summed again the reference's way, so the result is the same.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from models.common.resample import Taps, pack, taps_on, weighted

_ULP = 2.0**-24  # largest relative error of one float32 operation


def resize_area(images: Tensor, height: int, width: int) -> Tensor:
    """uint8 [N, C, H, W] -> uint8 [N, C, height, width]; the size it has already gives the tensor itself."""
    source_height, source_width = images.shape[-2:]
    if (source_height, source_width) == (height, width):
        return images
    if height > source_height or width > source_width:
        return _growing(images, height, width)
    columns, rows = _shares((source_height, source_width), (height, width), images.device)
    # The reference's order of sums, across before down.
    out = weighted(weighted(images.transpose(2, 3).contiguous(), columns).transpose(2, 3).contiguous(), rows)
    return _levels(out, (source_height, source_width), (height, width))


def resize_area_frames(frames: Tensor, height: int, width: int) -> Tensor:
    """uint8 [N, H, W, C] -> uint8 [N, height, width, C]: the levels of `resize_area` for frames as they are decoded."""
    source = (frames.shape[1], frames.shape[2])
    if source == (height, width):
        return frames
    if frames.device.type != "cpu" or height > source[0] or width > source[1]:
        return resize_area(frames.permute(0, 3, 1, 2).contiguous(), height, width).permute(0, 2, 3, 1)
    columns, rows = _shares(source, (height, width), frames.device)
    out = frames.new_empty(len(frames), height, width, frames.shape[3])
    for frame, target in zip(frames.contiguous(), out, strict=True):  # one after the other stays in the cache
        sums = _sums(frame, columns, rows)
        lines = target.flatten(1)
        if _is_mean(source, (height, width)):  # sums of integers: exact in any order
            lines.copy_(_levels(sums, source, (height, width)))
            continue
        rounded = sums.round()
        lines.copy_(rounded)
        _settle_halves(lines, sums.sub_(rounded), frame, columns, rows)
    return out


def _sums(frame: Tensor, columns: Taps, rows: Taps) -> Tensor:
    """uint8 [H, W, C] on the CPU -> float32 [h, w * C], down before across."""
    channels, width, height = frame.shape[2], columns.index.shape[1], rows.index.shape[1]
    down = embedding_bag(rows.index.T, frame.flatten(1).to(torch.float32), per_sample_weights=rows.weight.T, mode="sum")
    turned = down.t().contiguous().view(frame.shape[1], channels * height)
    across = embedding_bag(columns.index.T, turned, per_sample_weights=columns.weight.T, mode="sum")
    return across.view(width * channels, height).t().contiguous()


def _settle_halves(out: Tensor, rest: Tensor, frame: Tensor, columns: Taps, rows: Taps) -> None:
    """Sum entries of `out` [h, w * C] again, in the reference's order, where rounding depends on the order.

    `rest` is what rounding took away, in [-0.5, 0.5].
    """
    # Each of the two results is off by at most one rounding for each of its products and sums along both axes.
    bound = 2 * (len(columns.index) + len(rows.index) + 2) * 255 * _ULP
    places = (rest.abs_() > 0.5 - bound).flatten().nonzero().squeeze(1)
    if not len(places):
        return
    channels = frame.shape[2]
    y, x = places // out.shape[1], places % out.shape[1]
    column = x // channels
    picked = columns.index[:, column] * channels + x % channels  # [Kx, n]
    levels = frame.flatten(1)[rows.index[:, y][:, None], picked].to(torch.float32)  # [Ky, Kx, n]
    across = levels[:, 0] * columns.weight[0, column]
    for k in range(1, len(picked)):
        across += levels[:, k] * columns.weight[k, column]
    total = across[0] * rows.weight[0, y]
    for k in range(1, len(across)):
        total += across[k] * rows.weight[k, y]
    out.view(-1)[places] = total.round_().to(torch.uint8)


def _levels(out: Tensor, source: tuple[int, int], target: tuple[int, int]) -> Tensor:
    """Sums to levels, in place where it can be."""
    if not _is_mean(source, target):
        out = out.round_()
    elif source == (2 * target[0], 2 * target[1]):
        out = out.add_(2).mul_(0.25).floor_()  # the special case of a 2x2 mean rounds a half up
    else:
        cells = (source[0] // target[0]) * (source[1] // target[1])
        out = out.mul_(torch.tensor(1.0 / cells, dtype=torch.float32).item()).round_()
    return out.clamp_(0, 255).to(torch.uint8)


def _is_mean(source: tuple[int, int], target: tuple[int, int]) -> bool:
    """Whether whole pixels are averaged: both axes shrink by an integer."""
    return source[0] % target[0] == 0 and source[1] % target[1] == 0


def _shares(source: tuple[int, int], target: tuple[int, int], device: torch.device) -> tuple[Taps, Taps]:
    """Taps across and down."""
    build = _whole_taps if _is_mean(source, target) else _area_taps
    return taps_on(device, build, source[1], target[1]), taps_on(device, build, source[0], target[0])


def _whole_taps(source: int, target: int) -> Taps:
    """Plain sums; the integer total is divided once."""
    step = source // target
    return pack([[(out * step + k, 1.0) for k in range(step)] for out in range(target)])


def _area_taps(source: int, target: int) -> Taps:
    """Share of each source row in the interval an output row covers; OpenCV drops edge shares under 1e-3."""
    scale = 1.0 / (target / source)  # the reference's rounding of source / target
    rows = []
    for out in range(target):
        start = out * scale
        end = start + scale
        cell = min(scale, source - start)
        first, last = math.ceil(start), min(math.floor(end), source - 1)
        first = min(first, last)
        row = [(first - 1, (first - start) / cell)] if first - start > 1e-3 else []
        row += [(inner, 1.0 / cell) for inner in range(first, last)]
        if end - last > 1e-3:
            row.append((last, min(min(end - last, 1.0), cell) / cell))
        rows.append(row)
    return pack(rows)


def _growing(images: Tensor, height: int, width: int) -> Tensor:
    columns = taps_on(images.device, _linear_taps, images.shape[-1], width)
    rows = taps_on(images.device, _linear_taps, images.shape[-2], height)
    # Horizontal sums are below 2^19: exact in float32. Four bits are dropped before the vertical products, each product
    # loses sixteen, and the last two are rounded: all in integers, because the products need 27 bits.
    across = weighted(images.transpose(2, 3).contiguous(), columns).mul_(1 / 16).floor_().to(torch.int32)
    across = across.transpose(2, 3).contiguous()
    weight = rows.weight.to(torch.int32)
    out = (across.index_select(2, rows.index[0]) * weight[0][:, None]).bitwise_right_shift_(16)
    out += (across.index_select(2, rows.index[1]) * weight[1][:, None]).bitwise_right_shift_(16)
    return out.add_(2).bitwise_right_shift_(2).clamp_(0, 255).to(torch.uint8)


def _linear_taps(source: int, target: int) -> Taps:
    """Two taps per output row with 11-bit weights: OpenCV's linear kernel with the phase it uses for growing areas."""
    inverse = target / source
    scale = 1.0 / inverse
    rows = []
    for out in range(target):
        left = math.floor(out * scale)
        # float32, because the reference rounds the phase to single precision before it quantises it
        phase = float(torch.tensor((out + 1) - (left + 1) * inverse, dtype=torch.float64).to(torch.float32))
        phase = 0.0 if phase <= 0 else phase - math.floor(phase)
        if left >= source - 1:
            left, phase = source - 1, 0.0
        rows.append([(left, round((1 - phase) * 2048)), (min(left + 1, source - 1), round(phase * 2048))])
    return pack(rows, bits=11)
