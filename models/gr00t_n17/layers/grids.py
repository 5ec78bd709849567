"""Tables that depend only on the patch grids of a batch: position interpolation, rotary angles, M-RoPE offsets.

They are a pure function of the grids, so they are computed once per distinct list of grids and kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.gr00t_n17.config import TextConfig, VisionConfig

Grid = tuple[int, int]
"""Height and width of an image in patches."""


@dataclass(frozen=True, kw_only=True)
class GridGroup:
    """Tables of all images that share one grid.

    `position_rows` int64 [patches, 4] and `position_weights` float32 [patches, 4, 1] resample the learned position
    table; `cos` and `sin` float32 [patches, head_dim] rotate, the sign of the rotation's first half is in `sin`;
    `patch_rows` int64 picks the group's rows from all patches of the batch.
    """

    num_images: int
    num_patches: int
    patch_rows: Tensor
    position_rows: Tensor
    position_weights: Tensor
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, kw_only=True)
class GridTables:
    """Groups of a batch and, for its N image tokens in prompt order, what M-RoPE needs.

    `token_order` int64 [N] brings the concatenated groups back to the order of the images; `token_offsets` int64 [2, N]
    are row and column inside the merged image; `token_advance` int64 [N] is how far a token moves the position counter:
    max(h, w) of the merged grid on the last token of an image, else 0.
    """

    groups: tuple[GridGroup, ...]
    num_tokens: int
    token_order: Tensor
    token_offsets: Tensor
    token_advance: Tensor


def read_grids(image_grid_thw: Tensor | Sequence[Sequence[int]], merge: int) -> tuple[Grid, ...]:
    """Host values of [images, 3]; raises ValueError on anything but still images of whole merge blocks."""
    rows = image_grid_thw.tolist() if isinstance(image_grid_thw, Tensor) else image_grid_thw
    for row in rows:
        if len(row) != 3 or row[0] != 1 or row[1] % merge or row[2] % merge or min(row) < 1:
            raise ValueError(f"image_grid_thw row {list(row)}: expected [1, h, w] with h and w multiples of {merge}")
    return tuple((int(h), int(w)) for _, h, w in rows)


def image_tokens(grids: Sequence[Grid], batch: int, merge: int) -> int | None:
    """Image tokens of a sample when all samples of a batch have as many, else None."""
    if batch < 1 or len(grids) % batch:
        return None
    images = max(1, len(grids) // batch)
    counts = {sum(h * w for h, w in grids[i : i + images]) // merge**2 for i in range(0, len(grids), images)}
    return counts.pop() if len(counts) == 1 else None


def build_tables(grids: tuple[Grid, ...], vision: VisionConfig, device: torch.device) -> GridTables:
    """All tables of a batch whose images have these grids, in this order."""
    # Leaving inference mode: a table first needed by a validation step must be usable by autograd later.
    with torch.inference_mode(False), torch.no_grad():
        merge = vision.spatial_merge_size
        starts, total = [], 0
        for h, w in grids:
            starts.append(total)
            total += h * w
        groups, token_rows = [], []
        for grid in dict.fromkeys(grids):
            members = torch.tensor([start for g, start in zip(grids, starts, strict=True) if g == grid])
            patches = grid[0] * grid[1]
            rows = (members[:, None] + torch.arange(patches)).flatten()
            groups.append(_group(grid, len(members), rows, vision, device))
            token_rows.append(rows[:: merge * merge] // (merge * merge))
        offsets = [_merge_order(h // merge, w // merge, 1) for h, w in grids]
        advance = torch.zeros(total // (merge * merge), dtype=torch.int64)
        for (h, w), start in zip(grids, starts, strict=True):
            advance[(start + h * w) // (merge * merge) - 1] = max(h, w) // merge
        return GridTables(
            groups=tuple(groups),
            num_tokens=len(advance),
            token_order=torch.argsort(torch.cat(token_rows)).to(device),
            token_offsets=torch.cat(offsets, dim=1).to(device),
            token_advance=advance.to(device),
        )


def _merge_order(height: int, width: int, merge: int) -> Tensor:
    """Row and column [2, height * width] of the patches, merge block by merge block."""
    grid = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))
    blocks = grid.view(2, height // merge, merge, width // merge, merge)
    return blocks.transpose(2, 3).flatten(1)


def _group(grid: Grid, num_images: int, rows: Tensor, vision: VisionConfig, device: torch.device) -> GridGroup:
    position = _merge_order(*grid, vision.spatial_merge_size)
    side = round(vision.num_position_embeddings**0.5)
    taps, weights = [], []
    for axis, size in enumerate(grid):
        # First and last patch lie on the first and last entry of the table.
        source = position[axis].float() * (side - 1) / max(size - 1, 1)
        low = source.floor()
        taps.append(torch.stack([low.long(), (low.long() + 1).clamp(max=side - 1)], dim=1))
        weights.append(torch.stack([1 - (source - low), source - low], dim=1))
    head_dim = vision.hidden_size // vision.num_heads
    axis_dim = head_dim // 2
    frequency = 1.0 / (vision.rope_theta ** (torch.arange(0, axis_dim, 2, dtype=torch.float32) / axis_dim))
    angles = (position.T.float()[:, :, None] * frequency).flatten(1)
    return GridGroup(
        num_images=num_images,
        num_patches=grid[0] * grid[1],
        patch_rows=rows.to(device),
        position_rows=(taps[0][:, :, None] * side + taps[1][:, None, :]).flatten(1).to(device),
        position_weights=(weights[0][:, :, None] * weights[1][:, None, :]).flatten(1).unsqueeze(-1).to(device),
        cos=torch.cat([angles.cos(), angles.cos()], dim=-1).to(device),
        sin=torch.cat([-angles.sin(), angles.sin()], dim=-1).to(device),
    )


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + half) of the last axis in the tables' precision; `sin` is negative in its first half."""
    half = x.shape[-1] // 2
    swapped = torch.cat([x[..., half:], x[..., :half]], dim=-1)
    return (x * cos + swapped * sin).to(x.dtype)


def mrope_axes(text: TextConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of every rotary pair [head_dim / 2]: position axis (0 time, 1 row, 2 column, interleaved), float32 frequency."""
    with torch.inference_mode(False), torch.no_grad():
        pairs = torch.arange(text.head_dim // 2)
        axes = torch.zeros_like(pairs)
        for axis in (1, 2):
            axes[(pairs % 3 == axis) & (pairs < 3 * text.mrope_section[axis])] = axis
        exponents = torch.arange(0, text.head_dim, 2, dtype=torch.float32) / text.head_dim
        return axes.to(device), (1.0 / (text.rope_theta**exponents)).to(device)


def mrope_positions(valid: Tensor, places: Tensor, tables: GridTables) -> Tensor:
    """Position ids int64 [3, B, S]: text moves all axes by one, an image holds time still and then skips max(h, w).

    `valid` [B, S] bool; `places` int64 [N] are the flat indices of the image tokens. Padding gets 0.
    """
    with torch.no_grad():
        advance = valid.long().flatten().index_copy(0, places, tables.token_advance).view_as(valid)
        start = (advance.cumsum(1) - advance) * valid
        offsets = start.new_zeros(2, start.numel()).index_copy(1, places, tables.token_offsets)
        return torch.cat([start[None], start + offsets.view(2, *start.shape)])
