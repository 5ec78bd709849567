"""Inputs and weights of the parity test, read by the script that makes the expected values and by the test itself."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# No two widths are equal, so that a swapped axis cannot go unseen.
SIZES = {
    "hidden_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 56,
    "vocab_size": 256,
    "rope_theta": 1e4,
    "rope_scaling": {"mrope_section": [4, 2, 2]},
    "latent_channel": 3,
    "patch_latent_dim": 12,
    "action_dim": 6,
    "action_gen": True,
    "num_embodiment_domains": 4,
}
"""A transformer/config.json."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample; its values follow from its name."""

    name: str
    text: int
    grid: tuple[int, int, int]
    """Latent frames, height and width."""
    clean_frames: tuple[int, ...]
    rows: int
    clean_rows: tuple[int, ...]
    start: int
    domain: int
    sigma: float
    fps: float

    def text_ids(self) -> Tensor:
        ids = np.random.default_rng(_seed(self.name + "/text")).integers(0, SIZES["vocab_size"], self.text)
        return torch.from_numpy(ids)

    def latents(self) -> Tensor:
        return values(self.name + "/latents", (SIZES["latent_channel"], *self.grid))

    def action(self) -> Tensor:
        return values(self.name + "/action", (self.rows, SIZES["action_dim"]))

    def vision_noisy(self) -> Tensor:
        return torch.tensor([i not in self.clean_frames for i in range(self.grid[0])])

    def action_noisy(self) -> Tensor:
        return torch.tensor([i not in self.clean_rows for i in range(self.rows)], dtype=torch.bool)


# As in training: first frame and state clean, and an odd height.
POLICY = Sample(
    name="policy",
    text=7,
    grid=(3, 5, 6),
    clean_frames=(0,),
    rows=9,
    clean_rows=(0,),
    start=0,
    domain=2,
    sigma=0.7,
    fps=15.0,
)
# Another length of everything; commands only, an odd width, and two clean frames.
COMMANDS = Sample(
    name="commands",
    text=12,
    grid=(4, 4, 7),
    clean_frames=(0, 1),
    rows=5,
    clean_rows=(),
    start=1,
    domain=1,
    sigma=0.25,
    fps=10.0,
)
VIDEO = Sample(
    name="video",
    text=4,
    grid=(2, 5, 4),
    clean_frames=(),
    rows=0,
    clean_rows=(),
    start=0,
    domain=0,
    sigma=0.9,
    fps=24.0,
)
SAMPLES = (POLICY, COMMANDS, VIDEO)


def weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Weights by name: norms around 1, products that keep the size of what goes through, biases around 0."""
    result = {}
    for name, shape in shapes.items():
        value = values(name, shape)
        if "norm" in name:
            value = 1 + 0.2 * value
        elif ".fc." in name:
            value = value * SIZES["action_dim" if name.startswith("action_proj_in") else "hidden_size"] ** -0.5
        elif name.endswith("bias") or "bias." in name or name == "action_modality_embed":
            value = 0.1 * value
        elif not name.startswith("embed_tokens"):
            value = value * shape[-1] ** -0.5
        result[name] = value
    return result


def values(name: str, shape: tuple[int, ...]) -> Tensor:
    """Standard normal float32, a function of the name."""
    return torch.from_numpy(np.random.default_rng(_seed(name)).standard_normal(shape).astype(np.float32))


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
