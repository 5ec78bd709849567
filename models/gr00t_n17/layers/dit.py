"""The two transformers of the action head: self-attention over backbone features and the alternating DiT."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.common.dropout import Dropout, twice
from models.gr00t_n17.config import GR00TN17Config


class Attention(nn.Module):
    """Multi-head attention with biases everywhere and dropout on the output only.

    Keys may come from fewer rows than queries: with x [B * R, T, C] and context [B, S, C] the R rows of a sample share
    its keys, which are projected once.
    """

    def __init__(self, dim: int, context_dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_q = nn.Linear(dim, dim)
        self.to_k = nn.Linear(context_dim, dim)
        self.to_v = nn.Linear(context_dim, dim)
        self.to_out = nn.ModuleList([nn.Linear(dim, dim), Dropout(dropout)])

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """`mask` [B, S] bool, True = may be attended."""
        context = x if context is None else context
        rows, length, dim = x.shape
        batch, keys, _ = context.shape
        # Queries of one sample's rows stand one after another, as if they were one longer sequence.
        q = self.to_q(x).view(batch, -1, self.num_heads, dim // self.num_heads).transpose(1, 2)
        k = self.to_k(context).view(batch, keys, self.num_heads, -1).transpose(1, 2)
        v = self.to_v(context).view(batch, keys, self.num_heads, -1).transpose(1, 2)
        mask = None if mask is None else mask[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y = y.transpose(1, 2).reshape(rows, length, dim)
        return self.to_out[1](self.to_out[0](y))


class GELUProjection(nn.Module):
    """Linear then tanh-approximated GELU."""

    def __init__(self, dim: int, inner_dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, inner_dim)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    """Four times wider hidden layer; dropout after the activation and, with `final_dropout`, at the end."""

    def __init__(self, dim: int, dropout: float, final_dropout: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = [GELUProjection(dim, 4 * dim), Dropout(dropout), nn.Linear(4 * dim, dim)]
        if final_dropout:
            layers.append(Dropout(dropout))
        self.net = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = layer(x)
        return x


class AdaLayerNorm(nn.Module):
    """LayerNorm without weights, then x * (1 + scale) + shift; the linear layer's first half is the scale."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.linear = nn.Linear(dim, 2 * dim)

    def forward(self, x: Tensor, activated_time: Tensor) -> Tensor:
        scale, shift = self.linear(activated_time).unsqueeze(1).chunk(2, dim=-1)
        return F.layer_norm(x, (self.dim,), eps=1e-5) * (1 + scale) + shift


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, no gates.

    With time conditioning norm1 is AdaLN and norm3 has no weights; without it both are affine LayerNorms. With
    `final_dropout` upstream drops the attention's output twice in a row; here one draw has the law of both.
    """

    def __init__(
        self,
        dim: int,
        context_dim: int,
        num_heads: int,
        *,
        dropout: float,
        final_dropout: bool,
        time_conditioned: bool,
    ) -> None:
        super().__init__()
        self.norm1 = AdaLayerNorm(dim) if time_conditioned else nn.LayerNorm(dim, eps=1e-5)
        self.attn1 = Attention(dim, context_dim, num_heads, twice(dropout) if final_dropout else dropout)
        self.norm3 = nn.LayerNorm(dim, eps=1e-5, elementwise_affine=not time_conditioned)
        self.ff = FeedForward(dim, dropout, final_dropout)

    def forward(
        self,
        x: Tensor,
        activated_time: Tensor | None = None,
        context: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        normed = self.norm1(x) if activated_time is None else self.norm1(x, activated_time)
        x = x + self.attn1(normed, context, mask)
        return x + self.ff(self.norm3(x))


class VLSelfAttention(nn.Module):
    """Self-attention over all backbone tokens; as released, the padding of a batch is among the keys."""

    def __init__(self, config: GR00TN17Config) -> None:
        super().__init__()
        cfg = config.vl_self_attention_cfg
        dim = config.backbone_embedding_dim
        self.transformer_blocks = nn.ModuleList(
            TransformerBlock(
                dim,
                dim,
                cfg.num_attention_heads,
                dropout=cfg.dropout,
                final_dropout=cfg.final_dropout,
                time_conditioned=False,
            )
            for _ in range(cfg.num_layers)
        )

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """x [B, S, D]; `keys` [1 or B, S] bool, True = may be attended, None for all."""
        for block in self.transformer_blocks:
            x = block(x, mask=keys)
        return x


class TimestepEmbedder(nn.Module):
    """Two linear layers with SiLU between."""

    def __init__(self, input_dim: int, dim: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(input_dim, dim)
        self.linear_2 = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(x)))


class TimestepEncoder(nn.Module):
    """Integer time bucket -> [cos, sin] of 128 frequencies (denominator 127) -> embedding."""

    NUM_CHANNELS = 256

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.timestep_embedder = TimestepEmbedder(self.NUM_CHANNELS, dim)

    def forward(self, bucket: Tensor) -> Tensor:
        """`bucket` int64 [B] -> [B, dim]."""
        half = self.NUM_CHANNELS // 2
        index = torch.arange(half, device=bucket.device, dtype=torch.float32)
        angles = bucket[:, None].float() * torch.exp(-math.log(10000.0) * index / (half - 1))
        projection = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return self.timestep_embedder(projection.to(self.timestep_embedder.linear_1.weight.dtype))


class AlternateVLDiT(nn.Module):
    """Even blocks attend to text or image tokens of the backbone, odd blocks to the state and action tokens."""

    def __init__(self, config: GR00TN17Config) -> None:
        super().__init__()
        cfg = config.diffusion_model_cfg
        self.dim = config.input_embedding_dim
        self.attend_text_every = 2 * config.attend_text_every_n_blocks
        self.timestep_encoder = TimestepEncoder(self.dim)
        self.transformer_blocks = nn.ModuleList(
            TransformerBlock(
                self.dim,
                self.dim if i % 2 else config.backbone_embedding_dim,
                cfg.num_attention_heads,
                dropout=cfg.dropout,
                final_dropout=cfg.final_dropout,
                time_conditioned=True,
            )
            for i in range(cfg.num_layers)
        )
        self.proj_out_1 = nn.Linear(self.dim, 2 * self.dim)
        self.proj_out_2 = nn.Linear(self.dim, cfg.output_dim)

    def forward(
        self,
        x: Tensor,
        bucket: Tensor,
        context: Tensor,
        valid: Tensor,
        image_mask: Tensor,
        tokens: Tensor | None = None,
        image_tokens: int | None = None,
    ) -> Tensor:
        """x [B * R, T, C], bucket [B * R], context [B, S, D], masks [B, S] bool -> [B * R, T, output_dim].

        `tokens` [B * R, T] bool: which rows of x are keys of the self-attention, None for all. `image_tokens`: how many
        of the S context tokens are image tokens, where that is the same in every sample; an even block then projects
        keys and values of the tokens it attends to and of no others.
        """
        activated_time = F.silu(self.timestep_encoder(bucket))
        keys = _context_keys(context, valid, image_mask, image_tokens)
        for i, block in enumerate(self.transformer_blocks):
            if i % 2:
                x = block(x, activated_time, mask=tokens)
            else:
                x = block(x, activated_time, *keys[i % self.attend_text_every == 0])
        # The order of the halves is the opposite of AdaLayerNorm's.
        shift, scale = self.proj_out_1(activated_time).unsqueeze(1).chunk(2, dim=-1)
        x = F.layer_norm(x, (self.dim,), eps=1e-6) * (1 + scale) + shift
        return self.proj_out_2(x)


def _context_keys(
    context: Tensor, valid: Tensor, image_mask: Tensor, image_tokens: int | None
) -> dict[bool, tuple[Tensor, Tensor]]:
    """Context tokens and which of them may be attended, for blocks that look at text (True) and at images (False)."""
    batch, length, _ = context.shape
    if image_tokens is None or not 0 < image_tokens < length:
        return {True: (context, valid & ~image_mask), False: (context, valid & image_mask)}
    keys = {}
    for text, members, count in ((True, ~image_mask, length - image_tokens), (False, image_mask, image_tokens)):
        # Every sample has `count` of them, so they form a rectangle; its size is known without asking the device.
        places = torch.nonzero_static(members.flatten(), size=batch * count).squeeze(1)
        part = context.flatten(0, 1).index_select(0, places).view(batch, count, -1)
        keys[text] = (part, valid.flatten().index_select(0, places).view(batch, count))
    return keys
