"""No step waits for the device: nothing reads a value or a data-dependent shape of a tensor on it."""

import logging
import traceback
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from models.cosmos3_policy.config import Cosmos3PolicyConfig
from models.cosmos3_policy.module import Cosmos3PolicyModule
from models.cosmos3_policy.network import Cosmos3Policy

CONFIG = Cosmos3PolicyConfig.tiny()
READS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"}


class Vae:
    """Stands for the encoder, on whatever device the video is."""

    def to(self, device: Any) -> "Vae":
        return self

    def encode(self, video: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool3d(video[:, :1, ::4].float(), (1, 16, 16)).repeat(1, 4, 1, 1, 1)

    def flops(self, *size: int, upstream: bool = False) -> int:
        return 1


def make_module(**options: Any) -> Cosmos3PolicyModule:
    return Cosmos3PolicyModule(
        Cosmos3Policy(CONFIG), Vae(), seed=0, optimizer={"lr": 1e-3, "lr_multipliers": {"action_heads": 5.0}},
        schedule={"max_steps": 10, "kind": "linear"}, **options,
    )  # fmt: skip


def make_inputs() -> dict[str, Any]:
    """Two samples; what the host must know is no tensor."""
    return {
        "video": torch.zeros(2, 3, 9, 80, 96, dtype=torch.uint8),
        "content_size": (80, 96),
        "text_ids": torch.arange(7),
        "text_lengths": (3, 4),
        "action": torch.zeros(2, 9, CONFIG.action_dim),
        "action_dim": 5,
        "domain": 1,
        "fps": 15.0,
        "position": torch.arange(2),
    }


class Reads(TorchDispatchMode):
    """Collects who turns a tensor into a Python value, or makes one whose size depends on values, within a function."""

    def __init__(self, within: str) -> None:
        super().__init__()
        self.within = within
        self.readers: set[str] = set()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        if func.overloadpacket.__name__ in READS and self.within in {f.name for f in traceback.extract_stack()}:
            self.readers.add("".join(traceback.format_stack()[-9:-1]))
        return func(*args, **(kwargs or {}))


class Same(Dataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return make_inputs()


def test_no_value_is_read_in_training_steps_between_metrics(tmp_path: Path) -> None:
    """Encoder, forward, backward, guard, clip, optimiser, averages and what Lightning does around them."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = Trainer(
        accelerator="cpu", max_steps=3, precision="bf16-mixed", gradient_clip_val=1.0, log_every_n_steps=100,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    with Reads("advance") as reads:  # Lightning's loop over steps; its set-up reads sizes of loaders
        trainer.fit(make_module(ema={}, lookahead="stream"), DataLoader(Same(), batch_size=None))
    assert trainer.global_step == 3
    assert reads.operations > 1000
    assert not reads.readers, "\n".join(reads.readers)


def test_the_check_would_see_a_read() -> None:
    def advance() -> None:
        torch.ones(()).item()

    with Reads("advance") as reads:
        advance()
    assert len(reads.readers) == 1
