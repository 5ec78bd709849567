"""Lightning's side of the data layer: builds the loader of this rank and carries its position in checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch

from knonik.batches.batch import Batch
from knonik.batches.costs import Tokens
from knonik.batches.finish import Transform
from knonik.batches.hold import HOLD_BYTES
from knonik.batches.parts import FramePrefix
from knonik.dataset import Dataset
from knonik.loader import Loader, default_threads
from knonik.order.blocks import BLOCK_WINDOW, LANES
from knonik.order.mixture import Mixture
from knonik.order.plan import Offsets

DeviceTransform = Callable[[Batch], dict[str, Any]]


class DataModule(pl.LightningDataModule):
    """Feeds a Trainer from a dataset or a mixture; a resumed run goes on with the very next sample.

    Lightning fetches a batch ahead, so a batch counts as trained only when it reaches the device for its step
    (`on_after_batch_transfer`). That position is saved by rank 0, means the same to every rank and holds for any number
    of ranks; with the same global batch (batch_size * ranks) the batches are the same too.

    Args:
        dataset: an opened dataset or a mixture.
        device_transform: makes the training step's input from a batch on its device, whose images are rgb whatever the
            transport; None passes the batch itself.
        others: as for `Loader`; batch_size is that of one rank.

    Raises:
        ValueError: while fitting, a checkpoint of another dataset, seed or order.
    """

    def __init__(
        self,
        dataset: Dataset | Mixture,
        *,
        batch_size: int,
        seed: int = 0,
        windows: Mapping[str, Offsets] | None = None,
        edge: str = "repeat",
        cameras: Sequence[str] | None = None,
        state: Sequence[str] = ("observation.state",),
        action: Sequence[str] = ("action",),
        decode_threads: int | None = None,
        ring_batches: int | None = None,
        ring_bytes: int | None = None,
        pack_tokens: int | None = None,
        pack_cost: Tokens | None = None,
        order: str = "exact",
        block_window: int = BLOCK_WINDOW,
        lanes: int = LANES,
        transport: str = "rgb24",
        ram_bytes: int = 1 << 30,
        disk_bytes: int | None = None,
        connections: int = 32,
        prefix: FramePrefix | None = None,
        decoded_bytes: int = 0,
        hold_bytes: int = HOLD_BYTES,
        on_bad_sample: str = "raise",
        max_bad_share: float = 0.01,
        transform: Transform | None = None,
        device_transform: DeviceTransform | None = None,
    ) -> None:
        super().__init__()
        self.dataset = dataset
        self.loader: Loader | None = None
        self._options: dict[str, Any] = {
            "batch_size": batch_size,
            "seed": seed,
            "windows": windows,
            "edge": edge,
            "cameras": cameras,
            "state": state,
            "action": action,
            "ring_batches": ring_batches,
            "ring_bytes": ring_bytes,
            "pack_tokens": pack_tokens,
            "pack_cost": pack_cost,
            "order": order,
            "block_window": block_window,
            "lanes": lanes,
            "transport": transport,
            "ram_bytes": ram_bytes,
            "disk_bytes": disk_bytes,
            "connections": connections,
            "prefix": prefix,
            "decoded_bytes": decoded_bytes,
            "hold_bytes": hold_bytes,
            "on_bad_sample": on_bad_sample,
            "max_bad_share": max_bad_share,
            "transform": transform,
        }
        self._decode_threads = decode_threads
        self._device_transform = device_transform
        self._saved: dict[str, Any] | None = None
        self._stages: dict[str, dict[str, float]] = {}
        self._gauges: dict[str, float] = {}

    def setup(self, stage: str) -> None:
        """A new fit starts at the first sample, unless a checkpoint is loaded after this."""
        if stage == "fit":
            self._saved = None

    def train_dataloader(self) -> Loader:
        """The loader of this rank, at the saved position; when called again within a fit, at the one reached."""
        assert self.trainer is not None
        state = self.state_dict()
        self._close()
        # Ranks that share a model's shards read the same samples; only the strategy knows which do.
        share = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        threads = self._decode_threads or default_threads(self.trainer.num_devices)
        loader = Loader(
            self.dataset,
            **self._options,
            rank=share["rank"],
            world_size=share["num_replicas"],
            decode_threads=threads,
            pin_memory=self.trainer.strategy.root_device.type == "cuda",
        )
        loader.manual_acknowledge = True
        if state:
            loader.load_state_dict(state)
        self.loader = loader
        return loader

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Asynchronous for a GPU: the loader's batches lie in page-locked memory then."""
        if isinstance(batch, Batch):
            return batch.to(device, non_blocking=device.type == "cuda")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Count the batch as trained and turn it into the training step's input.

        Inputs that were made ahead by `device_inputs` come with the batch they were made of, as `drawn`.
        """
        drawn = getattr(batch, "drawn", batch)
        if isinstance(drawn, Batch) and self.loader is not None and self.trainer is not None and self.trainer.training:
            self.loader.acknowledge(drawn)
        return self._inputs(batch) if isinstance(batch, Batch) else batch

    def device_inputs(self, batch: Any, device: torch.device) -> Any:
        """The training step's input of a batch whose step is still to come: nothing is counted as trained."""
        batch = self.transfer_batch_to_device(batch, device, 0)
        return self._inputs(batch) if isinstance(batch, Batch) else batch

    def _inputs(self, batch: Batch) -> Any:
        batch = batch.rgb()
        return batch if self._device_transform is None else self._device_transform(batch)

    def state_dict(self) -> dict[str, Any]:
        """The loader's state, or the one loaded if there is no loader yet; empty before any."""
        if self.loader is not None:
            return dict(self.loader.state_dict())
        return dict(self._saved or {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state for the loader that `train_dataloader` builds, which checks it."""
        self._saved = dict(state_dict)

    def stages(self) -> dict[str, dict[str, float]]:
        """Stage statistics of the loader in use, or of the last one; see `Loader.stages`."""
        return self.loader.stages() if self.loader is not None else self._stages

    def gauges(self) -> dict[str, float]:
        """Gauges of the loader in use, or of the last one; see `Loader.gauges`."""
        return self.loader.gauges() if self.loader is not None else self._gauges

    def teardown(self, stage: str) -> None:
        """Stop the loader; the last position stays readable in `state_dict`."""
        self._saved = self.state_dict()
        self._close()

    def _close(self) -> None:
        if self.loader is not None:
            self._stages, self._gauges = self.loader.stages(), self.loader.gauges()
            self.loader.close()
            self.loader = None
