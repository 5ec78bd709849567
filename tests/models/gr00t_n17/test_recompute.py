"""What checkpointing runs a second time: the formulas against PyTorch's counter, which sees the recomputation."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.common.block_options import CheckpointingConfig
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.flops import step_flops
from models.gr00t_n17.lora import LoraConfig, add_lora
from models.gr00t_n17.network import GR00TN17
from models.gr00t_n17.parallelize import checkpoint_blocks, gradient_blocks
from models.gr00t_n17.recompute import recompute_flops

BATCH = 2
IDS = [0, 1, 3, 5, 5, 5, 5, 4, 3, 5, 5, 5, 5, 5, 5, 4, 20, 21, 2]
SHAPES: dict[str, Any] = {
    "image_grids": [(4, 4), (4, 6)] * BATCH,
    "sequence_length": len(IDS),
    "batch_size": BATCH,
}
FROZEN = {"tune_llm": False, "tune_visual": False}
DROPOUT = {"diffusion_model_cfg": {"dropout": 0.2}, "vl_self_attention_cfg": {"dropout": 0.2}}


def loss_of(network: GR00TN17, draws: int) -> torch.Tensor:
    config, g = network.config, torch.Generator().manual_seed(0)
    shape = (config.action_horizon, config.max_action_dim)
    inputs = {
        "input_ids": torch.tensor([IDS] * BATCH),
        "attention_mask": torch.ones(BATCH, len(IDS), dtype=torch.int64),
        "pixel_values": torch.randn(sum(h * w for h, w in SHAPES["image_grids"]), 1536, generator=g),
        "image_grid_thw": [[1, h, w] for h, w in SHAPES["image_grids"]],
        "state": torch.randn(BATCH, 1, config.max_state_dim, generator=g),
        "action": torch.randn(BATCH, *shape, generator=g),
        "action_mask": torch.ones(BATCH, *shape),
        "embodiment_id": 1,
    }
    return network(inputs, torch.randn(draws * BATCH, *shape, generator=g), torch.rand(draws * BATCH, generator=g))


def counted(network: GR00TN17, draws: int) -> int:
    """FLOPs of a whole step; attention as plain products, which the counter sees exactly."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss_of(network, draws).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize(
    ("config", "values"),
    [
        ({}, {"mode": "full"}),
        (DROPOUT, {"mode": "full"}),
        (FROZEN, {"mode": "layers", "last_k": 1}),
        (FROZEN | DROPOUT, {"mode": "layers", "layers": [0, 1, 2], "parts": ["dit"]}),
        (FROZEN | {"tune_top_llm_layers": 1}, {"mode": "layers", "every_k": 2}),
        ({}, {"mode": "selective"}),
        ({}, {"mode": "selective", "save": ["aten.mm", "aten.bmm"]}),
    ],
)
def test_formulas_agree_with_the_counter(config: dict[str, Any], values: dict[str, Any], draws: int) -> None:
    network = GR00TN17(GR00TN17Config.tiny(**config))
    plain = counted(network, draws)
    with sdpa_kernel(SDPBackend.MATH):
        checkpoint_blocks(network, CheckpointingConfig(**values))
        loss_of(network, draws).backward()  # a pattern of `save` is checked in the first step
    with_recompute = counted(network, draws)
    ours = recompute_flops(network, **SHAPES, draws=draws)
    model = step_flops(network, **SHAPES, draws=draws)
    assert model == pytest.approx(plain, rel=0.01)
    assert model + ours == pytest.approx(with_recompute, rel=0.01)
    if values["mode"] != "selective":  # the plain attention of this test is no kept operation
        assert ours == pytest.approx(with_recompute - plain, rel=0.01)
        assert ours > 0.02 * plain


@pytest.mark.parametrize("targets", [("dit",), ("vl_self_attention", "llm"), ("vision",)])
def test_formulas_agree_with_the_counter_on_adapters(targets: tuple[str, ...]) -> None:
    network = GR00TN17(GR00TN17Config.tiny(**FROZEN), slots=(1,))
    add_lora(network, LoraConfig(targets=targets, rank=8), seed=0)
    plain = counted(network, 1)
    checkpoint_blocks(network, CheckpointingConfig(mode="full"))
    assert recompute_flops(network, **SHAPES) == pytest.approx(counted(network, 1) - plain, rel=0.01)


def test_auto_says_what_its_choice_costs() -> None:
    network = GR00TN17(GR00TN17Config.tiny(**FROZEN))
    report = checkpoint_blocks(network, CheckpointingConfig(mode="auto", memory_gb=2e-4))
    loss_of(network, 1).backward()
    assert report.recomputed
    assert report.extra_flops == pytest.approx(recompute_flops(network, **SHAPES), rel=0.01)


def test_only_blocks_with_gradients_can_recompute() -> None:
    network = GR00TN17(GR00TN17Config.tiny(**FROZEN, tune_top_llm_layers=1))
    assert {part: len(found) for part, found in gradient_blocks(network).items()} == {
        "vision": 0,
        "llm": 1,
        "vl_self_attention": 1,
        "dit": 4,
    }
    assert gradient_blocks(network)["llm"] == [network.backbone.language_model.layers[1]]
    with pytest.raises(ValueError, match=r"checkpointing\.parts: vision has no blocks that run with gradients"):
        checkpoint_blocks(network, CheckpointingConfig(mode="full", parts=("vision",)))
    network = GR00TN17(GR00TN17Config.tiny(**FROZEN, tune_vlln=False))
    assert not gradient_blocks(network)["vl_self_attention"]
    assert recompute_flops(network, **SHAPES) == 0
