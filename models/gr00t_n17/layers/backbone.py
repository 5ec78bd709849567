"""The Qwen3-VL backbone cut to its first layers, run on batches of images with known patch grids.

The modules, their names and their arithmetic are those of `transformers`. What differs is the path through them: images
of one grid form one batched attention instead of a loop over images, position tables are computed once per grid, the
M-RoPE positions are vectorised, nothing waits for the device, and neither the final norm nor the LM head runs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLModel,
    Qwen3VLTextDecoderLayer,
    Qwen3VLVisionBlock,
)

from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.layers.grids import (
    Grid,
    GridTables,
    build_tables,
    mrope_axes,
    mrope_positions,
    read_grids,
    rotary,
)


class BackboneFeatures(NamedTuple):
    """`features` [B, S, D] before the final norm; `attention_mask` and `image_mask` [B, S] bool."""

    features: Tensor
    attention_mask: Tensor
    image_mask: Tensor


class LowerFeatures(NamedTuple):
    """Where a pass stands before one of the decoder layers; what the layers above need is all here."""

    hidden: Tensor
    attention_mask: Tensor
    image_mask: Tensor
    cos: Tensor
    sin: Tensor
    causal: Tensor
    """[B, 1, S, S] bool."""
    places: Tensor
    deepstack: tuple[Tensor, ...]
    layer: int


def transformers_config(config: GR00TN17Config) -> Qwen3VLConfig:
    """The `transformers` configuration of the cut backbone: `select_layer` decoder layers, SDPA attention."""
    text, vision = config.backbone.text, config.backbone.vision
    return Qwen3VLConfig(
        text_config={
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "intermediate_size": text.intermediate_size,
            "num_hidden_layers": config.select_layer,
            "num_attention_heads": text.num_attention_heads,
            "num_key_value_heads": text.num_key_value_heads,
            "head_dim": text.head_dim,
            "rms_norm_eps": text.rms_norm_eps,
            "max_position_embeddings": text.max_position_embeddings,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": text.rope_theta,
                "mrope_section": list(text.mrope_section),
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": vision.depth,
            "hidden_size": vision.hidden_size,
            "intermediate_size": vision.intermediate_size,
            "num_heads": vision.num_heads,
            "in_channels": vision.in_channels,
            "patch_size": vision.patch_size,
            "spatial_merge_size": vision.spatial_merge_size,
            "temporal_patch_size": vision.temporal_patch_size,
            "out_hidden_size": text.hidden_size,
            "num_position_embeddings": vision.num_position_embeddings,
            "deepstack_visual_indexes": list(vision.deepstack_visual_indexes),
            "rope_parameters": {"rope_type": "axial", "rope_theta": vision.rope_theta},
        },
        image_token_id=config.backbone.image_token_id,
        video_token_id=config.backbone.video_token_id,
        vision_start_token_id=config.backbone.vision_start_token_id,
        vision_end_token_id=config.backbone.vision_end_token_id,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )


class BatchedVisionBlock(Qwen3VLVisionBlock):
    """The stock block on [images, patches, C]: the batch axis takes the place of the stock loop over images."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`cos`, `sin` [patches, head_dim]."""
        images, patches, dim = x.shape
        attn = self.attn
        qkv = attn.qkv(self.norm1(x)).view(images, patches, 3, attn.num_heads, attn.head_dim)
        qk = rotary(qkv[:, :, :2], cos[:, None, None], sin[:, None, None])
        q, k, v = (t.transpose(1, 2) for t in (qk[:, :, 0], qk[:, :, 1], qkv[:, :, 2]))
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + attn.proj(y.transpose(1, 2).reshape(images, patches, dim))
        return x + self.mlp(self.norm2(x))


class MaskedDecoderLayer(Qwen3VLTextDecoderLayer):
    """The stock decoder layer without cache and attention dispatch."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """`cos`, `sin` [B, S, head_dim]; `mask` [B, 1, S, S] bool, True = may be attended."""
        batch, length, _ = x.shape
        attn = self.self_attn
        normed = _rms_norm(self.input_layernorm, x)
        shape = (batch, length, -1, attn.head_dim)
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        q = rotary(_rms_norm(attn.q_norm, attn.q_proj(normed).view(shape)), cos, sin).transpose(1, 2)
        k = rotary(_rms_norm(attn.k_norm, attn.k_proj(normed).view(shape)), cos, sin).transpose(1, 2)
        v = attn.v_proj(normed).view(shape).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=attn.num_key_value_groups > 1)
        x = x + attn.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return x + self.mlp(_rms_norm(self.post_attention_layernorm, x))


def _rms_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """The stock RMSNorm as one operation in float32, the input's dtype restored before the weight is applied."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
    y = F.rms_norm(x.float(), norm.weight.shape, None, norm.variance_epsilon)
    return norm.weight * y.to(x.dtype)


class Backbone(nn.Module):
    """Images and text in, features of the last kept decoder layer out.

    `train_visual` and `llm_grad_from` say where gradients are needed; `parallelize.set_trainable` sets them from the
    tune switches. Everything below runs under no_grad.
    """

    MAX_TABLES = 64

    def __init__(self, config: GR00TN17Config) -> None:
        super().__init__()
        self.image_token_id = config.backbone.image_token_id
        self.vision_config = config.backbone.vision
        self.text_config = config.backbone.text
        # One level of nesting more than needed: upstream wraps the model in the class that adds the LM head.
        self.model = nn.Module()
        self.model.model = Qwen3VLModel(transformers_config(config))
        for block in self.visual.blocks:
            block.__class__ = BatchedVisionBlock
        for layer in self.language_model.layers:
            layer.__class__ = MaskedDecoderLayer
        # Rotary tables are made here in float32 from the config. The stock buffers are not in the state dict, would be
        # garbage after `to_empty` and would follow a cast to bfloat16.
        del self.visual.rotary_pos_emb
        del self.language_model.rotary_emb
        self.train_visual = True
        self.llm_grad_from = 0
        self._tables: dict[tuple[tuple[Grid, ...], torch.device], GridTables] = {}
        self._inverse_frequencies: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def visual(self) -> nn.Module:
        return self.model.model.visual

    @property
    def language_model(self) -> nn.Module:
        return self.model.model.language_model

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        pixel_values: Tensor,
        image_grid_thw: Tensor | Sequence[Sequence[int]],
    ) -> BackboneFeatures:
        """Features for left-padded prompts.

        Args:
            input_ids: int64 [B, S], image tokens already expanded to (h * w / merge^2) per image.
            attention_mask: [B, S], 1 on real tokens.
            pixel_values: [sum of patches, channels * temporal * patch^2] in merge-block order, images sample by sample;
                or one still frame per patch, [.., channels * patch^2], without the copy in time.
            image_grid_thw: [images, 3] (1, h, w) in patches. Keep it on the CPU, or give a nested list: values of a
                device tensor have to be fetched, which waits for the device in every step.
        """
        self._check_autocast(input_ids.device)
        valid = attention_mask == 1
        image_mask = input_ids == self.image_token_id
        grids = read_grids(image_grid_thw, self.vision_config.spatial_merge_size)
        tables = self._tables_for(grids, input_ids.device)
        _check_image_tokens(image_mask, tables.num_tokens)
        features = self.compute(input_ids, valid, image_mask, pixel_values, tables, self._mrope(input_ids.device))
        return BackboneFeatures(features, valid, image_mask)

    @torch.no_grad()
    def lower(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        pixel_values: Tensor,
        image_grid_thw: Tensor | Sequence[Sequence[int]],
    ) -> LowerFeatures:
        """`forward` up to the first trained layer, of which the rest is `upper`; together they are `forward`."""
        self._check_autocast(input_ids.device)
        valid = attention_mask == 1
        image_mask = input_ids == self.image_token_id
        tables = self._tables_for(read_grids(image_grid_thw, self.vision_config.spatial_merge_size), input_ids.device)
        _check_image_tokens(image_mask, tables.num_tokens)
        image_embeds, deepstack = self.encode_images(pixel_values, tables)
        mrope = self._mrope(input_ids.device)
        start = self._embed(input_ids, valid, image_mask, image_embeds, deepstack, tables, mrope)
        return self._layers(start, self.llm_grad_from)

    def upper(self, lower: LowerFeatures) -> BackboneFeatures:
        """The layers that `lower` left."""
        done = self._layers(lower, len(self.language_model.layers))
        return BackboneFeatures(done.hidden, done.attention_mask, done.image_mask)

    def compute(
        self,
        input_ids: Tensor,
        valid: Tensor,
        image_mask: Tensor,
        pixel_values: Tensor,
        tables: GridTables,
        mrope: tuple[Tensor, Tensor],
    ) -> Tensor:
        """All device work of `forward`, one graph when compiled: what depends on host values is in its arguments."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.train_visual):
            image_embeds, deepstack = self.encode_images(pixel_values, tables)
        start = self._embed(input_ids, valid, image_mask, image_embeds, deepstack, tables, mrope)
        return self._layers(start, len(self.language_model.layers)).hidden

    def encode_images(self, pixel_values: Tensor, tables: GridTables) -> tuple[Tensor, list[Tensor]]:
        """Merged image tokens [N, D] and one [N, D] per DeepStack stage, in the order of the images."""
        if len(tables.groups) == 1:
            return self._encode_group(pixel_values, tables, 0)
        parts = [
            self._encode_group(pixel_values.index_select(0, group.patch_rows), tables, i)
            for i, group in enumerate(tables.groups)
        ]
        merged = torch.cat([part[0] for part in parts]).index_select(0, tables.token_order)
        stages = [
            torch.cat(stage).index_select(0, tables.token_order) for stage in zip(*(p[1] for p in parts), strict=True)
        ]
        return merged, stages

    def _encode_group(self, pixel_values: Tensor, tables: GridTables, index: int) -> tuple[Tensor, list[Tensor]]:
        """All images of one grid."""
        group = tables.groups[index]
        visual = self.visual
        x = self._embed_patches(pixel_values).view(group.num_images, group.num_patches, -1)
        table = visual.pos_embed(group.position_rows)
        x = x.to(_stream_dtype(visual.blocks[0].norm1))
        x = x + (table * group.position_weights).sum(1).to(x.dtype)
        stages = []
        for i, block in enumerate(visual.blocks):
            x = block(x, group.cos, group.sin)
            if i in visual.deepstack_visual_indexes:
                stages.append(visual.deepstack_merger_list[len(stages)](x))
        return visual.merger(x), stages

    def _embed_patches(self, pixel_values: Tensor) -> Tensor:
        """The patch convolution as a matrix product; its stride equals its kernel."""
        proj = self.visual.patch_embed.proj
        weight = proj.weight
        if pixel_values.shape[1] * self.vision_config.temporal_patch_size == weight.shape[1:].numel():
            # The two frames of a still image are equal, so their weights can be added instead of the pixels doubled.
            weight = weight.float().sum(2)
        dtype = proj.weight.dtype
        return F.linear(pixel_values.to(dtype), weight.flatten(1).to(dtype), proj.bias)

    def _embed(
        self,
        input_ids: Tensor,
        valid: Tensor,
        image_mask: Tensor,
        image_embeds: Tensor,
        deepstack: list[Tensor],
        tables: GridTables,
        mrope: tuple[Tensor, Tensor],
    ) -> LowerFeatures:
        """Text and image tokens before the first decoder layer."""
        grad = torch.is_grad_enabled()
        length = input_ids.shape[1]
        language_model = self.language_model
        # A static size keeps nonzero from waiting for the device.
        places = torch.nonzero_static(image_mask.flatten(), size=tables.num_tokens).squeeze(1)
        positions = mrope_positions(valid, places, tables)
        axes, frequencies = mrope
        with torch.no_grad():
            angles = positions.movedim(0, -1)[..., axes].float() * frequencies
            cos, sin = angles.cos(), angles.sin()
            causal = torch.ones(length, length, dtype=torch.bool, device=valid.device).tril()
            # Rows of padding attend to nothing and get zeros, like FlashAttention's.
            mask = (causal & valid[:, None, :])[:, None]
        with torch.set_grad_enabled(grad and (self.train_visual or self.llm_grad_from == 0)):
            x = language_model.embed_tokens(input_ids).to(_stream_dtype(language_model.layers[0].input_layernorm))
            x = _flat(torch.index_copy, x, places, image_embeds)
        cos = torch.cat([cos, cos], dim=-1).to(x.dtype)
        sin = torch.cat([-sin, sin], dim=-1).to(x.dtype)
        return LowerFeatures(x, valid, image_mask, cos, sin, mask, places, tuple(deepstack), 0)

    def _layers(self, at: LowerFeatures, end: int) -> LowerFeatures:
        """Run the decoder layers before layer `end`."""
        x, grad = at.hidden, torch.is_grad_enabled()
        layers = list(self.language_model.layers)
        for i in range(at.layer, end):
            with torch.set_grad_enabled(grad and (self.train_visual or i >= self.llm_grad_from)):
                x = layers[i](x, at.cos, at.sin, at.causal)
                if i < len(at.deepstack):
                    x = _flat(torch.index_add, x, at.places, at.deepstack[i])
        return at._replace(hidden=x, layer=end)

    def _check_autocast(self, device: torch.device) -> None:
        weight, norm = self.visual.patch_embed.proj.weight.dtype, self.visual.blocks[0].norm1.weight.dtype
        available = torch.amp.is_autocast_available(device.type)
        if weight != norm and not (available and torch.is_autocast_enabled(device.type)):
            raise ValueError(
                f"the backbone keeps product weights in {weight} and norms in {norm} (precision=lean or bf16): run it "
                "under bfloat16 autocast (trainer precision bf16-mixed; `precision.context(network)` outside a trainer)"
            )

    def _tables_for(self, grids: tuple[Grid, ...], device: torch.device) -> GridTables:
        key = (grids, device)
        tables = self._tables.get(key)
        if tables is None:
            if len(self._tables) >= self.MAX_TABLES:
                self._tables.pop(next(iter(self._tables)))
            tables = build_tables(grids, self.vision_config, device)
            self._tables[key] = tables
        return tables

    def _mrope(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Axis and inverse frequency of every rotary pair."""
        if device not in self._inverse_frequencies:
            self._inverse_frequencies[device] = mrope_axes(self.text_config, device)
        return self._inverse_frequencies[device]


def _stream_dtype(norm: nn.Module) -> torch.dtype:
    """dtype of a residual stream: that of the norms which read it.

    Under autocast the patch product is bfloat16. The stock model adds float32 positions to it and so has a float32
    stream from there on; newer releases of `transformers` cast the positions down instead.
    """
    return norm.weight.dtype


def _flat(operation, x: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """An indexed operation on the flattened token axis."""
    return operation(x.flatten(0, 1), 0, places, values.to(x.dtype)).view_as(x)


def _check_image_tokens(image_mask: Tensor, expected: int) -> None:
    if image_mask.device.type == "cpu":
        found = int(image_mask.sum())
        if found != expected:
            raise ValueError(
                f"input_ids holds {found} image tokens but image_grid_thw stands for {expected}; "
                "the processor must expand each image to h * w / merge^2 tokens"
            )
    elif image_mask.device.type == "cuda":
        torch._assert_async((image_mask.sum() == expected).all())
