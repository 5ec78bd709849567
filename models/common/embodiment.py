"""Layers with one weight set per embodiment, chosen by an id per sample or by one id for the whole batch."""

import torch
from torch import Tensor, nn

Category = Tensor | int
"""Ids [B] on the samples' device, or a Python integer: the whole batch shares one embodiment."""


def shared_category(ids: Category) -> Category:
    """The ids as one integer when they sit on the CPU and agree, else unchanged.

    A device tensor is never read: that would wait for the device. Pass an integer to get the plain matmul there.
    """
    if isinstance(ids, int) or ids.device.type != "cpu" or ids.numel() == 0 or torch.compiler.is_compiling():
        return ids
    first = int(ids[0])
    return first if bool((ids == first).all()) else ids


class CategorySpecificLinear(nn.Module):
    """y = x @ W[id] + b[id] for x [B, T, in]; parameters W [num_categories, in, out] and b [num_categories, out].

    Ids lie in 0..num_categories - 1; those on a device are not read, so that no check waits for it.
    """

    MAX_PRODUCTS = 8

    def __init__(self, num_categories: int, input_dim: int, output_dim: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(num_categories, input_dim, output_dim))
        self.b = nn.Parameter(torch.empty(num_categories, output_dim))
        if not self.W.is_meta:
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """W ~ N(0, 1 / in), b = 0: keeps the variance of the input."""
        self.W.normal_(0.0, self.W.shape[1] ** -0.5, generator=generator)
        self.b.zero_()

    def forward(self, x: Tensor, category: Category) -> Tensor:
        if isinstance(category, Tensor) and len(self.W) <= min(self.MAX_PRODUCTS, len(x)):
            # Few weight sets: all of them on all samples costs less than one copy of the weights for each sample.
            y = self.forward(x, 0)
            for row in range(1, len(self.W)):
                y = torch.where((category == row).view(-1, 1, 1), self.forward(x, row), y)
            return y
        if isinstance(category, int):
            # Product and bias stay separate operations: under autocast the float32 bias promotes the result.
            return x.to(self.W.dtype) @ self.W[category] + self.b[category]
        return torch.bmm(x.to(self.W.dtype), self.W[category]) + self.b[category].unsqueeze(1)


class CategorySpecificMLP(nn.Module):
    """Linear, ReLU, linear, all per embodiment."""

    def __init__(self, num_categories: int, input_dim: int, hidden_dim: int, output_dim: int) -> None:
        super().__init__()
        self.layer1 = CategorySpecificLinear(num_categories, input_dim, hidden_dim)
        self.layer2 = CategorySpecificLinear(num_categories, hidden_dim, output_dim)

    def forward(self, x: Tensor, category: Category) -> Tensor:
        return self.layer2(torch.relu(self.layer1(x, category)), category)
