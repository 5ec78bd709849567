"""Rectified flow of video and actions together: noise levels, noise, what the network shall say, and the loss.

A point of the path at noise level sigma is sigma * noise + (1 - sigma) * data, and the network gives its direction,
noise - data. One level holds for both parts of a sample. The first latent frame and the first action row, which is the
measured state, are given clean.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models.common import draws
from models.cosmos3_policy.packed import Packed, Velocity
from models.cosmos3_policy.vision.canvas import crop_latents

SHIFTS = {"256": 3.0, "480": 5.0, "720": 10.0}
"""Shift of the noise levels by the canvas tier, as the released model was trained; see `shift_of`."""
# Esser et al. 2024 (arXiv 2403.03206), "mode sampling with heavy tails"; the scale is that of the released model.
_MODE_SCALE = 1.29
_DRAWN_AT_ONCE = 1 << 22


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Defaults are those of the released policy."""

    shift: float = SHIFTS["480"]
    """Above 1 it moves noise levels towards 1: what a small picture hides, a large one still shows."""
    vision_weight: float = 10.0
    action_weight: float = 10.0

    def __post_init__(self) -> None:
        if self.shift <= 0:
            raise ValueError(f"objective.shift={self.shift}: a number above 0 is needed")
        if min(self.vision_weight, self.action_weight) < 0 or self.vision_weight + self.action_weight == 0:
            raise ValueError(
                f"objective.vision_weight={self.vision_weight}, action_weight={self.action_weight}: both at least 0, "
                "one of them above"
            )


def shift_of(tier: str) -> float:
    """Shift for a canvas tier; tier 704 has that of 720, and any other size that of the reference recipe's 480."""
    return SHIFTS.get("720" if tier == "704" else tier, SHIFTS["480"])


class Flow(NamedTuple):
    """A pack of noised samples, and what its network shall say: noise - data, float32, in the shapes of its parts."""

    packed: Packed
    vision_target: Tensor
    action_target: Tensor
    action_dim: int
    """Leading channels of an action row that mean something."""


def sigma_of(u: Tensor, shift: float) -> Tensor:
    """Noise level in 0..1 for a uniform u in 0..1, which it falls with; computed in the precision of u."""
    t = 1.0 - u - _MODE_SCALE * ((0.5 * torch.pi * u).cos().square() - 1.0 + u)
    return shift * t / (1.0 + (shift - 1.0) * t)


def sigmas(seed: int, position: Tensor, shift: float) -> Tensor:
    """Noise level of each sample, float32 [N], for int64 positions [N]."""
    return sigma_of(draws.uniform(seed, "flow.sigma", position).double(), shift).float()


def noised(
    latents: Tensor,
    action: Tensor,
    *,
    seed: int,
    position: Tensor,
    shift: float,
    action_dim: int,
    text_ids: Tensor,
    text_lengths: tuple[int, ...],
    domain: int | Tensor,
    fps: float,
) -> Flow:
    """Mix noise into N samples; noise and its level are functions of (seed, position).

    Args:
        latents: float32 [N, C, T, H, W], their first frame the one that is given.
        action: float32 [N, R, D]: the measured state, then commands; channels from `action_dim` on are zeros.
        position: int64 [N], the samples' places in the whole run.
        text_ids, text_lengths, domain, fps: of the pack.
    """
    n, device = len(text_lengths), latents.device
    sigma = sigmas(seed, position, shift)
    frames_noisy = (torch.arange(latents.shape[2], device=device) > 0).expand(n, -1)
    rows_noisy = (torch.arange(action.shape[1], device=device) > 0).expand(n, -1)

    latents = latents.float()
    noise = _normal(seed, "flow.noise.vision", position, latents.shape[1:])
    x = _between(noise, latents, sigma.view(-1, 1, 1, 1, 1) * frames_noisy.view(n, 1, -1, 1, 1))
    vision_target = noise.sub_(latents)

    action = action.float()
    noise = torch.zeros_like(action)  # padded channels get none
    noise[..., :action_dim] = _normal(seed, "flow.noise.action", position, (action.shape[1], action_dim))
    rows = _between(noise, action, sigma.view(-1, 1, 1) * rows_noisy.unsqueeze(-1))
    rows[..., action_dim:] = 0.0
    packed = Packed(
        text_ids=text_ids,
        text_lengths=text_lengths,
        latents=x,
        vision_noisy=frames_noisy,
        action=rows,
        action_noisy=rows_noisy,
        action_start=(0,) * n,
        sigma=sigma,
        domain=domain,
        fps=(float(fps),) * n,
    )
    return Flow(packed, vision_target, noise - action, action_dim)


def flow_of(inputs: Mapping[str, Any], encoder: Any, *, seed: int, position: Tensor, shift: float) -> Flow:
    """The noised pack of the inputs of a step: their videos encoded, without the latents around the picture.

    Args:
        inputs: as `Cosmos3Processor.to_network` gives them.
        encoder: of clips, as `vision.vae.VideoEncoder`.
        seed, position, shift: as for `noised`.
    """
    latents = crop_latents(encoder.encode(inputs["video"]), inputs["content_size"]).float()
    rest = {name: inputs[name] for name in ("action", "action_dim", "text_ids", "text_lengths", "domain", "fps")}
    return noised(latents, seed=seed, position=position, shift=shift, **rest)


def losses(velocity: Velocity, flow: Flow) -> tuple[Tensor, Tensor]:
    """Squared errors of the two parts of each sample, float32 [N] each.

    Means over all elements of a sample: clean positions count with an error of 0, padded action channels do not count.
    """
    packed, n = flow.packed, len(flow.packed)
    assert isinstance(velocity.vision, Tensor)
    assert isinstance(velocity.action, Tensor)
    assert isinstance(packed.vision_noisy, Tensor)
    assert isinstance(packed.action_noisy, Tensor)
    vision = (velocity.vision.float() - flow.vision_target) * packed.vision_noisy.view(n, 1, -1, 1, 1)
    width = flow.action_dim
    action = velocity.action[..., :width].float() - flow.action_target[..., :width]
    action = action * packed.action_noisy.unsqueeze(-1)
    return vision.square().flatten(1).mean(1), action.square().flatten(1).mean(1)


def _between(noise: Tensor, data: Tensor, sigma: Tensor) -> Tensor:
    return noise * sigma + data * (1.0 - sigma)


def _normal(seed: int, stream: str, position: Tensor, shape: Sequence[int]) -> Tensor:
    """`draws.normal`, some samples at a time: on its way it needs many times the memory of what it gives."""
    some = max(1, _DRAWN_AT_ONCE // max(1, torch.Size(shape).numel()))
    return torch.cat([draws.normal(seed, stream, part, shape) for part in position.split(some)])
