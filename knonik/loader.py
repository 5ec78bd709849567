"""The loader: an endless, resumable iterator of batches, decoded ahead by threads of this process.

Why threads and no side process: `benchmarks/loader_disturbance.py` (two 64x64 H.264 cameras, batch 32, a CPU step of
86 ms, one decode thread, two cores at load 1 to 2). Step and wait for the batch together took 1.29 times the step
without a loader with threads and 1.44 times with a spawned process; the bare step alone differed by less than its
noise. At load 3 to 5, three runs gave 1.33, 1.57, 1.74 for threads and 1.46, 1.84, 1.86 for the process.
"""

import hashlib
import os
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from knonik.batches.bad_samples import BadSample, BadSamples
from knonik.batches.batch import Batch
from knonik.batches.buffers import BufferPool
from knonik.batches.costs import SampleCosts, Tokens
from knonik.batches.finish import Finish, Transform
from knonik.batches.gather import Gather
from knonik.batches.hold import HOLD_BYTES, Hold
from knonik.batches.parts import Cameras, FramePrefix, OpenPart, check_decoded, open_parts, picture_specs
from knonik.batches.pictures import Pictures
from knonik.batches.pipeline import LoaderError, Pipeline
from knonik.batches.ring import ring_size
from knonik.batches.stages import Stage
from knonik.dataset import Dataset
from knonik.order.blocks import BLOCK_WINDOW, LANES
from knonik.order.mixture import Mixture, Part
from knonik.order.packs import PackPlanner, Packs
from knonik.order.plan import Offsets, Planner

__all__ = ["Loader", "LoaderError"]

_MAX_DEFAULT_THREADS = 8
_LOOKAHEAD_BATCHES = 256


class Loader:
    """Endless iterator of batches in an order that is a function of (seed, position) alone.

    The global batch is B = batch_size * world_size samples; batch b takes positions bB..(b+1)B-1 of the global order,
    rank r every world_size-th of them. Epochs follow each other without a gap, so a batch may hold the end of one
    and the beginning of the next. A batch handed out is the receiver's: the loader never writes into it again.

    Args:
        source: an opened dataset or a mixture of several.
        batch_size: samples per rank.
        seed: chooses the order.
        windows: feature or camera key to step offsets from the anchor; default [0] each.
        edge: `repeat` repeats an episode's first or last row beyond its ends; `inside` takes only anchors whose future
            windows end inside the episode.
        cameras: camera keys; None = all.
        state, action: column keys; the windows of all action keys must be equal.
        rank, world_size: this process' share.
        transform: makes `Batch.inputs` of each batch; runs in the assembling thread.
        decode_threads: None = one less than the cores this rank may use, at least 1 and at most 8. Of the first batch,
            for which a consumer does nothing but wait, one thread more decodes.
        ring_batches: batches being made or ready at any time; bounds memory. None = what 256 MB of pictures hold, at
            least 3 and at most 16: small batches need more of them to even out an uneven machine.
        ring_bytes: bound of their pictures; two batches must fit. None = half of the machine's memory.
        pack_tokens, pack_cost: batches are packs of as many tokens at most, of `batch_size` samples at most; pack_cost
            says the tokens of each sample of a batch without pictures. See `knonik.order.packs`.
        shuffle: False gives the stored order.
        pin_memory: make each batch in page-locked memory, for asynchronous copies to a GPU.
        order: `exact`: a permutation of all samples. `blocks`: for long GOPs, each decoded once; see
            `knonik.order.blocks`.
        block_window, lanes: with `blocks`, samples over which those of a GOP are spread at least, and the number of
            lanes, which the world size should divide.
        transport: `rgb24`: images are uint8 [B, T, H, W, 3]. `yuv420p`: they are `Planes`, half the bytes, which
            `Batch.rgb` turns into the same rgb on any device.
        ram_bytes: bound of the compressed packets in memory, for datasets that are not local.
        disk_bytes: bound of the compressed packets on local disk, likewise; None = what the dataset needs, at most half
            of the free space; 0 = none.
        connections: range reads under way at a time.
        prefix: deterministic first step of the image path, such as a resize; images in the batch are its results.
        decoded_bytes: bound of the pictures kept on local disk after decoding and prefix, from which later epochs are
            served; all pictures of the rows in use must fit. 0 = none are kept.
        hold_bytes: bound of the pictures held in memory for batches to come, for orders that spread a GOP over several.
        on_bad_sample: `raise`, or `skip`: the nearest good sample of the batch takes the place of one that cannot be
            made, a pack goes without it; `bad_samples` lists them.
        max_bad_share: share of an epoch's samples that may be bad before `skip` raises.

    Attributes:
        manual_acknowledge: False: a batch counts as consumed when it is handed out. True: when `acknowledge` is called
            with it, for a trainer that fetches ahead; `iter` then begins again at the first unacknowledged batch.
    """

    def __init__(
        self,
        source: Dataset | Mixture,
        *,
        batch_size: int,
        seed: int = 0,
        windows: Mapping[str, Offsets] | None = None,
        edge: str = "repeat",
        cameras: Sequence[str] | None = None,
        state: Sequence[str] = ("observation.state",),
        action: Sequence[str] = ("action",),
        rank: int = 0,
        world_size: int = 1,
        transform: Transform | None = None,
        decode_threads: int | None = None,
        ring_batches: int | None = None,
        ring_bytes: int | None = None,
        pack_tokens: int | None = None,
        pack_cost: Tokens | None = None,
        shuffle: bool = True,
        pin_memory: bool = False,
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
    ) -> None:
        mixture = source if isinstance(source, Mixture) else Mixture([Part(dataset=source)])
        cameras = list(mixture.cameras if cameras is None else cameras)
        windows = dict(windows or {})
        used = (*cameras, *state, *action)
        if unknown := sorted(windows.keys() - set(used)):
            raise ValueError(f"windows names {unknown}, which are not loaded; loaded are {sorted(used)}")
        windows = {key: windows.get(key, [0]) for key in used}
        if len({tuple(windows[key]) for key in action}) > 1:
            raise ValueError(
                f"windows of the action keys {list(action)} differ; one action_is_pad serves all, give equal ones"
            )
        for name, value, least in (
            ("decode_threads", decode_threads, 1),
            ("ring_batches", ring_batches, 1),
            ("connections", connections, 1),
            ("ram_bytes", ram_bytes, 0),
            ("disk_bytes", disk_bytes, 0),
            ("decoded_bytes", decoded_bytes, 0),
            ("hold_bytes", hold_bytes, 0),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name}={value} is not allowed; give {least} or more")
        if (pack_tokens is None) != (pack_cost is None):
            raise ValueError("pack_tokens and pack_cost go together: a budget, and what counts against it")
        if pack_tokens is not None and order != "exact":
            raise ValueError(f"pack_tokens does not go with order={order!r}: packs are runs of the exact order")
        planner = Planner(
            source,
            batch_size=batch_size,
            seed=seed,
            windows=windows,
            edge=edge,
            cameras=cameras,
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            order=order,
            block_window=block_window,
            lanes=lanes,
        )
        self._source, self._seed = source, seed
        self._gather = Gather(source, windows=windows, state=state, action=action)
        self._planner: Planner | PackPlanner = planner
        if pack_tokens is not None and pack_cost is not None:
            packs = Packs(SampleCosts(planner, self._gather, pack_cost), budget=pack_tokens, most=batch_size)
            self._planner = PackPlanner(planner, packs, rank=rank, world_size=world_size)
        self._parts: list[tuple[Dataset, Cameras]] = [
            (part.dataset, {name: key for name in cameras if (key := part.camera(name)) is not None})
            for part in mixture.parts
        ]
        self._specs = picture_specs(self._parts, transport=transport, prefix=prefix)
        if decoded_bytes:
            check_decoded(self._parts, self._specs, decoded_bytes)
        self._transport, self._prefix, self._decoded_bytes = transport, prefix, decoded_bytes
        self._transport_options: dict[str, Any] = {
            "ram_bytes": ram_bytes,
            "disk_bytes": disk_bytes,
            "connections": connections,
        }
        self._bad_samples = BadSamples(
            on_bad_sample,
            max_share=max_bad_share,
            num_anchors=self._planner.num_anchors,
            packs=pack_tokens is not None,
        )
        self._transform, self._pin_memory = transform, pin_memory
        # torchrun tells how many ranks share this machine; without it all of them may.
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        self._threads = decode_threads or default_threads(local_ranks)
        sample_bytes = sum(spec.num_bytes * len(windows[name]) for name, spec in self._specs.items())
        self._ring_batches = ring_size(
            batch_size, sample_bytes, ring_batches=ring_batches, ring_bytes=ring_bytes, local_ranks=local_ranks
        )
        batch_bytes = batch_size * sample_bytes
        self._batch_size, self._batch_bytes, self._hold_bytes = batch_size, batch_bytes, hold_bytes
        self._holds = self._planner.reuse_batches > 1 and not decoded_bytes
        # Samples that wait for their turn, and those of the batches decoded just now.
        held = (self._planner.held_samples + 2 * batch_size) * batch_bytes // batch_size
        if self._holds and held > hold_bytes:
            raise ValueError(
                f"hold_bytes={hold_bytes} is too small: with block_window={block_window} the pictures of "
                f"{self._planner.held_samples} samples wait for their turn, up to {held} bytes; give at least that, a "
                "smaller block_window, a prefix that makes pictures smaller, or decoded_bytes"
            )
        self._stages = {name: Stage() for name in ("fetch", "decode", "assemble", "transform")}
        self._order = self._planner.digest
        self._position = 0  # samples consumed over all epochs and ranks
        self._given: deque[Batch] = deque()  # handed out, not yet acknowledged
        self._again: deque[Batch] = deque()  # to be handed out once more after `iter`
        self._pipeline: Pipeline | None = None
        self._finalizer: weakref.finalize[[], Loader] | None = None
        self._closed = False
        self.manual_acknowledge = False

    def __iter__(self) -> "Loader":
        self._again.extendleft(reversed(self._given))
        self._given.clear()
        self._running()
        return self

    def __next__(self) -> Batch:
        batch = self._again.popleft() if self._again else (self._pipeline or self._running()).take()
        if self.manual_acknowledge:
            self._given.append(batch)
        else:
            self._position = batch.end
        return batch

    def acknowledge(self, batch: Batch) -> None:
        """Count a batch handed out, and those before it, as consumed. Copies of the batch on a device do as well."""
        if batch.begin not in [given.begin for given in self._given]:
            raise ValueError(f"the batch at position {batch.begin} is not one this loader is waiting for")
        while self._given[0].begin != batch.begin:
            self._given.popleft()
        self._given.popleft()
        self._position = batch.end

    @property
    def num_anchors(self) -> int:
        """Samples of one epoch over all ranks."""
        return self._planner.num_anchors

    def state_dict(self) -> dict[str, str | int]:
        """Where to go on: plain values, the same on every rank, valid for any world size.

        `position` counts the samples consumed inside `epoch` over all ranks; `order` is a digest of what else the order
        depends on (anchors, edge policy, shuffle, shares of a mixture, blocks). `match` and `text_column` are those the
        dataset was opened with; a digest where the parts of a mixture differ.
        """
        epoch, position = divmod(self._position, self.num_anchors)
        return {
            "fingerprint": self._source.fingerprint,
            "order": self._order,
            "match": _of_all([dataset.match for dataset, _ in self._parts]),
            "text_column": _of_all([dataset.text_column for dataset, _ in self._parts]),
            "seed": self._seed,
            "epoch": epoch,
            "position": position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; batches made ahead are dropped.

        Raises:
            ValueError: the state is of another dataset, seed or order, or the dataset is read by other rules.
        """
        own = self.state_dict()
        hints = {
            "fingerprint": "the dataset has changed since; resume with the same files",
            "seed": "give the same seed",
            "order": "give the same episodes, windows, edge and shuffle",
            "match": "open the dataset with the same match, or rows show other frames",
            "text_column": "open the dataset with the same text_column, or rows have other texts",
        }
        for key, hint in hints.items():
            if state.get(key) != own[key]:
                raise ValueError(f"saved {key} is {state.get(key)!r}, this loader has {own[key]!r}: {hint}")
        self._stop()
        self._position = int(state["epoch"]) * self.num_anchors + int(state["position"])

    @property
    def bad_samples(self) -> list[BadSample]:
        """Samples left out so far under `on_bad_sample="skip"`, each once."""
        return self._bad_samples.listed()

    def stages(self) -> dict[str, dict[str, float]]:
        """Seconds each stage was busy, starved and blocked, and its items (frames fetched and decoded, else batches).

        `fetch` counts the time decoding threads waited for packets, `decode` the rest of their work.
        """
        return {name: stage.snapshot() for name, stage in self._stages.items()}

    def gauges(self) -> dict[str, float]:
        """Every bound and its use, and counters since the start: packets, ring, pictures held and kept, bad samples.

        Names end in `_bytes` or `_s` where the value is no count. Without running threads only some are there.
        """
        running = self._pipeline.gauges() if self._pipeline is not None else {}
        limits = {"hold_limit_bytes": self._hold_bytes} if self._holds else {}
        limits |= {"decoded_limit_bytes": self._decoded_bytes} if self._decoded_bytes else {}
        return {**running, **limits, **self._bad_samples.gauges()}

    def close(self) -> None:
        """Join all threads and let go of the columns; the dataset stays open."""
        self._closed = True  # at once: a transform may close it while another thread asks for a batch
        self._stop()
        self._gather.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _running(self) -> Pipeline:
        if self._closed:
            raise LoaderError("the loader is closed; make a new one")
        if self._pipeline is None:
            parts = open_parts(
                self._parts,
                self._specs,
                transport=self._transport,
                prefix=self._prefix,
                decoded_limit=self._decoded_bytes,
                **self._transport_options,
            )
            finish = Finish(self._gather, self._specs, self._transform)
            local = all(dataset.store.is_local for dataset, _ in self._parts)
            pipeline = Pipeline(
                self._planner,
                self._pictures(parts),
                begin=self._position,
                capacity=self._batch_size,
                specs={camera: spec.frame for camera, spec in self._specs.items()},
                black={camera: spec.black for camera, spec in self._specs.items()},
                buffers=BufferPool(keep=(self._ring_batches + 1) * len(self._specs), pin_memory=self._pin_memory),
                finish=finish.batch,
                transform=finish.pinned if self._pin_memory else finish.inputs,
                batch_bytes=self._batch_bytes,
                bad_samples=self._bad_samples,
                decode_threads=self._threads,
                ring_batches=self._ring_batches,
                lookahead_batches=self._ring_batches if local else _LOOKAHEAD_BATCHES,
                stages=self._stages,
            )
            # The threads hold the pipeline and never the loader, so a forgotten loader is collected and stops them; the
            # same call runs when the interpreter ends.
            self._finalizer = weakref.finalize(self, pipeline.close)
            self._pipeline = pipeline
            pipeline.start()  # last: its first batch may close this loader
            return pipeline
        return self._pipeline

    def _pictures(self, parts: Sequence[OpenPart]) -> Pictures:
        prefixed = [camera for camera, spec in self._specs.items() if spec.prefixed]
        return Pictures(parts, prefix=self._prefix, prefixed=prefixed, hold=Hold() if self._holds else None)

    def _stop(self) -> None:
        self._given.clear()
        self._again.clear()
        if self._finalizer is not None:
            self._finalizer()
        self._pipeline = self._finalizer = None


def _of_all(values: Sequence[str]) -> str:
    return values[0] if len(set(values)) == 1 else hashlib.sha256("\0".join(values).encode()).hexdigest()[:16]


def default_threads(local_ranks: int) -> int:
    """Decoding threads for one of `local_ranks` processes on this machine: its share of the cores less one, 1 to 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MAX_DEFAULT_THREADS, cores // local_ranks - 1))
