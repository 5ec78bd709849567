"""Samples packed on one token axis: their values, their positions, and latents as patches and back.

Two axes run through the network. The text axis holds the caption tokens of all samples, the other one the generated
tokens: of each sample first the latent patches (frame, row, column), then its action rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.cosmos3_policy.config import LATENT_STRIDE, Cosmos3PolicyConfig

Samples = Tensor | list[Tensor]
"""One value for each of N samples: a tensor [N, ...] where the shapes agree, else a list of N tensors."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """N samples as the network reads them; noise is mixed in already.

    Raises:
        ValueError: parts that are not about the same N samples.
    """

    text_ids: Tensor
    """int64 [S]: caption tokens of all samples, one after the other. More than `text_lengths` add up to are padding."""
    text_lengths: tuple[int, ...]
    latents: Samples
    """[N, C, T, H, W] or a list of [C, T, H, W]."""
    vision_noisy: Samples
    """bool [N, T] or a list of [T]: latent frames to be denoised."""
    action: Samples | None = None
    """[N, R, D] or a list of [R, D], D the config's action_dim."""
    action_noisy: Samples | None = None
    """bool [N, R] or a list of [R]."""
    action_start: tuple[int, ...] = ()
    """Place in time of a sample's first row: 0 where that is the state, 1 where it is the first command."""
    sigma: Tensor
    """float32 [N] in 0..1, one noise level for both parts of a sample."""
    domain: int | Tensor = 0
    """Embodiment domain of all samples, or int64 [N] on the samples' device."""
    fps: tuple[float, ...]

    def __post_init__(self) -> None:
        n = len(self.text_lengths)
        if self.action is not None and not self.action_start:
            object.__setattr__(self, "action_start", (0,) * n)
        counts = {"text_lengths": n, "latents": len(self.latents), "vision_noisy": len(self.vision_noisy)}
        counts |= {"sigma": len(self.sigma), "fps": len(self.fps)}
        if self.action is not None:
            noisy = () if self.action_noisy is None else self.action_noisy
            counts |= {"action": len(self.action), "action_noisy": len(noisy), "action_start": len(self.action_start)}
        if isinstance(self.domain, Tensor):
            counts["domain"] = len(self.domain)
        if len(set(counts.values())) != 1:
            raise ValueError(
                "a pack holds one value of everything for each sample: "
                + ", ".join(f"{name} {count}" for name, count in counts.items())
            )
        if sum(self.text_lengths) > len(self.text_ids) or min(self.text_lengths, default=0) < 1:
            raise ValueError(
                f"text_lengths {list(self.text_lengths)} must be 1 or more each and add up to at most the "
                f"{len(self.text_ids)} text_ids"
            )

    def __len__(self) -> int:
        return len(self.text_lengths)

    def groups(self) -> Iterator[Group]:
        """Runs of samples with equal shapes: the whole pack where tensors are stacked, else sample by sample."""
        n = len(self)
        ragged = isinstance(self.latents, list) or isinstance(self.action, list)
        for start in range(n) if ragged else (0,):
            stop = start + 1 if ragged else n
            yield Group(
                latents=_rows(self.latents, start, stop),
                vision_noisy=_rows(self.vision_noisy, start, stop),
                action=None if self.action is None else _rows(self.action, start, stop),
                action_noisy=None if self.action_noisy is None else _rows(self.action_noisy, start, stop),
                action_start=self.action_start[start:stop],
                sigma=self.sigma[start:stop],
                domain=self.domain if isinstance(self.domain, int) else self.domain[start:stop],
                fps=self.fps[start:stop],
                start=start,
                stop=stop,
            )

    def generated_lengths(self, patch: int) -> tuple[int, ...]:
        """Tokens of each sample on the generated axis."""
        return tuple(group.tokens(patch) for group in self.groups() for _ in range(group.start, group.stop))


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Samples start..stop of a pack, stacked: fields as those of `Packed`."""

    latents: Tensor
    vision_noisy: Tensor
    action: Tensor | None
    action_noisy: Tensor | None
    action_start: tuple[int, ...]
    sigma: Tensor
    domain: int | Tensor
    fps: tuple[float, ...]
    start: int
    stop: int

    def grid(self, patch: int) -> tuple[int, int, int]:
        """Latent frames, patch rows and patch columns."""
        frames, height, width = self.latents.shape[2:]
        return frames, -(-height // patch), -(-width // patch)

    @property
    def rows(self) -> int:
        """Action rows of a sample."""
        return 0 if self.action is None else self.action.shape[1]

    def tokens(self, patch: int) -> int:
        """Generated tokens of a sample."""
        frames, height, width = self.grid(patch)
        return frames * height * width + self.rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Velocity:
    """Predicted noise minus data, float32, in the structure of the pack's parts; zeros at clean positions."""

    vision: Samples
    action: Samples | None


def patchify(latents: Tensor, patch: int) -> Tensor:
    """[N, C, T, H, W] -> [N, T * rows * columns, patch * patch * C], channel fastest; odd edges padded with zeros."""
    height, width = latents.shape[-2:]
    latents = torch.nn.functional.pad(latents, (0, -width % patch, 0, -height % patch))
    cut = latents.unflatten(-1, (-1, patch)).unflatten(-3, (-1, patch))  # [N, C, T, rows, p, columns, p]
    return cut.permute(0, 2, 3, 5, 4, 6, 1).flatten(4).flatten(1, 3)


def unpatchify(patches: Tensor, shape: Sequence[int], patch: int) -> Tensor:
    """Inverse of `patchify` for latents of `shape` (C, T, H, W); what was padded is cropped."""
    channels, frames, height, width = shape
    rows, columns = -(-height // patch), -(-width // patch)
    cut = patches.view(-1, frames, rows, columns, patch, patch, channels)
    whole = cut.permute(0, 6, 1, 2, 4, 3, 5).reshape(-1, channels, frames, rows * patch, columns * patch)
    return whole[..., :height, :width]


def text_positions(packed: Packed, device: torch.device | str | None = None) -> Tensor:
    """float32 [3, S]: each sample counts from 0, the same on all three axes; padding stands at 0."""
    starts: list[int] = []
    for length in packed.text_lengths:
        starts.extend(range(length))
    starts.extend([0] * (len(packed.text_ids) - len(starts)))
    return to_device(torch.tensor(starts, dtype=torch.float32), device or packed.text_ids.device).expand(3, -1)


def generated_positions(
    packed: Packed, config: Cosmos3PolicyConfig, device: torch.device | str | None = None
) -> Tensor:
    """float32 [3, G]: time, row and column of every generated token.

    Time begins `unified_3d_mrope_temporal_modality_margin` after the sample's text and counts frames at the base rate
    in units of a latent frame: at 15 fps a latent frame is 1.6 and an action 0.4. Rows and columns count from 0, those
    of actions are 0.
    """
    margin = config.unified_3d_mrope_temporal_modality_margin
    pieces = []
    for group in packed.groups():
        frames, rows, columns = grid = group.grid(config.latent_patch_size)
        row = torch.arange(rows, dtype=torch.float32).view(1, -1, 1).expand(grid)
        column = torch.arange(columns, dtype=torch.float32).view(1, 1, -1).expand(grid)
        for i in range(group.stop - group.start):
            offset = packed.text_lengths[group.start + i] + margin
            time = _times(frames, group.fps[i], LATENT_STRIDE, config) + offset
            pieces.append(torch.stack([time.view(-1, 1, 1).expand(grid), row, column]).flatten(1))
            if group.rows:
                time = _times(group.rows, group.fps[i], 1, config, group.action_start[i]) + offset
                pieces.append(torch.stack([time, torch.zeros_like(time), torch.zeros_like(time)]))
    return to_device(torch.cat(pieces, dim=1), device or packed.text_ids.device)


def _times(count: int, fps: float, stride: int, config: Cosmos3PolicyConfig, start: int = 0) -> Tensor:
    """Places in time of `count` entries that are `stride` frames apart; every step is rounded to float32."""
    index = torch.arange(start, start + count, dtype=torch.float32)
    if not config.enable_fps_modulation or count == 1:
        return index
    # Divided first, then multiplied: another order rounds differently, and near 15,000 that is a visible angle.
    return index / (fps / stride) * (config.base_fps / LATENT_STRIDE)


def _rows(samples: Samples, start: int, stop: int) -> Tensor:
    if isinstance(samples, Tensor):
        return samples[start:stop]
    return torch.stack(samples[start:stop]) if stop - start > 1 else samples[start].unsqueeze(0)


def to_device(host: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on a device, without waiting for it."""
    if torch.device(device).type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
