"""Configuration and sizes: the released shape, the file it is read from, and what is refused."""

import json

import pytest
import torch

from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.network import Cosmos3Policy
from models.cosmos3_policy.parallelize import is_trained

# Name and shape of every tensor that is not in a layer, and of layer 0, by Diffusers' names.
OUTSIDE = {
    "embed_tokens.weight": (151936, 4096),
    "lm_head.weight": (151936, 4096),
    "norm.weight": (4096,),
    "norm_moe_gen.weight": (4096,),
    "proj_in.weight": (4096, 192),
    "proj_in.bias": (4096,),
    "proj_out.weight": (192, 4096),
    "proj_out.bias": (192,),
    "time_embedder.linear_1.weight": (4096, 256),
    "time_embedder.linear_1.bias": (4096,),
    "time_embedder.linear_2.weight": (4096, 4096),
    "time_embedder.linear_2.bias": (4096,),
    "action_proj_in.fc.weight": (32, 262144),
    "action_proj_in.bias.weight": (32, 4096),
    "action_proj_out.fc.weight": (32, 262144),
    "action_proj_out.bias.weight": (32, 64),
    "action_modality_embed": (4096,),
}
FROZEN_IN_LAYER = {
    "self_attn.to_q.weight": (4096, 4096),
    "self_attn.to_k.weight": (1024, 4096),
    "self_attn.to_v.weight": (1024, 4096),
    "self_attn.to_out.weight": (4096, 4096),
    "self_attn.norm_q.weight": (128,),
    "self_attn.norm_k.weight": (128,),
    "mlp.gate_proj.weight": (12288, 4096),
    "mlp.up_proj.weight": (12288, 4096),
    "mlp.down_proj.weight": (4096, 12288),
    "input_layernorm.weight": (4096,),
    "post_attention_layernorm.weight": (4096,),
}
TRAINED_IN_LAYER = {
    "self_attn.add_q_proj.weight": (4096, 4096),
    "self_attn.add_k_proj.weight": (1024, 4096),
    "self_attn.add_v_proj.weight": (1024, 4096),
    "self_attn.to_add_out.weight": (4096, 4096),
    "self_attn.norm_added_q.weight": (128,),
    "self_attn.norm_added_k.weight": (128,),
    "mlp_moe_gen.gate_proj.weight": (12288, 4096),
    "mlp_moe_gen.up_proj.weight": (12288, 4096),
    "mlp_moe_gen.down_proj.weight": (4096, 12288),
    "input_layernorm_moe_gen.weight": (4096,),
    "post_attention_layernorm_moe_gen.weight": (4096,),
}


@pytest.fixture(scope="module")
def released() -> Cosmos3Policy:
    with torch.device("meta"):
        return Cosmos3Policy(Cosmos3PolicyConfig())


def test_sizes_of_the_released_shape(released: Cosmos3Policy) -> None:
    assert sum(p.numel() for p in released.parameters()) == 15_173_136_576
    assert sum(p.numel() for p in released.parameters() if p.requires_grad) == 6_982_401_216
    heads = {name: p.numel() for name, p in released.named_parameters() if name.startswith("action_")}
    assert sum(heads.values()) == 8_519_680 + 8_390_656 + 4_096


def test_names_and_shapes_are_those_of_diffusers(released: Cosmos3Policy) -> None:
    layer = FROZEN_IN_LAYER | TRAINED_IN_LAYER
    expected = OUTSIDE | {f"layers.{i}.{name}": shape for i in range(36) for name, shape in layer.items()}
    assert {name: tuple(tensor.shape) for name, tensor in released.state_dict().items()} == expected


def test_only_the_generation_tower_and_its_heads_are_trained(released: Cosmos3Policy) -> None:
    frozen = {"embed_tokens.weight", "lm_head.weight", "norm.weight"}
    frozen |= {f"layers.{i}.{name}" for i in range(36) for name in FROZEN_IN_LAYER}
    assert {name for name, p in released.named_parameters() if not p.requires_grad} == frozen
    assert all(is_trained(name) == p.requires_grad for name, p in released.named_parameters())


def test_tiny_is_the_size_it_says() -> None:
    network = Cosmos3Policy(Cosmos3PolicyConfig.tiny())
    assert sum(p.numel() for p in network.parameters()) == 208_176
    assert Cosmos3PolicyConfig.tiny(num_hidden_layers=3).num_hidden_layers == 3


def test_a_file_is_read_and_written_back() -> None:
    """As Diffusers writes it for a model with sound: what is not built stays in the file."""
    file = {
        "_class_name": "Cosmos3OmniTransformer",
        "_diffusers_version": "0.39.0",
        "action_dim": 64,
        "action_gen": True,
        "rope_axes_dim": [24, 20, 20],
        "rope_scaling": {"mrope_section": [24, 20, 20], "rope_type": "default"},
        "sound_dim": 128,
        "sound_gen": True,
        "vocab_size": 151936,
    }
    config = Cosmos3PolicyConfig.from_dict(file)
    assert {**config.to_dict(), **file} == config.to_dict()
    assert Cosmos3PolicyConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_model_without_action_heads() -> None:
    config = Cosmos3PolicyConfig.from_dict({**Cosmos3PolicyConfig.tiny().to_dict(), "action_gen": False})
    names = Cosmos3Policy(config).state_dict()
    assert not any("action" in name for name in names)
    assert "action_gen" in config.to_dict()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 17}, "head_dim = 17 must be even"),
        ({"rope_axes_dim": (2, 3, 3)}, "3 \\* 3 must be at most head_dim / 2 = 8"),
        ({"rope_axes_dim": (4, 2)}, "three numbers"),
        ({"rope_axes_dim": 8}, "rope_axes_dim = 8 must be a list"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads = 3"),
        ({"patch_latent_dim": 15}, "latent_channel \\* latent_patch_size\\^2 = 16"),
        ({"attention_bias": True, "attention_dropout": 0.1}, "attention_dropout = 0.1[^$]*attention_bias = true"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0 must be a whole number, at least 1"),
        ({"num_key_value_heads": 0, "hidden_size": "64"}, "hidden_size = '64'[^$]*num_key_value_heads = 0"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers = 2.0 must be a whole number"),
        ({"rope_theta": 0.0, "rms_norm_eps": None}, "rope_theta = 0.0[^$]*rms_norm_eps = None"),
    ],
)
def test_inconsistent_sizes_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Cosmos3PolicyConfig.tiny(**changes)


@pytest.mark.parametrize(("key", "value"), [("hidden_act", "relu2"), ("qk_norm_for_text", False)])
def test_a_sibling_network_is_refused(key: str, value: object) -> None:
    """Its tensors have the same names: only the file tells that they mean something else."""
    file = Cosmos3PolicyConfig.tiny().to_dict()
    with pytest.raises(ValueError, match=f"{key} = {value!r}: only"):
        Cosmos3PolicyConfig.from_dict({**file, key: value})
    built = {"hidden_act": "silu", "qk_norm_for_text": True}[key]
    assert Cosmos3PolicyConfig.from_dict({**file, key: built}).to_dict() == {**file, key: built}


def test_slots_of_the_axes_are_read_as_diffusers_reads_them() -> None:
    file = Cosmos3PolicyConfig.tiny().to_dict()
    assert Cosmos3PolicyConfig.from_dict({**file, "rope_axes_dim": None}).rope_axes_dim == (4, 2, 2)
    # as a recipe's own value stands over a file's
    changed = Cosmos3PolicyConfig.from_dict({**file, "rope_axes_dim": [6, 1, 1]})
    assert changed.rope_axes_dim == (6, 1, 1)
    assert changed.to_dict()["rope_scaling"]["mrope_section"] == [6, 1, 1]
