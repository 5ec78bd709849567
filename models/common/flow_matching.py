"""Flow matching on straight lines from noise (t = 0) to data (t = 1): times, path, loss and Euler sampler."""

from collections.abc import Callable

import torch
from torch import Tensor


def beta_times(batch: int, alpha: float, beta: float, noise_s: float) -> Tensor:
    """Times t = noise_s * (1 - u), u ~ Beta(alpha, beta), float32 [batch], from the global CPU generator."""
    # The concentrations are CPU tensors so that the draw comes from the CPU generator on every device.
    u = torch.distributions.Beta(torch.tensor(alpha), torch.tensor(beta)).sample((batch,))
    return (1.0 - u) * noise_s


def interpolate(noise: Tensor, data: Tensor, time: Tensor) -> Tensor:
    """Point of the path at `time` [B]: (1 - t) * noise + t * data, for tensors [B, ...]."""
    t = time.reshape(-1, *([1] * (noise.ndim - 1)))
    return (1.0 - t) * noise + t * data


def time_bucket(time: Tensor, num_buckets: int) -> Tensor:
    """Whole-number time floor(t * num_buckets), int64; `time` decides the precision of the product."""
    return (time * num_buckets).long()


def masked_mean_square(prediction: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Sum of masked squared errors over (sum of mask + 1e-6): one mean over the whole batch, not one per sample."""
    # mse_loss is on autocast's float32 list, so the square is never formed in half precision.
    error = torch.nn.functional.mse_loss(prediction, target, reduction="none")
    return (error * mask).sum() / (mask.sum() + 1e-6)


def euler(velocity: Callable[[Tensor, int], Tensor], start: Tensor, *, num_steps: int, num_buckets: int) -> Tensor:
    """Integrate `velocity(x, bucket)` from t = 0 to 1 in equal steps, bucket = int(k / num_steps * num_buckets)."""
    x = start
    for k in range(num_steps):
        x = x + velocity(x, int(k / num_steps * num_buckets)) / num_steps
    return x
