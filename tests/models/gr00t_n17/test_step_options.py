"""Averages of the weights and the other options of a step inside a training run."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset

from models.common.digest import weights_digest
from models.common.trained import load_trained
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.module import GR00TN17Module
from models.gr00t_n17.network import GR00TN17


class Steps(IterableDataset):
    def __init__(self, config: GR00TN17Config, start: int = 0) -> None:
        self.config, self.start = config, start

    def __iter__(self) -> Iterator[dict[str, Any]]:
        step = self.start
        while True:
            yield make_inputs(self.config, step)
            step += 1


def make_inputs(config: GR00TN17Config, step: int) -> dict[str, Any]:
    generator, b = torch.Generator().manual_seed(step), config.backbone
    row = [b.im_start_token_id, b.vision_start_token_id, b.image_token_id, b.vision_end_token_id, 10]
    mask = torch.ones(2, config.action_horizon, config.max_action_dim)
    return {
        "input_ids": torch.tensor([row] * 2),
        "attention_mask": torch.ones(2, len(row), dtype=torch.int64),
        "pixel_values": torch.rand(8, 1536, generator=generator),
        "image_grid_thw": torch.tensor([[1, 2, 2]] * 2),
        "state": torch.rand(2, 1, config.max_state_dim, generator=generator),
        "action": torch.rand(2, config.action_horizon, config.max_action_dim, generator=generator),
        "action_mask": mask,
        "embodiment_id": torch.ones(2, dtype=torch.int64),
        "position": torch.arange(2 * step, 2 * step + 2),
    }


def make_module(**options: Any) -> GR00TN17Module:
    torch.manual_seed(0)
    network = GR00TN17(GR00TN17Config.tiny(tune_llm=False, tune_visual=False, diffusion_model_cfg={"num_layers": 2}))
    schedule = {"max_steps": 6, "warmup_steps": 0}
    return GR00TN17Module(network, seed=0, optimizer={"lr": 1e-2}, schedule=schedule, **options)


def fit(module: GR00TN17Module, folder: Path, steps: int, start: int = 0, path: Path | None = None) -> None:
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=steps, logger=False, callbacks=[saver], enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, gradient_clip_val=1.0,
    )  # fmt: skip
    data = DataLoader(Steps(module.network.config, start), batch_size=None)
    trainer.fit(module, data, ckpt_path=path, weights_only=True)


def digest(module: torch.nn.Module) -> str:
    return weights_digest(module.state_dict())


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def test_averages_are_saved_continued_and_read_as_weights_and_leave_training_alone(tmp_path: Path) -> None:
    plain, whole = make_module(), make_module(ema={"kind": "constant", "decay": 0.5})
    fit(plain, tmp_path / "a", 6)
    fit(whole, tmp_path / "b", 6)
    assert digest(plain.network) == digest(whole.network)
    second = make_module(ema={"kind": "constant", "decay": 0.5})
    fit(second, tmp_path / "c", 6, start=3, path=tmp_path / "b" / "step=3.ckpt")
    assert whole.ema is not None
    assert second.ema is not None
    assert digest(second.ema) == digest(whole.ema)
    # the checkpoint of a step holds the average after that step, beside its weights
    stored = torch.load(tmp_path / "b" / "step=6.ckpt", weights_only=True)
    trained = [name for name, p in whole.network.named_parameters() if p.requires_grad]
    assert sorted(name for name in stored["state_dict"] if name.startswith("ema.")) == sorted(
        f"ema.{name}" for name in trained
    )
    restored = make_module().network
    load_trained(restored, stored, prefix="ema.")
    with whole.averaged():
        assert digest(restored) == digest(whole.network)
    assert digest(restored) != digest(whole.network)


def test_averages_can_begin_or_end_where_a_run_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = make_module()
    fit(first, tmp_path / "a", 3)
    later = make_module(ema={"kind": "power"})
    with caplog.at_level(logging.WARNING):
        fit(later, tmp_path / "b", 6, start=3, path=tmp_path / "a" / "step=3.ckpt")
    assert any("they begin here" in record.message for record in caplog.records)
    without = make_module()
    fit(without, tmp_path / "c", 6, start=6, path=tmp_path / "b" / "step=6.ckpt")
    assert digest(without.network) == digest(later.network)
    with without.averaged():
        assert digest(without.network) == digest(later.network)


def test_without_a_gpu_graphs_change_nothing_and_say_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain, graphs = make_module(), make_module(graphs="head")
    fit(plain, tmp_path / "a", 3)
    with caplog.at_level(logging.WARNING):
        fit(graphs, tmp_path / "b", 3)
    assert [r.message for r in caplog.records if r.message.startswith("graphs")] == [
        "graphs: off, CUDA graphs need a GPU; the head runs as usual"
    ]
    assert digest(plain.network) == digest(graphs.network)


def test_a_module_without_averages_validates_its_weights() -> None:
    assert isinstance(make_module().averaged(), contextlib.nullcontext)
