"""Our own loader for the benchmarks, with the options named in the specification."""

from pathlib import Path
from typing import Any


def imports(spec: dict[str, Any]) -> None:
    import numpy  # noqa: F401
    import torch

    import knonik.dataset
    import knonik.loader
    import knonik.video.decode

    if spec["data"].startswith("s3:"):
        import boto3  # noqa: F401
        import obstore  # noqa: F401

        import knonik.stores.s3  # noqa: F401
    torch.set_num_threads(1)


class Ours:
    """`knonik.Loader` as a source of batches, one held at a time as by a training step."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import knonik

        options: dict[str, Any] = dict(spec.get("options", {}))
        if edge := options.pop("prefix_edge", None):
            from models.gr00t_n17.images import FirstResize

            options["prefix"] = FirstResize(int(edge))
        self._dataset = knonik.open(spec["data"], cache_dir=spec["cache"])
        self._loader = knonik.Loader(
            self._dataset,
            batch_size=int(spec["batch"]),
            seed=0,
            windows={"action": range(int(spec["horizon"]))},
            edge="inside",
            decode_threads=spec.get("threads"),
            **options,
        )
        self._batch: Any = None

    def take(self) -> int:
        self._batch = None
        self._batch = next(self._loader)
        return len(self._batch)

    def settled(self) -> bool:
        gauges = self.gauges()
        return gauges.get("fill_done_bytes", 0.0) >= gauges.get("fill_total_bytes", 0.0)

    def gauges(self) -> dict[str, float]:
        read = getattr(self._loader, "gauges", None)
        return dict(read()) if read else {}

    def close(self) -> None:
        self._loader.close()
        self._dataset.close()


def open_source(spec: dict[str, Any]) -> Ours:
    return Ours(spec)


def build_index(uri: str, cache: Path) -> None:
    """Make index and columns, for runs that are to find them."""
    import knonik

    with knonik.open(uri, cache_dir=cache) as dataset:
        dataset.columns(["observation.state", "action", "task_index"])
