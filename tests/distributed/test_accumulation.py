"""Accumulated and split steps have the gradient of one large batch, whatever the masks of their parts look like."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from callbacks.step_clock import StepClock
from callbacks.window import gather
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.module import GR00TN17Module
from models.gr00t_n17.network import GR00TN17

SAMPLES, STEPS = 8, 2
CONFIG: dict[str, Any] = {
    "diffusion_model_cfg": {"num_layers": 2},
    "tune_llm": False,
    "tune_visual": False,
}


class Recorded(GR00TN17Module):
    """Keeps the gradient that reaches the optimiser, and its norm before clipping."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[dict[str, Tensor]] = []

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *args: Any, **options: Any) -> None:
        super().configure_gradient_clipping(optimizer, *args, **options)
        self.seen.append({name: p.grad.clone() for name, p in self.network.named_parameters() if p.grad is not None})


def make_module(**config: Any) -> Recorded:
    torch.manual_seed(0)
    return Recorded(
        GR00TN17(GR00TN17Config.tiny(**{**CONFIG, **config})),
        seed=0,
        optimizer={"lr": 1e-3, "eps": 1e-3},  # so large that the gradient decides the step, not its rounding
        schedule={"max_steps": STEPS, "warmup_steps": 0},
    )


def samples(config: GR00TN17Config, step: int, kind: str) -> dict[str, Tensor]:
    """The samples of one optimiser step. `kind` says what their masks are: equal, or of other sizes in each part."""
    generator = torch.Generator().manual_seed(step)
    b = config.backbone
    row = [b.im_start_token_id, b.vision_start_token_id, b.image_token_id, b.vision_end_token_id, 10, 11]
    mask = torch.zeros(SAMPLES, config.action_horizon, config.max_action_dim)
    mask[:, :8, :7] = 1
    slots = torch.ones(SAMPLES, dtype=torch.int64)
    if kind == "padded":  # episodes end inside the chunk
        for sample, steps in enumerate((8, 8, 1, 3, 8, 7, 2, 2)):
            mask[sample, steps:] = 0
    if kind == "mixed":  # robots of 3 and of 20 joints, each with a horizon of its own
        slots[::3] = 2
        mask[::3, :, :20] = 1
        mask[1::3, 4:] = mask[1::3, :, 3:] = 0
    return {
        "input_ids": torch.tensor([row] * SAMPLES),
        "attention_mask": torch.ones(SAMPLES, len(row), dtype=torch.int64),
        "pixel_values": torch.rand(SAMPLES * 4, 1536, generator=generator) * 2 - 1,
        "image_grid_thw": torch.tensor([[1, 2, 2]] * SAMPLES),
        "state": torch.rand(SAMPLES, 1, config.max_state_dim, generator=generator),
        "action": torch.rand(SAMPLES, config.action_horizon, config.max_action_dim, generator=generator) * mask,
        "action_mask": mask,
        "embodiment_id": slots,
        "position": torch.arange(step * SAMPLES, (step + 1) * SAMPLES),
    }


def part(inputs: dict[str, Tensor], index: int, parts: int) -> dict[str, Tensor]:
    """Part `index` of `parts` of a step's samples."""
    return {
        key: value[len(value) // parts * index : len(value) // parts * (index + 1)] for key, value in inputs.items()
    }


class Parts:
    """Micro-batches of this rank, step after step: of every step the rank takes neighbouring parts."""

    def __init__(self, config: GR00TN17Config, kind: str, micro_batches: int, rank: int = 0, ranks: int = 1) -> None:
        self.config, self.kind = config, kind
        self.micro_batches, self.rank, self.ranks = micro_batches, rank, ranks

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for step in range(STEPS):
            inputs = samples(self.config, step, self.kind)
            for index in range(self.micro_batches):
                yield part(inputs, self.rank * self.micro_batches + index, self.micro_batches * self.ranks)


def train(folder: Path, kind: str, micro_batches: int, *, clip: float | None, ranks: int = 1) -> dict[str, Any]:
    """Gradients, weights and recorded losses of two steps."""
    module, clock = make_module(), StepClock(time.perf_counter())
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", max_steps=STEPS,
        accumulate_grad_batches=micro_batches, gradient_clip_val=clip, callbacks=[clock], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, default_root_dir=folder, log_every_n_steps=1,
    )  # fmt: skip
    data = Parts(module.network.config, kind, micro_batches, trainer.global_rank, ranks)
    trainer.fit(module, train_dataloaders=data)
    recorded = gather(clock.drain(), torch.device("cpu")).loss
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {
        "gradients": module.seen, "weights": dict(module.network.state_dict()), "loss": recorded, "logged": logged,
        "rank": trainer.global_rank,
    }  # fmt: skip


def assert_equal_steps(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert len(one["gradients"]) == len(other["gradients"]) == STEPS
    for expected, found in zip(one["gradients"], other["gradients"], strict=True):
        assert expected.keys() == found.keys()
        largest = max(float(value.abs().max()) for value in expected.values())
        for name, value in expected.items():
            assert float((found[name] - value).abs().max()) <= 1e-6 * max(1.0, largest), name
    for name, value in one["weights"].items():
        torch.testing.assert_close(other["weights"][name], value, rtol=1e-6, atol=1e-6)
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
    for name in ("train/loss", "train/grad_norm"):
        assert other["logged"][name] == pytest.approx(one["logged"][name], rel=1e-6)


@pytest.mark.parametrize("kind", ["equal", "padded", "mixed"])
@pytest.mark.parametrize("clip", [None, 0.1], ids=["unclipped", "clipped"])
def test_four_micro_batches_are_one_batch_four_times_as_large(tmp_path: Path, kind: str, clip: float | None) -> None:
    assert_equal_steps(train(tmp_path, kind, 1, clip=clip), train(tmp_path, kind, 4, clip=clip))


def test_a_mean_of_means_would_be_another_gradient(tmp_path: Path) -> None:
    """Guards the tests above: their masks are uneven enough to tell the two apart."""
    module = make_module()
    inputs = samples(module.network.config, 0, "padded")
    noise, time_ = module.flow_variables(inputs["position"])
    parts = [
        module.network(part(inputs, i, 4), noise=noise[2 * i : 2 * i + 2], time=time_[2 * i : 2 * i + 2])
        for i in range(4)
    ]
    whole = float(module.network(inputs, noise=noise, time=time_))
    assert abs(float(torch.stack(parts).mean()) / whole - 1) > 1e-3


@pytest.mark.distributed
def test_two_ranks_with_two_micro_batches_are_one_batch_four_times_as_large(tmp_path: Path) -> None:
    launched = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            __file__, str(tmp_path),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert launched.returncode == 0, launched.stderr[-4000:]
    for kind in ("padded", "mixed"):
        expected = train(tmp_path, kind, 1, clip=0.1)
        for rank in range(2):
            found = torch.load(tmp_path / f"{kind}-{rank}.pt", weights_only=True)
            assert found["rank"] == rank
            assert_equal_steps(expected, found)


def main(folder: Path) -> None:
    """One of two ranks under torchrun."""
    for kind in ("padded", "mixed"):
        result = train(folder, kind, 2, clip=0.1, ranks=2)
        torch.save(result, folder / f"{kind}-{result['rank']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
