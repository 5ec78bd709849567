"""MFU and HFU of real training steps against PyTorch's own counter, with activation checkpointing off and on."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from callbacks.mfu import Mfu
from callbacks.step_clock import StepClock
from callbacks.window import Window, gather
from models.common.block_options import CheckpointingConfig
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.flops import count_flops
from models.gr00t_n17.module import GR00TN17Module
from models.gr00t_n17.network import GR00TN17
from models.gr00t_n17.parallelize import checkpoint_blocks

STEPS, MICRO_BATCHES = 2, 2
PEAK = 1e-3
CONFIG = GR00TN17Config.tiny(tune_llm=False, tune_visual=False)
CHOICES = {
    "none": CheckpointingConfig(),
    "full": CheckpointingConfig(mode="full"),
    "last two": CheckpointingConfig(mode="layers", last_k=2, parts=("dit",)),
    "selective": CheckpointingConfig(mode="selective", save=("aten.addmm",)),
}


class Batches:
    """Micro-batches of changing size and prompt length."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(STEPS * MICRO_BATCHES):
            size, tail = 2 + number % 2, [20] * (1 + number)
            row = [1, 3, 5, 5, 5, 5, 4, *tail, 2]
            action = torch.rand(size, CONFIG.action_horizon, CONFIG.max_action_dim)
            yield {
                "input_ids": torch.tensor([row] * size),
                "attention_mask": torch.ones(size, len(row), dtype=torch.int64),
                "pixel_values": torch.randn(size * 16, 1536),
                "image_grid_thw": torch.tensor([[1, 4, 4]] * size),
                "state": torch.randn(size, 1, CONFIG.max_state_dim),
                "action": action,
                "action_mask": torch.ones_like(action),
                "embodiment_id": torch.ones(size, dtype=torch.int64),
                "position": torch.arange(size),
            }


class Counted(GR00TN17Module):
    """Counts what is really multiplied from the first batch to the end."""

    counter: FlopCounterMode

    def on_train_start(self) -> None:
        super().on_train_start()
        self.counter = FlopCounterMode(display=False)
        self.counter.__enter__()

    def on_train_end(self) -> None:
        self.counter.__exit__(None, None, None)


def trained(folder: Path, checkpointing: CheckpointingConfig) -> tuple[int, Window]:
    """FLOPs that ran, and the window of the run's steps."""
    torch.manual_seed(0)
    network = GR00TN17(CONFIG)
    checkpoint_blocks(network, checkpointing)
    module = Counted(network, seed=0, optimizer={"lr": 1e-3}, schedule={"max_steps": STEPS, "warmup_steps": 0})
    clock = StepClock(time.perf_counter())
    trainer = Trainer(
        accelerator="cpu", max_steps=STEPS, accumulate_grad_batches=MICRO_BATCHES, callbacks=[clock], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    with sdpa_kernel(SDPBackend.MATH):  # attention as plain products, which the counter sees exactly
        trainer.fit(module, train_dataloaders=Batches())
    return module.counter.get_total_flops(), gather(clock.drain(), torch.device("cpu"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Window]:
    return trained(tmp_path_factory.mktemp("plain"), CHOICES["none"])


@pytest.mark.parametrize("choice", CHOICES)
def test_mfu_leaves_recomputation_out_and_hfu_counts_exactly_it(
    tmp_path: Path, plain: tuple[int, Window], choice: str
) -> None:
    ran, window = trained(tmp_path, CHOICES[choice])
    assert sum(window.flops) == sum(plain[1].flops) == pytest.approx(plain[0], rel=0.01)
    assert sum(window.recompute_flops) == pytest.approx(ran - plain[0], rel=1e-6)
    assert (ran > plain[0]) == (choice != "none")
    mfu = Mfu(torch.device("cpu"), "bf16-mixed", peak_override=PEAK)
    timed = Window(window.index, window.loss, window.step_s, window.wait_s, window.slowest_rank, window.samples,
                   window.flops, 1, recompute_flops=window.recompute_flops)  # fmt: skip
    metrics = mfu.measure(timed)
    seconds = sum(window.step_s)
    assert metrics["perf/mfu"] == pytest.approx(plain[0] / seconds / 1e12 / PEAK, rel=0.01)
    assert metrics["perf/hfu"] == pytest.approx(ran / seconds / 1e12 / PEAK, rel=0.01)


def test_a_frozen_backbone_counts_its_forward_only() -> None:
    """Were its backward counted too, the figure would be off by far more than the percent allowed above."""
    flops = count_flops(CONFIG, image_grids=[(4, 4)] * 2, sequence_length=9, batch_size=2)
    assert flops.training["vit"] == flops.forward["vit"] > 0.05 * flops.training_total
    assert flops.training["llm"] == flops.forward["llm"]
