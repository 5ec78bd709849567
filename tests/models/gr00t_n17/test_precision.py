"""The precision modes: which weights are kept in bfloat16, and that `lean` is `stock` bit for bit."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from models.common.optim import OptimizerConfig, build_optimizer
from models.gr00t_n17 import precision
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.network import GR00TN17
from models.gr00t_n17.slots import is_slot_tensor, pick_rows

SLOT = 2
DROPOUT = {
    "diffusion_model_cfg": {"dropout": 0.2},
    "vl_self_attention_cfg": {"dropout": 0.2},
    "state_dropout_prob": 0.2,
}
FROZEN = {"tune_llm": False, "tune_visual": False}


def make_network(slots: tuple[int, ...] | None, mode: str, **config: Any) -> GR00TN17:
    """Weights of a checkpoint stored in bfloat16, norms and biases random too."""
    tiny = GR00TN17Config.tiny(**{**FROZEN, **DROPOUT, **config})
    full = GR00TN17(tiny)
    full.init_weights(0)
    generator = torch.Generator().manual_seed(1)
    stored = {
        name: (p + 0.1 * torch.randn(p.shape, generator=generator)).bfloat16() for name, p in full.state_dict().items()
    }
    network = GR00TN17(tiny, slots)
    precision.apply(network, mode)
    network.load_state_dict({n: pick_rows(t, slots) if is_slot_tensor(n) else t for n, t in stored.items()})
    return network


def make_inputs(step: int, pixel_width: int = 1536) -> dict[str, Any]:
    """Two samples, two grids, one prompt shorter than the other."""
    g = torch.Generator().manual_seed(step)
    rows = [
        [1, 3, 5, 5, 5, 5, 4, 3, 5, 5, 5, 5, 5, 5, 4, 20, 21, 2],
        [0, 1, 3, 5, 5, 5, 5, 4, 3] + [5] * 6 + [4, 22, 2],
    ]
    action_mask = torch.zeros(2, 16, 32)
    action_mask[:, :8, :7] = 1
    return {
        "input_ids": torch.tensor(rows),
        "attention_mask": torch.tensor([[1] * 18, [0] + [1] * 17]),
        "pixel_values": torch.rand(2 * (16 + 24), pixel_width, generator=g) * 2 - 1,
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 6]] * 2),
        "state": torch.randn(2, 1, 32, generator=g),
        "action": torch.randn(2, 16, 32, generator=g),
        "action_mask": action_mask,
        "embodiment_id": SLOT,
    }


def training(network: GR00TN17, steps: int, pixel_width: int = 1536) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Loss and gradients of each optimiser step under autocast, stock AdamW."""
    optimizer = build_optimizer(network, OptimizerConfig(lr=1e-3, weight_decay=1e-2))
    network.train()
    for step in range(steps):
        torch.manual_seed(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = network(make_inputs(step, pixel_width))
        loss.backward()
        yield loss.detach(), {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("config", "pixel_width"),
    [
        ({}, 1536),
        ({}, 768),
        ({"tune_diffusion_model": False}, 1536),
        ({"tune_top_llm_layers": 1}, 1536),
        ({"tune_llm": True, "tune_projector": False}, 1536),
        ({"tune_visual": True}, 1536),
    ],
    ids=["head", "still frames", "frozen DiT", "top layer", "language model", "vision"],
)
def test_lean_equals_stock_bit_for_bit_over_five_steps(config: dict[str, Any], pixel_width: int) -> None:
    stock, lean = make_network(None, "stock", **config), make_network((SLOT,), "lean", **config)
    narrow = sum(p.dtype == torch.bfloat16 for p in lean.parameters())
    assert narrow > 10
    assert not any(p.dtype == torch.bfloat16 for p in stock.parameters())
    for (loss, gradients), (lean_loss, lean_gradients) in zip(
        training(stock, 5, pixel_width), training(lean, 5, pixel_width), strict=True
    ):
        assert torch.equal(loss, lean_loss)
        assert gradients.keys() == lean_gradients.keys()
        for name, gradient in lean_gradients.items():
            expected = pick_rows(gradients[name], (SLOT,)) if is_slot_tensor(name) else gradients[name]
            assert torch.equal(gradient, expected), name
    weights = stock.state_dict()
    for name, weight in lean.state_dict().items():
        expected = pick_rows(weights[name], (SLOT,)) if is_slot_tensor(name) else weights[name]
        assert torch.equal(weight.float(), expected), name


def test_a_frozen_backbone_kept_whole_in_bfloat16_is_not_equal() -> None:
    """What the modes are for: casting norms and residual streams as well changes the loss."""
    lean, cast = make_network(None, "lean"), make_network(None, "lean")
    cast.backbone.to(torch.bfloat16)
    (loss, _), (other, _) = next(training(lean, 1)), next(training(cast, 1))
    assert not torch.equal(loss, other)


def test_bf16_follows_stock_closely_from_equal_weights() -> None:
    """Equal at the first step; later only rounding at ties of the weights and sums in bfloat16 tell them apart."""
    stock, narrow = make_network((SLOT,), "stock"), make_network((SLOT,), "bf16")
    losses = [
        (float(loss), float(other))
        for (loss, _), (other, _) in zip(training(stock, 8), training(narrow, 8), strict=True)
    ]
    assert losses[0][0] == losses[0][1]
    assert all(other == pytest.approx(loss, rel=0.02) for loss, other in losses)
    moved = max(abs(loss - losses[0][0]) for loss, _ in losses)
    assert moved > 0.1 * losses[0][0]


def test_lean_gradient_norm_and_clip_equal_stock_to_rounding() -> None:
    """Zeros of the inactive slots change only the order in which the squares are summed."""
    norms = []
    for network in (make_network(None, "stock"), make_network((SLOT,), "lean")):
        _, gradients = next(training(network, 1))
        norms.append(torch.nn.utils.get_total_norm(list(gradients.values())))
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0)


def test_which_weights_each_mode_keeps_in_bfloat16() -> None:
    with torch.device("meta"):
        network = GR00TN17(GR00TN17Config(), slots=[10])
    visual, llm, head = "backbone.model.model.visual.", "backbone.model.model.language_model.", "action_head."
    tables = (visual + "pos_embed.weight", llm + "embed_tokens.weight")
    always_wide = [
        visual + "blocks.0.norm1.weight",
        llm + "layers.0.self_attn.q_norm.weight",
        llm + "layers.0.input_layernorm.weight",
        head + "vlln.weight",
        head + "position_embedding.weight",
        head + "action_encoder.W1.b",
    ]
    frozen = [
        visual + "patch_embed.proj.bias",
        visual + "merger.linear_fc1.weight",
        llm + "layers.15.mlp.up_proj.weight",
    ]
    trained = [head + "model.transformer_blocks.0.attn1.to_q.weight", head + "action_encoder.W1.W"]
    wanted = {"stock": (0, 0, 0), "lean": (1, 1, 0), "bf16": (1, 1, 1)}
    for mode, narrow in wanted.items():
        dtypes = precision.weight_dtypes(network, mode)
        assert dtypes.keys() == dict(network.named_parameters()).keys()
        for names, is_narrow in zip((tables, frozen, trained), narrow, strict=True):
            assert {dtypes[name] for name in names} == {torch.bfloat16 if is_narrow else torch.float32}
        assert {dtypes[name] for name in always_wide} == {torch.float32}
    # Rounding a table that is stored wider would change what is looked up.
    stored = dict.fromkeys(tables, torch.float32)
    assert {precision.weight_dtypes(network, "lean", stored)[name] for name in tables} == {torch.float32}
    with pytest.raises(ValueError, match="precision='half': one of stock, lean, bf16"):
        precision.weight_dtypes(network, "half")


def test_narrow_weights_outside_autocast_are_named() -> None:
    network = make_network((SLOT,), "lean")
    with pytest.raises(ValueError, match="run it under bfloat16 autocast"):
        network(make_inputs(0))
    with precision.context(network):
        assert network(make_inputs(0)).dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    stock = make_network(None, "stock")
    with precision.context(stock):
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("mode", precision.MODES)
def test_flow_variables_and_time_buckets_stay_float32(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = make_network((SLOT,), mode)
    seen: list[Tensor] = []
    encode = network.action_head.action_encoder.forward
    monkeypatch.setattr(network.action_head.action_encoder, "forward", lambda *a: seen.extend(a[:2]) or encode(*a))
    time = torch.tensor([0.9985, 0.5015])
    with torch.autocast("cpu", torch.bfloat16):
        network(make_inputs(0), torch.randn(2, 16, 32), time)
    noisy, bucket = seen
    assert noisy.dtype == torch.float32
    assert bucket.flatten().tolist() == [998, 501]
