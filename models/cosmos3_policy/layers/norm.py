"""RMSNorm that leaves its input's dtype."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight over the last axis; the arithmetic is float32, the result has the dtype of `x`."""

    def forward(self, x: Tensor) -> Tensor:
        # Autocast would return float32, and the stream between the layers would double.
        with torch.autocast(x.device.type, enabled=False):
            return nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
