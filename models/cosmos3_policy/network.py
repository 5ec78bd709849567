"""Cosmos-3 policy network: captions are understood once, without gradients; video and actions are generated."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.layers.attention_plan import Backend, Plan, plan_attention
from models.cosmos3_policy.layers.heads import DomainLinear, TimeEmbedder
from models.cosmos3_policy.layers.layer import Layer, Table
from models.cosmos3_policy.layers.norm import RMSNorm
from models.cosmos3_policy.layers.rotary import rotary_table
from models.cosmos3_policy.packed import (
    Group,
    Packed,
    Samples,
    Velocity,
    generated_positions,
    patchify,
    text_positions,
    unpatchify,
)
from models.cosmos3_policy.parallelize import set_trainable


@dataclass(frozen=True, kw_only=True, eq=False)
class Understanding:
    """Keys and values [S, kv_heads, d] of the captions, one for each layer."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


class Cosmos3Policy(nn.Module):
    """The whole network. Parameter names are those of Diffusers' Cosmos3OmniTransformer.

    Build it under `torch.device("meta")` for large shapes, then `to_empty` and either load weights or `init_weights`.
    """

    def __init__(self, config: Cosmos3PolicyConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(width, eps=config.rms_norm_eps)
        self.norm_moe_gen = RMSNorm(width, eps=config.rms_norm_eps)
        # Part of a checkpoint, never run: a policy writes no text.
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.proj_in = nn.Linear(config.patch_latent_dim, width)
        self.proj_out = nn.Linear(width, config.patch_latent_dim)
        self.time_embedder = TimeEmbedder(width)
        if config.action_gen:
            self.action_proj_in = DomainLinear(config.num_embodiment_domains, config.action_dim, width)
            self.action_proj_out = DomainLinear(config.num_embodiment_domains, width, config.action_dim)
            self.action_modality_embed = nn.Parameter(torch.empty(width))
            if not self.action_modality_embed.is_meta:
                self.reset_action_heads()
        self.attention: Backend | None = None
        """Implementation of attention, None for the one that suits device, dtype and compiling."""
        self.length_multiple = 1
        """Caption axes are padded to it, for few different shapes; `compile_network` sets it."""
        set_trainable(self)

    def init_weights(self, seed: int) -> None:
        """Weights for training from scratch, in place, a function of the seed; needed after `to_empty`.

        Linear N(0, 1 / fan_in) without bias, token embedding N(0, 1), norms 1, action heads as `reset_action_heads`.
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    _normal(module.weight, module.in_features**-0.5, generator)
                    if module.bias is not None:
                        module.bias.zero_()
                elif isinstance(module, RMSNorm):
                    module.weight.fill_(1.0)
            _normal(self.embed_tokens.weight, 1.0, generator)
        if self.config.action_gen:
            self.reset_action_heads(generator)

    @torch.no_grad()
    def reset_action_heads(self, generator: torch.Generator | None = None) -> None:
        """Fresh action heads and modality embedding, as a warm start from a model of another robot takes them."""
        self.action_proj_in.reset(generator)
        self.action_proj_out.reset(generator)
        std = self.config.hidden_size**-0.5
        nn.init.trunc_normal_(self.action_modality_embed, std=std, a=-3 * std, b=3 * std, generator=generator)

    def forward(self, packed: Packed) -> Velocity:
        """Velocity of a pack of samples: noise minus data, float32; zeros at clean positions."""
        return self._generate(packed, self.understand(packed))

    def generate(self, packed: Packed, understanding: Understanding) -> Velocity:
        """As `forward`, given what `understand` returned for the same captions; they do not depend on noise."""
        return self._generate(packed, understanding)

    @torch.no_grad()
    def understand(self, packed: Packed) -> Understanding:
        """Run the captions through the frozen tower and keep the keys and values of every layer."""
        device = packed.text_ids.device
        missing = -len(packed.text_ids) % self.length_multiple
        if missing:
            packed = replace(packed, text_ids=nn.functional.pad(packed.text_ids, (0, missing)))
        dtype = _stream_dtype(self.embed_tokens.weight)
        plan = self._plan(dtype, packed.text_lengths, rows=len(packed.text_ids), device=device)
        table = self._table(text_positions(packed))
        x = self.embed_tokens(packed.text_ids).to(dtype)
        keys, values = [], []
        for layer in self.layers:
            x, key, value = layer.understand(x, table, plan)
            keys.append(key)
            values.append(value)
        return Understanding(keys=tuple(keys), values=tuple(values))

    def _generate(self, packed: Packed, understanding: Understanding) -> Velocity:
        device = packed.text_ids.device
        lengths = packed.generated_lengths(self.config.latent_patch_size)
        dtype = _stream_dtype(self.proj_in.weight)
        rows = len(understanding.keys[0])
        plan = self._plan(dtype, lengths, packed.text_lengths, context_rows=rows, device=device)
        table = self._table(generated_positions(packed, self.config))
        level = self.time_embedder(packed.sigma.float() * 1000 * self.config.timestep_scale).to(dtype)
        groups = list(packed.groups())
        x = torch.cat([self._embed(group, level[group.start : group.stop], dtype).flatten(0, 1) for group in groups])
        for layer, key, value in zip(self.layers, understanding.keys, understanding.values, strict=True):
            x = layer(x, key, value, table, plan)
        x = self.norm_moe_gen(x)
        unused = self._unused_heads() if packed.action is None else None
        parts = x.split([(group.stop - group.start) * group.tokens(self.config.latent_patch_size) for group in groups])
        decoded = [self._decode(group, part, unused) for group, part in zip(groups, parts, strict=True)]
        return Velocity(
            vision=_as(packed.latents, [vision for vision, _ in decoded]),
            action=None if packed.action is None else _as(packed.action, [a for _, a in decoded if a is not None]),
        )

    def _embed(self, group: Group, level: Tensor, dtype: torch.dtype) -> Tensor:
        """Tokens [n, frames * rows * columns + action rows, width] of samples of one shape; `level` [n, width]."""
        _, rows, columns = group.grid(self.config.latent_patch_size)
        patches = patchify(group.latents, self.config.latent_patch_size)
        vision = self.proj_in(patches.to(self.proj_in.weight.dtype)).to(dtype)
        noisy = group.vision_noisy.repeat_interleave(rows * columns, dim=1)
        tokens = torch.addcmul(vision, noisy.unsqueeze(-1).to(dtype), level.unsqueeze(1))
        if group.action is None:
            return tokens
        assert group.action_noisy is not None
        rows_in = self.action_proj_in(group.action, group.domain) + self.action_modality_embed
        rows_in = torch.addcmul(rows_in.to(dtype), group.action_noisy.unsqueeze(-1).to(dtype), level.unsqueeze(1))
        return torch.cat([tokens, rows_in], dim=1)

    def _decode(self, group: Group, x: Tensor, unused: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Velocities [n, C, T, H, W] and [n, R, D] of normalised tokens [n * tokens, width]."""
        n, patch = group.stop - group.start, self.config.latent_patch_size
        x = x.view(n, -1, x.shape[-1])
        count = x.shape[1] - group.rows
        patches = self.proj_out(x[:, :count]).float()
        if unused is not None:
            patches = patches + unused
        vision = unpatchify(patches, group.latents.shape[1:], patch) * group.vision_noisy.view(n, 1, -1, 1, 1)
        if group.action is None:
            return vision, None
        assert group.action_noisy is not None
        action = self.action_proj_out(x[:, count:], group.domain).float()
        return vision, action * group.action_noisy.unsqueeze(-1)

    def _unused_heads(self) -> Tensor | None:
        """Zero that depends on the action heads: ranks without actions must give them a gradient as the others do."""
        if not self.config.action_gen or not torch.is_grad_enabled():
            return None
        row = self.action_proj_in(self.action_modality_embed.new_zeros(1, 1, self.config.action_dim), 0)
        return self.action_proj_out(row + self.action_modality_embed, 0).float().sum() * 0.0

    def _plan(self, dtype: torch.dtype, *lengths: tuple[int, ...], device: torch.device, **rows: int) -> Plan:
        backend = self.attention
        if backend is None:
            backend = "padded" if self.length_multiple > 1 else "sdpa"
            if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
                backend = "varlen"
        return plan_attention(*lengths, backend=backend, device=device, multiple=self.length_multiple, **rows)

    def _table(self, positions: Tensor) -> Table:
        c = self.config
        return rotary_table(positions, c.head_dim, c.rope_theta, c.rope_axes_dim)


def _stream_dtype(weight: Tensor) -> torch.dtype:
    """dtype of the tokens between the layers: autocast's where it is on, else that of the tower's weights."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def _as(like: Samples, groups: list[Tensor]) -> Samples:
    """Velocities of the groups in the structure of the pack's own part."""
    if isinstance(like, list):
        # Copies, since sharding hangs its hooks on what is returned, and a view may lose them.
        return [sample.clone() for group in groups for sample in group]
    return groups[0] if len(groups) == 1 else torch.cat(groups)


def _normal(parameter: Tensor, std: float, generator: torch.Generator) -> None:
    # Drawn on the CPU in float32, so that device and dtype do not change the values.
    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
