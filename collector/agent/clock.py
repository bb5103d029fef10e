"""Tie this host's clock to the collector's while the ranks run, without moving what was sent."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import NS_PER_S, MonotonicNs

from ..clock.map import PPB, UNKNOWN_ERROR_NS, ClockMap, Stretch
from ..clock.probe import ProbeReply, parse_reply
from ..errors import ClockReplyError
from ..http.static_files import OK
from ..names import storable_name
from .errors import RetryLaterError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankscope.tracer.spool import SpoolIdentity

    from ..clock.sync import ClockEstimate, ClockSync
    from ..clock.watch import ClockEvent
    from ..identity import Row
    from .journal import Journal
    from .link import Link


FIRST_PROBES = 32
"""Before so many replies no row is placed: 1.6 s, for an error of some 100 us. After another
collector took over its clock is not followed before so many either."""

WAIT_NS = 5 * NS_PER_S
"""A collector that answers everything but probes holds nobody up for longer."""

RENEWAL_AGES_NS = (15 * NS_PER_S, 60 * NS_PER_S, 180 * NS_PER_S)
RENEWAL_NS = 300 * NS_PER_S
LEAD_NS = NS_PER_S
"""A stretch begins so long after it is decided on: nothing that lies in it was sent yet."""

SLEW_NS = 10 * NS_PER_S
MAX_SLEW_PPB = 500_000
"""A larger difference than 5 ms is no error of measurement; it is stepped over at once."""

TELL_NS = 60 * NS_PER_S

LOOK_S = 0.02

PROBES_A_FIT = 5

MAX_EVENTS = 64


class AgentClocks:
    """Which Unix time each moment of each host has, decided once and noted in the journal.

    This host's boot follows the estimates: at `RENEWAL_AGES_NS` and then every `RENEWAL_NS` a
    new stretch begins where the old one ends, and slews to the estimate. Other hosts and
    earlier boots keep the first anchor that came.

    Args:
        journal: Keeps the stretches.
        own: This host's name and boot, as spools have them.
        estimate: Returns the newest estimate of this host's clock.
        monotonic_ns: This host's ``CLOCK_MONOTONIC``.
        watch: Returns what happened to this host's clocks since it was last asked.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        own: tuple[str, bytes],
        estimate: Callable[[], ClockEstimate | None],
        monotonic_ns: Callable[[], int],
        watch: Callable[[], Sequence[ClockEvent]] = tuple,
    ) -> None:
        self._journal = journal
        self._watch = watch
        self._own = (storable_name(own[0]), own[1].hex())
        self._estimate = estimate
        self._monotonic_ns = monotonic_ns
        self._maps: dict[tuple[str, str], ClockMap] = {}
        self._asked_ns: int | None = None
        self._renewals = list(RENEWAL_AGES_NS)
        self._begun_ns = monotonic_ns()
        self._renewed_ns = self._begun_ns
        self._told_ns: int | None = None
        self._untold: list[Row] = []
        for line in journal.clock_rows():
            self._add((line["host"], line["boot_id"]), _stretch(line))

    def clock_map(self, identity: SpoolIdentity) -> ClockMap:
        """Return the map for the host and boot of a process; it goes on growing.

        Raises:
            RetryLaterError: This host's clock is being tied; ask again soon.
        """
        key = storable_name(identity.host), identity.boot_id.hex()
        known = self._maps.get(key)
        if known is not None:
            return known
        estimate = self._first_estimate() if key == self._own else None
        if estimate is None:
            offset_ns = identity.anchor_unix_ns - identity.anchor_monotonic_ns
            stretch = Stretch(begin_ns=identity.anchor_monotonic_ns, offset_ns=offset_ns)
            error_ns = UNKNOWN_ERROR_NS
        else:
            now_ns = self._monotonic_ns()
            stretch = _along(estimate, now_ns)
            error_ns = estimate.error_ns(MonotonicNs(now_ns))
        self._note(key, stretch)
        self._tell(key, stretch, at_ns=stretch.begin_ns, error_ns=error_ns)
        return self._maps[key]

    def renew(self) -> None:
        """Follow the newest estimate if it is time to, and tell how far off the map may be."""
        known, estimate = self._maps.get(self._own), self._estimate()
        if known is None or estimate is None:
            return
        now_ns = self._monotonic_ns()
        is_known = estimate.num_probes >= FIRST_PROBES
        if is_known and now_ns > known.newest.begin_ns and self._is_due(now_ns):
            for stretch in next_stretches(known, estimate, now_ns + LEAD_NS):
                self._note(self._own, stretch)
            self._renewed_ns = now_ns
            self._told_ns = None
        if self._told_ns is None or now_ns - self._told_ns >= TELL_NS:
            self._told_ns = now_ns
            at = MonotonicNs(now_ns)
            error_ns = abs(known.unix_at(now_ns) - estimate.unix_ns(at)) + estimate.error_ns(at)
            self._tell(self._own, known.newest, at_ns=now_ns, error_ns=error_ns)

    def unix_now(self) -> int:
        """Return the time as rows of this host have it; the collector's before it is tied.

        It is tied by a run's first row: a host that waits for a job has probes, and no map.
        Before any probe was answered it is the wall clock's.
        """
        known, now_ns = self._maps.get(self._own), self._monotonic_ns()
        if known is not None:
            return known.unix_at(now_ns)
        estimate = self._estimate()
        return time.time_ns() if estimate is None else estimate.unix_ns(MonotonicNs(now_ns))

    def take_events(self) -> list[tuple[int, ClockEvent]]:
        """Return what happened to this host's clocks, each with its Unix time."""
        known = self._maps.get(self._own)
        found = self._watch()
        return [] if known is None else [(known.unix_at(event.at_ns), event) for event in found]

    def take_rows(self) -> list[Row]:
        """Return the rows of table ``clock`` that are still to be sent."""
        taken, self._untold = self._untold, []
        return taken

    def _first_estimate(self) -> ClockEstimate | None:
        """Return an estimate that is good enough to begin with; None if none will come."""
        now_ns = self._monotonic_ns()
        if self._asked_ns is None:
            self._asked_ns = now_ns
        found = self._estimate()
        has_waited = now_ns - self._asked_ns >= WAIT_NS
        if not has_waited and (found is None or found.num_probes < FIRST_PROBES):
            raise RetryLaterError("this host's clock is being tied", pause_s=0.1, is_of_run=True)
        return found

    def _is_due(self, now_ns: int) -> bool:
        if self._renewals and now_ns - self._begun_ns >= self._renewals[0]:
            while self._renewals and now_ns - self._begun_ns >= self._renewals[0]:
                del self._renewals[0]
            return True
        return now_ns - self._renewed_ns >= RENEWAL_NS

    def _note(self, key: tuple[str, str], stretch: Stretch) -> None:
        line = {
            "host": key[0],
            "boot_id": key[1],
            "begin_ns": stretch.begin_ns,
            "offset_ns": stretch.offset_ns,
            "drift_ppb": stretch.drift_ppb,
        }
        self._journal.add_clock(line)
        self._add(key, stretch)

    def _add(self, key: tuple[str, str], stretch: Stretch) -> None:
        known = self._maps.get(key)
        if known is None:
            self._maps[key] = ClockMap([stretch])
        else:
            known.add(stretch)

    def _tell(self, key: tuple[str, str], stretch: Stretch, *, at_ns: int, error_ns: int) -> None:
        unix_ns = self._maps[key].unix_at(at_ns)
        self._untold.append(
            {
                "host": key[0],
                "boot_id": key[1],
                "at_ns": unix_ns,
                "offset_ns": unix_ns - at_ns,
                "drift_ppb": stretch.drift_ppb,
                "clock_error_ns": error_ns,
            }
        )


def next_stretches(known: ClockMap, estimate: ClockEstimate, begin_ns: int) -> list[Stretch]:
    """Return what leads a map to an estimate: no jump where a slew of `SLEW_NS` can do it.

    Args:
        known: The map so far.
        estimate: Where it shall lead.
        begin_ns: Monotonic time from which it may change; later than all that was mapped.
    """
    begin_unix_ns = known.unix_at(begin_ns)
    met_ns = begin_ns + SLEW_NS
    along = _along(estimate, met_ns)
    slewed_ns = met_ns + along.offset_ns - begin_unix_ns
    drift_ppb = (slewed_ns - SLEW_NS) * PPB // SLEW_NS
    if abs(drift_ppb - estimate.fit.drift_ppb) > MAX_SLEW_PPB:
        return [_along(estimate, begin_ns)]
    slew = Stretch(begin_ns=begin_ns, offset_ns=begin_unix_ns - begin_ns, drift_ppb=drift_ppb)
    return [slew, along]


def _along(estimate: ClockEstimate, begin_ns: int) -> Stretch:
    offset_ns = estimate.unix_ns(MonotonicNs(begin_ns)) - begin_ns
    return Stretch(begin_ns=begin_ns, offset_ns=offset_ns, drift_ppb=estimate.fit.drift_ppb)


def _stretch(line: dict[str, Any]) -> Stretch:
    return Stretch(
        begin_ns=line["begin_ns"], offset_ns=line["offset_ns"], drift_ppb=line["drift_ppb"]
    )


def exchange_over(link: Link) -> Callable[[], ProbeReply]:
    """Return what sends one probe and returns the reply.

    It raises `OSError` where none came and `ClockReplyError` where it is none, as
    `collector.clock.sync.ClockSync` has it.
    """

    def exchange() -> ProbeReply:
        try:
            answer = link.post("/v1/clock", b"", content_type="application/json")
        except RetryLaterError as error:
            raise OSError(error.reason) from error
        if answer.status != OK:
            raise OSError(f"the collector answers {answer.status}")
        try:
            return parse_reply(json.loads(answer.body))
        except (ValueError, RecursionError) as error:
            raise ClockReplyError("it is no JSON") from error

    return exchange


class ProbeThread:
    """Probes the collector beside everything else, so that no transfer delays a probe.

    Args:
        clock: What to poll; this thread's alone.
    """

    def __init__(self, clock: ClockSync) -> None:
        self._clock = clock
        self._latest: ClockEstimate | None = None
        self._events: deque[ClockEvent] = deque(maxlen=MAX_EVENTS)
        self._is_stopping = threading.Event()
        self._is_suspended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clock-probes", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; a probe under way is not waited for."""
        self._is_stopping.set()

    def latest(self) -> ClockEstimate | None:
        """Return the newest estimate; None before there is one."""
        return self._latest

    def take_events(self) -> list[ClockEvent]:
        """Return what the probes showed since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def forget(self) -> None:
        """Begin anew, for the host was suspended."""
        self._is_suspended.set()

    def _run(self) -> None:
        num_since = 0
        while not self._is_stopping.wait(LOOK_S):
            if self._is_suspended.is_set():
                self._is_suspended.clear()
                self._clock.forget()
            if not self._clock.poll():
                continue
            num_since += 1
            if num_since >= _probes_a_fit(self._latest):
                self._latest, num_since = self._clock.estimate(), 0
                self._events.extend(self._clock.take_events())


def _probes_a_fit(latest: ClockEstimate | None) -> int:
    """Return after how many probes to fit again: a fit of all costs some ms, one of few does not.

    A collector whom many ask is asked so seldom that five probes take seconds.
    """
    return 1 if latest is None else min(PROBES_A_FIT, 1 + latest.num_probes // 8)
