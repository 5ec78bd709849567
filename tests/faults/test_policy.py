"""The transport policy alone, with a clock of its own: what is asked for, when, how often, and what is raised."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from knonik.stores.base import Counters, ObjectChanged, ObjectMissing, StoreError, StoreUnavailable
from knonik.stores.pace import Governor, Patience
from knonik.stores.transport import Body, Fault, FaultKind, Policy, Transport

DATA = bytes(range(200))
THROTTLED = Fault(FaultKind.THROTTLED, "503 SlowDown")
RESET = Fault(FaultKind.TRANSIENT, "connection reset")


class FakeClock:
    """Time passes only by waiting."""

    def __init__(self) -> None:
        self.time_s = 100.0
        self.waits: list[float] = []
        self.begun = threading.Event()  # a request is on its way: until then no time passes
        self.begun.set()

    def now(self) -> float:
        return self.time_s

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        if timeout_s is None:
            assert event.wait(60)
        elif not event.is_set():
            assert self.begun.wait(60)
            self.time_s += timeout_s
            self.waits.append(timeout_s)
        return event.is_set()


class Server:
    """Answers requests by a script: a fault, a number of bytes before a fault, or everything at the script's end."""

    def __init__(self, *script: Fault | int, version: str = '"a"') -> None:
        self.script = list(script)
        self.version = version
        self.asked: list[tuple[int, int | None, str | None, bool]] = []

    def get(self, start: int, stop: int | None, version: str | None, careful: bool) -> Body:
        self.asked.append((start, stop, version, careful))
        step = self.script.pop(0) if self.script else None
        if isinstance(step, Fault):
            raise step
        end = len(DATA) if stop is None else stop
        return Body(length=end - start, version=self.version, chunks=self._chunks(start, end, step))

    def _chunks(self, start: int, end: int, cut: int | None) -> Iterator[bytes]:
        for place in range(start, end if cut is None else start + cut, 7):
            yield DATA[place : min(place + 7, end if cut is None else start + cut)]
        if cut is not None:
            raise RESET


def made(policy: Policy | None = None) -> tuple[Transport, Counters, FakeClock]:
    clock, counters = FakeClock(), Counters()
    return Transport(policy or Policy(), counters, clock), counters, clock


def test_a_clean_read_is_one_request() -> None:
    transport, counters, clock = made()
    server = Server()
    assert transport.read(server.get, 10, 50, '"a"', "x") == DATA[10:60]
    assert transport.read(server.get, 0, None, None, "x") == DATA
    assert server.asked == [(10, 60, '"a"', False), (0, None, None, False)]
    assert clock.waits == []
    values = counters.values()
    assert (values.pop("gets"), values.pop("get_bytes")) == (2, 250)
    assert set(values.values()) == {0}


def test_waits_grow_are_random_bounded_and_the_same_for_a_seed() -> None:
    drawn = []
    for seed in (1, 1, 2):
        transport, _, clock = made(Policy(attempts=12, backoff_s=0.5, backoff_cap_s=8, seed=seed))
        assert transport.read(Server(*[RESET] * 11).get, 0, 5, None, "x") == DATA[:5]
        assert all(0 <= wait <= min(8, 0.5 * 2**n) for n, wait in enumerate(clock.waits))
        drawn.append(clock.waits)
    assert len(drawn[0]) == 11
    assert drawn[0] == drawn[1] != drawn[2]


def test_giving_up_names_object_requests_and_cause() -> None:
    transport, counters, _ = made(Policy(attempts=4))
    server = Server(*[RESET] * 9)
    with pytest.raises(StoreUnavailable, match=r"cannot read a\.mp4 bytes 5-9 \(4 requests\): connection reset"):
        transport.read(server.get, 5, 5, None, "a.mp4 bytes 5-9")
    assert len(server.asked) == 4
    assert (counters.values()["failed"], counters.values()["retries"], counters.values()["in_flight"]) == (1, 3, 0)


def test_retry_after_is_obeyed_up_to_a_cap() -> None:
    for asked_s, least_s in ((7.0, 7.0), (1000.0, 30.0)):
        transport, counters, clock = made(Policy(backoff_s=0.1, retry_after_cap_s=30))
        server = Server(THROTTLED, Fault(FaultKind.THROTTLED, "429", asked_s))
        assert transport.read(server.get, 0, 9, None, "x") == DATA[:9]
        assert least_s <= clock.waits[1] <= least_s + 0.2
        # After the first refusal the requests are sent where the header can be seen.
        assert [careful for *_, careful in server.asked] == [False, True, True]
        assert counters.values()["throttled"] == 2


def test_a_pause_holds_for_all_reads() -> None:
    transport, _, clock = made(Policy(attempts=1))
    with pytest.raises(StoreError):
        transport.read(Server(Fault(FaultKind.THROTTLED, "429", 5.0)).get, 0, 1, None, "x")
    transport, _, clock = made(Policy(attempts=2))
    transport.read(Server(Fault(FaultKind.THROTTLED, "429", 5.0)).get, 0, 1, None, "x")
    begun = clock.now()
    transport.read(Server().get, 0, 1, None, "y")
    assert clock.now() > begun  # the halved rate, not the pause, which is over


def test_a_broken_body_goes_on_from_the_byte_reached_in_the_same_version() -> None:
    transport, counters, _ = made()
    server = Server(30, 20)
    assert transport.read(server.get, 100, 80, None, "x") == DATA[100:180]
    assert server.asked == [(100, 180, None, False), (130, 180, '"a"', False), (150, 180, '"a"', False)]
    assert counters.values()["resumed"] == 2
    assert counters.values()["get_bytes"] == 80
    whole = Server(30)
    assert transport.read(whole.get, 0, None, None, "x") == DATA
    assert whole.asked[1] == (30, len(DATA), '"a"', False)


def test_progress_is_no_failure_but_not_for_ever() -> None:
    transport, _, _ = made(Policy(attempts=2))
    assert transport.read(Server(*[3] * 40).get, 0, 150, None, "x") == DATA[:150]
    assert transport.read(Server(RESET, 5, RESET, 5, RESET, 5).get, 0, 20, None, "x") == DATA[:20]
    with pytest.raises(StoreError, match="100 requests"):
        transport.read(Server(*[1] * 150).get, 0, 150, None, "x")


def test_a_read_that_no_thread_has_taken_up_ends_with_the_store() -> None:
    transport = Transport(Policy(), Counters())
    transport._patience.seconds = lambda size: 3600.0  # type: ignore[method-assign]
    pool = transport._pool = ThreadPoolExecutor(1)
    occupied, queued = threading.Event(), threading.Event()
    pool.submit(occupied.wait)
    submit = pool.submit

    def noted(*args: Any) -> Any:
        future = submit(*args)
        queued.set()
        return future

    pool.submit = noted  # type: ignore[method-assign, assignment]
    raised: list[BaseException] = []

    def read() -> None:
        try:
            transport.read(Server().get, 0, 5, None, "x")
        except StoreUnavailable as error:
            raised.append(error)

    threads = [threading.Thread(target=read, daemon=True), threading.Thread(target=transport.close, daemon=True)]
    threads[0].start()
    assert queued.wait(60)
    threads[1].start()
    threads[0].join(60)
    occupied.set()
    threads[1].join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert "closed" in str(raised[0])


@pytest.mark.parametrize("patience_s", [None, 3600.0])
@pytest.mark.parametrize("answers", [True, False])
def test_a_read_that_is_not_wanted_any_more_is_given_up(answers: bool, patience_s: float | None) -> None:
    transport = Transport(Policy(backoff_s=1000, backoff_cap_s=1000), Counters())
    transport._patience.seconds = lambda size: patience_s  # type: ignore[method-assign]
    until, begun, silent = threading.Event(), threading.Event(), threading.Event()
    raised: list[BaseException] = []

    def get(start: int, stop: int | None, version: str | None, careful: bool) -> Body:
        begun.set()
        if not answers:
            silent.wait()
        raise RESET

    def read() -> None:
        try:
            transport.read(get, 0, 5, None, "x", until)
        except StoreUnavailable as error:
            raised.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert begun.wait(60)
    until.set()
    thread.join(60)
    assert len(raised) == 1
    silent.set()
    transport.close()


@pytest.mark.parametrize(
    ("kind", "error"),
    [(FaultKind.CHANGED, ObjectChanged), (FaultKind.ABSENT, ObjectMissing), (FaultKind.REFUSED, StoreError)],
)
def test_what_cannot_succeed_is_not_repeated(kind: FaultKind, error: type[StoreError]) -> None:
    transport, _, clock = made()
    server = Server(Fault(kind, "403 AccessDenied"))
    with pytest.raises(error, match=r"cannot read k\.bin.*403 AccessDenied") as raised:
        transport.read(server.get, 0, 5, "v", "k.bin")
    assert type(raised.value) is error
    assert (len(server.asked), clock.waits) == (1, [])


def test_new_sessions_are_tried_twice_without_waiting() -> None:
    renewed = Fault(FaultKind.RENEWED, "400 ExpiredToken")
    transport, _, clock = made()
    assert transport.read(Server(renewed, renewed).get, 0, 5, None, "x") == DATA[:5]
    server = Server(*[renewed] * 5)
    with pytest.raises(StoreError, match="ExpiredToken"):
        transport.read(server.get, 0, 5, None, "x")
    assert (len(server.asked), clock.waits) == (3, [])


def test_small_requests_follow_the_same_policy() -> None:
    transport, counters, clock = made(Policy(attempts=3))
    script: list[Fault | str] = [RESET, Fault(FaultKind.THROTTLED, "503", 2.0), "page"]

    def request() -> str:
        step = script.pop(0)
        if isinstance(step, Fault):
            raise step
        return step

    assert transport.call(request, "cannot list") == "page"
    assert clock.waits[1] >= 2
    assert counters.values()["gets"] == 0
    script += [RESET] * 3
    with pytest.raises(StoreError, match=r"cannot list \(3 requests\): connection reset"):
        transport.call(request, "cannot list")


def test_the_rate_halves_once_a_burst_and_recovers() -> None:
    governor = Governor()
    for i in range(200):
        assert governor.admit(i / 100) == 0  # 100 a second
    for _ in range(32):
        governor.throttled(2.0, 0)
    waits = [governor.admit(2.0) for _ in range(11)]
    assert waits == pytest.approx([i / 50 for i in range(11)], rel=0.1)
    governor.throttled(3.5, 4.0)
    assert governor.admit(3.5) == pytest.approx(4.0)
    assert governor.limiting(8.0)
    assert not governor.limiting(3600.0)
    assert [governor.admit(3600.0) for _ in range(100)] == [0] * 100


def test_refusals_whatever_the_rate_do_not_bring_it_to_a_halt() -> None:
    """One answer in twenty is a 503 at any rate: after ten minutes still tens of requests a second."""
    governor, now, sent = Governor(), 0.0, 0
    while now < 600:
        sent += 1
        now += max(0.002, governor.admit(now))
        if sent % 20 == 0:
            governor.throttled(now, 0)
    assert sent > 600 * 20


def test_slow_is_a_quantile_of_reads_of_that_size() -> None:
    patience = Patience(0.05, 0.95)
    assert patience.seconds(1000) is None
    for i in range(64):
        patience.record(1000 + i, 10.0 if i % 16 == 0 else 1.0)  # 6 % stragglers
        patience.record(8 << 20, 50.0)
    assert patience.seconds(50_000) == 10.0
    assert patience.seconds(8 << 20) == 100.0  # nothing is slow where all take the same: twice that would be
    assert patience.seconds(64 << 20) is None
    assert Patience(0.0, 0.95).seconds(1000) is None


def test_second_requests_are_a_bounded_share() -> None:
    patience = Patience(0.05, 0.95)
    granted = 0
    for _ in range(1000):
        granted += patience.spend()
        patience.record(1000, 1.0)
    assert 45 <= granted <= 51


def warmed(policy: Policy) -> tuple[Transport, Counters, FakeClock]:
    transport, counters, clock = made(policy)
    for _ in range(32):
        transport.read(Server().get, 0, 100, None, "x")
    return transport, counters, clock


class TwoRequests:
    """A get whose first call waits for `first`, and whose second runs `second`; the clock stands until the first."""

    def __init__(self, clock: FakeClock, second: Callable[[], object]) -> None:
        self.clock, self.second = clock, second
        self.first = threading.Event()
        self.calls = 0
        clock.begun = threading.Event()

    def get(self, start: int, stop: int | None, version: str | None, careful: bool) -> Body:
        self.calls += 1
        if self.calls == 1:
            self.clock.begun.set()
            assert self.first.wait(60)
        else:
            self.second()
        return Body(length=100, version=None, chunks=[DATA[:50], DATA[50:100]])


def test_the_faster_of_two_requests_wins() -> None:
    transport, counters, clock = warmed(Policy(hedge_share=0.5))
    server = TwoRequests(clock, lambda: None)
    assert transport.read(server.get, 0, 100, None, "x") == DATA[:100]
    assert server.calls == 2
    assert (counters.values()["hedges"], counters.values()["hedge_wins"]) == (1, 1)
    server.first.set()
    transport.close()


def test_the_first_request_may_still_win() -> None:
    transport, counters, clock = warmed(Policy(hedge_share=0.5))
    go = threading.Event()
    server = TwoRequests(clock, lambda: (server.first.set(), go.wait(60)))
    assert transport.read(server.get, 0, 100, None, "x") == DATA[:100]
    assert (server.calls, counters.values()["hedges"], counters.values()["hedge_wins"]) == (2, 1, 0)
    go.set()
    transport.close()


def test_one_failure_of_two_is_none() -> None:
    transport, counters, clock = warmed(Policy(hedge_share=0.5))

    def fail() -> None:
        server.first.set()
        raise RESET

    server = TwoRequests(clock, fail)
    assert transport.read(server.get, 0, 100, None, "x") == DATA[:100]
    assert (server.calls, counters.values()["retries"], counters.values()["failed"]) == (2, 0, 0)
    transport.close()


def test_a_bug_in_a_second_thread_reaches_the_caller() -> None:
    transport, _, _ = warmed(Policy(hedge_share=0.5))

    def bug(*arguments: object) -> Body:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        transport.read(bug, 0, 100, None, "x")
    transport.close()


def test_closing_ends_waiting_and_threads(since) -> None:
    watch = since()
    counters = Counters()
    transport = Transport(Policy(backoff_s=1000, backoff_cap_s=1000, attempts=50), counters)
    failed = threading.Event()

    def get(start: int, stop: int | None, version: str | None, careful: bool) -> Body:
        failed.set()
        raise RESET

    errors: list[str] = []

    def reader() -> None:
        try:
            transport.read(get, 0, 5, None, "x")
        except StoreError as error:
            errors.append(str(error))

    thread = threading.Thread(target=reader)
    thread.start()
    assert failed.wait(60)
    transport.close()
    thread.join(60)
    assert not thread.is_alive()
    assert "closed" in errors[0]
    assert watch.threads("knonik-get") == []


def test_impossible_policies_are_refused() -> None:
    for wrong in ({"attempts": 0}, {"backoff_s": -1}, {"stall_s": 0}, {"hedge_share": 2}, {"hedge_quantile": 1}):
        with pytest.raises(ValueError, match="must be"):
            Policy(**wrong)
