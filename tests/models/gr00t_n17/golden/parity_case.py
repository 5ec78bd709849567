"""Sizes, weights and batches of the parity goldens: the same on both sides, from NumPy's generators alone."""

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

# No two widths are equal where upstream allows it, so that a swapped axis cannot go unseen.
SIZES: dict[str, Any] = {
    "model_name": "parity",
    "select_layer": 3,
    "tune_llm": False,
    "tune_visual": False,
    "backbone_embedding_dim": 32,
    "input_embedding_dim": 24,
    "hidden_size": 20,
    "max_state_dim": 11,
    "max_action_dim": 9,
    "action_horizon": 7,
    "max_num_embodiments": 5,
    "max_seq_len": 16,
    "state_dropout_prob": 0.0,
    "diffusion_model_cfg": {
        "positional_embeddings": None,
        "num_layers": 6,
        "num_attention_heads": 4,
        "attention_head_dim": 6,
        "norm_type": "ada_norm",
        "dropout": 0.0,
        "final_dropout": True,
        "output_dim": 20,
        "interleave_self_attention": True,
    },
    "vl_self_attention_cfg": {
        "positional_embeddings": None,
        "num_layers": 2,
        "num_attention_heads": 4,
        "attention_head_dim": 8,
        "dropout": 0.0,
        "final_dropout": True,
    },
    "backbone": {
        "text": {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_theta": 1e4,
            "mrope_section": [4, 2, 2],
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-6,
        },
        "vision": {
            "hidden_size": 32,
            "depth": 4,
            "num_heads": 4,
            "intermediate_size": 48,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 2],
            "rope_theta": 1e4,
        },
        "image_token_id": 5,
        "video_token_id": 6,
        "vision_start_token_id": 3,
        "vision_end_token_id": 4,
        "im_start_token_id": 1,
        "im_end_token_id": 2,
        "pad_token_id": 0,
    },
}

# Per sample: patch grids of its images, words of its text, embodiment, loss mask (steps, dimensions).
Sample = tuple[list[tuple[int, int]], int, int, tuple[int, int]]
BATCHES: dict[str, list[Sample]] = {
    # one length, one image each, one embodiment: nothing is padded
    "plain": [([(4, 4)], 5, 1, (7, 9)), ([(4, 4)], 5, 1, (7, 9))],
    # left padding, several images of several shapes, three embodiments, unequal masks
    "mixed": [
        ([(4, 4), (4, 6)], 6, 0, (7, 9)),
        ([(4, 4), (4, 4)], 3, 2, (4, 7)),
        ([(6, 4)], 2, 4, (3, 5)),
    ],
    # the other length
    "long": [([(8, 6), (4, 4), (4, 4)], 21, 3, (4, 7)), ([(8, 6), (4, 4), (4, 4)], 13, 3, (4, 7))],
}


def normal(name: str, *shape: int) -> Tensor:
    """Standard normal float32, a function of the name and the shape."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    values = np.random.Generator(np.random.Philox(key=key)).standard_normal(shape)
    return torch.from_numpy(values.astype(np.float32))


def weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """A weight by its name: products keep the variance of their input, norms and biases are no ones and zeros."""
    values = normal(name, *shape)
    if name.endswith((".b", ".bias")):
        return 0.1 * values
    if len(shape) == 1:
        return 1 + 0.1 * values
    if name.endswith(("embed_tokens.weight", "pos_embed.weight", "position_embedding.weight")):
        return 0.5 * values
    fan_in = shape[1] if name.endswith(".W") else int(np.prod(shape[1:]))
    return fan_in**-0.5 * values


def weights(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """All weights of a state dict but the LM head's, which is tied."""
    return {name: weight(name, tuple(shape)) for name, shape in shapes.items() if "lm_head" not in name}


def batch(name: str) -> dict[str, Tensor]:
    """A batch of `BATCHES` as both networks take it, without noise and time."""
    samples = BATCHES[name]
    rows = []
    for grids, words, _, _ in samples:
        row = [1]
        for height, width in grids:
            row += [3] + [5] * (height * width // 4) + [4]
        rows.append(row + [10 + (7 * len(row) + 11 * i) % 50 for i in range(words)] + [2])
    length = max(map(len, rows))
    grids = [grid for sample in samples for grid in sample[0]]
    mask = torch.zeros(len(samples), SIZES["action_horizon"], SIZES["max_action_dim"])
    for i, (_, _, _, (steps, dims)) in enumerate(samples):
        mask[i, :steps, :dims] = 1
    action = normal(f"{name}.action", *mask.shape)
    return {
        "input_ids": torch.tensor([[0] * (length - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows]),
        "pixel_values": normal(f"{name}.pixels", sum(h * w for h, w in grids), 1536),
        "image_grid_thw": torch.tensor([[1, h, w] for h, w in grids]),
        "state": normal(f"{name}.state", len(samples), 1, SIZES["max_state_dim"]),
        "action": action * mask,
        "action_mask": mask,
        "embodiment_id": torch.tensor([sample[2] for sample in samples]),
    }


def noise_and_time(name: str) -> tuple[Tensor, Tensor]:
    """Noise [B, H, A] and time [B], the latter spread over (0, 0.999]."""
    rows = len(BATCHES[name])
    noise = normal(f"{name}.noise", rows, SIZES["action_horizon"], SIZES["max_action_dim"])
    return noise, torch.linspace(0.999, 0.137, rows)
