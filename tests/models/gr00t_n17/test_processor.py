"""Normalisation with its rounding, padding and masks, state dropout by position, and the way back to robot units."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.inputs.processor import Normalizer, Processor, ProcessorConfig
from models.gr00t_n17.inputs.text import WordTokenizer

CONFIG = GR00TN17Config.tiny()
TEXTS = ["pick up the red block", "pick up the blue block please"]
SETTINGS = ProcessorConfig(
    shortest_image_edge=None, crop_fraction=None, min_pixels=1024, tokenizer="words", state_dropout_prob=0.0
)


@dataclasses.dataclass(kw_only=True)
class Sample:
    images: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    action: Mapping[str, Tensor]
    action_is_pad: Tensor
    text: Sequence[str]
    position: Tensor
    inputs: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)


def statistics(dim: int, scale: float) -> dict[str, np.ndarray]:
    base = np.linspace(0.5, 1.5, dim) * scale
    return {"min": -2 * base, "max": 3 * base, "mean": 0 * base, "std": base, "q01": -base, "q99": 2 * base}


STATISTICS = {
    "arm": statistics(3, 1.0),
    "grip": statistics(1, 0.1),
    "move": statistics(3, 0.05),
    "close": statistics(1, 1),
}


def processor(settings: ProcessorConfig = SETTINGS, **overrides: Any) -> Processor:
    arguments: dict[str, Any] = {
        "cameras": ["top", "wrist"],
        "statistics": STATISTICS,
        "state_keys": ["arm", "grip"],
        "action_keys": ["move", "close"],
        "horizon": 8,
        "embodiment_id": 2,
        "tokenizer": WordTokenizer.from_texts(TEXTS, backbone=CONFIG.backbone),
        "seed": 0,
    }
    return Processor(CONFIG, settings, **{**arguments, **overrides})


def sample(batch: int = 4, start: int = 0) -> Sample:
    generator = torch.Generator().manual_seed(0)
    pad = torch.zeros(batch, 8, dtype=torch.bool)
    pad[0, 5:] = True
    frames = torch.randint(0, 256, (2, batch, 1, 32, 64, 3), dtype=torch.uint8, generator=generator)
    return Sample(
        images={"wrist": frames[0], "top": frames[1]},
        state={
            "arm": torch.randn(batch, 1, 3, generator=generator),
            "grip": torch.rand(batch, 1, 1, generator=generator),
        },
        action={
            "move": torch.randn(batch, 8, 3, generator=generator) * 0.05,
            "close": torch.rand(batch, 8, 1, generator=generator),
        },
        action_is_pad=pad,
        text=[TEXTS[i % 2] for i in range(batch)],
        position=torch.arange(start, start + batch),
    )


def test_normalisation_rounds_like_the_reference() -> None:
    """Quotient in float64, stored as float32, stretched in float32; flat dimensions are exactly 0; then the clip."""
    low, high = np.array([0.1, -3.0, 5.0, 2.0]), np.array([0.7, 9.0, 5.0, 2.0 + 1e-9])
    values = np.random.default_rng(0).uniform(-4, 10, (1000, 4)).astype(np.float32)
    normalizer = Normalizer({"q01": low, "q99": high}, use_percentiles=True, clip=False)
    expected = np.zeros_like(values)
    for d in range(2):
        for row in range(1000):
            share = np.float32((np.float64(values[row, d]) - low[d]) / (high[d] - low[d]))
            expected[row, d] = np.float32(2) * share - np.float32(1)
    out = normalizer.forward(values)
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, expected)
    clipped = Normalizer({"q01": low, "q99": high}, use_percentiles=True, clip=True).forward(values)
    np.testing.assert_array_equal(clipped, np.clip(expected, -1, 1))


def test_percentiles_or_extremes_decide_the_bounds() -> None:
    values = np.array([[-0.5, -1.0, -1.5]], dtype=np.float32)
    assert Normalizer(STATISTICS["arm"], use_percentiles=True, clip=True).forward(values).tolist() == [[-1, -1, -1]]
    assert (Normalizer(STATISTICS["arm"], use_percentiles=False, clip=True).forward(values) > -1).all()


def test_inverse_returns_robot_units_and_clips_first() -> None:
    normalizer = Normalizer(STATISTICS["arm"], use_percentiles=True, clip=True)
    inside = np.random.default_rng(0).uniform(-0.4, 0.9, (50, 3)).astype(np.float32)
    np.testing.assert_allclose(normalizer.inverse(normalizer.forward(inside)), inside, atol=1e-6)
    np.testing.assert_allclose(
        normalizer.inverse(np.full((1, 3), 7, np.float32))[0], STATISTICS["arm"]["q99"], rtol=1e-6
    )


def test_prepare_concatenates_pads_and_masks() -> None:
    batch = sample()
    out = processor().prepare(batch)
    assert out["state"].shape == (4, 1, CONFIG.max_state_dim)
    assert out["action"].shape == out["action_mask"].shape == (4, CONFIG.action_horizon, CONFIG.max_action_dim)
    arm = Normalizer(STATISTICS["arm"], use_percentiles=True, clip=True).forward(batch.state["arm"].numpy())
    grip = Normalizer(STATISTICS["grip"], use_percentiles=True, clip=True).forward(batch.state["grip"].numpy())
    np.testing.assert_array_equal(out["state"][..., :3], arm)
    np.testing.assert_array_equal(out["state"][..., 3:4], grip)
    assert out["state"][..., 4:].abs().sum() == 0
    close = Normalizer(STATISTICS["close"], use_percentiles=True, clip=True).forward(batch.action["close"].numpy())
    np.testing.assert_array_equal(out["action"][:, :8, 3:4], close)
    assert out["action"][:, 8:].abs().sum() == out["action"][..., 4:].abs().sum() == 0
    assert out["action_mask"].sum() == 4 * 8 * 4
    assert (out["action_mask"][:, :8, :4] == 1).all()
    assert out["embodiment_id"].tolist() == [2] * 4
    assert out["position"].tolist() == [0, 1, 2, 3]
    assert all(value.dtype == torch.int64 for key, value in out.items() if key.endswith(("ids", "id", "position")))


def test_without_state_columns_the_network_sees_zeros() -> None:
    out = processor(state_keys=[]).prepare(sample())
    assert out["state"].shape == (4, 1, CONFIG.max_state_dim)
    assert out["state"].abs().sum() == 0


def test_padded_steps_are_trained_unless_masked() -> None:
    masked = processor(dataclasses.replace(SETTINGS, mask_padded_steps=True)).prepare(sample())["action_mask"]
    assert masked[0, 5:].sum() == 0
    assert masked.sum() == processor().prepare(sample())["action_mask"].sum() - 3 * 4


def test_image_tokens_of_the_prompt_match_the_grids_and_the_camera_order() -> None:
    batch = sample()
    batch.images = {"wrist": batch.images["wrist"], "top": batch.images["top"][:, :, :, :32]}
    part = processor()
    batch.inputs = part.prepare(batch)
    out = part.to_network(batch, augment=False)
    assert out["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4]] * 4  # top first, as the processor's cameras say
    tokens = (out["input_ids"] == CONFIG.backbone.image_token_id).sum().item()
    assert tokens == out["image_grid_thw"].prod(dim=1).sum().item() // 4
    assert len(out["pixel_values"]) == tokens * 4
    assert out["embodiment_id"] == 2
    assert out["image_grid_thw"].device.type == "cpu"


def test_state_dropout_is_a_function_of_position_and_only_acts_in_training() -> None:
    part = processor(dataclasses.replace(SETTINGS, state_dropout_prob=0.5))
    batch = sample(64)
    batch.inputs = part.prepare(batch)
    kept = part.to_network(batch, augment=False)["state"]
    assert torch.equal(kept, batch.inputs["state"])
    dropped = part.to_network(batch, augment=True)["state"]
    zero = (dropped == 0).all(dim=(1, 2))
    assert 16 < zero.sum() < 48
    assert torch.equal(dropped[~zero], kept[~zero])
    tail = sample(64)
    tail.inputs = {key: value[40:] for key, value in batch.inputs.items()}
    tail.images = {key: value[40:] for key, value in batch.images.items()}
    assert torch.equal(part.to_network(tail, augment=True)["state"], dropped[40:])


def test_decode_returns_each_key_over_its_horizon() -> None:
    part, batch = processor(), sample()
    decoded = part.decode_actions(part.prepare(batch)["action"])
    assert {key: value.shape for key, value in decoded.items()} == {"move": (4, 8, 3), "close": (4, 8, 1)}
    for key, value in decoded.items():
        expected = np.clip(batch.action[key].numpy(), STATISTICS[key]["q01"], STATISTICS[key]["q99"])
        np.testing.assert_allclose(value, expected, atol=1e-6)
        assert value.dtype == np.float32


def test_processor_survives_json() -> None:
    part = processor(dataclasses.replace(SETTINGS, color_jitter=(0.3, 0.4, 0.5, 0.08)))
    again = Processor.from_dict(json.loads(json.dumps(part.to_dict())))
    assert again.to_dict() == part.to_dict()
    assert again.processor_config == part.processor_config
    for key, value in part.prepare(sample()).items():
        assert torch.equal(again.prepare(sample())[key], value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"horizon": 17}, "horizon=17 must lie in 1..action_horizon=16"),
        ({"embodiment_id": 4}, "embodiment_id=4 must lie in 0..3"),
        ({"state_keys": ["arm", "head"]}, r"no statistics for \['head'\]"),
        ({"cameras": []}, "data.cameras is empty"),
        ({"tokenizer": None}, "tokenizer=words"),
        (
            {"statistics": {**STATISTICS, "hand": statistics(33, 1.0)}, "action_keys": ["hand"]},
            "the action has 33 dimensions, max_action_dim is 32",
        ),
        ({"action_keys": ["move", "move"]}, r"columns \['move'\] are named twice"),
    ],
)
def test_a_processor_that_does_not_fit_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        processor(**overrides)


def test_a_batch_that_does_not_fit_is_refused() -> None:
    part = processor()
    for change, message in [
        ({"images": {"top": sample().images["top"]}}, r"cameras \['wrist'\] are not in the batch"),
        ({"state": {"arm": sample().state["arm"]}}, "'grip' is not in the batch"),
        ({"action": {k: v[:, :5] for k, v in sample().action.items()}}, "5 action steps.*horizon is 8"),
        ({"state": {**sample().state, "arm": torch.zeros(4, 1, 2)}}, "'arm' has 2 dimensions, its statistics have 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            part.prepare(dataclasses.replace(sample(), **change))


def test_settings_are_checked_together() -> None:
    with pytest.raises(ValueError, match=r"crop_fraction=1.5.*color_jitter.*state_dropout_prob"):
        ProcessorConfig(crop_fraction=1.5, color_jitter=(0.1, 0.1, 0.1, 0.9), state_dropout_prob=1.0)
