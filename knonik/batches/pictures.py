"""From the jobs of a plan to pictures in a batch's memory: read, decode, prepare, and keep what is wanted again."""

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from knonik.batches.decoded import DecodedFrames
from knonik.batches.hold import Hold
from knonik.batches.parts import FramePrefix, OpenPart
from knonik.dataset import Dataset
from knonik.index.stock import TOLERANCE_S
from knonik.order.plan import BatchPlan, GopJob
from knonik.video.frames import Start

logger = logging.getLogger(__name__)

_SHARED = frozenset({"disk_bytes", "disk_limit_bytes"})  # gauges of what all parts share


class Pictures:
    """Writes the pictures of jobs into a batch's memory.

    Args:
        parts: the datasets, in the order plans number them.
        prefix: applied to rgb pictures of the cameras in `prefixed`.
        hold: keeps pictures for later batches; None where every batch decodes its own.
    """

    def __init__(
        self,
        parts: Sequence[OpenPart],
        *,
        prefix: FramePrefix | None = None,
        prefixed: Sequence[str] = (),
        hold: Hold | None = None,
    ) -> None:
        self._parts = parts
        self._prefix, self._prefixed = prefix, frozenset(prefixed if prefix is not None else ())
        self._hold = hold
        self._told = -1, 0  # batch announced last, and to how many parts

    def expect(self, plan: BatchPlan) -> list[list[tuple[str, int]]]:
        """Units of packets the batch will need, a list for each part. Called once for each batch, in order."""
        units: list[dict[tuple[str, int], None]] = [{} for _ in self._parts]
        for job in plan.jobs:
            decoded = self._parts[job.dataset].decoded.get(job.camera)
            if decoded is not None:
                needed = not decoded.has(self._rows(plan, job))
            elif self._hold is not None:
                needed = self._hold.expect(_hold_key(job), job.numbers)
            else:
                needed = True
            if needed and self._parts[job.dataset].kind(job.source_camera) != "image":  # those are no packets
                units[job.dataset][job.key, job.group] = None
        return [list(each) for each in units]

    def prepare(self, plan: BatchPlan, jobs: Sequence[GopJob], flat: Mapping[str, NDArray[Any]]) -> list[Start]:
        """`write` for each of a few jobs, in parts: to be begun one after another and then ended, by this thread.

        What can be done without decoding is done here for all of them, and their packets are read where that is
        cheaper: between two decodings every step would find its code and data gone from the caches.
        """
        if self._hold is None:  # else it turns out when a job's turn comes which packets are needed, and how far
            wanted: dict[int, list[tuple[str, int]]] = {}
            for job in jobs:
                part = self._parts[job.dataset]
                if job.camera not in part.decoded and part.kind(job.source_camera) != "image":
                    wanted.setdefault(job.dataset, []).append((job.key, max(job.numbers)))
            for number, frames in wanted.items():
                self._parts[number].source.ahead(frames)
        return [self._prepared(plan, job, flat[job.camera]) for job in jobs]

    def _prepared(self, plan: BatchPlan, job: GopJob, flat: NDArray[Any]) -> Start:
        part = self._parts[job.dataset]
        kept = self._hold is not None or job.camera in part.decoded or job.camera in self._prefixed
        try:
            if not kept and not part.dataset.index.has_far_rows(job.key):
                return part.readers[job.camera].prepare(job.key, job.numbers, [flat[place] for place in job.places])
        except Exception as error:  # met once more by `write`, where it is known which job it belongs to
            logger.debug("%s is not prepared: %s", job.key, error)
        return partial(self.write, plan, job, flat)

    def write(self, plan: BatchPlan, job: GopJob, flat: NDArray[Any]) -> None:
        """Put the pictures of a job into `flat`, the camera's [B * T, ...] pictures of the batch."""
        part = self._parts[job.dataset]
        if part.dataset.index.has_far_rows(job.key):
            _check_times(plan, job, part.dataset)
        out = [flat[place] for place in job.places]
        decoded = part.decoded.get(job.camera)
        if decoded is not None:
            self._write_kept(plan, job, out, decoded)
        elif self._hold is not None:
            self._hold.take(_hold_key(job), job.numbers, out, lambda numbers, into: self._decode(job, numbers, into))
        else:
            self._decode(job, job.numbers, out)

    def write_alone(self, plan: BatchPlan, job: GopJob, flat: NDArray[Any]) -> None:
        """As `write`, without regard to other batches: to find out which picture of a failed job is the bad one."""
        part = self._parts[job.dataset]
        if part.dataset.index.has_far_rows(job.key):
            _check_times(plan, job, part.dataset)
        self._decode(job, job.numbers, [flat[place] for place in job.places])

    def waited_s(self) -> float:
        """Seconds the calling thread has waited for packets since it last asked."""
        return sum(part.source.waited_s() for part in self._parts)

    def announce(self, number: int, units: Sequence[Sequence[tuple[str, int]]]) -> bool:
        """Tell the parts' sources what batch `number` needs; False: one has no room, ask again with the same batch."""
        if self._told[0] != number:
            self._told = number, 0
        while self._told[1] < len(self._parts):
            part = self._told[1]
            if not self._parts[part].source.announce(number, units[part]):
                return False
            self._told = number, part + 1
        return True

    def uri(self, part: int) -> str:
        """Where a part's dataset lies."""
        return self._parts[part].dataset.uri

    def done(self, number: int) -> None:
        """All jobs of a batch are through."""
        for part in self._parts:
            part.source.done(number)

    def gauges(self) -> dict[str, float]:
        """Sums over the parts of what their sources and caches say, and the hold's; the disk cache is one for all."""
        total: dict[str, float] = {}
        decoded = {id(kept): kept for part in self._parts for kept in part.decoded.values()}
        for values in [part.source.gauges() for part in self._parts] + [kept.gauges() for kept in decoded.values()]:
            for name, value in values.items():
                before = total.get(name, 0.0)
                total[name] = max(before, value) if name in _SHARED else before + value
        return total | (self._hold.gauges() if self._hold is not None else {})

    def stop(self) -> None:
        """Stop the sources: waits for packets end with an error. Decoders and files stay for threads still at work."""
        for part in self._parts:
            part.source.close()

    def close(self) -> None:
        """Let go of everything, when no thread writes pictures any more."""
        for part in self._parts:
            part.close()

    def _rows(self, plan: BatchPlan, job: GopJob) -> NDArray[np.int64]:
        seen = plan.seen[job.camera]
        places = np.asarray(job.places)
        return self._parts[job.dataset].dataset.rows(plan.episodes[places // seen.shape[1]], seen.reshape(-1)[places])

    def _write_kept(self, plan: BatchPlan, job: GopJob, out: list[NDArray[Any]], decoded: DecodedFrames) -> None:
        rows = self._rows(plan, job).tolist()
        absent = [i for i, row in enumerate(rows) if not decoded.read(row, out[i])]
        if not absent:
            return
        missing = {job.numbers[i]: rows[i] for i in absent}
        # Frames before the last wanted one come out of the same packets: they are kept too, for their own turn. Rows
        # and frames run side by side within an episode, so the row of a neighbour is found without the index.
        extra = self._neighbours(plan, job, max(missing), missing, decoded)
        kept = {number: out[i] for i, number in ((i, job.numbers[i]) for i in absent)}
        spare = {number: np.empty_like(out[0]) for number in extra}
        into = kept | spare
        self._decode(job, list(into), list(into.values()))
        for number, row in (missing | extra).items():
            decoded.write(row, into[number])
        for i in absent:
            if out[i] is not kept[job.numbers[i]]:
                out[i][...] = kept[job.numbers[i]]

    def _neighbours(
        self, plan: BatchPlan, job: GopJob, last: int, missing: Mapping[int, int], decoded: DecodedFrames
    ) -> dict[int, int]:
        """Rows, by frame number, of the same episode and GOP up to frame `last` that are not kept yet."""
        dataset = self._parts[job.dataset].dataset
        if self._parts[job.dataset].kind(job.source_camera) == "image":
            return {}
        place = job.places[job.numbers.index(last)]
        episode, frame = sample(plan, job.camera, place)
        first = max(last - frame, int(dataset.index.object(job.key).first_frames[job.group]))
        frames = np.arange(frame - (last - first), frame)
        if not len(frames):
            return {}
        episodes = np.full(len(frames), episode)
        keys, numbers = dataset.index.locate_many(episodes, job.source_camera, frames)
        rows = dataset.rows(episodes, frames)
        return {
            number: row
            for key, number, row in zip(keys, numbers.tolist(), rows.tolist(), strict=True)
            if key == job.key and first <= number < last and number not in missing and not decoded.has([row])
        }

    def _decode(self, job: GopJob, numbers: Sequence[int], out: Sequence[NDArray[Any]]) -> None:
        reader = self._parts[job.dataset].readers[job.camera]
        if job.camera not in self._prefixed:
            reader.read(job.key, numbers, out)
            return
        assert self._prefix is not None
        whole = np.empty((len(numbers), *reader.spec.shape), reader.spec.dtype)
        reader.read(job.key, numbers, list(whole))
        for picture, target in zip(self._prefix(torch.from_numpy(whole)).numpy(), out, strict=True):
            target[...] = picture


def sample(plan: BatchPlan, camera: str, place: int) -> tuple[int, int]:
    """(episode, frame) of a place among the camera's [B * T] pictures of a batch."""
    seen = plan.seen[camera]
    return int(plan.episodes[place // seen.shape[1]]), int(seen.reshape(-1)[place])


def _hold_key(job: GopJob) -> tuple[int, str, str, int]:
    return job.dataset, job.camera, job.key, job.group


def _check_times(plan: BatchPlan, job: GopJob, dataset: Dataset) -> None:
    for place in job.places:
        episode, frame = sample(plan, job.camera, place)
        if off_s := dataset.index.off_s(job.source_camera, episode, frame):
            if math.isinf(off_s):
                raise ValueError("the row has no timestamp: its data file is damaged, or holds none here")
            raise ValueError(
                f"the nearest video frame is {off_s:.6f} s off the row's timestamp (tolerance {TOLERANCE_S:g} s)"
            )
