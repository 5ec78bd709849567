"""Pictures kept between batches, so that a GOP whose samples are spread over several batches is decoded once.

With the order `blocks` the planner spreads the samples of a GOP over a few batches. The first of them decodes all
frames of it that the batches planned so far ask for; the others take theirs from here. A picture goes when the last
batch that asked for it has it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Key = tuple[int, str, str, int]  # part, camera, object, group
Decode = Callable[[Sequence[int], Sequence[NDArray[Any]]], None]
HOLD_BYTES = 8 << 30  # bound of a loader that is not told another


class _Group:
    """Frames of one GOP: how often each is still wanted, and the pictures kept."""

    def __init__(self) -> None:
        self.decoding = threading.Lock()  # held by the thread that decodes; others need the same packets
        self.wanted: Counter[int] = Counter()
        self.pictures: dict[int, NDArray[Any]] = {}
        self.coming: set[int] = set()  # frames that the decoding under way will add to the pictures
        self.decoded = False  # or being decoded: what is wanted from now on comes too late for it


class Hold:
    """Decoded pictures wanted by planned batches; safe for one planning and any number of decoding threads.

    Memory is bounded by what the planned batches ask for: nothing else is kept. `Loader` checks that bound before it
    starts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[Key, _Group] = {}
        self._bytes = 0
        self._peak = 0
        self._decodes = 0
        self._taken = 0

    def expect(self, key: Key, numbers: Sequence[int]) -> bool:
        """A batch will ask for these frames, in the order of calls. True: it will have to decode, so needs packets."""
        with self._lock:
            group = self._groups.get(key)
            first = group is None
            if group is None:
                group = self._groups[key] = _Group()
            group.wanted.update(numbers)
            there = group.pictures.keys() | group.coming
            return first or (group.decoded and any(number not in there for number in numbers))

    def take(self, key: Key, numbers: Sequence[int], out: Sequence[NDArray[Any]], decode: Decode) -> None:
        """Write the pictures of frames announced by `expect` into `out`, decoding them and those wanted later."""
        with self._lock:
            group = self._groups[key]
        try:
            with group.decoding:
                self._fill(group, numbers, out, decode)
        finally:
            self._release(key, group, numbers)

    def _fill(self, group: _Group, numbers: Sequence[int], out: Sequence[NDArray[Any]], decode: Decode) -> None:
        now: dict[int, NDArray[Any]] = {}
        held: list[tuple[NDArray[Any], NDArray[Any]]] = []
        with self._lock:
            mine = Counter(numbers)
            for number, target in zip(numbers, out, strict=True):
                if number in group.pictures:
                    held.append((target, group.pictures[number]))
                elif number in now:
                    held.append((target, now[number]))
                else:
                    now[number] = target
            # What comes out of the same packets and is wanted by later batches is decoded along.
            later = [n for n, count in group.wanted.items() if count > mine[n] and n not in group.pictures]
            self._taken += len(numbers)
            if now:
                group.decoded, group.coming = True, set(later)
        if now:
            kept = {number: np.empty_like(out[0]) for number in later}
            extra = [number for number in later if number not in now]
            try:
                decode([*now, *extra], [*now.values(), *(kept[number] for number in extra)])
            except BaseException:
                with self._lock:
                    group.coming = set()
                raise
            for number, picture in kept.items():
                if number in now:
                    picture[...] = now[number]
            with self._lock:
                group.pictures |= kept
                group.coming = set()
                self._decodes += 1
                self._bytes += sum(picture.nbytes for picture in kept.values())
                self._peak = max(self._peak, self._bytes)
        for target, picture in held:
            target[...] = picture

    def _release(self, key: Key, group: _Group, numbers: Sequence[int]) -> None:
        with self._lock:
            group.wanted.subtract(numbers)
            for number in set(numbers):
                if group.wanted[number] <= 0:
                    del group.wanted[number]
                    if (picture := group.pictures.pop(number, None)) is not None:
                        self._bytes -= picture.nbytes
            if not group.wanted:
                self._groups.pop(key, None)

    def gauges(self) -> dict[str, float]:
        """`hold_bytes` now and `hold_peak_bytes`; `hold_decodes` of GOPs and `hold_frames` handed out, counts."""
        with self._lock:
            return {
                "hold_bytes": self._bytes,
                "hold_peak_bytes": self._peak,
                "hold_decodes": self._decodes,
                "hold_frames": self._taken,
            }
