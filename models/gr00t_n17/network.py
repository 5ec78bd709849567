"""GR00T N1.7: vision-language backbone, flow-matching action head and the loss of a training batch."""

import math
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from models.common import flow_matching
from models.common.embodiment import (
    Category,
    CategorySpecificLinear,
    CategorySpecificMLP,
    shared_category,
)
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.layers import init
from models.gr00t_n17.layers.backbone import Backbone, BackboneFeatures, LowerFeatures
from models.gr00t_n17.layers.dit import AlternateVLDiT, VLSelfAttention
from models.gr00t_n17.layers.grids import image_tokens, read_grids
from models.gr00t_n17.parallelize import parts, set_trainable
from models.gr00t_n17.slots import checked_slots, rows_of


class ActionEncoder(nn.Module):
    """Noisy actions and their time bucket -> one token per step, all layers per embodiment."""

    def __init__(self, num_categories: int, action_dim: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.W1 = CategorySpecificLinear(num_categories, action_dim, dim)
        self.W2 = CategorySpecificLinear(num_categories, 2 * dim, dim)
        self.W3 = CategorySpecificLinear(num_categories, dim, dim)

    def forward(self, actions: Tensor, bucket: Tensor, category: Category) -> Tensor:
        """actions [B, R * H, A] and bucket [B, R] for R draws per sample -> [B, R * H, dim]."""
        a = self.W1(actions, category)
        tau = self._sinusoid(bucket).to(a.dtype).repeat_interleave(a.shape[1] // bucket.shape[1], dim=1)
        h = self.W2(torch.cat([a, tau], dim=-1), category)
        return self.W3(torch.nn.functional.silu(h), category)

    def _sinusoid(self, bucket: Tensor) -> Tensor:
        """[sin, cos] with exponent denominator dim / 2, float32 [B, R, dim]; not the sinusoid of the DiT."""
        half = self.dim // 2
        index = torch.arange(half, device=bucket.device, dtype=torch.float32)
        angles = bucket.unsqueeze(-1).float() * torch.exp(index * (-math.log(10000.0) / half))
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class ActionHead(nn.Module):
    """Everything trained in a stock fine-tune: VL adapter, per-embodiment encoders, DiT and decoder.

    With `slots` the per-embodiment tensors hold these slots only; embodiment ids stay those of the full tensors.
    """

    def __init__(self, config: GR00TN17Config, slots: Sequence[int] | None = None) -> None:
        super().__init__()
        self.config = config
        self.slots = checked_slots(slots, config.max_num_embodiments)
        held = config.max_num_embodiments if self.slots is None else len(self.slots)
        width = config.input_embedding_dim
        vl_dim, hidden = config.backbone_embedding_dim, config.hidden_size
        self.model = AlternateVLDiT(config)
        self.state_encoder = CategorySpecificMLP(held, config.max_state_dim, hidden, width)
        self.action_encoder = ActionEncoder(held, config.max_action_dim, width)
        self.action_decoder = CategorySpecificMLP(held, hidden, hidden, config.max_action_dim)
        self.vlln = nn.LayerNorm(vl_dim, eps=1e-5) if config.use_vlln else nn.Identity()
        self.vl_self_attention = VLSelfAttention(config)
        if config.add_pos_embed:
            self.position_embedding = nn.Embedding(config.max_seq_len, width)
            if not self.position_embedding.weight.is_meta:
                nn.init.normal_(self.position_embedding.weight, 0.0, 0.02)

    def loss(
        self,
        features: Tensor,
        attention_mask: Tensor,
        image_mask: Tensor,
        state: Tensor,
        action: Tensor,
        action_mask: Tensor,
        embodiment_id: Category,
        noise: Tensor | None = None,
        time: Tensor | None = None,
        image_tokens: int | None = None,
    ) -> Tensor:
        """Flow-matching loss, a scalar: one mean over all unmasked entries of the batch.

        Args:
            features: [B, S, D] of the backbone, before its final norm.
            attention_mask, image_mask: [B, S] bool.
            state: [B, 1, Ds] normalised and zero padded; action, action_mask: [B, H, Da].
            embodiment_id: int64 [B], or one integer for the whole batch.
            noise: standard normal [K * B, H, Da], K draws per sample that share the features; row k * B + b is draw k
                of sample b. Drawn on the features' device (K = 1) when absent.
            time: [K * B] in [0, 1], in the same order. Drawn from the Beta distribution of the config when absent.
            image_tokens: image tokens of a sample where all have as many (`GR00TN17.image_tokens`): spares the keys
                that a block does not attend to. Same values up to rounding.
        """
        dtype = self._flow_dtype()
        batch = action.shape[0]
        state, action, action_mask = state.to(dtype), action.to(dtype), action_mask.to(dtype)
        category = rows_of(shared_category(embodiment_id), self.slots)
        context = self._context(features, attention_mask)
        # Dropout of the state is drawn before the noise, as upstream does: both may come from the same generator.
        drawn = noise if noise is not None else time
        draws = 1 if drawn is None else len(drawn) // batch
        state_token = self._encode_state(state, category, draws)
        if noise is None:
            noise = torch.randn_like(action) if time is None else self._randn(len(time), action)
        if time is None:
            c = self.config
            time = flow_matching.beta_times(len(noise), c.noise_beta_alpha, c.noise_beta_beta, c.noise_s)
        if noise.shape[1:] != action.shape[1:] or len(noise) != draws * batch or time.shape != noise.shape[:1]:
            raise ValueError(
                f"noise {tuple(noise.shape)} and time {tuple(time.shape)} must be [K * {batch}, "
                f"{action.shape[1]}, {action.shape[2]}] and [K * {batch}] for actions {tuple(action.shape)}"
            )
        # From here on the draws of a sample stand together, so that they share its attention keys.
        noise = _by_sample(noise.to(dtype), draws)
        time = _by_sample(time.to(device=action.device, dtype=dtype), draws)
        action, action_mask = (t.repeat_interleave(draws, dim=0) for t in (action, action_mask))
        noisy = flow_matching.interpolate(noise, action, time)
        bucket = flow_matching.time_bucket(time, self.config.num_timestep_buckets)
        real = self._real_entries(action_mask)
        vl = (context, attention_mask, image_mask, image_tokens)
        velocity = self._velocity(noisy, bucket, state_token, vl, category, real)
        return flow_matching.masked_mean_square(velocity, action - noise, action_mask)

    @torch.no_grad()
    def sample(
        self,
        features: Tensor,
        attention_mask: Tensor,
        image_mask: Tensor,
        state: Tensor,
        embodiment_id: Category,
        noise: Tensor | None = None,
        action_mask: Tensor | None = None,
        velocity_scale: Tensor | None = None,
        image_tokens: int | None = None,
    ) -> Tensor:
        """Actions [B, H, Da] by Euler steps from `noise` [B, H, Da] (drawn when absent), normalised, not clipped.

        `action_mask` [B, H, Da] marks the real entries; only a model with `strict_action_padding_mask` reads it, and
        needs it. `velocity_scale` [H, 1] multiplies the velocity: 0 keeps a row as it is in `noise`. `image_tokens`: as
        for the loss. Call this in eval mode: dropout would act otherwise.
        """
        dtype = self._flow_dtype()
        category = rows_of(shared_category(embodiment_id), self.slots)
        context = self._context(features, attention_mask)
        real = self._real_entries(action_mask)
        if noise is None:
            shape = (features.shape[0], self.config.action_horizon, self.config.max_action_dim)
            noise = torch.randn(shape, dtype=dtype, device=features.device)
        state_token = self._encode_state(state.to(dtype), category, 1)
        vl = (context, attention_mask, image_mask, image_tokens)

        def velocity(x: Tensor, bucket: int) -> Tensor:
            buckets = torch.full((len(x),), bucket, device=x.device)
            result = self._velocity(x, buckets, state_token, vl, category, real)
            for factor in (real, velocity_scale):
                result = result if factor is None else result * factor
            return result

        noise = noise.to(dtype)
        return flow_matching.euler(
            velocity,
            noise if real is None else noise * real,
            num_steps=self.config.num_inference_timesteps,
            num_buckets=self.config.num_timestep_buckets,
        )

    def _context(self, features: Tensor, valid: Tensor) -> Tensor:
        """VL tokens for the DiT [B, S, D].

        As released, the padding of a batch is attended to, so a sample depends on the longest prompt beside it. Columns
        that are padding in every sample only round lengths up to a static shape: they are no keys.
        """
        return self.vl_self_attention(self.vlln(features), valid.any(0, keepdim=True))

    def _real_entries(self, action_mask: Tensor | None) -> Tensor | None:
        """The action mask where padded entries are to stay zero, None where they pass as noise (as released)."""
        if not self.config.strict_action_padding_mask:
            return None
        if action_mask is None:
            raise ValueError(
                "strict_action_padding_mask=true: pass action_mask [B, H, Da] to sample, the mask of training"
            )
        return (action_mask != 0).to(self._flow_dtype())

    def _encode_state(self, state: Tensor, category: Category, draws: int) -> Tensor:
        """One token per row [B * draws, 1, C]; in training it is multiplied by 0 with `state_dropout_prob`."""
        token = self.state_encoder(state, category).repeat_interleave(draws, dim=0)
        if self.training and self.config.state_dropout_prob > 0:
            keep = torch.rand(len(token), 1, 1, device=token.device) >= self.config.state_dropout_prob
            token = token * keep.to(token.dtype)
        return token

    def _velocity(
        self,
        noisy: Tensor,
        bucket: Tensor,
        state_token: Tensor,
        vl: tuple[Tensor, Tensor, Tensor, int | None],
        category: Category,
        real: Tensor | None = None,
    ) -> Tensor:
        """Predicted velocity [B * R, H, A] of noisy actions [B * R, H, A] at bucket [B * R], R rows per sample.

        `vl`: context [B, S, D], its masks of real and of image tokens [B, S], and image tokens per sample if equal.
        With `real` [B * R, H, A] padded entries are zeroed and padded steps are no keys.
        """
        context, valid, image_mask, image_tokens = vl
        batch, (rows, horizon, _) = len(context), noisy.shape
        keys = None
        if real is not None:
            noisy = noisy * real
            keys = torch.nn.functional.pad(real.any(-1), (1, 0), value=True)  # the state token stands first
        # Per-embodiment layers see the rows of a sample as one longer sequence: one weight lookup per sample.
        tokens = self.action_encoder(noisy.view(batch, -1, noisy.shape[-1]), bucket.view(batch, -1), category)
        tokens = tokens.view(rows, horizon, -1)
        if self.config.add_pos_embed:
            tokens = tokens + self.position_embedding.weight[:horizon]
        tokens = torch.cat([state_token, tokens], dim=1)
        output = self.model(tokens, bucket, context, valid, image_mask, keys, image_tokens)[:, 1:]
        return self.action_decoder(output.reshape(batch, -1, output.shape[-1]), category).view(rows, horizon, -1)

    def _flow_dtype(self) -> torch.dtype:
        """float32 at least: in bfloat16, time would fall on a coarse grid of buckets."""
        return torch.promote_types(self.action_encoder.W1.W.dtype, torch.float32)

    def _randn(self, rows: int, like: Tensor) -> Tensor:
        return torch.randn(rows, *like.shape[1:], dtype=like.dtype, device=like.device)


def _by_sample(x: Tensor, draws: int) -> Tensor:
    """[K * B, ...] ordered by draw -> [B * K, ...] ordered by sample."""
    return x if draws == 1 else x.unflatten(0, (draws, -1)).transpose(0, 1).flatten(0, 1)


class GR00TN17(nn.Module):
    """The whole network. Parameter names are those of the released checkpoint.

    Build it under `torch.device("meta")` for large shapes, then `to_empty` and either load weights or `init_weights`.

    Args:
        config: the architecture, from a checkpoint's config.json.
        slots: embodiment slots whose weights are held, None for all. Embodiment ids are slots in either case; one that
            is not held is a ValueError.
    """

    def __init__(self, config: GR00TN17Config, slots: Sequence[int] | None = None) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.action_head = ActionHead(config, slots)
        set_trainable(self, config)

    @property
    def slots(self) -> tuple[int, ...] | None:
        """Active embodiment slots in rising order, None when the full tensors are held."""
        return self.action_head.slots

    def init_weights(self, seed: int) -> None:
        """Weights for training from scratch, in place; needed after `to_empty` when nothing is loaded."""
        init.init_weights(self.backbone, self.action_head, seed)

    def train(self, mode: bool = True) -> Self:
        """Parts without a trained parameter stay in eval mode, as upstream does: their dropout must not act."""
        super().train(mode)
        for modules in parts(self).values():
            for module in modules:
                if not any(p.requires_grad for p in module.parameters()):
                    module.eval()
        return self

    def forward(
        self,
        inputs: Mapping[str, Tensor],
        noise: Tensor | None = None,
        time: Tensor | None = None,
        features: BackboneFeatures | LowerFeatures | None = None,
    ) -> Tensor:
        """Loss of a batch: input_ids, attention_mask, pixel_values, image_grid_thw, state, action, action_mask,
        embodiment_id. With `noise` [K * B, H, Da] and `time` [K * B] the K draws share one backbone pass; given
        `features` of the backbone or of its lower layers, these are not run again."""
        if features is None:
            names = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")
            features = self.backbone(*(inputs[name] for name in names))
        elif isinstance(features, LowerFeatures):
            features = self.backbone.upper(features)
        return self.action_head.loss(
            *features,
            inputs["state"],
            inputs["action"],
            inputs["action_mask"],
            inputs["embodiment_id"],
            noise,
            time,
            self.image_tokens(inputs),
        )

    def image_tokens(self, inputs: Mapping[str, Tensor]) -> int | None:
        """Image tokens of a sample when all samples of a batch have as many, else None; reads the grids on the host."""
        merge = self.config.backbone.vision.spatial_merge_size
        return image_tokens(read_grids(inputs["image_grid_thw"], merge), len(inputs["input_ids"]), merge)
