"""Model FLOPs of a forward pass and a training step, counted from the configuration (a multiply-add is two).

Counted are matrix products and attention (full, also where it is causal). Recomputation, norms and activations are not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.layers.grids import Grid, image_tokens

if TYPE_CHECKING:
    from models.gr00t_n17.network import GR00TN17

# Targets of adapters and the switch of the part they freeze.
_SWITCHES = {
    "vision": "tune_visual",
    "llm": "tune_llm",
    "vl_self_attention": "tune_vlln",
    "dit": "tune_diffusion_model",
}
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

    def linear(
        self, part: str, rows: int, *shapes: tuple[int, int], trained: bool, input_grad: bool, rank: int = 0
    ) -> None:
        """Layers (in, out) on `rows` rows; with `rank` each has an adapter of that rank, which is trained."""
        base = 2 * rows * sum(a * b for a, b in shapes)
        down, up = (2 * rows * rank * sum(shape[end] for shape in shapes) for end in (0, 1))
        self.forward[part] += base + down + up
        self.training[part] += base * (1 + trained + input_grad) + down * (2 + input_grad) + up * 3

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
    adapters: Mapping[str, int] | None = None,
    cached_features: bool = False,
    all_keys: bool = False,
) -> Flops:
    """FLOPs of a batch.

    Args:
        image_grids: patch grid (h, w) of every image of the batch.
        sequence_length: prompt length S with padding.
        draws: flow draws per sample that share a backbone pass.
        still_frames: pixel_values holds one frame per patch instead of the copy in time.
        adapters: rank of the low-rank adapters by target ("vision", "llm", "vl_self_attention", "dit"); the weights of
            a target are frozen.
        cached_features: the backbone does not run.
        all_keys: every cross block projects and scores all S tokens and masks what it must not see, as upstream does
            and as here where samples differ in their image tokens.

    Frozen parts count their forward only, unless gradients pass through them to a trained part before them; then the
    gradient of their input is added. Formulas: section "FLOPs" of this folder's README.
    """
    ranks = dict(adapters or {})
    unknown = set(ranks) - set(_SWITCHES)
    if unknown:
        raise ValueError(f"adapters on {sorted(unknown)}: targets are {', '.join(_SWITCHES)}")
    frozen: dict[str, Any] = {_SWITCHES[target]: False for target in ranks}
    if "llm" in ranks:
        frozen["tune_top_llm_layers"] = 0
    adapter_norm = config.use_vlln and config.tune_vlln  # vlln is no part of any target
    config = dataclasses.replace(config, **frozen)
    tally, sample = _Tally(), _Tally()
    context_grad = False
    if not cached_features:
        _count_vision(tally, config, image_grids, still_frames, ranks.get("vision", 0))
        embeds_grad = config.tune_visual or "vision" in ranks
        context_grad = _count_decoder(sample, config, sequence_length, embeds_grad, ranks.get("llm", 0))
    context_grad = context_grad or adapter_norm
    context_grad = _count_vl_self_attention(
        sample, config, sequence_length, context_grad, ranks.get("vl_self_attention", 0)
    )
    found = None if all_keys else image_tokens(image_grids, batch_size, config.backbone.vision.spatial_merge_size)
    keys = (sequence_length, sequence_length)
    if found is not None and 0 < found < sequence_length:
        keys = (sequence_length - found, found)
    _count_action(sample, config, keys, draws, context_grad, ranks.get("dit", 0))
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
    cached_features: bool = False,
) -> int:
    """FLOPs of forward and backward of one micro-batch: `count_flops` with the network's configuration and adapters."""
    lora = getattr(network, "lora", None)
    flops = count_flops(
        network.config,
        image_grids=image_grids,
        sequence_length=sequence_length,
        batch_size=batch_size,
        draws=draws,
        still_frames=still_frames,
        adapters=None if lora is None else dict.fromkeys(lora.targets, lora.rank),
        cached_features=cached_features,
    )
    return flops.training_total


def _count_vision(tally: _Tally, config: GR00TN17Config, grids: Sequence[Grid], still_frames: bool, rank: int) -> None:
    vision, text = config.backbone.vision, config.backbone.text
    width, inner, tuned = vision.hidden_size, vision.intermediate_size, config.tune_visual
    pixels = vision.in_channels * vision.patch_size**2 * (1 if still_frames else vision.temporal_patch_size)
    merge = vision.spatial_merge_size**2
    wide = merge * width
    mergers = [(wide, wide), (wide, text.hidden_size)] * (1 + len(vision.deepstack_visual_indexes))
    grad = tuned or rank > 0
    for height, grid_width in grids:
        n = height * grid_width
        tally.linear("vit", n, (pixels, width), trained=tuned, input_grad=False)
        for block in range(vision.depth):
            # Adapters of the first block are the first trained weights: nothing before them needs a gradient.
            before = tuned or (grad and block > 0)
            tally.linear("vit", n, (width, 3 * width), trained=tuned, input_grad=before, rank=rank)
            rest = (width, width), (width, inner), (inner, width)
            tally.linear("vit", n, *rest, trained=tuned, input_grad=grad, rank=rank)
            tally.attention("vit", n, n, width, grad=grad)
        tally.linear("vit", n // merge, *mergers, trained=tuned, input_grad=grad)


def _count_decoder(tally: _Tally, config: GR00TN17Config, num_tokens: int, stream: bool, rank: int) -> bool:
    """The kept decoder layers, on tokens that carry a gradient or not; returns whether the features do."""
    text = config.backbone.text
    dim, inner = text.hidden_size, text.intermediate_size
    queries, keys = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    first_trained = 0 if config.tune_llm else config.select_layer - config.tune_top_llm_layers
    for layer in range(config.select_layer):
        trained = layer >= first_trained
        # A trained layer always needs the gradient of its projections' input: the norm before them trains with it.
        qkv = (dim, queries), (dim, keys), (dim, keys)
        tally.linear("llm", num_tokens, *qkv, trained=trained, input_grad=stream or trained, rank=rank)
        stream = stream or trained or rank > 0
        rest = (queries, dim), (dim, inner), (dim, inner), (inner, dim)
        tally.linear("llm", num_tokens, *rest, trained=trained, input_grad=stream, rank=rank)
        tally.attention("llm", num_tokens, num_tokens, queries, grad=stream)
    return stream


def _count_vl_self_attention(tally: _Tally, config: GR00TN17Config, num_tokens: int, stream: bool, rank: int) -> bool:
    """Blocks on features that carry a gradient or not; returns whether their output does."""
    tuned, dim = config.tune_vlln, config.backbone_embedding_dim
    for _ in range(config.vl_self_attention_cfg.num_layers):
        # norm1 stands before the projections and trains with them.
        qkv = [(dim, dim)] * 3
        tally.linear("vlsa", num_tokens, *qkv, trained=tuned, input_grad=stream or tuned, rank=rank)
        stream = stream or tuned or rank > 0
        rest = (dim, dim), (dim, 4 * dim), (4 * dim, dim)
        tally.linear("vlsa", num_tokens, *rest, trained=tuned, input_grad=stream, rank=rank)
        tally.attention("vlsa", num_tokens, num_tokens, dim, grad=stream)
    return stream


def _count_action(
    tally: _Tally, config: GR00TN17Config, vl_keys: tuple[int, int], draws: int, context_grad: bool, rank: int
) -> None:
    """Encoders, DiT and decoder; `vl_keys`: keys of a cross block that attends to text, to images.

    Keys of the cross blocks are projected once for all draws.
    """
    dit, projector = config.tune_diffusion_model, config.tune_projector
    width, hidden, context = config.input_embedding_dim, config.hidden_size, config.backbone_embedding_dim
    horizon, length = config.action_horizon, config.action_horizon + 1
    steps, tokens = draws * horizon, draws * length
    encode: dict[str, bool] = {"trained": projector, "input_grad": False}
    tally.linear("encoders", 1, (config.max_state_dim, hidden), **encode)
    tally.linear("encoders", 1, (hidden, width), trained=projector, input_grad=projector)
    tally.linear("encoders", steps, (config.max_action_dim, width), **encode)
    tally.linear("encoders", steps, (2 * width, width), (width, width), trained=projector, input_grad=projector)
    tally.linear("encoders", draws, (256, width), trained=dit, input_grad=False)
    tally.linear("encoders", draws, (width, width), trained=dit, input_grad=dit)
    # A gradient reaches the token stream from the encoders, and from the first block on from anything trained.
    stream = projector
    for layer in range(config.diffusion_model_cfg.num_layers):
        part, own = ("dit_self", True) if layer % 2 else ("dit_cross", False)
        tally.linear(part, draws, (width, 2 * width), trained=dit, input_grad=dit)
        num_keys = length if own else vl_keys[layer % (2 * config.attend_text_every_n_blocks) != 0]
        projections = [(width, width)] * (3 if own else 1)
        tally.linear(part, tokens, *projections, trained=dit, input_grad=stream or dit, rank=rank)
        if not own:
            keys = [(context, width)] * 2
            tally.linear(part, num_keys, *keys, trained=dit, input_grad=context_grad, rank=rank)
        stream = stream or dit or rank > 0 or (context_grad and not own)
        tally.attention(part, tokens, num_keys, width, grad=stream)
        rest = (width, width), (width, 4 * width), (4 * width, width)
        tally.linear(part, tokens, *rest, trained=dit, input_grad=stream, rank=rank)
    tally.linear("encoders", draws, (width, 2 * width), trained=dit, input_grad=dit)
    tally.linear("encoders", tokens, (width, hidden), trained=dit, input_grad=stream)
    decoder = (hidden, hidden), (hidden, config.max_action_dim)
    tally.linear("encoders", steps, *decoder, trained=projector, input_grad=stream)
