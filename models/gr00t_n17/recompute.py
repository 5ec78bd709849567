"""FLOPs of activation checkpointing: what the blocks that recompute run a second time in a training step.

They are no model FLOPs (MFU), but the device executes them (HFU). A recomputation ends where the backward has all it
needs, so the last product of a block does not run again unless dropout follows it. Results kept by mode `selective` do
not run again either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from models.common.checkpointing import CheckpointingReport, kept_kinds
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.layers.grids import Grid, image_tokens

if TYPE_CHECKING:
    from models.gr00t_n17.network import GR00TN17


@dataclass(frozen=True)
class _Product:
    """FLOPs of one product; `kind` is that of its operation: "addmm" with a bias, "mm" without, or "attention"."""

    kind: str
    flops: int


def recompute_flops(
    network: GR00TN17,
    *,
    image_grids: Sequence[Grid],
    sequence_length: int,
    batch_size: int,
    draws: int = 1,
) -> int:
    """FLOPs that one micro-batch runs again; arguments are those of `flops.step_flops`. 0 without checkpointing."""
    report: CheckpointingReport | None = getattr(network, "checkpointing", None)
    if report is None or not report.recomputed:
        return 0
    lora = getattr(network, "lora", None)
    ranks = {} if lora is None else dict.fromkeys(lora.targets, lora.rank)
    kept = kept_kinds(report)
    config, head = network.config, network.action_head
    length = sequence_length

    def again(products: Iterator[_Product], ends_in_dropout: bool = False) -> int:
        row = list(products)
        if not ends_in_dropout:
            row = row[:-1]
        return sum(product.flops for product in row if product.kind not in kept)

    total = 0
    recomputed = report.recomputed
    vision, text = config.backbone.vision, config.backbone.text
    for height, width in image_grids:
        block = _encoder_block(height * width, vision.hidden_size, vision.intermediate_size, ranks.get("vision", 0))
        total += len(recomputed.get("vision", ())) * again(block)
    total += batch_size * len(recomputed.get("llm", ())) * again(_decoder_layer(length, text, ranks.get("llm", 0)))
    dim, rank = config.backbone_embedding_dim, ranks.get("vl_self_attention", 0)
    dropout = _ends_in_dropout(head.vl_self_attention, config.vl_self_attention_cfg)
    adapter = again(_block(length, length, length, dim, dim, rank), dropout)
    total += batch_size * len(recomputed.get("vl_self_attention", ())) * adapter
    images = image_tokens(image_grids, batch_size, config.backbone.vision.spatial_merge_size)
    keys = (length, length) if images is None or not 0 < images < length else (length - images, images)
    dropout = _ends_in_dropout(head.model, config.diffusion_model_cfg)
    for layer in recomputed.get("dit", ()):
        total += batch_size * again(_dit_block(config, layer, keys, draws, ranks.get("dit", 0)), dropout)
    return total


def _dit_block(
    config: GR00TN17Config, layer: int, vl_keys: tuple[int, int], draws: int, rank: int
) -> Iterator[_Product]:
    width, rows = config.input_embedding_dim, config.action_horizon + 1
    yield from _linear(draws, (width, 2 * width))  # the adaptive norm has no adapters
    if layer % 2:
        yield from _block(draws * rows, draws * rows, rows, width, width, rank)
    else:
        keys = vl_keys[layer % (2 * config.attend_text_every_n_blocks) != 0]
        yield from _block(draws * rows, keys, keys, width, config.backbone_embedding_dim, rank)


def _block(rows: int, context_rows: int, keys: int, width: int, context: int, rank: int) -> Iterator[_Product]:
    """A block of the head: `keys` per row are attended to, `context_rows` rows are projected to make them."""
    yield from _linear(rows, (width, width), rank=rank)
    yield from _linear(context_rows, (context, width), (context, width), rank=rank)
    yield _Product("attention", 4 * rows * keys * width)
    yield from _linear(rows, (width, width), (width, 4 * width), (4 * width, width), rank=rank)


def _encoder_block(rows: int, width: int, inner: int, rank: int) -> Iterator[_Product]:
    """A block of the vision tower on one image."""
    yield from _linear(rows, (width, 3 * width), rank=rank)
    yield _Product("attention", 4 * rows * rows * width)
    yield from _linear(rows, (width, width), (width, inner), (inner, width), rank=rank)


def _decoder_layer(rows: int, text: Any, rank: int) -> Iterator[_Product]:
    """A layer of the language model on one prompt."""
    dim, inner = text.hidden_size, text.intermediate_size
    queries, keys = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    yield from _linear(rows, (dim, queries), (dim, keys), (dim, keys), rank=rank, kind="mm")
    yield _Product("attention", 4 * rows * rows * queries)
    yield from _linear(rows, (queries, dim), (dim, inner), (dim, inner), (inner, dim), rank=rank, kind="mm")


def _linear(rows: int, *shapes: tuple[int, int], rank: int = 0, kind: str = "addmm") -> Iterator[_Product]:
    for into, out in shapes:
        yield _Product(kind, 2 * rows * into * out)
        if rank:
            yield _Product("mm", 2 * rows * into * rank)
            yield _Product("mm", 2 * rows * rank * out)


def _ends_in_dropout(part: nn.Module, cfg: Any) -> bool:
    """Frozen parts are in eval mode, where dropout does not act."""
    return cfg.final_dropout and cfg.dropout > 0 and any(p.requires_grad for p in part.parameters())
