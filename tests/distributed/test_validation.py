"""Validation gives the same figures for any batch size and number of ranks, and training does not notice it."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from callbacks.step_clock import StepClock
from callbacks.validation import Validation as ValidationCallback
from knonik import Batch
from models.common.digest import weights_digest
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.inputs.processor import Processor, ProcessorConfig
from models.gr00t_n17.inputs.text import WordTokenizer
from models.gr00t_n17.module import GR00TN17Module
from models.gr00t_n17.network import GR00TN17
from models.gr00t_n17.validation import Validation

TEXTS = ("pick red", "pick up the blue block", "put red on blue", "open", "pick up the red block and put it down")
SAMPLES, HORIZON, DIM = 10, 6, 3
CONFIG: dict[str, Any] = {
    "diffusion_model_cfg": {"num_layers": 4, "dropout": 0.2},
    "vl_self_attention_cfg": {"dropout": 0.2},
    "state_dropout_prob": 0.2,
    "tune_llm": False,
    "tune_visual": False,
}


def make_module() -> GR00TN17Module:
    torch.manual_seed(0)
    return GR00TN17Module(
        GR00TN17(GR00TN17Config.tiny(**CONFIG)),
        seed=0,
        optimizer={"lr": 1e-3},
        schedule={"max_steps": 6, "warmup_steps": 1},
    )


def make_processor() -> Processor:
    config = GR00TN17Config.tiny(**CONFIG)
    numbers = {"min": -2.0, "max": 2.0, "mean": 0.0, "std": 1.0, "q01": -2.0, "q99": 2.0}
    statistics = {name: [value] * DIM for name, value in numbers.items()}
    return Processor(
        config,
        ProcessorConfig(shortest_image_edge=None, crop_fraction=0.9, min_pixels=1024, tokenizer="words"),
        cameras=["top", "side"],
        statistics={"state": statistics, "arm": statistics, "gripper": statistics},
        state_keys=["state"],
        action_keys=["arm", "gripper"],
        horizon=HORIZON,
        embodiment_id=1,
        tokenizer=WordTokenizer.from_texts(TEXTS, backbone=config.backbone),
    )


def sample(index: int) -> dict[str, Any]:
    rng = np.random.default_rng(index)
    pad = torch.zeros(1, HORIZON, dtype=torch.bool)
    pad[:, HORIZON - index % 4 :] = index % 4 > 0  # some chunks run past the end of their episode
    return {
        "images": {
            camera: torch.from_numpy(rng.integers(0, 256, (1, 1, 64, 64, 3), dtype=np.uint8))
            for camera in ("top", "side")
        },
        "state": {"state": torch.from_numpy(rng.normal(size=(1, 1, DIM)).astype(np.float32))},
        "action": {
            key: torch.from_numpy(rng.uniform(-1.9, 1.9, size=(1, HORIZON, DIM)).astype(np.float32))
            for key in ("arm", "gripper")
        },
        "action_is_pad": pad,
        "text": [TEXTS[index % len(TEXTS)]],
        "dataset": torch.zeros(1, dtype=torch.int64),
        "episode": torch.tensor([index // 4]),
        "frame": torch.tensor([index % 4]),
        "position": torch.tensor([0]),  # says nothing about which sample it is
    }


def batch_of(indices: list[int], processor: Processor) -> Batch:
    parts = [sample(index) for index in indices]

    def joined(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: joined([value[key] for value in values]) for key in values[0]}
        return [x for value in values for x in value] if isinstance(values[0], list) else torch.cat(values)

    batch = Batch(**{key: joined([part[key] for part in parts]) for key in parts[0]})
    return Batch(**{**{name: getattr(batch, name) for name in parts[0]}, "inputs": processor.prepare(batch)})


def held_out(processor: Processor, size: int, rank: int = 0, ranks: int = 1) -> list[Batch]:
    own = list(range(SAMPLES))[rank::ranks]
    return [batch_of(own[start : start + size], processor) for start in range(0, len(own), size)]


def validation(size: int, rank: int = 0, ranks: int = 1) -> Validation:
    processor = make_processor()
    batches = held_out(processor, size, rank, ranks)
    return Validation(processor, seed=7, loss_batches=batches, open_loop_batches=batches, flow_draws=2)


def test_the_figures_depend_on_weights_and_samples_alone() -> None:
    network = make_module().train().network
    modes = [part.training for part in network.modules()]
    torch.manual_seed(1)
    first = validation(4).measure(network)
    torch.manual_seed(2)
    assert validation(4).measure(network) == first
    assert [part.training for part in network.modules()] == modes
    assert set(first) == {
        "val/loss", "val/action_mse", "val/action_mae", "val/action_mse/arm", "val/action_mae/arm",
        "val/action_mse/gripper", "val/action_mae/gripper",
    }  # fmt: skip
    for size in (1, 3, SAMPLES):
        assert validation(size).measure(network) == pytest.approx(first, rel=1e-6), size
    with torch.no_grad():
        next(network.action_head.action_decoder.parameters()).mul_(1.1)
    assert validation(4).measure(network)["val/loss"] != pytest.approx(first["val/loss"], rel=1e-3)


def test_the_loss_is_that_of_training_without_its_random_parts() -> None:
    """One sample alone, with the noise and time of the validation, through the network as training calls it."""
    module = make_module()
    network = module.network.eval()
    processor = make_processor()
    some = Validation(processor, seed=7, loss_batches=held_out(processor, 3))
    seen: list[tuple[float, float]] = []
    forward = network.forward

    def note(inputs: dict[str, Tensor], noise: Tensor, time: Tensor) -> Tensor:
        seen.extend(
            (float(forward({**one, "embodiment_id": 1}, noise=noise[i : i + 1], time=time[i : i + 1])), size)
            for i in range(len(noise))
            for one in [_row(inputs, i)]
            for size in [float(one["action_mask"].sum())]
        )
        return forward(inputs, noise=noise, time=time)

    network.forward = note  # type: ignore[method-assign]
    found = some.measure(network)["val/loss"]
    assert len(seen) == SAMPLES
    assert found == pytest.approx(sum(x * n for x, n in seen) / sum(n for _, n in seen), rel=1e-5)


def _row(inputs: dict[str, Any], row: int) -> dict[str, Any]:
    """Sample `row` without its padding; two images of 2 x 2 tokens each."""
    length = int(inputs["attention_mask"][row].sum())
    out = {key: inputs[key][row : row + 1] for key in ("state", "action", "action_mask")}
    out |= {key: inputs[key][row : row + 1, -length:] for key in ("input_ids", "attention_mask")}
    patches = len(inputs["pixel_values"]) // len(inputs["state"])
    out["pixel_values"] = inputs["pixel_values"][row * patches : (row + 1) * patches]
    out["image_grid_thw"] = inputs["image_grid_thw"][2 * row : 2 * row + 2]
    return out


def test_action_errors_are_in_robot_units_and_leave_padded_steps_out() -> None:
    network = make_module().network
    processor = make_processor()
    batches = held_out(processor, 4)
    rows = iter([batch.inputs["action"] for batch in batches])
    # Normalised by half the range of 4: an error of 0.25 is one of 0.5 robot units, of 3 dimensions one is off.
    network.action_head.sample = lambda *args, noise, action_mask, **kwargs: _off(action_mask, next_rows)  # type: ignore[method-assign]
    next_rows: list[Tensor] = []
    found = []
    for batch, actions in zip(batches, rows, strict=True):
        lengths = batch.inputs["attention_mask"].sum(1)
        next_rows[:] = [actions[lengths == length] for length in lengths.unique()]
        found.append(Validation(processor, seed=0, open_loop_batches=[batch]).measure(network))
    for metrics in found:
        assert "val/loss" not in metrics
        assert metrics["val/action_mae/arm"] == pytest.approx(0.5 / 3, rel=1e-5)
        assert metrics["val/action_mse/arm"] == pytest.approx(0.25 / 3, rel=1e-5)
        assert metrics["val/action_mae/gripper"] == pytest.approx(0, abs=1e-6)
        assert metrics["val/action_mae"] == pytest.approx(0.25 / 3, rel=1e-5)


def _off(mask: Tensor, rows: list[Tensor]) -> Tensor:
    """The recorded actions with the first dimension off by 0.25, and nonsense where an episode has ended."""
    actions = rows.pop(0).clone()
    assert actions.shape == mask.shape
    actions[..., 0] += torch.where(actions[..., 0] > 0, -0.25, 0.25)
    return actions


class Steps:
    """Endless training batches; the images of a step depend on its number."""

    def __init__(self, processor: Processor) -> None:
        self.batches = [processor.to_network(batch, augment=True) for batch in held_out(processor, 5)]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            yield from self.batches


def fit(folder: Path, *callbacks: Callback, steps: int = 6, checkpoint: Path | None = None) -> GR00TN17Module:
    module = make_module()
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=steps, accumulate_grad_batches=2, gradient_clip_val=1.0,
        callbacks=list(callbacks), logger=CSVLogger(folder, name=None, version=""), enable_progress_bar=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        enable_model_summary=False, default_root_dir=folder, log_every_n_steps=2,
    )  # fmt: skip
    trainer.fit(module, train_dataloaders=Steps(make_processor()), ckpt_path=checkpoint, weights_only=True)
    return module


class Measured:
    """A validation that knows at which steps it was called, and draws from the global generator besides."""

    def __init__(self, size: int = 4) -> None:
        self.validation = validation(size)
        self.steps: list[int] = []

    def __call__(self, module: LightningModule) -> dict[str, float]:
        self.steps.append(module.global_step)
        torch.rand(13)
        return self.validation.measure(module.network)  # type: ignore[arg-type]


def test_training_does_not_notice_validation(tmp_path: Path) -> None:
    plain = fit(tmp_path / "a")
    clock, measured = StepClock(time.perf_counter()), Measured()
    callback = ValidationCallback(clock, measured, every_n_steps=4)
    validated = fit(tmp_path / "b", clock, callback)
    assert measured.steps == [4, 6]  # every four steps and after the last
    assert weights_digest(validated.network.state_dict()) == weights_digest(plain.network.state_dict())
    rows = (tmp_path / "b" / "metrics.csv").read_text()
    assert "val/loss" in rows.splitlines()[0]
    assert repr(callback.latest["val/loss"]) in rows
    summary = callback.summary()
    assert summary["val_step"] == 6
    assert summary["val_loss"] == callback.latest["val/loss"]
    assert summary["val_loss_best"] <= summary["val_loss"]
    assert clock.first_batch_s is not None


def test_a_run_that_continues_validates_where_it_would_have(tmp_path: Path) -> None:
    def callback(measured: Measured) -> ValidationCallback:
        return ValidationCallback(StepClock(time.perf_counter()), measured, every_n_steps=2)

    saver = ModelCheckpoint(tmp_path, filename="at-{step}", every_n_train_steps=4, save_top_k=-1)
    whole, part = Measured(), Measured()
    first = callback(whole)
    fit(tmp_path / "a", first, saver)
    second = callback(part)
    fit(tmp_path / "b", second, checkpoint=tmp_path / "at-step=4.ckpt")
    assert whole.steps == [2, 4, 6]
    assert part.steps == [6]
    assert second.summary() == first.summary()


def test_the_time_of_a_measurement_is_no_time_of_a_step(tmp_path: Path) -> None:
    clock = StepClock(time.perf_counter())
    spent: list[float] = []

    def slow(module: LightningModule) -> dict[str, float]:
        begin = time.perf_counter()
        while time.perf_counter() - begin < 0.1:
            pass
        spent.append(time.perf_counter() - begin)
        return {}

    begin = time.perf_counter()
    fit(tmp_path, clock, ValidationCallback(clock, slow, every_n_steps=1))
    whole = time.perf_counter() - begin
    assert len(spent) == 6
    assert sum(step.step_s for step in clock.drain()) <= whole - sum(spent)


@pytest.mark.distributed
def test_two_ranks_measure_what_one_process_measures(tmp_path: Path) -> None:
    launched = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert launched.returncode == 0, launched.stderr[-4000:]
    expected = validation(3).measure(make_module().network)
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt", weights_only=True) == pytest.approx(expected, rel=1e-6)


def main(folder: Path) -> None:
    """One of two ranks under torchrun."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.save(validation(2, rank, 2).measure(make_module().network), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
