"""How fast requests may follow each other, and how long a request may take before a second one is worth it.

Both learn from what happens and take the time as an argument, so that they are functions of what they were told.
"""

import threading
from collections import deque

_COOLDOWN_S = 1.0  # requests that were on their way together are throttled together: that is one event, not many
_FLOOR_PER_S = 4.0
_GROWTH = 0.1  # of the rate at which it was throttled, added back each second; and at least ...
_GROWTH_PER_S = 20.0
_FORGETS = 0.8  # refusals that come whatever the rate must not bring it down to the floor
_SAMPLES = 32  # reads of a size before their times mean something
_KEPT = 256
_LEAST_S = 0.02  # a second request is not worth less than this
_SMALL_BITS = 16  # up to 64 KiB the latency counts, not the size


class Governor:
    """Request rate: halves when the server throttles, then grows steadily until it no longer limits anything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen, self._since = 0, 0.0  # requests in the present second
        self._observed_per_s = 0.0
        self._rate_per_s: float | None = None  # right after the last cut; None: unlimited
        self._cut_at, self._grows_from, self._peak_per_s = 0.0, 0.0, 0.0
        self._next = 0.0

    def admit(self, now: float) -> float:
        """Seconds to wait before the request that is asked for may be sent."""
        with self._lock:
            self._count(now)
            rate = self._rate(now)
            if rate is None:
                return 0.0
            at = max(now, self._next)
            self._next = at + 1 / rate
            return at - now

    def throttled(self, now: float, pause_s: float) -> None:
        """The server asked for fewer requests, and for none in the next `pause_s`."""
        with self._lock:
            rate = self._rate(now)
            if rate is None or now - self._cut_at >= _COOLDOWN_S:
                elapsed = max(now - self._since, 0.1)
                seen = max(self._observed_per_s, self._seen / elapsed)
                reached = seen if rate is None else min(rate, seen)
                self._peak_per_s = max(reached, 0.0 if rate is None else _FORGETS * self._peak_per_s)
                self._rate_per_s = max(_FLOOR_PER_S, reached / 2)
                self._cut_at = now
            self._next = max(self._next, now + pause_s)
            self._grows_from = max(self._cut_at, now + pause_s)

    def limiting(self, now: float) -> bool:
        """Whether the rate is bounded at present."""
        with self._lock:
            return self._rate(now) is not None

    def _count(self, now: float) -> None:
        if now - self._since >= 1.0:
            self._observed_per_s = self._seen / (now - self._since)
            self._seen, self._since = 0, now
        self._seen += 1

    def _rate(self, now: float) -> float | None:
        if self._rate_per_s is None:
            return None
        growth = max(_GROWTH_PER_S, _GROWTH * self._peak_per_s)
        rate = self._rate_per_s + growth * max(0.0, now - self._grows_from)
        if rate > 2 * self._peak_per_s + _GROWTH_PER_S:
            self._rate_per_s = None
            return None
        return rate


class Patience:
    """Time after which a read counts as slow: a quantile of the recent reads of about its size.

    Args:
        share: second requests per read at most.
        quantile: of the times.
    """

    def __init__(self, share: float, quantile: float) -> None:
        self._lock = threading.Lock()
        self._share, self._quantile = share, quantile
        self._times: dict[int, deque[float]] = {}
        self._fresh: dict[int, int] = {}
        self._limits: dict[int, float] = {}
        self._budget = 1.0

    def seconds(self, size: int) -> float | None:
        """How long to wait for `size` bytes; None while too little is known."""
        return self._limits.get(_class(size)) if self._share else None

    def record(self, size: int, seconds: float) -> None:
        """A read of `size` bytes took so long."""
        if not self._share:
            return
        kind = _class(size)
        with self._lock:
            self._budget = min(self._budget + self._share, 10.0)
            times = self._times.setdefault(kind, deque(maxlen=_KEPT))
            times.append(seconds)
            self._fresh[kind] = self._fresh.get(kind, 0) + 1
            if self._fresh[kind] >= _SAMPLES:
                self._fresh[kind] = 0
                ordered = sorted(times)
                slow, usual = ordered[int(self._quantile * len(ordered))], ordered[len(ordered) // 2]
                # Where all reads take about the same, the slowest of them are no stragglers.
                self._limits[kind] = max(slow, 2 * usual, _LEAST_S)

    def spend(self) -> bool:
        """Take the right to one second request, where there is one."""
        with self._lock:
            if self._budget < 1:
                return False
            self._budget -= 1
            return True


def _class(size: int) -> int:
    return max(_SMALL_BITS, size.bit_length())
