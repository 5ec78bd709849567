"""Dropout with a mask that is cheap to draw on a CPU.

PyTorch draws one double per element there, which at the sizes of `benchmarks/gr00t_step.py` is 5 % of a training step.
Here one 64-bit draw serves four elements; the probability is met to 2^-16. GPUs keep PyTorch's own kernel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LEVELS = 1 << 16


class Dropout(nn.Dropout):
    """`nn.Dropout` whose masks on a CPU come from 16 random bits an element, of PyTorch's default generator.

    The kept share is a multiple of 2^-16 and is what the kept elements are divided by, so the mean is exact.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu" or not self.training or self.p == 0:
            return F.dropout(x, self.p, self.training)
        # As one operation of its own for the compiler, which would otherwise draw from another stream than eager code.
        draw = torch.ops.robot_recipes.dropout_mask if torch.compiler.is_compiling() else draw_mask
        return x * draw(x.detach(), self.p)


def twice(p: float) -> float:
    """Probability of one dropout that acts like two independent ones of probability `p`, one after the other."""
    return 1.0 - (1.0 - p) ** 2


def draw_mask(like: Tensor, p: float) -> Tensor:
    """0 with probability `p`, else 1 / (1 - p), for each element of `like`, in its dtype; on the CPU."""
    count = like.numel()
    words = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    dropped = min(round(_LEVELS * p), _LEVELS - 1)
    kept = words.view(torch.int16)[:count].view(like.shape) >= dropped - _LEVELS // 2
    return kept.to(like.dtype).mul_(_LEVELS / (_LEVELS - dropped))


# The tag makes the compiler keep a mask, or the generator's state, instead of drawing anew in the backward pass.
_drawn = torch.library.custom_op(
    "robot_recipes::dropout_mask", draw_mask, mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
_drawn.register_fake(lambda like, p: torch.empty_like(like, memory_format=torch.contiguous_format))
