"""A tiny training run: the loss falls, draws and dropout are functions of the place in the run, resume is exact."""

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
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from models.common.digest import weights_digest
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.flops import count_flops
from models.gr00t_n17.inputs.processor import Processor, ProcessorConfig
from models.gr00t_n17.inputs.text import WordTokenizer
from models.gr00t_n17.module import GR00TN17Module
from models.gr00t_n17.network import GR00TN17
from models.gr00t_n17.policy import Policy

DROPOUT = {
    "diffusion_model_cfg": {"dropout": 0.2},
    "vl_self_attention_cfg": {"dropout": 0.2},
    "state_dropout_prob": 0.2,
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def make_module(
    seed: int = 0, max_steps: int = 30, flow_draws: int = 1, lr: float = 3e-3, **config: Any
) -> GR00TN17Module:
    torch.manual_seed(seed)
    return GR00TN17Module(
        GR00TN17(GR00TN17Config.tiny(**config)),
        seed=seed,
        optimizer={"lr": lr, "weight_decay": 1e-4},
        schedule={"max_steps": max_steps, "warmup_steps": 2},
        flow_draws=flow_draws,
    )


def make_inputs(config: GR00TN17Config, step: int = 0, batch: int = 4) -> dict[str, Any]:
    """Two images of 2x2 tokens and a short text per sample."""
    generator = torch.Generator().manual_seed(step)
    b, patches = config.backbone, batch * 2 * 4
    row = [b.im_start_token_id, *([b.vision_start_token_id, b.image_token_id, b.vision_end_token_id] * 2), 10, 11, 12]
    mask = torch.zeros(batch, config.action_horizon, config.max_action_dim)
    mask[:, :8, :7] = 1
    return {
        "input_ids": torch.tensor([row] * batch),
        "attention_mask": torch.ones(batch, len(row), dtype=torch.int64),
        "pixel_values": torch.rand(patches, 1536, generator=generator) * 2 - 1,
        "image_grid_thw": torch.tensor([[1, 2, 2]] * (2 * batch)),
        "state": torch.rand(batch, 1, config.max_state_dim, generator=generator),
        "action": torch.rand(batch, config.action_horizon, config.max_action_dim, generator=generator) * mask,
        "action_mask": mask,
        "embodiment_id": torch.ones(batch, dtype=torch.int64),
        "position": torch.arange(step * batch, (step + 1) * batch),
    }


class Steps(IterableDataset):
    """Batch `start`, `start + 1`, ... as the data layer would give them."""

    def __init__(self, config: GR00TN17Config, start: int = 0, fixed: bool = False) -> None:
        self.config, self.start, self.fixed = config, start, fixed

    def __iter__(self) -> Iterator[dict[str, Any]]:
        step = self.start
        while True:
            yield make_inputs(self.config, 0 if self.fixed else step)
            step += 1


def fit(
    module: GR00TN17Module, folder: Path, steps: int, data: Steps, ckpt_path: Path | None = None, **options: Any
) -> None:
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        log_every_n_steps=1,
        **{"logger": False, "enable_checkpointing": False, **options},
    )
    trainer.fit(module, DataLoader(data, batch_size=None), ckpt_path=ckpt_path, weights_only=True)


def loss_of(module: GR00TN17Module, inputs: dict[str, Any]) -> Tensor:
    noise, time = module.flow_variables(inputs["position"])
    return module.network(inputs, noise=noise, time=time)


def test_loss_falls_and_numbers_are_logged(tmp_path: Path) -> None:
    module = make_module(max_steps=25, flow_draws=2)
    config = module.network.config
    logger = CSVLogger(tmp_path, name=None, version="")
    fit(module, tmp_path, 25, Steps(config, fixed=True), logger=logger, gradient_clip_val=1.0)
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["train/loss"]) for row in rows]
    rates = [float(row["train/lr"]) for row in rows]
    norms = [float(row["train/grad_norm"]) for row in rows]
    assert len(rows) == 25
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)  # the first step has rate 0
    assert losses[-1] < 0.6 * losses[0]
    assert rates == pytest.approx([3e-3 * module.schedule_config.factor(step) for step in range(25)])
    assert max(norms) > 1.0  # before the clip
    counted = count_flops(config, image_grids=[(2, 2)] * 8, sequence_length=10, batch_size=4, draws=2)
    assert module.step_flops == counted.training_total


def test_every_step_logs_tensors_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning copies a plain number to the device, and that copy waits for the device in every step."""
    module = make_module(max_steps=2)
    logged: dict[str, Any] = {}
    monkeypatch.setattr(module, "log", lambda name, value, **options: logged.update({name: value}))
    fit(module, tmp_path, 2, Steps(module.network.config, fixed=True))
    assert {"train/loss", "train/lr"} <= logged.keys()
    assert all(isinstance(value, Tensor) for value in logged.values())
    assert logged["train/lr"].device.type == "cpu"


def test_noise_and_time_follow_position_and_draw() -> None:
    module = make_module(flow_draws=2)
    config = module.network.config
    noise, time = module.flow_variables(torch.arange(6))
    assert noise.shape == (12, config.action_horizon, config.max_action_dim)
    some_noise, some_time = module.flow_variables(torch.tensor([4, 1]))
    # Row k * B + b is draw k of sample b, so position 4 sits in rows 4 and 10 of the batch of six.
    assert torch.equal(some_noise, noise[[4, 1, 10, 7]])
    assert torch.equal(some_time, time[[4, 1, 10, 7]])
    assert not torch.equal(noise[:6], noise[6:])
    assert ((time >= 0) & (time <= config.noise_s)).all()


def test_draws_share_a_backbone_pass_and_average_the_single_losses() -> None:
    module = make_module(flow_draws=3)
    inputs = make_inputs(module.network.config)
    noise, time = module.flow_variables(inputs["position"])
    single = [module.network(inputs, noise=n, time=t) for n, t in zip(noise.chunk(3), time.chunk(3), strict=True)]
    torch.testing.assert_close(loss_of(module, inputs), torch.stack(single).mean(), rtol=1e-5, atol=1e-6)


def test_resume_repeats_the_run_with_dropout_and_accumulation(tmp_path: Path) -> None:
    def digest(module: GR00TN17Module) -> str:
        return weights_digest(module.network.state_dict())

    whole = make_module(max_steps=6, **DROPOUT)
    config = whole.network.config
    fit(whole, tmp_path / "a", 6, Steps(config), accumulate_grad_batches=2)
    first = make_module(max_steps=6, **DROPOUT)
    saver = ModelCheckpoint(tmp_path / "b", filename="last", every_n_train_steps=3)
    fit(
        first, tmp_path / "b", 3, Steps(config), accumulate_grad_batches=2, callbacks=[saver], enable_checkpointing=True
    )
    assert digest(first) != digest(whole)
    torch.rand(17)  # a resumed process has another generator state
    second = make_module(max_steps=6, **DROPOUT)
    path = tmp_path / "b" / "last.ckpt"
    fit(second, tmp_path / "c", 6, Steps(config, start=6), ckpt_path=path, accumulate_grad_batches=2)
    assert digest(second) == digest(whole)


def test_dropout_differs_between_steps_micro_batches_and_seeds() -> None:
    module = make_module(**DROPOUT)
    inputs = make_inputs(module.network.config)
    first = module.training_step(inputs).item()
    second = module.training_step(inputs).item()  # the next micro-batch of the same step
    assert first != second
    module._last_step = -1
    assert module.training_step(inputs).item() == first


def test_frozen_parts_stay_in_eval_mode_and_get_no_gradient() -> None:
    module = make_module(tune_llm=False, tune_visual=False, tune_vlln=False, **DROPOUT)
    module.eval()
    module.train()
    network = module.network
    for frozen in (network.backbone.visual, network.backbone.language_model):
        assert not any(part.training for part in frozen.modules())
    assert not any(part.training for part in network.action_head.vl_self_attention.modules())
    assert all(part.training for part in network.action_head.model.modules())
    dropouts = [part for part in network.action_head.model.modules() if isinstance(part, nn.Dropout)]
    assert dropouts
    module.training_step(make_inputs(network.config)).backward()
    assert all(p.grad is None for p in network.backbone.parameters())
    assert all(p.grad is not None for p in network.action_head.model.parameters())


def test_options_that_cannot_be_met_are_refused() -> None:
    with pytest.raises(ValueError, match="flow_draws=0"):
        make_module(flow_draws=0)
    with pytest.raises(ValueError, match=r"noise_beta_beta=2\.0"):
        make_module(noise_beta_beta=2.0)
    network = make_module().network
    with pytest.raises(ValueError, match=r"optimizer: unknown keys \['rate'\]"):
        GR00TN17Module(network, seed=0, optimizer={"rate": 1.0}, schedule={"max_steps": 1})


def test_policy_acts_in_eval_mode_and_is_deterministic_for_given_noise() -> None:
    config = GR00TN17Config.tiny(**DROPOUT)
    torch.manual_seed(0)
    network = GR00TN17(config).train()
    stats = {
        "min": [-1.0] * 3,
        "max": [1.0] * 3,
        "mean": [0.0] * 3,
        "std": [1.0] * 3,
        "q01": [-1.0] * 3,
        "q99": [1.0] * 3,
    }
    settings = ProcessorConfig(shortest_image_edge=None, crop_fraction=None, min_pixels=1024, tokenizer="words")
    tokenizer = WordTokenizer.from_texts(["pick red", "pick up blue"], backbone=config.backbone)
    processor = Processor(
        config, settings, cameras=["top"], statistics={"state": stats, "action": stats}, state_keys=["state"],
        action_keys=["action"], horizon=8, embodiment_id=0, tokenizer=tokenizer,
    )  # fmt: skip
    policy = Policy(network, processor)
    generator = torch.Generator().manual_seed(0)
    images = {"top": torch.randint(0, 256, (2, 32, 64, 3), dtype=torch.uint8, generator=generator).numpy()}
    state = {"state": torch.rand(2, 3, generator=generator).numpy()}
    noise = torch.randn(2, config.action_horizon, config.max_action_dim, generator=generator)
    actions = policy.act(images, state, ["pick red", "pick up blue"], noise=noise)
    assert {key: value.shape for key, value in actions.items()} == {"action": (2, 8, 3)}
    assert abs(actions["action"]).max() <= 1.0
    again = policy.act(images, state, ["pick red", "pick up blue"], noise=noise)
    assert (again["action"] == actions["action"]).all()
    assert network.training
    assert network.action_head.model.training


def test_a_continued_run_follows_its_own_learning_rate_from_the_first_step(tmp_path: Path) -> None:
    first = make_module(max_steps=4, lr=1e-3)
    config = first.network.config
    checkpoint = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    fit(first, tmp_path / "a", 4, Steps(config), callbacks=[checkpoint], enable_checkpointing=True)
    second = make_module(max_steps=8, lr=5e-3)
    rates: list[float] = []
    before_step = second.on_before_optimizer_step

    def note(optimizer: torch.optim.Optimizer) -> None:
        rates.append(optimizer.param_groups[0]["lr"])
        before_step(optimizer)

    second.on_before_optimizer_step = note  # type: ignore[method-assign]
    fit(second, tmp_path / "b", 8, Steps(config, start=4), ckpt_path=str(tmp_path / "step=4.ckpt"))
    assert rates == [5e-3 * second.schedule_config.factor(step) for step in range(4, 8)]


def test_gradients_are_clipped_in_mixed_precision(tmp_path: Path) -> None:
    module = make_module(max_steps=2)
    before = weights_digest(module.network.state_dict())
    steps = Steps(module.network.config)
    fit(module, tmp_path, 2, steps, precision="bf16-mixed", gradient_clip_val=1.0)
    assert weights_digest(module.network.state_dict()) != before
