"""The memory plan: the published estimate of a rank, and a real layer's saved tensors beside the formula."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.common import block_memory
from models.cosmos3_policy import memory
from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.flops import PackShape
from models.cosmos3_policy.layers.norm import RMSNorm
from models.cosmos3_policy.memory import activations, inner_bytes, predict
from models.cosmos3_policy.network import Cosmos3Policy
from models.cosmos3_policy.packed import Packed

RELEASED = Cosmos3PolicyConfig()
RANK = PackShape(text=(150,) * 32, vision=(3060,) * 32, action=(33,) * 32)
GB = 1e9


def test_trained_state_at_shard_8_is_that_of_the_published_estimate() -> None:
    """Estimated for the stock framework: Adam 7.0 GB and gradients 3.5 GB; averages of all 15.2 B values 7.6 GB."""
    plan = predict(RELEASED, shard=8)
    assert round(sum(plan.optimizer.values()) / GB, 1) == 7.0
    assert round(sum(plan.gradients.values()) / GB, 1) == 3.5
    stock = plan.parameters * 4 / 8
    assert round(stock / GB, 1) == 7.6
    # averages of what is trained alone save 4 GB a rank
    assert round((stock - sum(plan.averages.values())) / GB, 1) == 4.1
    # the frozen half: whole in bfloat16 here, sharded float32 there
    frozen = (plan.parameters - plan.trained) * 2
    assert sum(plan.weights.values()) == pytest.approx(frozen + plan.trained * 4 / 8, abs=8)
    assert round(plan.static_total / GB, 1) == 33.8


def test_only_trained_parameters_have_optimizer_state_and_averages() -> None:
    plan = predict(RELEASED)
    assert sum(plan.optimizer.values()) == 8 * plan.trained
    assert sum(plan.averages.values()) == sum(plan.gradients.values()) == 4 * plan.trained
    for column in (plan.optimizer, plan.averages, plan.gradients):
        assert [part for part, size in column.items() if size] == ["generation_layers", "heads"]
    assert not any(predict(RELEASED, averaged=False).averages.values())


def test_inputs_of_layers_at_32_samples_a_rank() -> None:
    """Estimated for the stock framework at 104 k tokens: 31 GB with all layers recomputing; the captions are no longer
    among them here."""
    kept = activations(RELEASED, RANK, 36)
    assert sum(RANK.generated) == 98_976
    assert kept["inputs of 36 layers"] == 36 * 98_976 * 4096 * 2
    assert 28 < kept["inputs of 36 layers"] / GB < 31
    assert kept["inside 0 layers that do not recompute"] == 0


def test_layers_that_do_not_recompute_keep_what_is_inside() -> None:
    full, some, none = (sum(activations(RELEASED, RANK, count).values()) for count in (36, 31, 0))
    inner = inner_bytes(RELEASED, RANK)
    assert some - full == 5 * inner
    assert none - full == 35 * inner  # nothing recomputes any more


def test_the_table_adds_up() -> None:
    plan = predict(RELEASED, shard=8, shape=RANK, video_bytes=32 * 3 * 33 * 544 * 736)
    lines = plan.table().splitlines()
    rows = {line[:20].strip(): line.split() for line in lines[1 : len(memory.PARTS) + 1]}
    assert list(rows) == list(memory.PARTS)
    assert sum(float(cells[-1]) for cells in rows.values()) == pytest.approx(plan.static_total / GB, abs=0.03)
    assert f"{plan.total / GB:.2f}" in next(line for line in lines if line.startswith("total"))
    assert any("lm_head, 1.24 GB" in line for line in lines)


def test_weights_are_gathered_or_copied_for_a_step() -> None:
    split, alone = (predict(RELEASED, shard=shard, shape=RANK).step for shard in (8, 1))
    assert split["gathered weights, 2 layers and heads"] < GB
    assert alone["bfloat16 copies of the trained weights"] == 2 * 6_982_401_216


class _Fused(torch.autograd.Function):
    """What a GPU's norm keeps, which the CPU's does not: its input and one reciprocal norm a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        reciprocal = x.float().square().mean(-1, keepdim=True).add(eps).rsqrt()
        ctx.save_for_backward(x, weight, reciprocal)
        return (x * reciprocal).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("never asked for")


def test_a_real_layer_keeps_what_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: _Fused.apply(x, self.weight, self.eps))
    config = Cosmos3PolicyConfig.tiny(vocab_size=64)
    network = Cosmos3Policy(config)
    network.init_weights(0)
    network.to(torch.bfloat16)
    packed = Packed(
        text_ids=torch.arange(19),
        text_lengths=(7, 12),
        latents=torch.zeros(2, 4, 3, 6, 6),
        vision_noisy=torch.ones(2, 3, dtype=torch.bool),
        action=torch.zeros(2, 5, config.action_dim),
        action_noisy=torch.ones(2, 5, dtype=torch.bool),
        sigma=torch.full((2,), 0.5),
        fps=(15.0, 15.0),
    )
    layer, uses = network.layers[1], []
    run = layer.forward

    def watched(*args: Any) -> Tensor:
        uses.append(block_memory.measure(layer, run, args, {}))
        return run(*args)

    monkeypatch.setattr(layer, "forward", watched)
    network(packed)
    shape = PackShape.of(packed, config)
    # The reference implementation of attention joins the samples' outputs in a second tensor.
    joined = sum(shape.generated) * config.num_attention_heads * config.head_dim * 2
    assert uses[0].inner_bytes == inner_bytes(config, shape) + joined
