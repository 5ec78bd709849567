"""Padding: static prompt lengths change nothing, and with the strict mask padded actions reach no valid prediction."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.network import GR00TN17, ActionHead

BATCH, LENGTH, HORIZON = 2, 9, 6


def make_inputs(config: GR00TN17Config, extra: int = 0) -> dict[str, Any]:
    """Two prompts of unequal length, padded on the left to the longer one and by `extra` more."""
    g = torch.Generator().manual_seed(0)
    rows = [[1, 3, 5, 5, 5, 5, 4, 20, 21, 22, 2], [0, 0, 1, 3, 5, 5, 5, 5, 4, 20, 2]]
    shape = (config.action_horizon, config.max_action_dim)
    return {
        "input_ids": F.pad(torch.tensor(rows), (extra, 0)),
        "attention_mask": F.pad(torch.tensor([[1] * 11, [0] * 2 + [1] * 9]), (extra, 0)),
        "pixel_values": torch.randn(32, 1536, generator=g),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "state": torch.randn(2, 1, config.max_state_dim, generator=g),
        "action": torch.randn(2, *shape, generator=g),
        "action_mask": torch.ones(2, *shape),
        "embodiment_id": 1,
    }


def test_padding_to_a_static_length_changes_nothing() -> None:
    """The batch's own padding is attended to, as released; columns that are padding in every sample are not."""
    config = GR00TN17Config.tiny(tune_llm=False, tune_visual=False, vl_self_attention_cfg={"num_layers": 2})
    network = GR00TN17(config)
    noise, time = torch.randn(2, 16, 32), torch.rand(2)
    results = []
    for extra in (0, 1, 21):
        network.zero_grad()
        inputs = make_inputs(config, extra)
        loss = network(inputs, noise, time)
        loss.backward()
        grads = torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])
        features = network.backbone(*(inputs[k] for k in list(inputs)[:4]))
        actions = network.action_head.sample(*features, inputs["state"], 1, noise)
        results.append((loss.detach(), grads, actions))
    for other in results[1:]:
        for found, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    # Not so for the padding between the samples: cutting the second one out on its own moves it.
    alone = {k: v[1:] if isinstance(v, Tensor) and k != "pixel_values" else v for k, v in make_inputs(config).items()}
    alone["pixel_values"] = make_inputs(config)["pixel_values"][16:]
    cut = {**alone, "input_ids": alone["input_ids"][:, 2:], "attention_mask": alone["attention_mask"][:, 2:]}
    torch.testing.assert_close(network(alone, noise[1:], time[1:]), network(cut, noise[1:], time[1:]))
    both, _ = network.backbone(*(make_inputs(config)[k] for k in list(alone)[:4]))[:2]
    masks = make_inputs(config)["attention_mask"] == 1
    context = network.action_head._context(both, masks)[1, 2:]
    assert (context - network.action_head._context(both[1:, 2:], masks[1:, 2:])[0]).abs().max() > 1e-3


def make_head(strict: bool) -> ActionHead:
    config = GR00TN17Config.tiny(action_horizon=HORIZON, strict_action_padding_mask=strict)
    return ActionHead(config)


def make_batch() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(2)
    image_mask = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    image_mask[:, 2:5] = True
    action_mask = torch.zeros(BATCH, HORIZON, 32)
    action_mask[:, :4, :5] = 1
    return {
        "features": torch.randn(BATCH, LENGTH, 64, generator=g),
        "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.bool),
        "image_mask": image_mask,
        "state": torch.randn(BATCH, 1, 32, generator=g),
        "action": torch.randn(BATCH, HORIZON, 32, generator=g) * action_mask,
        "action_mask": action_mask,
        "embodiment_id": torch.tensor([2, 0]),
    }


@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize("strict", [True, False])
def test_strict_mask_keeps_padded_noise_from_the_loss(strict: bool, draws: int) -> None:
    head, batch = make_head(strict), make_batch()
    time = torch.rand(draws * BATCH)
    padded = (batch["action_mask"] == 0).repeat(draws, 1, 1)
    noise = torch.randn(draws * BATCH, HORIZON, 32).requires_grad_()
    loss = head.loss(**batch, noise=noise, time=time)
    loss.backward()
    moved = head.loss(**batch, noise=noise.detach() + padded, time=time)
    assert torch.equal(loss.detach(), moved.detach()) == strict
    assert (noise.grad[padded].abs().max() == 0) == strict
    assert noise.grad[~padded].abs().min() > 0


def test_strict_mask_equals_the_sequence_without_the_padded_steps() -> None:
    head, batch = make_head(True), make_batch()
    noise, time = torch.randn(BATCH, HORIZON, 32), torch.rand(BATCH)
    short = {**batch, "action": batch["action"][:, :4], "action_mask": batch["action_mask"][:, :4]}
    torch.testing.assert_close(
        head.loss(**batch, noise=noise, time=time), head.loss(**short, noise=noise[:, :4], time=time), rtol=1e-6, atol=0
    )


def test_strict_mask_holds_padded_actions_at_zero_in_the_sampler() -> None:
    head, batch = make_head(True).eval(), make_batch()
    mask, noise = batch["action_mask"], torch.randn(BATCH, HORIZON, 32)
    given = {key: value for key, value in batch.items() if not key.startswith("action")}
    actions = head.sample(**given, noise=noise, action_mask=mask)
    assert actions[mask == 0].abs().max() == 0
    assert torch.equal(actions, head.sample(**given, noise=noise + (mask == 0), action_mask=mask))
    with pytest.raises(ValueError, match="pass action_mask"):
        head.sample(**given, noise=noise)
