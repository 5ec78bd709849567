"""The FLOP formulas against PyTorch's own counter and against the published sizes."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.flops import count_flops, step_flops
from models.gr00t_n17.lora import LoraConfig, add_lora
from models.gr00t_n17.network import GR00TN17

BATCH = 2
IDS = [0, 1, 3, 5, 5, 5, 5, 4, 3, 5, 5, 5, 5, 5, 5, 4, 20, 21, 2]
GRIDS = [(4, 4), (4, 6)] * BATCH


def counted(network: GR00TN17, draws: int, pixel_width: int) -> tuple[int, int]:
    """FLOPs of forward and of forward plus backward; attention as plain products, which the counter sees exactly."""
    config = network.config
    shape = (config.action_horizon, config.max_action_dim)
    inputs = {
        "input_ids": torch.tensor([IDS] * BATCH),
        "attention_mask": torch.tensor([[0] + [1] * (len(IDS) - 1)] * BATCH),
        "pixel_values": torch.randn(sum(h * w for h, w in GRIDS), pixel_width),
        "image_grid_thw": [[1, h, w] for h, w in GRIDS],
        "state": torch.randn(BATCH, 1, config.max_state_dim),
        "action": torch.randn(BATCH, *shape),
        "action_mask": torch.ones(BATCH, *shape),
        "embodiment_id": 1,
    }
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            loss = network(inputs, torch.randn(draws * BATCH, *shape), torch.rand(draws * BATCH))
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    return forward.get_total_flops(), forward.get_total_flops() + backward.get_total_flops()


@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"tune_llm": False, "tune_visual": False},
        {"tune_llm": False},
        {"tune_visual": False},
        {"tune_llm": False, "tune_visual": False, "tune_top_llm_layers": 1},
        {"tune_llm": False, "tune_visual": False, "tune_vlln": False},
        {"tune_llm": False, "tune_visual": False, "tune_diffusion_model": False},
        {"tune_llm": False, "tune_visual": False, "tune_projector": False},
    ],
    ids=lambda switches: ",".join(switches) or "all tuned",
)
def test_formulas_agree_with_the_counter(switches: dict[str, Any], draws: int) -> None:
    network = GR00TN17(GR00TN17Config.tiny(**switches))
    forward, training = counted(network, draws, 1536)
    ours = count_flops(network.config, image_grids=GRIDS, sequence_length=len(IDS), batch_size=BATCH, draws=draws)
    assert ours.forward_total == pytest.approx(forward, rel=0.01)
    assert ours.training_total == pytest.approx(training, rel=0.01)


def test_samples_with_unequal_images_count_every_key() -> None:
    config = GR00TN17Config.tiny()
    given = {"sequence_length": len(IDS), "batch_size": BATCH}
    unequal = count_flops(config, image_grids=GRIDS[:3], **given)
    assert unequal == count_flops(config, image_grids=GRIDS[:3], **given, all_keys=True)
    assert unequal.forward["dit_cross"] > count_flops(config, image_grids=GRIDS, **given).forward["dit_cross"]


@pytest.mark.parametrize("targets", [("dit",), ("vl_self_attention",), ("llm",), ("vision",), ("vision", "llm", "dit")])
def test_formulas_agree_with_the_counter_on_adapters(targets: tuple[str, ...]) -> None:
    network = GR00TN17(GR00TN17Config.tiny(tune_llm=False, tune_visual=False), slots=(1,))
    add_lora(network, LoraConfig(targets=targets, rank=8), seed=0)
    _, training = counted(network, 1, 1536)
    ours = step_flops(network, image_grids=GRIDS, sequence_length=len(IDS), batch_size=BATCH)
    assert ours == pytest.approx(training, rel=0.01)
    with pytest.raises(ValueError, match=r"adapters on \['head'\]"):
        count_flops(network.config, image_grids=GRIDS, sequence_length=len(IDS), adapters={"head": 8})


def test_cached_features_leave_the_head() -> None:
    network = GR00TN17(GR00TN17Config.tiny(tune_llm=False, tune_visual=False))
    given = {"image_grids": GRIDS, "sequence_length": len(IDS), "batch_size": BATCH}
    whole = count_flops(network.config, **given)
    cached = step_flops(network, **given, cached_features=True)
    assert cached == whole.training_total - whole.training["vit"] - whole.training["llm"]


def test_still_frames_halve_the_patch_product() -> None:
    network = GR00TN17(GR00TN17Config.tiny())
    _, training = counted(network, 1, 768)
    ours = step_flops(network, image_grids=GRIDS, sequence_length=len(IDS), batch_size=BATCH, still_frames=True)
    assert ours == pytest.approx(training, rel=0.01)


def test_released_fine_tune_on_three_cameras() -> None:
    """Upstream's step: 1.96 T a sample and 125 T a step of 64 at 16x22 patches, 1.49 T at 16x16.

    Ours leaves out the keys that a cross block masks: of 290 tokens 264 are image tokens, so 16 blocks project 145
    instead of 290 on average.
    """
    config = GR00TN17Config()
    shape = {"image_grids": [(16, 22)] * 3 * 64, "sequence_length": 290, "batch_size": 64}
    flops = count_flops(config, **shape, all_keys=True)
    assert flops.training_total == pytest.approx(125e12, rel=0.01)
    assert flops.training_total / 64 == pytest.approx(1.96e12, rel=0.01)
    giga = {part: value / 64e9 for part, value in flops.forward.items()}
    expected = {"vit": 731, "llm": 478, "vlsa": 119, "dit_cross": 91, "dit_self": 38, "encoders": 0.8}
    for part, value in expected.items():
        assert giga[part] == pytest.approx(value, rel=0.05), part
    assert flops.training["vit"] == flops.forward["vit"]
    assert flops.training["dit_self"] == 3 * flops.forward["dit_self"]
    spared = 16 * 145 * (2 * 2 * 2048 * 1536 + 4 * 41 * 1536)
    assert flops.forward_total - count_flops(config, **shape).forward_total == 64 * spared
    small = count_flops(config, image_grids=[(16, 16)] * 3, sequence_length=218, all_keys=True)
    assert small.training_total == pytest.approx(1.49e12, rel=0.01)
