"""The schedule's values and which parameter decays."""

import math

import pytest
import torch
from torch import Tensor, nn

from models.common.optim import (
    OptimizerConfig,
    ScheduleConfig,
    apply_settings,
    build_optimizer,
    decay_groups,
    fold_scale,
    from_options,
    rates_by_part,
    settings_of,
)
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.network import GR00TN17


def test_schedule_of_3000_steps_warms_up_over_150() -> None:
    schedule = ScheduleConfig(max_steps=3000, warmup_ratio=0.05)
    assert schedule.warmup == 150
    assert schedule.factor(0) == 0.0
    assert schedule.factor(1) == pytest.approx(1 / 150)
    assert schedule.factor(149) == pytest.approx(149 / 150)
    assert schedule.factor(150) == 1.0
    assert schedule.factor(1575) == pytest.approx(0.5)
    assert schedule.factor(2999) == pytest.approx(0.5 * (1 + math.cos(math.pi * 2849 / 2850)))
    assert schedule.factor(3000) == schedule.factor(3100) == 0.0


def test_warmup_is_rounded_up_and_defaults_to_the_stock_ratio() -> None:
    assert ScheduleConfig(max_steps=101, warmup_ratio=0.05).warmup == 6
    assert ScheduleConfig(max_steps=3000).warmup == 150
    assert ScheduleConfig(max_steps=10, warmup_steps=0).factor(0) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": 0}, "max_steps=0"),
        ({"max_steps": 10, "warmup_steps": 11}, "11 warm-up steps"),
        ({"max_steps": 10, "warmup_steps": 1, "warmup_ratio": 0.1}, "both set"),
        ({"max_steps": 10, "warmup": 1}, r"schedule: unknown keys \['warmup'\]"),
        ({"max_steps": 10, "kind": "step"}, "kind='step': one of cosine, linear"),
        ({"max_steps": 10, "cycle_steps": 20}, "cycle_steps is read with kind=linear only"),
        ({"max_steps": 10, "kind": "linear", "warmup_steps": 2}, "no warm-up"),
        ({"max_steps": 10, "kind": "linear", "cycle_steps": 9}, "cycle_steps=9: the learning rate would be 0"),
    ],
)
def test_bad_schedules_name_the_key(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_options(ScheduleConfig, options, "schedule")


def test_decay_follows_module_class_and_name() -> None:
    """`.b` is not "bias" and `norm1.linear` decays; affine norms and biases do not (of both parts)."""
    decay, no_decay = decay_groups(GR00TN17(GR00TN17Config.tiny()))
    for name in (
        "action_head.state_encoder.layer1.b",
        "action_head.action_encoder.W1.W",
        "action_head.model.transformer_blocks.0.norm1.linear.weight",
        "action_head.position_embedding.weight",
        "backbone.model.model.visual.pos_embed.weight",
        "backbone.model.model.language_model.embed_tokens.weight",
    ):
        assert name in decay, name
    for name in (
        "action_head.vlln.weight",
        "action_head.vl_self_attention.transformer_blocks.0.norm1.weight",
        "action_head.vl_self_attention.transformer_blocks.0.norm3.weight",
        "action_head.model.transformer_blocks.0.norm1.linear.bias",
        "action_head.model.transformer_blocks.0.attn1.to_q.bias",
        "backbone.model.model.language_model.layers.0.input_layernorm.weight",
        "backbone.model.model.language_model.layers.0.self_attn.q_norm.weight",
        "backbone.model.model.visual.blocks.0.norm1.weight",
        "backbone.model.model.visual.merger.norm.weight",
    ):
        assert name in no_decay, name
    network = GR00TN17(GR00TN17Config.tiny())
    trained = {name for name, p in network.named_parameters() if p.requires_grad}
    assert set(decay) | set(no_decay) == trained
    assert not set(decay) & set(no_decay)


def test_frozen_parameters_stay_out_and_nothing_to_train_is_an_error() -> None:
    network = GR00TN17(GR00TN17Config.tiny(tune_llm=False, tune_visual=False))
    optimizer = build_optimizer(network, OptimizerConfig(lr=2e-3, weight_decay=0.1))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    held = {p for group in optimizer.param_groups for p in group["params"]}
    assert held == set(network.action_head.parameters())
    with pytest.raises(ValueError, match="tune_"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), OptimizerConfig())


def test_a_step_at_rate_zero_changes_nothing() -> None:
    layer = nn.Linear(3, 3)
    before = layer.weight.detach().clone()
    optimizer = build_optimizer(layer, OptimizerConfig(lr=1.0))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, ScheduleConfig(max_steps=10, warmup_steps=2).factor)
    for expected in (0.0, 0.5, 1.0):
        assert scheduler.get_last_lr() == [expected, expected]
        layer(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
        if expected == 0:
            assert torch.equal(layer.weight, before)
    assert not torch.equal(layer.weight, before)


def steps_with(factor: float, *, fold: bool, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The float32 weights after three updates with gradients times `factor`, and the gradient that was left."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(64, 32, bias=False).to(dtype)
    layer.weight.data = torch.randn(32, 64, generator=generator).to(dtype)
    optimizer = build_optimizer(layer, OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, fold_clip=fold))
    for _ in range(3):
        layer.weight.grad = torch.randn(32, 64, generator=generator).to(dtype)
        if fold:
            fold_scale(optimizer, torch.tensor(factor))
        else:
            layer.weight.grad *= factor
        optimizer.step()
    assert layer.weight.grad is not None
    master = getattr(optimizer, "master", lambda parameter: parameter.detach())
    return master(layer.weight), layer.weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_update_scales_the_gradients_itself(dtype: torch.dtype) -> None:
    def weights(factor: float, *, fold: bool) -> Tensor:
        return steps_with(factor, fold=fold, dtype=dtype)[0]

    assert torch.equal(weights(0.25, fold=True), weights(0.25, fold=False)), "powers of two are exact"
    torch.testing.assert_close(
        weights(0.3, fold=True), weights(0.3, fold=False), rtol=0, atol=3e-7 if dtype == torch.float32 else 2e-4
    )
    assert not torch.allclose(weights(1.0, fold=True), weights(0.3, fold=True), atol=1e-3)


def test_a_scale_is_for_one_step() -> None:
    layer = nn.Linear(2, 2, bias=False)
    optimizer = build_optimizer(layer, OptimizerConfig(fold_clip=True))
    fold_scale(optimizer, torch.tensor(0.5))
    assert float(optimizer.grad_scale) == 2.0
    fold_scale(optimizer, None)
    assert optimizer.grad_scale is None
    with pytest.raises(ValueError, match=r"fold_clip.*fused to true"):
        OptimizerConfig(fold_clip=True, fused=False)


def test_a_restored_optimizer_follows_the_new_settings() -> None:
    def build(lr: float, weight_decay: float, max_steps: int):
        schedule = ScheduleConfig(max_steps=max_steps, warmup_steps=0)
        config = OptimizerConfig(lr=lr, weight_decay=weight_decay, fused=False)
        optimizer = build_optimizer(nn.Sequential(nn.Linear(2, 2)), config)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor), schedule

    old, old_schedule, _ = build(1e-3, 1e-2, 10)
    for _ in range(10):
        old.step()
        old_schedule.step()
    assert old.param_groups[0]["lr"] == 0.0
    new, new_schedule, schedule = build(5e-3, 1e-4, 20)
    settings = settings_of(new)
    new.load_state_dict(old.state_dict())
    new_schedule.load_state_dict(old_schedule.state_dict())
    apply_settings(new, new_schedule, settings)
    assert [group["weight_decay"] for group in new.param_groups] == [1e-4, 0.0]
    assert new_schedule.last_epoch == 10
    for step in (10, 11, 12):
        assert [group["lr"] for group in new.param_groups] == [5e-3 * schedule.factor(step)] * 2
        assert new_schedule.get_last_lr() == [5e-3 * schedule.factor(step)] * 2
        new.step()
        new_schedule.step()


def test_linear_schedule_is_a_straight_line_to_the_end_of_its_cycle() -> None:
    schedule = ScheduleConfig(max_steps=10_000, kind="linear", cycle_steps=100_000)
    assert schedule.warmup == 0
    for step in (0, 1, 2_500, 9_999, 10_000):
        assert 8e-5 * schedule.factor(step) == pytest.approx(2e-4 * 0.4 * (100_000 - step) / 100_000, rel=1e-12)
    assert 8e-5 * schedule.factor(10_000) == pytest.approx(7.2e-5)
    whole = ScheduleConfig(max_steps=10, kind="linear")
    assert [whole.factor(step) for step in (0, 5, 10, 11)] == [1.0, 0.5, 0.0, 0.0]


def parted() -> nn.Module:
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2), "frozen": nn.Linear(2, 2)})
    model["frozen"].requires_grad_(False)
    return model


PARTS = {"heads": ("head.",), "frozen": ("frozen.",)}


def test_a_part_has_its_own_learning_rate_all_the_way_down_the_schedule() -> None:
    model = parted()
    config = OptimizerConfig(lr=8e-5, weight_decay=0.05, weight_decay_on="all", lr_multipliers={"heads": 5.0})
    optimizer = build_optimizer(model, config, PARTS)
    assert [(len(g["params"]), g["weight_decay"], g.get("part")) for g in optimizer.param_groups] == [
        (2, 0.05, None),
        (2, 0.05, "heads"),
    ]
    schedule = ScheduleConfig(max_steps=100, kind="linear", cycle_steps=1000)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor)
    for step in range(100):
        rates = rates_by_part(optimizer)
        assert rates[None] == pytest.approx(8e-5 * (1 - step / 1000))
        assert rates["heads"] == pytest.approx(4e-4 * (1 - step / 1000))
        optimizer.step()
        scheduler.step()


def test_without_multipliers_groups_are_as_they_always_were() -> None:
    model = parted()
    plain, asked = (build_optimizer(model, OptimizerConfig(), parts) for parts in (None, PARTS))
    assert [g["params"] for g in plain.param_groups] == [g["params"] for g in asked.param_groups]
    assert all("part" not in group for group in asked.param_groups)
    kept = build_optimizer(model, OptimizerConfig(lr_multipliers={"heads": 2.0}, weight_decay=0.1), PARTS)
    found = [(g.get("part"), g["weight_decay"], g["lr"]) for g in kept.param_groups]
    assert found == [(None, 0.1, 1e-4), (None, 0.0, 1e-4), ("heads", 0.1, 2e-4), ("heads", 0.0, 2e-4)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_multipliers": {"tail": 5.0}}, r"lr_multipliers\.tail: this model names \['frozen', 'heads'\]"),
        ({"lr_multipliers": {"frozen": 5.0}}, r"lr_multipliers\.frozen: nothing of that part is trained"),
        ({"lr_multipliers": {"heads": 0.0}}, "multiples above 0"),
        ({"weight_decay_on": "biases"}, "weight_decay_on='biases': one of matrices, all"),
    ],
)
def test_optimizer_values_that_cannot_be_met_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_optimizer(parted(), OptimizerConfig(**options), PARTS)
