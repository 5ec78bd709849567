"""Consistency of a GR00T N1.7 configuration: all problems at once, each naming the keys to change."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from models.gr00t_n17.config import GR00TN17Config


def problems(config: GR00TN17Config) -> list[str]:
    """Every inconsistency at once, each naming the keys to change."""
    text, vision = config.backbone.text, config.backbone.vision
    dit, vlsa = config.diffusion_model_cfg, config.vl_self_attention_cfg
    found: list[str] = []

    def need(condition: bool, message: str) -> None:
        if not condition:
            found.append(message)

    def equal(left: str, a: int, right: str, b: int) -> None:
        need(a == b, f"{left} = {a} must equal {right} = {b}")

    def one_of(key: str, value: object, *allowed: object) -> None:
        need(value in allowed, f"{key} = {value!r}: only {', '.join(map(repr, allowed))} is built")

    need(
        1 <= config.select_layer <= text.num_hidden_layers,
        f"select_layer = {config.select_layer} must lie in 1..backbone.text.num_hidden_layers = "
        f"{text.num_hidden_layers}",
    )
    need(
        0 <= config.tune_top_llm_layers <= config.select_layer,
        f"tune_top_llm_layers = {config.tune_top_llm_layers} must lie in 0..select_layer = {config.select_layer}",
    )
    equal("backbone_embedding_dim", config.backbone_embedding_dim, "backbone.text.hidden_size", text.hidden_size)
    equal(
        "input_embedding_dim",
        config.input_embedding_dim,
        "diffusion_model_cfg.num_attention_heads * attention_head_dim",
        dit.num_attention_heads * dit.attention_head_dim,
    )
    equal("hidden_size", config.hidden_size, "diffusion_model_cfg.output_dim", dit.output_dim)
    if vlsa.num_layers:
        equal(
            "backbone_embedding_dim",
            config.backbone_embedding_dim,
            "vl_self_attention_cfg.num_attention_heads * attention_head_dim",
            vlsa.num_attention_heads * vlsa.attention_head_dim,
        )
    need(config.input_embedding_dim % 2 == 0, f"input_embedding_dim = {config.input_embedding_dim} must be even")
    need(
        not config.add_pos_embed or config.action_horizon <= config.max_seq_len,
        f"action_horizon = {config.action_horizon} must be at most max_seq_len = {config.max_seq_len}",
    )
    equal("2 * sum(backbone.text.mrope_section)", 2 * sum(text.mrope_section), "backbone.text.head_dim", text.head_dim)
    need(
        text.num_attention_heads % text.num_key_value_heads == 0,
        f"backbone.text.num_attention_heads = {text.num_attention_heads} must be a multiple of "
        f"num_key_value_heads = {text.num_key_value_heads}",
    )
    need(
        vision.hidden_size % (4 * vision.num_heads) == 0,
        f"backbone.vision.hidden_size = {vision.hidden_size} must be a multiple of 4 * num_heads = "
        f"{4 * vision.num_heads}",
    )
    side = round(vision.num_position_embeddings**0.5)
    equal("backbone.vision.num_position_embeddings", vision.num_position_embeddings, "a square, nearest", side * side)
    stages = vision.deepstack_visual_indexes
    need(
        list(stages) == sorted(set(stages)) and all(0 <= i < vision.depth for i in stages),
        f"backbone.vision.deepstack_visual_indexes = {stages} must rise within 0..depth-1 = {vision.depth - 1}",
    )
    need(
        # Upstream's features are taken before the addition behind the last layer, ours after it.
        len(stages) < config.select_layer,
        f"backbone.vision.deepstack_visual_indexes has {len(stages)} entries, it must have fewer than select_layer = "
        f"{config.select_layer}",
    )
    names = [f.name for f in dataclasses.fields(config.backbone) if f.name.endswith("_id")]
    ids = {name: getattr(config.backbone, name) for name in names}
    for name, value in ids.items():
        need(0 <= value < text.vocab_size, f"backbone.{name} = {value} must lie below vocab_size = {text.vocab_size}")
    need(len(set(ids.values())) == len(ids), f"backbone special token ids must differ from each other: {ids}")
    for key, probability in (
        ("diffusion_model_cfg.dropout", dit.dropout),
        ("vl_self_attention_cfg.dropout", vlsa.dropout),
        ("state_dropout_prob", config.state_dropout_prob),
    ):
        need(0.0 <= probability < 1.0, f"{key} = {probability} must lie in [0, 1)")
    need(0.0 < config.noise_s <= 1.0, f"noise_s = {config.noise_s} must lie in (0, 1]")
    for key in ("num_inference_timesteps", "num_timestep_buckets", "attend_text_every_n_blocks", "max_num_embodiments"):
        need(getattr(config, key) >= 1, f"{key} = {getattr(config, key)} must be at least 1")
    one_of("backbone_model_type", config.backbone_model_type, "qwen")
    one_of("state_history_length", config.state_history_length, 1)
    one_of("reproject_vision", config.reproject_vision, False)
    one_of("use_alternate_vl_dit", config.use_alternate_vl_dit, True)
    one_of("diffusion_model_cfg.interleave_self_attention", dit.interleave_self_attention, True)
    one_of("diffusion_model_cfg.norm_type", dit.norm_type, "ada_norm")
    one_of("diffusion_model_cfg.positional_embeddings", dit.positional_embeddings, None)
    one_of("vl_self_attention_cfg.positional_embeddings", vlsa.positional_embeddings, None)
    return found
