"""Under a Lightning Trainer: what is saved is what was trained, and a resumed run goes on with the next sample."""

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import knonik
from knonik import DataModule

LENGTHS = (7, 4, 9, 1, 6)


class Recorder(pl.LightningModule):
    """Remembers the positions it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.positions: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        position = batch["position"] if isinstance(batch, dict) else batch.position
        state = batch["state"] if isinstance(batch, dict) else batch.state["observation.state"]
        self.positions += position.tolist()
        return self.layer(state).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


@pytest.fixture
def dataset(make_set, tmp_path: Path) -> knonik.Dataset:
    return knonik.open(make_set(LENGTHS), cache_dir=tmp_path / "cache")


def trainer(folder: Path, steps: int, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
        **options,
    )


def module(dataset: knonik.Dataset, **options: Any) -> DataModule:
    return DataModule(dataset, **{"batch_size": 4, "seed": 7, "cameras": ["observation.images.cam0"], **options})


def checkpointed(folder: Path, dataset: knonik.Dataset, every: int, steps: int, **options: Any) -> list[Path]:
    saver = ModelCheckpoint(folder / "saved", every_n_train_steps=every, save_top_k=-1, filename="{step}")
    trainer(folder, steps, callbacks=[saver], **options).fit(Recorder(), module(dataset))
    return sorted((folder / "saved").iterdir())


def test_resume_goes_on_with_the_next_sample(dataset: knonik.Dataset, tmp_path: Path) -> None:
    (saved,) = checkpointed(tmp_path, dataset, every=3, steps=5)
    state = torch.load(saved, weights_only=True)["DataModule"]
    assert state == {**state, "fingerprint": dataset.fingerprint, "seed": 7, "epoch": 0, "position": 12}
    model = Recorder()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(tmp_path, 12, enable_checkpointing=False).fit(
            model, datamodule=module(dataset), ckpt_path=saved, weights_only=True
        )
    assert model.positions == list(range(12, 48))  # over the end of the first epoch, at 27
    assert not [str(w.message) for w in caught if "resum" in str(w.message).lower() and "loader" in str(w.message)]


def test_resume_twice_with_accumulation(dataset: knonik.Dataset, tmp_path: Path) -> None:
    saved = checkpointed(tmp_path, dataset, every=2, steps=6, accumulate_grad_batches=2)
    assert len(saved) == 3
    for path, step in zip(saved, (2, 4, 6), strict=True):
        model = Recorder()
        trainer(tmp_path, step + 1, enable_checkpointing=False, accumulate_grad_batches=2).fit(
            model, datamodule=module(dataset), ckpt_path=path, weights_only=True
        )
        assert model.positions == list(range(8 * step, 8 * step + 8))


def test_lightnings_own_epochs_lose_no_sample(dataset: knonik.Dataset, tmp_path: Path) -> None:
    model = Recorder()
    trainer(tmp_path, 7, enable_checkpointing=False, limit_train_batches=2).fit(model, datamodule=module(dataset))
    assert model.positions == list(range(28))


def test_reloading_the_loader_goes_on(dataset: knonik.Dataset, tmp_path: Path) -> None:
    model = Recorder()
    trainer(tmp_path, 6, enable_checkpointing=False, limit_train_batches=2, reload_dataloaders_every_n_epochs=1).fit(
        model, datamodule=module(dataset)
    )
    assert model.positions == list(range(24))


def test_a_second_fit_starts_anew(dataset: knonik.Dataset, tmp_path: Path) -> None:
    data = module(dataset)
    for _ in range(2):
        model = Recorder()
        trainer(tmp_path, 2, enable_checkpointing=False).fit(model, datamodule=data)
        assert model.positions == list(range(8))
        assert data.loader is None
        assert data.state_dict()["position"] == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [({"seed": 8}, "saved seed is 7"), ({"edge": "inside", "windows": {"action": range(3)}}, "edge")],
)
def test_a_changed_order_is_refused(
    dataset: knonik.Dataset, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    (saved,) = checkpointed(tmp_path, dataset, every=3, steps=3)
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, 6, enable_checkpointing=False).fit(
            Recorder(), datamodule=module(dataset, **change), ckpt_path=saved, weights_only=True
        )


def test_planes_reach_the_step_as_rgb(dataset: knonik.Dataset, tmp_path: Path) -> None:
    seen: dict[str, list[torch.Tensor]] = {}

    for transport in ("rgb24", "yuv420p"):
        images = seen[transport] = []

        def on_device(batch: knonik.Batch, kept: list[torch.Tensor] = images) -> dict[str, torch.Tensor]:
            kept.append(batch.images["observation.images.cam0"].clone())
            return {"state": batch.state["observation.state"][:, 0], "position": batch.position}

        data = module(dataset, transport=transport, device_transform=on_device, ring_batches=2)
        trainer(tmp_path, 2, enable_checkpointing=False).fit(Recorder(), datamodule=data)
        assert data.gauges()["ring_batches"] == 2  # those of the last loader
    assert len(seen["rgb24"]) == len(seen["yuv420p"]) == 2
    assert all(torch.equal(left, right) for left, right in zip(seen["rgb24"], seen["yuv420p"], strict=True))


def test_transforms_and_their_places(dataset: knonik.Dataset, tmp_path: Path) -> None:
    def inputs(batch: knonik.Batch) -> dict[str, torch.Tensor]:
        return {"state": batch.state["observation.state"][:, 0]}

    def on_device(batch: knonik.Batch) -> dict[str, torch.Tensor]:
        assert set(batch.images) == {"observation.images.cam0"}
        return {"state": batch.inputs["state"] * 2, "position": batch.position}

    model = Recorder()
    data = module(dataset, transform=inputs, device_transform=on_device)
    trainer(tmp_path, 3, enable_checkpointing=False).fit(model, datamodule=data)
    assert model.positions == list(range(12))
