"""Precision modes under Lightning: lean trains as stock does; bf16 is resumed to the last bit of its float32 values."""

import logging
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from models.common.split_adamw import SplitAdamW
from models.common.step_mean import total_norm
from models.gr00t_n17 import precision
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.module import GR00TN17Module
from models.gr00t_n17.network import GR00TN17
from models.gr00t_n17.parallelize import tuned_parameters

CONFIG = GR00TN17Config.tiny(tune_llm=False, tune_visual=False, diffusion_model_cfg={"num_layers": 2})


class Batches(Dataset):
    def __init__(self, start: int, stop: int) -> None:
        self.steps = range(start, stop)

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(self.steps[index])
        return {
            "input_ids": torch.tensor([[1, 3, 5, 5, 5, 5, 4, 20, 21, 2]] * 2),
            "attention_mask": torch.ones(2, 10, dtype=torch.int64),
            "pixel_values": torch.randn(32, 1536, generator=g),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
            "state": torch.randn(2, 1, 32, generator=g),
            "action": torch.randn(2, 16, 32, generator=g),
            "action_mask": torch.ones(2, 16, 32),
            "embodiment_id": 1,
            "position": torch.arange(2) + 2 * self.steps[index],
        }


def run(network: GR00TN17, folder: Path, start: int, stop: int, **options: Any) -> torch.optim.Optimizer:
    """Train steps start..stop - 1; returns the optimiser."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    checkpoint = options.pop("checkpoint", None)
    module = GR00TN17Module(network, seed=0, optimizer={"lr": 1e-3}, schedule={"max_steps": 6, "warmup_steps": 1})
    trainer = Trainer(
        accelerator="cpu", max_steps=stop, precision="bf16-mixed", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, **{"enable_checkpointing": False, **options},
    )  # fmt: skip
    trainer.fit(module, DataLoader(Batches(start, stop), batch_size=None), ckpt_path=checkpoint, weights_only=True)
    return trainer.optimizers[0]


def fit(folder: Path, start: int, stop: int, checkpoint: Path | None = None) -> list[Tensor]:
    """A run in mode bf16 with a checkpoint at its end; returns the float32 values behind the trained parameters."""
    network = GR00TN17(CONFIG, slots=(1,))
    network.init_weights(0)
    precision.apply(network, "bf16")
    saver = ModelCheckpoint(folder, filename="last", every_n_train_steps=stop)
    options: dict[str, Any] = {"callbacks": [saver], "enable_checkpointing": True, "gradient_clip_val": 1.0}
    optimizer = run(network, folder, start, stop, checkpoint=checkpoint, **options)
    assert isinstance(optimizer, SplitAdamW)
    return [optimizer.master(p) for p in tuned_parameters(network).values()]


def test_a_resumed_run_continues_on_the_float32_values(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", 0, 6)
    half = fit(tmp_path / "half", 0, 3)
    path = tmp_path / "half" / "last.ckpt"
    resumed = fit(tmp_path / "resumed", 3, 6, path)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(whole, half, strict=True))
    # Without the lower halves the values would have been rounded on the way.
    assert any(not torch.equal(value, value.bfloat16().float()) for value in half)
    saved = torch.load(path, weights_only=True, map_location="cpu")
    trained = [t for name, t in saved["state_dict"].items() if name.endswith("attn1.to_q.weight")]
    assert {t.dtype for t in trained} == {torch.bfloat16}


def test_lean_is_stock_under_lightning(tmp_path: Path) -> None:
    """Its autocast leaves float32 streams and norms alone where frozen weights are bfloat16."""
    trained = []
    for mode, clip in (("stock", None), ("lean", None), ("stock", 1.0), ("lean", 1.0)):
        network = GR00TN17(CONFIG)
        network.init_weights(0)
        for parameter in network.parameters():
            parameter.data = parameter.data.bfloat16().float()  # as a released checkpoint stores them
        precision.apply(network, mode)
        run(network, tmp_path, 0, 5, gradient_clip_val=clip)
        trained.append(tuned_parameters(network))
    stock, lean, clipped, lean_clipped = trained
    assert stock.keys() == lean.keys()
    assert all(torch.equal(stock[name], lean[name]) for name in stock)
    assert all(torch.equal(clipped[name], lean_clipped[name]) for name in stock)
    assert any(not torch.equal(stock[name], clipped[name]) for name in stock)


def test_the_norm_of_bfloat16_gradients_keeps_its_digits() -> None:
    g = torch.Generator().manual_seed(0)
    grads = [torch.randn(50, 70, generator=g).bfloat16(), torch.randn(33, generator=g)]
    expected = torch.cat([grad.double().flatten() for grad in grads]).norm()
    assert total_norm(grads).dtype == torch.float32
    torch.testing.assert_close(total_norm(grads).double(), expected, rtol=1e-6, atol=0)
