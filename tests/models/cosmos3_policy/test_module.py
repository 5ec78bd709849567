"""Tiny training runs: logged numbers, one mean over packs, averages, what checkpoints hold, resuming, working ahead."""

import csv
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from models.common import lookahead
from models.common.digest import weights_digest
from models.common.ema import power_exponent
from models.common.trained import load_trained
from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.flops import PackShape, count_flops, upstream_flops
from models.cosmos3_policy.module import Cosmos3PolicyModule
from models.cosmos3_policy.network import Cosmos3Policy
from models.cosmos3_policy.objective import losses

CONFIG = Cosmos3PolicyConfig.tiny()
LINE = {"max_steps": 30, "kind": "linear", "cycle_steps": 300}


class MeanVae(torch.nn.Module):
    """Stands for the encoder: one value of a picture's square for each latent, its weight frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([0.5, -0.5, 1.0, 2.0]), requires_grad=False)

    def encode(self, video: Tensor) -> Tensor:
        pixels = video[:, :, ::4].float() / 127.5 - 1
        grey = torch.nn.functional.avg_pool3d(pixels.mean(1, keepdim=True), (1, 16, 16))
        return grey * self.scale.view(1, -1, 1, 1, 1)

    def flops(self, frames: int, height: int, width: int, *, upstream: bool = False) -> int:
        return 2 * frames * height * width * (1 + upstream)


def make_module(**options: Any) -> Cosmos3PolicyModule:
    network = Cosmos3Policy(CONFIG)
    network.init_weights(0)
    defaults: dict[str, Any] = {"seed": 5, "optimizer": {"lr": 2e-3, "betas": (0.9, 0.99)}, "schedule": LINE}
    return Cosmos3PolicyModule(network, MeanVae(), **{**defaults, **options})


def make_inputs(first: int, count: int) -> dict[str, Any]:
    """Samples first, first + 1, ...: pictures of 80 x 96 on canvases of 96 x 112, captions of 3 to 6 tokens."""
    rows, texts = [], []
    for position in range(first, first + count):
        g = torch.Generator().manual_seed(position)
        video = torch.randint(0, 256, (3, 9, 96, 112), dtype=torch.uint8, generator=g)
        action = torch.rand(9, CONFIG.action_dim, generator=g)
        action[:, 5:] = 0
        rows.append((video, action))
        texts.append(torch.randint(0, CONFIG.vocab_size, (3 + position % 4,), generator=g))
    return {
        "video": torch.stack([video for video, _ in rows]),
        "content_size": (80, 96),
        "text_ids": torch.cat(texts),
        "text_lengths": tuple(len(text) for text in texts),
        "action": torch.stack([action for _, action in rows]),
        "action_dim": 5,
        "domain": 1,
        "fps": 15.0,
        "position": torch.arange(first, first + count),
    }


class Packs(IterableDataset):
    """Packs of the sizes given, over and over, from a pack on; `fixed` gives the first one always."""

    def __init__(self, sizes: tuple[int, ...] = (2, 3), start: int = 0, fixed: bool = False) -> None:
        self.sizes, self.start, self.fixed = sizes, start, fixed

    def __iter__(self) -> Iterator[dict[str, Any]]:
        place = turn = 0
        while True:
            size = self.sizes[turn % len(self.sizes)]
            if turn >= self.start:
                yield make_inputs(0 if self.fixed else place, size)
            place, turn = place + size, turn + 1


def fit(
    module: Cosmos3PolicyModule, folder: Path, steps: int, data: Packs, ckpt_path: Any = None, **options: Any
) -> None:
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=steps, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, log_every_n_steps=1, **{"logger": False, "enable_checkpointing": False, **options},
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=None), ckpt_path=ckpt_path, weights_only=True)


def digest(module: Cosmos3PolicyModule) -> str:
    return weights_digest(module.state_dict())


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def test_loss_falls_and_numbers_are_logged(tmp_path: Path) -> None:
    module = make_module(optimizer={"lr": 2e-3, "lr_multipliers": {"action_heads": 5.0}})
    logger = CSVLogger(tmp_path, name=None, version="")
    fit(module, tmp_path, 30, Packs((4,), fixed=True), logger=logger, gradient_clip_val=1.0)
    with (tmp_path / "metrics.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    assert len(rows) == 30
    assert rows[-1]["train/loss"] < 0.6 * rows[0]["train/loss"]
    for step, row in enumerate(rows):
        assert row["train/loss"] == pytest.approx(
            10 * row["train/loss/vision"] + 10 * row["train/loss/action"], rel=1e-5
        )
        assert row["train/lr"] == pytest.approx(2e-3 * (1 - step / 300))
        assert row["train/lr/action_heads"] == pytest.approx(1e-2 * (1 - step / 300))
        assert row["train/nonfinite_steps"] == 0
    shape = PackShape(text=(3, 4, 5, 6), vision=(3 * 3 * 3,) * 4, action=(9,) * 4)  # 5 x 6 latents are 3 x 3 patches
    encoder = 4 * 2 * 9 * 96 * 112
    assert module.step_encoder_flops == encoder
    assert module.step_flops == count_flops(CONFIG, shape).training + encoder
    assert module.step_recompute_flops == 0
    ratio = (upstream_flops(CONFIG, shape).training + 2 * encoder) / module.step_flops
    assert module.option_figures() == {"upstream_flops_ratio": pytest.approx(ratio)}


def test_a_step_is_the_weighted_sum_of_both_means_with_the_canvas_cropped() -> None:
    module = make_module()
    inputs = make_inputs(0, 3)
    flow = module.prepare(inputs).flow
    assert flow.packed.latents.shape == (3, 4, 3, 5, 6)
    vision, action = losses(module.network(flow.packed), flow)
    expected = 10 * vision.double().mean() + 10 * action.double().mean()
    assert float(module.training_step(inputs).detach()) == pytest.approx(float(expected), rel=1e-6)
    unequal = make_module(objective={"vision_weight": 1.0, "action_weight": 3.0, "shift": 3.0})
    flow = unequal.prepare(inputs).flow
    vision, action = losses(unequal.network(flow.packed), flow)
    assert float(unequal.training_step(inputs).detach()) == pytest.approx(
        float(vision.mean() + 3 * action.mean()), rel=1e-6
    )


def test_the_reference_optimizer_decays_everything_and_hurries_the_action_heads() -> None:
    module = make_module(
        optimizer={
            "lr": 8e-5, "betas": (0.9, 0.99), "weight_decay": 0.05, "weight_decay_on": "all",
            "lr_multipliers": {"action_heads": 5.0},
        },
        schedule={"max_steps": 10_000, "kind": "linear", "cycle_steps": 100_000},
    )  # fmt: skip
    optimizer = module.configure_optimizers()["optimizer"]
    names = {id(p): name for name, p in module.network.named_parameters()}
    rest, heads = ([names[id(p)] for p in group["params"]] for group in optimizer.param_groups)
    assert sorted(heads) == [
        "action_modality_embed",
        *(f"action_proj_{side}.{part}.weight" for side in ("in", "out") for part in ("bias", "fc")),
    ]
    assert set(rest) == {n for n, p in module.network.named_parameters() if p.requires_grad} - set(heads)
    assert all((g["weight_decay"], g["betas"], g["eps"]) == (0.05, (0.9, 0.99), 1e-8) for g in optimizer.param_groups)
    for step, rate in ((0, 8e-5), (5_000, 7.6e-5), (10_000, 7.2e-5)):
        factor = module.schedule_config.factor(step)
        rates = [group["initial_lr"] * factor for group in optimizer.param_groups]
        assert rates == pytest.approx([rate, 5 * rate])


def test_packs_of_unequal_sizes_give_the_mean_over_all_their_samples(tmp_path: Path) -> None:
    # With so large an eps the update is near the gradient itself, and rounding does not choose its sign.
    whole, parts = (make_module(optimizer={"lr": 1.0, "eps": 1.0}) for _ in range(2))
    start = make_module().network
    fit(whole, tmp_path, 2, Packs((6,)), gradient_clip_val=0.5)
    fit(parts, tmp_path, 2, Packs((1, 3, 2)), gradient_clip_val=0.5, accumulate_grad_batches=3)
    moved = 0.0
    for before, one, other in zip(*(n.parameters() for n in (start, whole.network, parts.network)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
        moved = max(moved, float((one - before).abs().max()))
    assert moved > 1e-2


def test_only_what_is_trained_has_moments_averages_and_a_place_in_checkpoints(tmp_path: Path) -> None:
    module = make_module(ema={"kind": "power", "rate": 0.1})
    saver = ModelCheckpoint(tmp_path, filename="last", every_n_train_steps=2)
    fit(module, tmp_path, 2, Packs(), callbacks=[saver], enable_checkpointing=True)
    trained = {name for name, p in module.network.named_parameters() if p.requires_grad}
    (optimizer,) = [module.trainer.optimizers[0]]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in module.network.parameters() if p.requires_grad}
    assert sum(p.numel() for p in optimizer.state) == sum(
        p.numel() for p in module.network.parameters() if p.requires_grad
    )
    assert module.ema is not None
    assert set(module.ema.state_dict()) == trained
    stored = torch.load(tmp_path / "last.ckpt", weights_only=True)
    names = {f"network.{name}" for name in trained} | {f"ema.{name}" for name in trained}
    assert set(stored["state_dict"]) == names
    again = make_module().network
    load_trained(again, stored)
    assert weights_digest(again.state_dict()) == weights_digest(module.network.state_dict())


def test_averages_are_those_of_the_closed_form(tmp_path: Path) -> None:
    module = make_module(ema={"kind": "power", "rate": 0.1})
    seen: list[dict[str, Tensor]] = []
    update = module.optimizer_step

    def noting(*args: Any, **options: Any) -> None:
        update(*args, **options)
        seen.append({n: p.detach().double().clone() for n, p in module.network.named_parameters() if p.requires_grad})

    module.optimizer_step = noting  # type: ignore[method-assign]
    steps = 12
    fit(module, tmp_path, steps, Packs())
    g = power_exponent(0.1) + 1
    assert g == pytest.approx(7.94, abs=0.005)
    assert module.ema is not None
    for name, average in module.ema.state_dict().items():
        # a weight's share in the average grows like the step's place to the power g
        shares = [((i + 1) / steps) ** g - (i / steps) ** g for i in range(steps)]
        expected = sum(share * weights[name] for share, weights in zip(shares, seen, strict=True))
        torch.testing.assert_close(average.double(), expected, rtol=1e-5, atol=1e-6)


def test_resume_repeats_the_run(tmp_path: Path) -> None:
    whole = make_module(ema={})
    fit(whole, tmp_path / "a", 4, Packs(), accumulate_grad_batches=2)
    first = make_module(ema={})
    saver = ModelCheckpoint(tmp_path / "b", filename="last", every_n_train_steps=2)
    fit(first, tmp_path / "b", 2, Packs(), accumulate_grad_batches=2, callbacks=[saver], enable_checkpointing=True)
    second = make_module(ema={})
    path = tmp_path / "b" / "last.ckpt"
    fit(second, tmp_path / "c", 4, Packs(start=4), ckpt_path=path, accumulate_grad_batches=2)
    assert digest(second) == digest(whole) != digest(first)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_working_ahead_is_the_plain_run(accumulate: int, tmp_path: Path) -> None:
    plain, ahead = make_module(ema={}), make_module(ema={}, lookahead="stream")
    for module in (plain, ahead):
        fit(module, tmp_path, 5, Packs(), accumulate_grad_batches=accumulate)
    assert ahead._ahead is not None
    assert (ahead._ahead.made, ahead._ahead.taken) == (5 * accumulate - 1,) * 2
    assert digest(ahead) == digest(plain)


def test_what_runs_ahead_keeps_no_graph_and_draws_from_no_generator() -> None:
    module = make_module()
    state = torch.get_rng_state()
    prepared = module.prepare(make_inputs(2, 2))
    assert torch.equal(torch.get_rng_state(), state)
    # the main stream must hold every one of them: pack, targets, and keys and values of both layers
    found = list(lookahead._tensors(prepared))
    flow, understanding = prepared
    assert {id(t) for t in (flow.packed.latents, flow.packed.text_ids, flow.vision_target, flow.action_target)} <= {
        id(tensor) for tensor in found
    }
    assert {id(t) for t in (*understanding.keys, *understanding.values)} <= {id(tensor) for tensor in found}
    assert not any(tensor.requires_grad for tensor in found)


def test_a_step_without_a_usable_gradient_does_no_harm(tmp_path: Path) -> None:
    class Broken(Packs):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for turn, inputs in enumerate(super().__iter__()):
                if turn == 1:
                    inputs["action"][0, 2, 0] = float("nan")
                yield inputs

    guarded = make_module()
    fit(guarded, tmp_path, 4, Broken(), gradient_clip_val=1.0)
    assert all(bool(p.isfinite().all()) for p in guarded.network.parameters())
    broken = make_module(nonfinite_patience=None)
    fit(broken, tmp_path, 4, Broken(), gradient_clip_val=1.0)
    assert not all(bool(p.isfinite().all()) for p in broken.network.parameters())
    ended = make_module(nonfinite_patience=1)
    with pytest.raises(RuntimeError, match="the last 1 steps"):
        fit(ended, tmp_path, 4, Broken(), gradient_clip_val=1.0)
