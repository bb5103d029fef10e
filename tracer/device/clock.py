"""A device's clock: anchors that map it to the host's clock, renewed every few seconds."""

from __future__ import annotations

import math
import time
from collections import deque
from time import monotonic_ns
from typing import TYPE_CHECKING, NamedTuple

from ..span import NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .backend import DeviceEvent, DeviceStream, Mark, MarkPool


NUM_PROBES = 8

RENEW_NS = 5_000_000_000
"""Age at which an anchor is renewed: below the limit of 10 s even if the thread is busy."""

FIRST_RENEWALS_NS = (100_000_000, 500_000_000, 1_000_000_000, 2_000_000_000)
"""Ages at which the first anchors are renewed: the drift is unknown until there are two of them."""

RENEW_TIMEOUT_NS = 2_000_000_000
"""After this time the best probe so far is taken."""

WATCH_NS = 10_000_000

NUM_ANCHORS = 16

SPIN_NS = 100_000
"""Time for which a new event is queried without a pause; an idle device takes some 10 us."""

POLL_S = 50e-6

MAX_VISIBILITY_DELAY_NS = 5_000
"""Longest time for the completion of an event to become visible to the host."""

EVENT_RESOLUTION_NS = 500
"""Resolution of an event's time. Source: CUDA Runtime API, ``cudaEventElapsedTime``."""

MAX_DRIFT_RATIO = 1e-4
"""Largest difference between two quartz clocks: ten times that of the worst common ones."""


class Anchor(NamedTuple):
    """One moment on the device's clock and on the host's."""

    mark: Mark
    device_ns: int
    """On the device's clock, since the first anchor."""

    bracket: Bracket
    """On the host's clock, monotonic; narrowed by the earlier anchors."""

    drift: Drift

    @property
    def monotonic_ns(self) -> int:
        """The host's time."""
        return (self.bracket.lower_ns + self.bracket.upper_ns) // 2

    @property
    def error_ns(self) -> int:
        """Bound of the error of the host's time."""
        return self.bracket.error_ns


class DeviceTime(NamedTuple):
    """The time at which the device reached an event."""

    at_ns: int
    """Monotonic."""

    error_ns: int
    """Bound of the error of the mapping."""


class DeviceClock:
    """Maps events of one device to the host's monotonic clock.

    One thread uses it. Nothing waits: a probe that the device has not reached is checked again in a
    later turn.
    """

    def __init__(
        self,
        pool: MarkPool,
        stream: DeviceStream,
        *,
        clock: Callable[[], int] = monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._pool = pool
        self._stream = stream
        self._clock = clock
        self._sleep = sleep
        self._probe: tuple[Probe, Mark] | None = None
        self._probed: list[tuple[Bracket, Mark]] = []
        self._started_ns: int | None = None
        self._num_anchors = 0
        self._points: deque[Point] = deque(maxlen=NUM_ANCHORS)
        self.anchors: deque[Anchor] = deque()
        self.drift = UNKNOWN_DRIFT
        self._ns_per_ms = float(NS_PER_MS)
        """Of the host's clock, per ms of the device's."""

        self._newest: tuple[int, int, DeviceEvent]
        """Of the newest anchor, once there is one: end of its bracket, its time, its event."""

    @property
    def ready(self) -> bool:
        """Return whether events can be mapped."""
        return bool(self.anchors)

    @property
    def renewing(self) -> bool:
        """Return whether an anchor is being renewed."""
        return self._started_ns is not None

    def renew_if_due(self) -> Anchor | None:
        """Renew the anchor if it is due; return the new anchor once it is complete."""
        now_ns = self._clock()
        if self._started_ns is None:
            if self.anchors and now_ns - self.anchors[-1].bracket.upper_ns < self._age_ns():
                return None
            self._started_ns = now_ns
        while len(self._probed) < NUM_PROBES:
            if not self._probe_once():
                break
        is_timed_out = bool(self._probed) and self._clock() - self._started_ns > RENEW_TIMEOUT_NS
        if len(self._probed) == NUM_PROBES or is_timed_out:
            return self._take_tightest()
        return None

    def read_time(self, event: DeviceEvent, launch_ns: int) -> DeviceTime:
        """Return the time at which the device reached an event that is done.

        Args:
            launch_ns: When the host recorded it, monotonic.
        """
        anchor, elapsed_ms = self._elapsed_ms(event, launch_ns)
        device_ns = elapsed_ms * NS_PER_MS
        drift_error_ns = abs(device_ns) * self.drift.error_ratio + rounding_ns(elapsed_ms)
        return DeviceTime(
            anchor.monotonic_ns + round(device_ns * (1 + self.drift.ratio)),
            anchor.error_ns + EVENT_RESOLUTION_NS + round(drift_error_ns),
        )

    def reached_ns(self, mark: Mark) -> int:
        """Return the time (monotonic) at which the device reached a mark that is done."""
        after_ns, at_ns, event = self._newest
        if after_ns <= mark.launch_ns:  # nearly always
            return at_ns + round(event.elapsed_time(mark.event) * self._ns_per_ms)
        anchor, elapsed_ms = self._elapsed_ms(mark.event, mark.launch_ns)
        return anchor.monotonic_ns + round(elapsed_ms * self._ns_per_ms)

    def elapsed_ns(self, begin: Mark, end: Mark) -> int:
        """Return the time between two marks that are done, in ns of the host's clock."""
        return round(begin.event.elapsed_time(end.event) * self._ns_per_ms)

    def _elapsed_ms(self, event: DeviceEvent, launch_ns: int) -> tuple[Anchor, float]:
        """Return the time of the device from an anchor to an event, negative if it came before."""
        anchor = self._anchor_before(launch_ns)
        if anchor.bracket.upper_ns <= launch_ns:
            return anchor, anchor.mark.event.elapsed_time(event)
        return anchor, -event.elapsed_time(anchor.mark.event)

    def _age_ns(self) -> int:
        if self._num_anchors <= len(FIRST_RENEWALS_NS):
            return FIRST_RENEWALS_NS[self._num_anchors - 1]
        return RENEW_NS

    def _anchor_before(self, launch_ns: int) -> Anchor:
        for anchor in reversed(self.anchors):
            if anchor.bracket.upper_ns <= launch_ns:
                return anchor
        return self.anchors[0]

    def _probe_once(self) -> bool:
        """Return whether another probe is complete."""
        if self._probe is None:
            mark = self._pool.take()
            if mark is None:
                return False
            probe = Probe(mark.event, self._stream, clock=self._clock, sleep=self._sleep)
            self._probe = (probe, mark)
        # A device that hangs is queried once per turn.
        is_in_time = self._clock() - (self._started_ns or 0) <= RENEW_TIMEOUT_NS
        probe, mark = self._probe
        bracket = probe.watch(WATCH_NS if is_in_time else 0)
        if bracket is None:
            return False
        self._probed.append((bracket, mark))
        self._probe = None
        return True

    def _take_tightest(self) -> Anchor:
        self._probed.sort(key=lambda one: one[0].error_ns)
        (bracket, mark), *others = self._probed
        self._pool.release(*(other for _, other in others))
        self._probed, self._started_ns = [], None
        anchor = self._make_anchor(bracket, mark)
        self.anchors.append(anchor)
        self._newest = (anchor.bracket.upper_ns, anchor.monotonic_ns, mark.event)
        self._ns_per_ms = NS_PER_MS * (1 + self.drift.ratio)
        self._num_anchors += 1
        if len(self.anchors) > NUM_ANCHORS:
            self._pool.release(self.anchors.popleft().mark)
        return anchor

    def _make_anchor(self, bracket: Bracket, mark: Mark) -> Anchor:
        """Return the anchor.

        Its bracket is narrowed by that of the previous one, extrapolated, if they intersect.
        """
        previous = self.anchors[-1] if self.anchors else None
        device_ns = 0
        if previous is not None:
            elapsed_ms = previous.mark.event.elapsed_time(mark.event)
            device_ns = previous.device_ns + round(elapsed_ms * NS_PER_MS)
        self._points.append(Point(device_ns, bracket))
        self.drift = fit_drift(list(self._points))
        if previous is not None:
            passed_ns = device_ns - previous.device_ns
            drift_error_ns = passed_ns * self.drift.error_ratio + EVENT_RESOLUTION_NS
            shift_ns = passed_ns * (1 + self.drift.ratio)
            before = previous.bracket
            lower_ns = max(bracket.lower_ns, before.lower_ns + round(shift_ns - drift_error_ns))
            upper_ns = min(bracket.upper_ns, before.upper_ns + round(shift_ns + drift_error_ns))
            if lower_ns <= upper_ns:
                bracket = Bracket(lower_ns, upper_ns)
        return Anchor(mark, device_ns, bracket, self.drift)


class Bracket(NamedTuple):
    """Two times of the host, monotonic, between which the device reached an event."""

    lower_ns: int
    upper_ns: int

    @property
    def error_ns(self) -> int:
        """Half of the bracket."""
        return (self.upper_ns - self.lower_ns + 1) // 2


class Probe:
    """An event on a private stream, watched until it is done.

    The lower end of the bracket is the time before the event was recorded, or the last time at
    which it was seen not done, whichever is later. So the bracket is tight even behind a deep queue
    (``CUDA_DEVICE_MAX_CONNECTIONS=1``), where the device reaches the event long after it was
    recorded.
    """

    def __init__(
        self,
        event: DeviceEvent,
        stream: DeviceStream,
        *,
        clock: Callable[[], int] = monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.event = event
        self._clock = clock
        self._sleep = sleep
        self._lower_ns = self._started_ns = clock()
        event.record(stream)

    def watch(self, budget_ns: int) -> Bracket | None:
        """Return the bracket; None if the device did not reach the event in time.

        Args:
            budget_ns: Time to watch. After `SPIN_NS` there is a pause between queries.
        """
        until_ns = self._clock() + budget_ns
        while True:
            asked_ns = self._clock()
            if self.event.query():
                upper_ns = self._clock() + EVENT_RESOLUTION_NS
                return Bracket(self._lower_ns - EVENT_RESOLUTION_NS, upper_ns)
            self._lower_ns = max(self._lower_ns, asked_ns - MAX_VISIBILITY_DELAY_NS)
            if asked_ns >= until_ns:
                return None
            if asked_ns - self._started_ns > SPIN_NS:
                self._sleep(POLL_S)


class Point(NamedTuple):
    """One moment: exact on the device's clock, within a bracket on the host's."""

    device_ns: int
    bracket: Bracket


class Drift(NamedTuple):
    """``host = (1 + ratio) device``, and the bound of the error of ``ratio``."""

    ratio: float
    error_ratio: float


UNKNOWN_DRIFT = Drift(0.0, MAX_DRIFT_RATIO)


def fit_drift(points: Sequence[Point]) -> Drift:
    """Return the drift that all points allow.

    Each pair of points bounds the slope from both sides: the host's interval between them is
    between the nearest and the farthest ends of their brackets. The drift is the middle of the
    range that all pairs allow. Older points that contradict the newer ones are left out: the
    temperature has changed.

    Args:
        points: In the order of the device's clock.
    """
    low, high = -MAX_DRIFT_RATIO, MAX_DRIFT_RATIO
    for first in range(len(points) - 2, -1, -1):
        narrower = _narrowed(points, first, low, high)
        if narrower is None:
            break
        low, high = narrower
    return Drift((low + high) / 2, (high - low) / 2)


def _narrowed(
    points: Sequence[Point], first: int, low: float, high: float
) -> tuple[float, float] | None:
    """Return the bounds after all pairs of one point with later ones; None if they are empty."""
    earlier = points[first]
    for later in points[first + 1 :]:
        device_ns = later.device_ns - earlier.device_ns
        if device_ns <= 0:
            continue
        low = max(low, (later.bracket.lower_ns - earlier.bracket.upper_ns) / device_ns - 1)
        high = min(high, (later.bracket.upper_ns - earlier.bracket.lower_ns) / device_ns - 1)
    return (low, high) if low <= high else None


def rounding_ns(elapsed_ms: float) -> float:
    """Return the rounding error of an ``elapsed_time`` in ns: it is a float32 in ms.

    Half the distance to the next float32: 0.5 us at 16 s, 60 us at half an hour.
    """
    if elapsed_ms == 0:
        return 0.0
    exponent = math.frexp(elapsed_ms)[1] - 1
    return math.ldexp(1.0, exponent - 24) * 1e6
