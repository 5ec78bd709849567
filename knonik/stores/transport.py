"""When a request to a remote store is sent, sent again, sent twice, or given up: the policy, free of client libraries.

A read goes out when the request rate allows it; a throttled one waits as long as the server says and slows all others
down; a broken body goes on from the byte reached; a slow one gets a second request beside it, and the faster wins.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeVar

from knonik.stores.base import Counters, ObjectChanged, ObjectMissing, StoreError, StoreUnavailable
from knonik.stores.pace import Governor, Patience

T = TypeVar("T")

logger = logging.getLogger(__name__)

_WORTH_TELLING = 4  # failures in a row: single ones are part of the business
_RENEWALS = 2  # new sessions for one read: more would only repeat what the first could not cure
_LOOK_S = 0.25  # how often a wait that may be given up looks at why
_BROKEN_BODIES = 100  # a server that sends a few bytes and breaks off, again and again, ends here


class FaultKind(Enum):
    """What went wrong, as far as it decides what to do next."""

    THROTTLED = "throttled"  # fewer requests, please
    TRANSIENT = "transient"  # the same request may well succeed
    RENEWED = "renewed"  # the session was of no use any more and has been replaced
    CHANGED = "changed"  # not the version that was asked for
    ABSENT = "absent"
    REFUSED = "refused"  # it will not succeed, however often


class Fault(Exception):
    """A request that failed; the text is for people and holds no credentials.

    retry_after_s: what the server asked for, None where it did not or where the client does not show it.
    """

    def __init__(self, kind: FaultKind, text: str, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.kind = kind
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How patient and how pushy reads are.

    attempts: requests in a row that bring no new byte before a read is given up. backoff_s, backoff_cap_s: the n-th
    wait is drawn from 0 to min(cap, backoff * 2**n). retry_after_cap_s: a server may not ask for more. stall_s: silence
    after which a connection counts as dead. hedge_share: at most this part of the reads gets a second request.
    hedge_quantile: ... namely those slower than this quantile of the recent ones. seed: of the random waits.
    """

    attempts: int = 10
    backoff_s: float = 0.1
    backoff_cap_s: float = 20.0
    retry_after_cap_s: float = 60.0
    stall_s: float = 10.0
    hedge_share: float = 0.05
    hedge_quantile: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if (
            self.attempts < 1
            or min(self.backoff_s, self.backoff_cap_s, self.retry_after_cap_s) < 0
            or self.stall_s <= 0
        ):
            raise ValueError(f"{self}: attempts must be 1 or more, waits 0 or more and stall_s above 0")
        if not (0 <= self.hedge_share <= 1 and 0 < self.hedge_quantile < 1):
            raise ValueError(f"{self}: hedge_share must be from 0 to 1 and hedge_quantile between 0 and 1")


class Clock(Protocol):
    """Time, so that tests need none."""

    def now(self) -> float:
        """Seconds from some moment on."""

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        """Sleep until the event or the timeout; whether it was the event."""


class SystemClock:
    """The clock of the machine."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        return event.wait(timeout_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Body:
    """An answer on its way: the bytes it ought to bring, the version of the object, and the bytes as they come."""

    length: int
    version: str | None
    chunks: Iterable[bytes]


# get(start, stop, version, careful) sends one request for bytes start..stop-1 (None: to the end) of an object, of the
# given version if any. careful: the last request was throttled; send this one so that a Retry-After of the answer can
# be seen. Raises `Fault`, from the call and from the iteration of the chunks.
Get = Callable[[int, int | None, str | None, bool], Body]


class Transport:
    """Carries out reads under a `Policy`; one for all threads of a store."""

    def __init__(self, policy: Policy, counters: Counters, clock: Clock | None = None) -> None:
        self._policy = policy
        self._counters = counters
        self._clock = clock or SystemClock()
        self._closed = threading.Event()
        self._random = random.Random(policy.seed)
        self._governor = Governor()
        self._patience = Patience(policy.hedge_share, policy.hedge_quantile)
        # Threads start as they are needed; the bound only has to exceed what callers have in flight.
        self._pool = ThreadPoolExecutor(256, thread_name_prefix="knonik-get")

    def read(
        self,
        get: Get,
        offset: int,
        length: int | None,
        version: str | None,
        where: str,
        until: threading.Event | None = None,
    ) -> bytes:
        """The `length` bytes from `offset` of an object (None: all of them), in one piece of one version.

        Args:
            until: set, the read is given up soon; a request under way goes on without anybody.

        Raises:
            ObjectChanged, ObjectMissing, StoreUnavailable, StoreError: with `where`, the number of requests and the
                last cause.
        """
        self._counters.add(in_flight=1)
        try:
            body = self._read(get, offset, length, version, where, until)
        except BaseException:
            self._counters.add(in_flight=-1, failed=1)
            raise
        self._counters.add(in_flight=-1, gets=1, get_bytes=len(body))
        return body

    def call(self, request: Callable[[], T], what: str) -> T:
        """The result of a small request that is not a read of bytes; it raises `Fault` where it fails."""
        tries = _Tries(what)
        while True:
            self._admit(tries)
            try:
                return request()
            except Fault as fault:
                self._after(fault, tries, progress=False)

    def close(self) -> None:
        """Ends all waiting: reads under way are given up."""
        self._closed.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _read(
        self,
        get: Get,
        offset: int,
        length: int | None,
        version: str | None,
        where: str,
        until: threading.Event | None,
    ) -> bytes:
        tries = _Tries(f"cannot read {where}", until)
        stop = None if length is None else offset + length
        parts: list[bytes] = []
        start = offset
        while True:
            self._admit(tries)
            piece = self._race(get, start, stop, version, tries)
            parts += piece.parts
            start += piece.size
            # Whatever comes next must belong to the same object: a resumed body is of one version.
            version = version or piece.version
            stop = piece.stop if stop is None else stop
            if stop is not None and start >= stop:
                return parts[0] if len(parts) == 1 and type(parts[0]) is bytes else b"".join(parts)
            fault = piece.fault or Fault(
                FaultKind.TRANSIENT, f"the body ended after {piece.size} bytes, {(stop or 0) - start} are missing"
            )
            self._after(fault, tries, progress=piece.size > 0)

    def _admit(self, tries: "_Tries") -> None:
        """Wait for this request's turn."""
        wait_s = self._governor.admit(self._clock.now())
        if self._over(tries) or (wait_s > 0 and self._wait(tries, wait_s)):
            raise StoreUnavailable(f"{tries.what}: the store was closed")

    def _over(self, tries: "_Tries") -> bool:
        return self._closed.is_set() or (tries.until is not None and tries.until.is_set())

    def _wait(self, tries: "_Tries", wait_s: float) -> bool:
        """Sleep; whether the store was closed, or the read is not wanted any more."""
        if tries.until is None:
            return self._clock.wait(self._closed, wait_s)
        while wait_s > 0 and not self._over(tries):  # two events cannot be waited for at once
            self._clock.wait(tries.until, min(wait_s, _LOOK_S))
            wait_s -= _LOOK_S
        return self._over(tries)

    def _after(self, fault: Fault, tries: "_Tries", *, progress: bool) -> None:
        """Raise what ends the read, or wait until it may go on."""
        tries.requests += 1
        if fault.kind is FaultKind.CHANGED:
            raise ObjectChanged(f"{tries.what}: the object has changed since it was listed ({fault})") from None
        if fault.kind is FaultKind.ABSENT:
            raise ObjectMissing(f"{tries.what}: {fault}") from None
        tries.fruitless = 0 if progress else tries.fruitless + 1
        tries.renewals += fault.kind is FaultKind.RENEWED
        gave_up = tries.fruitless >= self._policy.attempts or tries.requests >= _BROKEN_BODIES
        if fault.kind is FaultKind.REFUSED or gave_up or tries.renewals > _RENEWALS:
            plural = "request" if tries.requests == 1 else "requests"
            kind = StoreError if fault.kind is FaultKind.REFUSED else StoreUnavailable
            raise kind(f"{tries.what} ({tries.requests} {plural}): {fault}") from None
        if fault.kind is FaultKind.RENEWED:
            return
        wait_s = self._random.uniform(
            0, min(self._policy.backoff_cap_s, self._policy.backoff_s * 2 ** max(0, tries.fruitless - 1))
        )
        if fault.kind is FaultKind.THROTTLED:
            tries.throttled = True
            asked_s = min(fault.retry_after_s or 0.0, self._policy.retry_after_cap_s)
            wait_s += asked_s
            self._counters.add(throttled=1)
            self._governor.throttled(self._clock.now(), asked_s)
        self._counters.add(**{"resumed" if progress else "retries": 1})
        if tries.fruitless >= _WORTH_TELLING:
            logger.warning("%s: request %d failed (%s); the next in %.1f s", tries.what, tries.requests, fault, wait_s)
        if self._wait(tries, wait_s):
            raise StoreUnavailable(f"{tries.what}: the store was closed; last: {fault}") from None

    def _race(self, get: Get, start: int, stop: int | None, version: str | None, tries: "_Tries") -> "_Piece":
        """One request, or two where the first is slow."""
        careful = tries.throttled
        begun = self._clock.now()
        size = None if stop is None else stop - start
        patience_s = None if size is None or careful else self._patience.seconds(size)
        race = _Race(get, start, stop, version, careful)
        if patience_s is None and tries.until is None:
            race.run(0)
        else:
            # The waits below can be cut short, a blocking request cannot: so it runs in a thread of the pool.
            self._submit(race, 0)
            in_time = patience_s is None or self._wait_for(race, tries, patience_s)
            if not in_time and self._may_hedge() and race.enter():
                self._counters.add(hedges=1)
                self._submit(race, 1)
            self._wait_for(race, tries, None)
        if race.winner == 1:
            self._counters.add(hedge_wins=1)
        piece = race.result()
        if size is not None and piece.fault is None:
            self._patience.record(size, self._clock.now() - begun)
        return piece

    def _wait_for(self, race: "_Race", tries: "_Tries", timeout_s: float | None) -> bool:
        """Whether the race is over in time."""
        if tries.until is None:
            return self._clock.wait(race.over, timeout_s)
        left_s = float("inf") if timeout_s is None else timeout_s
        while left_s > 0:
            if self._clock.wait(race.over, min(left_s, _LOOK_S)):
                return True
            if self._over(tries):
                race.over.set()  # what comes now is for nobody
                raise StoreUnavailable(f"{tries.what}: not wanted any more")
            left_s -= _LOOK_S
        return False

    def _may_hedge(self) -> bool:
        # A server that asks for fewer requests gets no doubled ones.
        return not self._governor.limiting(self._clock.now()) and self._patience.spend()

    def _submit(self, race: "_Race", lane: int) -> None:
        def dropped(future: "Future[None]") -> None:
            if future.cancelled():  # closed before a thread took it up: nobody else would end the race
                race.leave(lane, _Piece(fault=Fault(FaultKind.TRANSIENT, "the store was closed")))

        try:
            self._pool.submit(race.run, lane).add_done_callback(dropped)
        except RuntimeError:  # closed meanwhile, or the interpreter is ending
            race.leave(lane, _Piece(fault=Fault(FaultKind.TRANSIENT, "the store was closed")))


@dataclass(kw_only=True)
class _Tries:
    """What one read has been through."""

    what: str
    until: threading.Event | None = None
    requests: int = 0
    fruitless: int = 0
    renewals: int = 0
    throttled: bool = False

    def __init__(self, what: str, until: threading.Event | None = None) -> None:
        self.what, self.until = what, until


@dataclass(kw_only=True)
class _Piece:
    """What one request brought: maybe all, maybe a part and a fault."""

    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    stop: int | None = None
    version: str | None = None
    fault: Fault | None = None
    error: BaseException | None = None


class _Race:
    """Requests for the same bytes, of which one is used."""

    def __init__(self, get: Get, start: int, stop: int | None, version: str | None, careful: bool) -> None:
        self._get = get
        self._request = (start, stop, version, careful)
        self._lock = threading.Lock()
        self._running = 1
        self._pieces: dict[int, _Piece] = {}
        self.over = threading.Event()
        self.winner: int | None = None

    def enter(self) -> bool:
        """Announce one more request; False when the race is over."""
        with self._lock:
            if self._running:
                self._running += 1
            return self._running > 0 and not self.over.is_set()

    def run(self, lane: int) -> None:
        """Send the request and gather the bytes until they are all there, the other has them, or it fails."""
        start, stop, _, _ = self._request
        piece = _Piece()
        try:
            body = self._get(*self._request)
            piece.version, piece.stop = body.version, start + body.length if stop is None else stop
            for chunk in body.chunks:
                piece.parts.append(chunk)
                piece.size += len(chunk)
                if self.over.is_set():
                    break
        except Fault as fault:
            piece.fault = fault
        except BaseException as error:  # a bug, an interrupt, a closed store: the waiting caller raises it
            piece.error = error
        self.leave(lane, piece)

    def leave(self, lane: int, piece: _Piece) -> None:
        """Hand in what a request brought."""
        complete = piece.stop is not None and piece.size == piece.stop - self._request[0]
        with self._lock:
            self._running -= 1
            if self.over.is_set():
                return
            self._pieces[lane] = piece
            if complete:
                self.winner = lane
            if complete or piece.error is not None or self._running == 0:
                self.over.set()

    def result(self) -> _Piece:
        """The winner's piece; where all failed, the one that came furthest."""
        if self.winner is not None:
            return self._pieces[self.winner]
        for piece in self._pieces.values():
            if piece.error is not None:
                raise piece.error
        return max(self._pieces.values(), key=lambda piece: piece.size)
