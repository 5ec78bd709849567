"""No step waits for the device: nothing reads a value or a data-dependent shape of a tensor on it."""

import logging
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from models.gr00t_n17 import precision
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.module import GR00TN17Module
from models.gr00t_n17.network import GR00TN17

CONFIG = GR00TN17Config.tiny(tune_llm=False, tune_visual=False, state_dropout_prob=0.2)
# Checks of values that only run where the tensors are on the host anyway.
ON_HOST_ONLY = {"shared_category", "rows_of", "_check_image_tokens"}


def make_module(mode: str, device: str = "cpu") -> GR00TN17Module:
    with torch.device(device):
        network = GR00TN17(CONFIG, slots=(1, 2))
    precision.apply(network, mode)
    return GR00TN17Module(
        network, seed=0, optimizer={"lr": 1e-3}, schedule={"max_steps": 10, "warmup_steps": 1}, flow_draws=2
    )


def make_inputs(embodiment: torch.Tensor | int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.tensor([[0, 1, 3, 5, 5, 5, 5, 4, 20, 21, 2]] * 2),
        "attention_mask": torch.tensor([[0] + [1] * 10] * 2),
        "pixel_values": torch.randn(32, 1536, generator=g),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "state": torch.randn(2, 1, 32, generator=g),
        "action": torch.randn(2, 16, 32, generator=g),
        "action_mask": torch.ones(2, 16, 32),
        "embodiment_id": embodiment,
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
        if func.overloadpacket.__name__ in {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"}:
            names = {frame.name for frame in traceback.extract_stack()}
            if self.within in names and not names & ON_HOST_ONLY:
                self.readers.add("".join(traceback.format_stack()[-9:-1]))
        return func(*args, **(kwargs or {}))


class Same(Dataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return make_inputs(torch.tensor([1, 2]))


@pytest.mark.parametrize("mode", precision.MODES)
def test_no_value_is_read_in_training_steps_between_metrics(mode: str, tmp_path: Path) -> None:
    """Forward, backward, clip, optimiser and what Lightning does around them."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = Trainer(
        accelerator="cpu", max_steps=3, precision="bf16-mixed", gradient_clip_val=1.0, log_every_n_steps=100,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    with Reads("advance") as reads:  # Lightning's loop over steps; its set-up reads sizes of loaders
        trainer.fit(make_module(mode), DataLoader(Same(), batch_size=None))
    assert trainer.global_step == 3
    assert reads.operations > 1000
    assert not reads.readers, "\n".join(reads.readers)

    def advance() -> None:
        torch.ones(()).item()

    with Reads("advance") as reads:
        advance()
    assert len(reads.readers) == 1


@pytest.mark.parametrize("mixed", [False, True])
def test_a_training_step_runs_where_values_cannot_be_read(mixed: bool) -> None:
    """On the meta device every such operation raises; the patch grids stay on the host."""
    module = make_module("stock", "meta")
    inputs = make_inputs(torch.tensor([1, 2]) if mixed else 2)
    on_device = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    loss = module.training_step({**on_device, "image_grid_thw": inputs["image_grid_thw"]})
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    assert module.step_flops > 0
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        module.training_step(on_device)
