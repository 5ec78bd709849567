"""Model FLOPs of a forward pass and a training step, counted from the configuration (a multiply-add is two).

Counted are matrix products and attention (full, also where it is causal). Recomputation, norms and activations are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.layers.grids import Grid

if TYPE_CHECKING:
    from models.gr00t_n17.network import GR00TN17

PARTS = ("vit", "llm", "vlsa", "dit_cross", "dit_self", "encoders")


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs by part (`PARTS`) of one forward pass, and of forward plus backward under the tune switches."""

    forward: dict[str, int]
    training: dict[str, int]

    @property
    def forward_total(self) -> int:
        return sum(self.forward.values())

    @property
    def training_total(self) -> int:
        return sum(self.training.values())


class _Tally:
    """Adds up products; the backward of a linear layer costs its forward once per gradient it has to form."""

    def __init__(self) -> None:
        self.forward = dict.fromkeys(PARTS, 0)
        self.training = dict.fromkeys(PARTS, 0)

    def linear(self, part: str, flops: int, *, trained: bool, input_grad: bool) -> None:
        self.forward[part] += flops
        self.training[part] += flops * (1 + trained + input_grad)

    def attention(self, part: str, queries: int, keys: int, width: int, *, grad: bool) -> None:
        """Scores and weighted sum; the backward forms four products of the same size."""
        flops = 4 * queries * keys * width
        self.forward[part] += flops
        self.training[part] += flops * (3 if grad else 1)


def count_flops(
    config: GR00TN17Config,
    *,
    image_grids: Sequence[Grid],
    sequence_length: int,
    batch_size: int = 1,
    draws: int = 1,
    still_frames: bool = False,
) -> Flops:
    """FLOPs of a batch.

    Args:
        image_grids: patch grid (h, w) of every image of the batch.
        sequence_length: prompt length S with padding.
        draws: flow draws per sample that share a backbone pass.
        still_frames: pixel_values holds one frame per patch instead of the copy in time.

    Frozen parts count their forward only, unless gradients pass through them to a trained part before them; then the
    gradient of their input is added. Formulas: section "FLOPs" of this folder's README.
    """
    tally = _Tally()
    _count_vision(tally, config, image_grids, still_frames)
    sample = _Tally()
    context_grad = _count_decoder(sample, config, sequence_length)
    context_grad = _count_vl_self_attention(sample, config, sequence_length, context_grad)
    _count_action(sample, config, sequence_length, draws, context_grad)
    return Flops(
        forward={part: tally.forward[part] + batch_size * sample.forward[part] for part in PARTS},
        training={part: tally.training[part] + batch_size * sample.training[part] for part in PARTS},
    )


def step_flops(
    network: GR00TN17,
    *,
    image_grids: Sequence[Grid],
    sequence_length: int,
    batch_size: int,
    draws: int = 1,
    still_frames: bool = False,
) -> int:
    """FLOPs of forward and backward of one micro-batch; arguments of `count_flops`."""
    flops = count_flops(
        network.config,
        image_grids=image_grids,
        sequence_length=sequence_length,
        batch_size=batch_size,
        draws=draws,
        still_frames=still_frames,
    )
    return flops.training_total


def _count_vision(tally: _Tally, config: GR00TN17Config, grids: Sequence[Grid], still_frames: bool) -> None:
    vision, text = config.backbone.vision, config.backbone.text
    width, tuned = vision.hidden_size, config.tune_visual
    pixels = vision.in_channels * vision.patch_size**2 * (1 if still_frames else vision.temporal_patch_size)
    merge = vision.spatial_merge_size**2
    wide = merge * width
    merger_weights = wide * wide + wide * text.hidden_size
    for height, grid_width in grids:
        n = height * grid_width
        tally.linear("vit", 2 * n * pixels * width, trained=tuned, input_grad=False)
        block_weights = 4 * width * width + 2 * width * vision.intermediate_size
        tally.linear("vit", 2 * n * vision.depth * block_weights, trained=tuned, input_grad=tuned)
        tally.attention("vit", n, n, width * vision.depth, grad=tuned)
        mergers = 1 + len(vision.deepstack_visual_indexes)
        tally.linear("vit", 2 * (n // merge) * mergers * merger_weights, trained=tuned, input_grad=tuned)


def _count_decoder(tally: _Tally, config: GR00TN17Config, num_tokens: int) -> bool:
    """The kept decoder layers; returns whether the features carry a gradient."""
    text = config.backbone.text
    query_width = text.num_attention_heads * text.head_dim
    qkv = text.hidden_size * (query_width + 2 * text.num_key_value_heads * text.head_dim)
    rest = query_width * text.hidden_size + 3 * text.hidden_size * text.intermediate_size
    first_trained = 0 if config.tune_llm else config.select_layer - config.tune_top_llm_layers
    for layer in range(config.select_layer):
        trained = layer >= first_trained
        # A trained layer always needs the gradient of its projections' input: the norm before them trains with it.
        grad = config.tune_visual or trained
        tally.linear("llm", 2 * num_tokens * (qkv + rest), trained=trained, input_grad=grad)
        tally.attention("llm", num_tokens, num_tokens, query_width, grad=grad)
    return config.tune_visual or first_trained < config.select_layer


def _count_vl_self_attention(tally: _Tally, config: GR00TN17Config, num_tokens: int, context_grad: bool) -> bool:
    """Adapter on the features; returns whether its output carries a gradient."""
    tuned, dim = config.tune_vlln, config.backbone_embedding_dim
    before = context_grad or (tuned and config.use_vlln)
    for _ in range(config.vl_self_attention_cfg.num_layers):
        # norm1 stands before the projections and trains with them.
        before = before or tuned
        tally.linear("vlsa", 2 * num_tokens * 12 * dim * dim, trained=tuned, input_grad=before)
        tally.attention("vlsa", num_tokens, num_tokens, dim, grad=before)
    return before


def _count_action(tally: _Tally, config: GR00TN17Config, num_tokens: int, draws: int, context_grad: bool) -> None:
    """Encoders, DiT and decoder. Keys of the cross blocks are projected once for all draws."""
    dit, projector = config.tune_diffusion_model, config.tune_projector
    width, hidden = config.input_embedding_dim, config.hidden_size
    horizon, length = config.action_horizon, config.action_horizon + 1
    states, steps, tokens = 1, draws * horizon, draws * length
    # A gradient reaches the token stream from the encoders, and from the first block on from anything trained.
    stream = projector or dit or context_grad
    tally.linear("encoders", 2 * states * config.max_state_dim * hidden, trained=projector, input_grad=False)
    tally.linear("encoders", 2 * states * hidden * width, trained=projector, input_grad=projector)
    tally.linear("encoders", 2 * steps * config.max_action_dim * width, trained=projector, input_grad=False)
    tally.linear("encoders", 2 * steps * 3 * width * width, trained=projector, input_grad=projector)
    tally.linear("encoders", 2 * draws * 256 * width, trained=dit, input_grad=False)
    tally.linear("encoders", 2 * draws * width * width, trained=dit, input_grad=dit)
    for layer in range(config.diffusion_model_cfg.num_layers):
        part = "dit_self" if layer % 2 else "dit_cross"
        tally.linear(part, 2 * draws * 2 * width * width, trained=dit, input_grad=dit)
        own = 12 if layer % 2 else 10
        tally.linear(part, 2 * tokens * own * width * width, trained=dit, input_grad=stream)
        if layer % 2:
            tally.attention(part, tokens, length, width, grad=stream)
        else:
            keys = 2 * 2 * num_tokens * config.backbone_embedding_dim * width
            tally.linear(part, keys, trained=dit, input_grad=context_grad)
            tally.attention(part, tokens, num_tokens, width, grad=stream)
    tally.linear("encoders", 2 * draws * 2 * width * width, trained=dit, input_grad=dit)
    tally.linear("encoders", 2 * tokens * width * hidden, trained=dit, input_grad=stream)
    decoder = hidden * hidden + hidden * config.max_action_dim
    tally.linear("encoders", 2 * steps * decoder, trained=projector, input_grad=stream)
