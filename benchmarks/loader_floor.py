"""The floor of the loader benchmarks: the packets of a run's own batches, decoded to rgb24 with nothing around it.

One thread, packets in memory, no batch to fill: what is left is the codec and the colour conversion, which no loader
that decodes these packets on this CPU can avoid. The decoding loop is PyAV's own, none of the data layer's.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from loader_knonik import planner_of

_HELD_SAMPLES = 512  # samples whose packets are kept and decoded again and again


def imports(spec: dict[str, Any]) -> None:
    import av  # noqa: F401
    import numpy  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    import knonik.order.plan  # noqa: F401


@dataclass(frozen=True, kw_only=True)
class _Job:
    codec: Any
    packets: list[bytes]
    pts: list[int]
    wanted: set[int]


class Floor:
    """Decodes the frames of the batches a loader would make, one batch a call."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from av.video.reformatter import VideoReformatter

        self._batch = int(spec["batch"])
        self._decoders: dict[tuple[str, bytes], Any] = {}
        self._reformatter = VideoReformatter()
        self._batches = itertools.cycle(_held(spec))

    def take(self) -> int:
        for job in next(self._batches):
            self._decode(job)
        return self._batch

    def _decode(self, job: _Job) -> None:
        import av

        decoder = self._decoder(job.codec)
        decoder.flush_buffers()
        wanted = set(job.wanted)
        for order, (body, pts) in enumerate(zip(job.packets, job.pts, strict=True)):
            packet = av.Packet(body)
            packet.pts, packet.dts = pts, order
            self._convert(decoder.decode(packet), wanted)
        if wanted:
            self._convert(decoder.decode(None), wanted)
        assert not wanted

    def _convert(self, frames: list[Any], wanted: set[int]) -> None:
        for frame in frames:
            if frame.pts in wanted:
                wanted.discard(frame.pts)
                self._reformatter.reformat(frame, format="rgb24", threads=1)

    def _decoder(self, codec: Any) -> Any:
        import av

        key = (codec.name, codec.extradata)
        if key not in self._decoders:
            decoder: Any = av.CodecContext.create({"av1": "libdav1d"}.get(codec.name, codec.name), "r")
            decoder.extradata, decoder.thread_count, decoder.options = codec.extradata, 1, {"strict": "1"}
            self._decoders[key] = decoder
        return self._decoders[key]

    def settled(self) -> bool:
        return True

    def gauges(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


def open_source(spec: dict[str, Any]) -> Floor:
    return Floor(spec)


def _held(spec: dict[str, Any]) -> list[list[_Job]]:
    import knonik

    with knonik.open(spec["data"], cache_dir=spec["cache"]) as dataset:
        return list(itertools.islice(_batches(dataset, spec), -(-_HELD_SAMPLES // int(spec["batch"]))))


def _batches(dataset: Any, spec: dict[str, Any]) -> Iterator[list[_Job]]:
    planner = planner_of(dataset, spec)
    for begin in itertools.count(0, planner.global_batch):
        jobs = []
        for job in planner.plan(begin).jobs:
            frames = dataset.index.object(job.key)
            packets, pts = frames.fetch(dataset.store, max(job.numbers))
            wanted = set(frames.pts[job.numbers].tolist())
            jobs.append(_Job(codec=frames.codec, packets=[bytes(p) for p in packets], pts=pts, wanted=wanted))
        yield jobs
