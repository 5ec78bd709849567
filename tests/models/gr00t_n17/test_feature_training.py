"""Training on kept backbone features: the same losses and weights, and no backbone from the second pass on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from models.common.digest import weights_digest
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.feature_store import FeatureCache
from models.gr00t_n17.features import KEYS, sample_keys
from models.gr00t_n17.module import GR00TN17Module
from models.gr00t_n17.network import GR00TN17

BATCHES, SIZE, EPOCHS = 2, 3, 3


def make_module(cache: FeatureCache | None) -> GR00TN17Module:
    torch.manual_seed(0)
    config = GR00TN17Config.tiny(tune_llm=False, tune_visual=False, diffusion_model_cfg={"num_layers": 2})
    return GR00TN17Module(
        GR00TN17(config),
        seed=0,
        optimizer={"lr": 1e-3},
        schedule={"max_steps": BATCHES * EPOCHS, "warmup_steps": 0},
        feature_cache=cache,
    )


def batch(config: GR00TN17Config, number: int, epoch: int) -> dict[str, Any]:
    """Batch `number` of an epoch: the same samples in each, at other places in the run."""
    generator = torch.Generator().manual_seed(number)
    b = config.backbone
    ids = torch.tensor([[b.vision_start_token_id, b.image_token_id, b.vision_end_token_id, 10 + number]] * SIZE)
    frame = torch.arange(number * SIZE, (number + 1) * SIZE)
    zero = torch.zeros_like(frame)
    shape = (SIZE, config.action_horizon, config.max_action_dim)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.rand(SIZE * 4, 1536, generator=generator) * 2 - 1,
        "image_grid_thw": torch.tensor([[1, 2, 2]] * SIZE),
        "state": torch.rand(SIZE, 1, config.max_state_dim, generator=generator),
        "action": torch.rand(shape, generator=generator),
        "action_mask": torch.ones(shape),
        "embodiment_id": 1,
        "position": frame + epoch * BATCHES * SIZE,
        KEYS: sample_keys(zero, zero, frame, ids, torch.ones_like(ids)),
    }


class Epochs:
    def __init__(self, config: GR00TN17Config) -> None:
        self.config = config

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for epoch in range(EPOCHS):
            yield from (batch(self.config, number, epoch) for number in range(BATCHES))


def test_kept_features_train_the_same_weights_without_the_backbone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for cache in (None, FeatureCache(tmp_path / "cache", 1 << 20, "weights")):
        module = make_module(cache)
        flops, passes = [], []
        backbone = module.network.backbone
        step, forward = module.training_step, backbone.forward

        def count(inputs: dict[str, Any], batch_idx: int, step: Any = step, flops: Any = flops, m: Any = module) -> Any:
            loss = step(inputs, batch_idx)
            flops.append(m.step_flops)
            return loss

        def note(*args: Any, forward: Any = forward, passes: Any = passes, **named: Any) -> Any:
            passes.append(1)
            return forward(*args, **named)

        monkeypatch.setattr(module, "training_step", count)
        monkeypatch.setattr(backbone, "forward", note)
        trainer = Trainer(
            accelerator="cpu", devices=1, max_steps=BATCHES * EPOCHS, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, train_dataloaders=Epochs(module.network.config))
        results.append((weights_digest(module.network.state_dict()), flops, len(passes)))
    (plain, whole, every), (kept, saved, once) = results
    assert kept == plain
    assert (every, once) == (BATCHES * EPOCHS, BATCHES)
    assert saved[:BATCHES] == whole[:BATCHES]
    assert all(value < whole[0] for value in saved[BATCHES:])
