"""A training checkpoint holds what is trained; the frozen rest is found again, and told when it is another one."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, IterableDataset

from models.common.trained import DIGEST_KEY, load_trained
from models.gr00t_n17.config import GR00TN17Config
from models.gr00t_n17.module import GR00TN17Module
from models.gr00t_n17.network import GR00TN17

STEPS = 4


def network(seed: int = 0, **config: Any) -> GR00TN17:
    made = GR00TN17(GR00TN17Config.tiny(tune_llm=False, tune_visual=False, **config))
    made.init_weights(seed)
    return made


def module(net: GR00TN17) -> GR00TN17Module:
    return GR00TN17Module(net, seed=0, optimizer={"lr": 1e-3}, schedule={"max_steps": STEPS, "warmup_steps": 1})


class Batches(IterableDataset):
    """Batch `start`, `start + 1`, ... without end, as the data layer gives them."""

    def __init__(self, start: int) -> None:
        self.start = start

    def __iter__(self) -> Iterator[dict[str, Any]]:
        config = GR00TN17Config.tiny()
        for step in itertools.count(self.start):
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(10, 200, (2, 8), generator=generator)
            ids[:, 1:5] = config.backbone.image_token_id
            yield {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "pixel_values": torch.randn(2 * 16, 1536, generator=generator),
                "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
                "state": torch.randn(2, 1, config.max_state_dim, generator=generator),
                "action": torch.randn(2, config.action_horizon, config.max_action_dim, generator=generator),
                "action_mask": torch.ones(2, config.action_horizon, config.max_action_dim),
                "embodiment_id": torch.zeros(2, dtype=torch.int64),
                "position": torch.arange(2) + 2 * step,
            }


def fit(made: GR00TN17Module, folder: Path, *, steps: int, start: int = 0, checkpoint: Path | None = None) -> Trainer:
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(made, DataLoader(Batches(start), batch_size=None), ckpt_path=checkpoint, weights_only=True)
    return trainer


def test_a_resumed_run_takes_frozen_weights_from_where_it_began(tmp_path: Path) -> None:
    whole = module(network())
    fit(whole, tmp_path, steps=STEPS)
    half = module(network())
    file = tmp_path / "half.ckpt"
    fit(half, tmp_path, steps=2).save_checkpoint(file)
    stored = torch.load(file, weights_only=True)
    trained = {f"network.{name}" for name, p in whole.network.named_parameters() if p.requires_grad}
    assert stored["state_dict"].keys() == trained
    assert not any(name.startswith("network.backbone.") for name in trained)

    resumed = module(network())
    fit(resumed, tmp_path, steps=STEPS, start=2, checkpoint=file)
    for (name, a), (_, b) in zip(whole.state_dict().items(), resumed.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    with pytest.raises(ValueError, match=r"frozen weights are not those .* Give the weights the run began with"):
        fit(module(network(seed=1)), tmp_path, steps=STEPS, start=2, checkpoint=file)

    target = network()
    load_trained(target, stored)
    assert all(torch.equal(a, b) for a, b in zip(target.parameters(), half.network.parameters(), strict=True))
    with pytest.raises(ValueError, match="frozen weights"):
        load_trained(network(seed=1), stored)


def test_checkpoints_with_all_tensors_are_still_read() -> None:
    made = network()
    stored = {"state_dict": {f"network.{name}": value + 1 for name, value in made.state_dict().items()}}
    assert DIGEST_KEY not in stored
    target = network(seed=1)
    load_trained(target, stored)
    assert all(torch.equal(a, b + 1) for a, b in zip(target.parameters(), made.parameters(), strict=True))
    other = module(network(seed=1))
    other.on_load_checkpoint(stored)
    other.load_state_dict(stored["state_dict"])
    assert torch.equal(next(other.network.parameters()), next(made.parameters()) + 1)


def test_every_misfit_is_listed() -> None:
    made = network()
    state = {f"network.{name}": value for name, value in made.state_dict().items()}
    del state["network.action_head.vlln.bias"]
    state["network.extra"] = torch.zeros(1)
    state["network.action_head.vlln.weight"] = torch.zeros(3)
    with pytest.raises(ValueError, match="does not fit") as caught:
        load_trained(made, {"state_dict": state})
    for line in (
        "missing: action_head.vlln.bias",
        "unexpected: extra",
        "misshapen: action_head.vlln.weight: stored (3,), network (64,)",
    ):
        assert line in str(caught.value)
