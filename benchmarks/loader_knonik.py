"""Our own loader for the benchmarks, with the options named in the specification."""

import itertools
import time
from typing import Any

_KNOWN_AHEAD = 256  # batches a loader looks ahead at most


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
            from models.gr00t_n17.inputs.images import FirstResize

            options["prefix"] = FirstResize(int(edge))
        self._spec, self._taken, self._ram_bytes = spec, 0, int(options.get("ram_bytes", 1 << 30))
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
        self._taken += 1
        return len(self._batch)

    def settled(self) -> bool:
        gauges = self.gauges()
        return gauges.get("fill_done_bytes", 0.0) >= gauges.get("fill_total_bytes", 0.0)

    def gauges(self) -> dict[str, float]:
        read = getattr(self._loader, "gauges", None)
        return dict(read()) if read else {}

    def foretold(self, batches: int) -> dict[str, float]:
        """Requests and their bytes for all batches since the start, and what `predict` says of the same plans."""
        from knonik.fetch.source import predict

        for _ in range(batches):
            self.take()
        # Nobody takes, so the ring fills, and then it is known which batches are done.
        while (gauges := self.gauges())["ring_ready"] < gauges["ring_batches"]:
            time.sleep(0.05)
        done = self._taken + int(gauges["ring_batches"])
        planner = planner_of(self._dataset, self._spec)
        assert planner.digest == self._loader.state_dict()["order"]
        plans = map(planner.plan, itertools.count(0, planner.global_batch))
        known = itertools.islice(plans, done + _KNOWN_AHEAD)
        plan = predict(self._dataset, known, ram_bytes=self._ram_bytes, count=done)
        samples = done * planner.global_batch
        return {
            "batches": done,
            "gets": gauges["done_gets"],
            "get_bytes": gauges["done_get_bytes"],
            "predicted_gets": plan.gets,
            "predicted_get_bytes": plan.get_bytes,
            "gets_per_sample": gauges["done_gets"] / samples,
            "get_bytes_per_sample": gauges["done_get_bytes"] / samples,
            **{name: gauges.get(name, 0.0) for name in ("retries", "hedges", "forced_decisions")},
        }

    def close(self) -> None:
        self._loader.close()
        self._dataset.close()


def open_source(spec: dict[str, Any]) -> Ours:
    return Ours(spec)


def planner_of(dataset: Any, spec: dict[str, Any]) -> Any:
    """The batches of the loader above in its default order."""
    from knonik.order.plan import Planner

    return Planner(
        dataset,
        batch_size=int(spec["batch"]),
        seed=0,
        windows={**{camera: [0] for camera in dataset.cameras}, "action": range(int(spec["horizon"]))},
        edge="inside",
        cameras=dataset.cameras,
        rank=0,
        world_size=1,
        shuffle=True,
    )
