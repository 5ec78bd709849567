"""Promises of the GR00T N1.7 configuration: released values, round trip, every inconsistency named."""

import json
import logging

import pytest

from models.gr00t_n17.config import GR00TN17Config


def test_defaults_are_the_released_checkpoint() -> None:
    config = GR00TN17Config()
    assert (config.select_layer, config.diffusion_model_cfg.num_layers) == (16, 32)
    assert config.vl_self_attention_cfg.num_layers == 4
    assert (config.max_state_dim, config.max_action_dim, config.action_horizon) == (132, 132, 40)
    assert (config.noise_beta_alpha, config.noise_beta_beta, config.noise_s) == (1.5, 1.0, 0.999)
    assert (config.num_timestep_buckets, config.num_inference_timesteps) == (1000, 4)
    assert config.state_dropout_prob == 0.2
    assert (config.tune_llm, config.tune_visual, config.tune_top_llm_layers) == (False, False, 0)
    assert config.backbone.image_token_id == 151655


def test_round_trip_through_json() -> None:
    for config in (GR00TN17Config(), GR00TN17Config.tiny(action_horizon=12)):
        assert GR00TN17Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_checkpoint_keys_unknown_and_missing_are_reported_and_kept(caplog: pytest.LogCaptureFixture) -> None:
    stored = {
        "architectures": ["Gr00tN1d7"],
        "select_layer": 12,
        "diffusion_model_cfg": {"num_layers": 16, "attn_dropout": 0.2},
        "image_crop_size": [230, 230],
    }
    with caplog.at_level(logging.INFO):
        config = GR00TN17Config.from_dict(stored)
    assert (config.select_layer, config.diffusion_model_cfg.num_layers) == (12, 16)
    assert config.extra == {"architectures": ["Gr00tN1d7"], "diffusion_model_cfg.attn_dropout": 0.2}
    for word in ("architectures", "attn_dropout", "tune_llm=False", "output_dim"):
        assert word in caplog.text
    written = config.to_dict()
    assert written["architectures"] == ["Gr00tN1d7"]
    assert written["diffusion_model_cfg"]["attn_dropout"] == 0.2
    assert GR00TN17Config.from_dict(written) == config


def test_unknown_backbone_needs_sizes() -> None:
    with pytest.raises(ValueError, match=r"somebody/else.*`backbone` section"):
        GR00TN17Config.from_dict({"model_name": "somebody/else"})


def test_nested_overrides_change_only_what_they_name() -> None:
    config = GR00TN17Config.tiny(
        action_horizon=12,
        diffusion_model_cfg={"num_layers": 2},
        backbone={"text": {"vocab_size": 300}},
    )
    assert (config.action_horizon, config.diffusion_model_cfg.num_layers) == (12, 2)
    assert config.diffusion_model_cfg.dropout == 0.0
    assert (config.backbone.text.vocab_size, config.backbone.text.hidden_size) == (300, 64)
    assert GR00TN17Config(diffusion_model_cfg={"dropout": 0.0}).diffusion_model_cfg.num_layers == 32
    with pytest.raises(ValueError, match=r"diffusion_model_cfg.num_layer is no setting.*num_layers"):
        GR00TN17Config.tiny(diffusion_model_cfg={"num_layer": 2})


def test_no_image_features_are_added_behind_the_last_kept_layer() -> None:
    """There upstream's features and ours would not be the same ones."""
    with pytest.raises(ValueError, match=r"deepstack_visual_indexes has 2 entries, it must have fewer than"):
        GR00TN17Config.tiny(backbone={"vision": {"depth": 3, "deepstack_visual_indexes": (0, 1)}})


def test_all_inconsistencies_are_listed_at_once() -> None:
    with pytest.raises(ValueError, match="inconsistent") as caught:
        GR00TN17Config(
            select_layer=29,
            input_embedding_dim=1500,
            backbone={"text": {"mrope_section": (24, 20, 24)}, "pad_token_id": 151655},
            diffusion_model_cfg={"norm_type": "layer_norm", "dropout": 1.0},
            use_alternate_vl_dit=False,
        )
    for words in (
        "select_layer = 29 must lie in 1..backbone.text.num_hidden_layers = 28",
        "input_embedding_dim = 1500 must equal diffusion_model_cfg.num_attention_heads * attention_head_dim = 1536",
        "2 * sum(backbone.text.mrope_section) = 136 must equal backbone.text.head_dim = 128",
        "special token ids must differ",
        "diffusion_model_cfg.norm_type = 'layer_norm': only 'ada_norm' is built",
        "diffusion_model_cfg.dropout = 1.0 must lie in [0, 1)",
        "use_alternate_vl_dit = False: only True is built",
    ):
        assert words in str(caught.value)
