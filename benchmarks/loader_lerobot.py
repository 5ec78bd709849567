"""LeRobotDataset and StreamingLeRobotDataset under torch's DataLoader, uint8 frames, one worker; needs `lerobot`."""

from collections.abc import Iterator
from typing import Any


def imports(spec: dict[str, Any]) -> None:
    import torch
    from lerobot.datasets import lerobot_dataset, streaming_dataset  # noqa: F401

    torch.set_num_threads(1)


class LeRobot:
    """The stock loaders with their defaults, but for uint8 frames (float32 ones cost more) and the action window."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from torch.utils.data import DataLoader

        self._batch = int(spec["batch"])
        deltas = {"action": [step / float(spec["fps"]) for step in range(int(spec["horizon"]))]}
        options: dict[str, Any] = {"root": spec["data"], "delta_timestamps": deltas, "return_uint8": True}
        common: dict[str, Any] = {"batch_size": self._batch, "num_workers": 1, "drop_last": True}
        if spec.get("options", {}).get("streaming"):
            from lerobot.datasets.streaming_dataset import StreamingLeRobotDataset

            buffer = int(spec["options"].get("buffer_size", 1000))
            self._loader: Any = DataLoader(
                StreamingLeRobotDataset("bench/set", buffer_size=buffer, **options), **common
            )
        else:
            from lerobot.datasets.lerobot_dataset import LeRobotDataset

            self._loader = DataLoader(
                LeRobotDataset("bench/set", **options), shuffle=True, persistent_workers=True, **common
            )
        self._batches = self._forever()

    def _forever(self) -> Iterator[Any]:
        while True:
            yield from self._loader

    def take(self) -> int:
        next(self._batches)
        return self._batch

    def settled(self) -> bool:
        return True

    def gauges(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


def open_source(spec: dict[str, Any]) -> LeRobot:
    return LeRobot(spec)
