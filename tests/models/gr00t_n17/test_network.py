"""Promises of the whole network: names and sizes of the released model, initial weights, what trains."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.network import GR00TN17
from models.gr00t_n17.parallelize import blocks, set_trainable, tuned_parameters


def released_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the released state dict (lm_head left out), written as patterns `{a..b}` for ranges."""
    visual, llm, head = "backbone.model.model.visual.", "backbone.model.model.language_model.", "action_head."
    shapes: dict[str, tuple[int, ...]] = {
        visual + "patch_embed.proj.weight": (1024, 3, 2, 16, 16),
        visual + "patch_embed.proj.bias": (1024,),
        visual + "pos_embed.weight": (2304, 1024),
        llm + "embed_tokens.weight": (151936, 2048),
        llm + "norm.weight": (2048,),
        head + "position_embedding.weight": (1024, 1536),
    }

    def layer(name: str, out: int, *inputs: int) -> None:
        shapes[name + ".weight"] = (out, *inputs)
        shapes[name + ".bias"] = (out,)

    def category(name: str, inputs: int, out: int) -> None:
        shapes[head + name + ".W"] = (32, inputs, out)
        shapes[head + name + ".b"] = (32, out)

    for i in range(24):
        block = f"{visual}blocks.{i}."
        layer(block + "norm1", 1024)
        layer(block + "norm2", 1024)
        layer(block + "attn.qkv", 3072, 1024)
        layer(block + "attn.proj", 1024, 1024)
        layer(block + "mlp.linear_fc1", 4096, 1024)
        layer(block + "mlp.linear_fc2", 1024, 4096)
    for merger, norm in (("merger", 1024), *((f"deepstack_merger_list.{i}", 4096) for i in range(3))):
        layer(f"{visual}{merger}.norm", norm)
        layer(f"{visual}{merger}.linear_fc1", 4096, 4096)
        layer(f"{visual}{merger}.linear_fc2", 2048, 4096)
    for i in range(16):
        block = f"{llm}layers.{i}."
        for name, shape in {
            "self_attn.q_proj": (2048, 2048),
            "self_attn.k_proj": (1024, 2048),
            "self_attn.v_proj": (1024, 2048),
            "self_attn.o_proj": (2048, 2048),
            "self_attn.q_norm": (128,),
            "self_attn.k_norm": (128,),
            "mlp.gate_proj": (6144, 2048),
            "mlp.up_proj": (6144, 2048),
            "mlp.down_proj": (2048, 6144),
            "input_layernorm": (2048,),
            "post_attention_layernorm": (2048,),
        }.items():
            shapes[f"{block}{name}.weight"] = shape
    layer(head + "vlln", 2048)
    for i in range(4):
        block = f"{head}vl_self_attention.transformer_blocks.{i}."
        layer(block + "norm1", 2048)
        layer(block + "norm3", 2048)
        for name in ("to_q", "to_k", "to_v", "to_out.0"):
            layer(f"{block}attn1.{name}", 2048, 2048)
        layer(block + "ff.net.0.proj", 8192, 2048)
        layer(block + "ff.net.2", 2048, 8192)
    category("state_encoder.layer1", 132, 1024)
    category("state_encoder.layer2", 1024, 1536)
    category("action_encoder.W1", 132, 1536)
    category("action_encoder.W2", 3072, 1536)
    category("action_encoder.W3", 1536, 1536)
    category("action_decoder.layer1", 1024, 1024)
    category("action_decoder.layer2", 1024, 132)
    layer(head + "model.timestep_encoder.timestep_embedder.linear_1", 1536, 256)
    layer(head + "model.timestep_encoder.timestep_embedder.linear_2", 1536, 1536)
    for i in range(32):
        block = f"{head}model.transformer_blocks.{i}."
        layer(block + "norm1.linear", 3072, 1536)
        for name in ("to_q", "to_out.0"):
            layer(f"{block}attn1.{name}", 1536, 1536)
        for name in ("to_k", "to_v"):
            layer(f"{block}attn1.{name}", 1536, 1536 if i % 2 else 2048)
        layer(block + "ff.net.0.proj", 6144, 1536)
        layer(block + "ff.net.2", 1536, 6144)
    layer(head + "model.proj_out_1", 3072, 1536)
    layer(head + "model.proj_out_2", 1024, 1536)
    return shapes


def test_released_names_shapes_and_counts() -> None:
    with torch.device("meta"):
        network = GR00TN17(GR00TN17Config())
    assert {name: tuple(p.shape) for name, p in network.state_dict().items()} == released_shapes()
    assert sum(p.numel() for p in network.parameters()) == 3_144_016_000
    assert sum(p.numel() for p in network.action_head.parameters()) == 1_620_515_968
    trained = tuned_parameters(network)
    assert sum(p.numel() for p in trained.values()) == 1_620_515_968
    assert all(name.startswith("action_head.") for name in trained)
    assert {part: len(modules) for part, modules in blocks(network).items()} == {
        "vision": 24,
        "llm": 16,
        "vl_self_attention": 4,
        "dit": 32,
    }


def make_inputs(config: GR00TN17Config) -> dict[str, Any]:
    row = [0, 1, 3, 5, 5, 5, 5, 4, 20, 21, 2]
    g = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.tensor([row] * 2),
        "attention_mask": torch.tensor([[0] + [1] * 10] * 2),
        "pixel_values": torch.randn(32, 1536, generator=g),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "state": torch.randn(2, 1, 32, generator=g),
        "action": torch.randn(2, 16, 32, generator=g),
        "action_mask": torch.ones(2, 16, 32),
        "embodiment_id": torch.tensor([1, 1]),
    }


def test_init_depends_on_the_seed_alone_and_works_from_meta() -> None:
    config = GR00TN17Config.tiny()
    torch.manual_seed(1)
    first = GR00TN17(config)
    first.init_weights(3)
    with torch.device("meta"):
        second = GR00TN17(config)
    second.to_empty(device="cpu")
    for parameter in second.parameters():
        nn.init.constant_(parameter, float("nan"))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second.init_weights(3)
    assert torch.equal(state, torch.get_rng_state())
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    noise, time = torch.randn(2, 16, 32), torch.rand(2)
    assert torch.equal(first(make_inputs(config), noise, time), second(make_inputs(config), noise, time))
    second.init_weights(4)
    assert not torch.equal(
        first.backbone.visual.blocks[0].attn.qkv.weight, second.backbone.visual.blocks[0].attn.qkv.weight
    )
    std = first.backbone.language_model.layers[0].mlp.down_proj.weight.std().item()
    assert std == pytest.approx(128**-0.5, rel=0.05)
    assert first.action_head.position_embedding.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_everything_tuned_trains_every_parameter_but_the_unused_norm() -> None:
    config = GR00TN17Config.tiny()
    network = GR00TN17(config)
    network(make_inputs(config)).backward()
    untouched = {name for name, p in network.named_parameters() if p.grad is None}
    assert untouched == {"backbone.model.model.language_model.norm.weight"}
    assert set(tuned_parameters(network)) == {name for name, _ in network.named_parameters()} - untouched


@pytest.mark.parametrize(
    ("switch", "pattern"),
    [
        ("tune_visual", r"backbone\.model\.model\.visual\."),
        ("tune_llm", r"backbone\.model\.model\.language_model\."),
        ("tune_projector", r"action_head\.(state_encoder|action_encoder|action_decoder|position_embedding)\."),
        ("tune_diffusion_model", r"action_head\.model\."),
        ("tune_vlln", r"action_head\.(vlln|vl_self_attention)\."),
    ],
)
def test_each_switch_freezes_its_part(switch: str, pattern: str) -> None:
    config = GR00TN17Config.tiny(**{switch: False})
    network = GR00TN17(config)
    network.train()
    network(make_inputs(config)).backward()
    frozen = {
        name for name, p in network.named_parameters() if p.grad is None and not name.endswith("_model.norm.weight")
    }
    expected = {name for name, _ in network.named_parameters() if re.match(pattern, name)}
    assert frozen == {name for name in expected if not name.endswith("_model.norm.weight")}
    modules = [m for name, m in network.named_modules() if re.match(pattern, name + ".")]
    assert modules
    assert not any(m.training for m in modules)
    set_trainable(network, GR00TN17Config.tiny())
    assert all(m.training for m in modules)


def test_a_step_reads_no_device_value() -> None:
    """On the meta device any operation that needs a value or a data-dependent shape on the host raises."""
    config = GR00TN17Config.tiny(state_dropout_prob=0.2)
    inputs = make_inputs(config)
    grids = inputs.pop("image_grid_thw").tolist()
    with torch.device("meta"):
        network = GR00TN17(config)
    on_device = {key: value.to("meta") for key, value in inputs.items()}
    noise, time = torch.empty(4, 16, 32, device="meta"), torch.empty(4, device="meta")
    for embodiment in (1, on_device["embodiment_id"]):
        loss = network({**on_device, "image_grid_thw": grids, "embodiment_id": embodiment}, noise, time)
        loss.backward()
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        float(loss.detach())
