"""Alignment of this host's clock with the collector's, without changing times that were sent."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from http import HTTPStatus
from typing import TYPE_CHECKING

from rankscope.tracer.span import NS_PER_S, MonotonicNs

from ..clock.map import PPB, UNKNOWN_ERROR_NS, ClockMap, Stretch
from ..clock.probe import ProbeReply, parse_reply
from ..errors import ClockReplyError
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
"""Replies before the first estimate is used: 1.6 s, for an error of some 100 us. After a change of
the reference clock, so many are needed again."""

FIRST_WAIT_NS = 5 * NS_PER_S
"""Longest wait for these replies, in case the collector answers everything but probes."""

RENEWAL_AGES_NS = (15 * NS_PER_S, 60 * NS_PER_S, 180 * NS_PER_S)
RENEWAL_NS = 300 * NS_PER_S
LEAD_NS = NS_PER_S
"""A new stretch begins so far in the future, so that no time in it was sent yet."""

SLEW_NS = 10 * NS_PER_S
MAX_SLEW_PPB = 500_000
"""A difference above 5 ms is not a measurement error: the map steps instead of slewing."""

REPORT_PERIOD_NS = 60 * NS_PER_S

POLL_PERIOD_S = 0.02

PROBES_PER_FIT = 5

MAX_EVENTS = 64


class AgentClocks:
    """Maps of the clocks of hosts to Unix time, whose stretches are in the journal.

    The map of this host's boot follows the estimates: at `RENEWAL_AGES_NS` and then every
    `RENEWAL_NS` a new stretch begins where the old one ends, and slews to the estimate. Other
    hosts and earlier boots keep the offset of their first anchor.

    Args:
        own: Name and boot id of this host, as in spools.
        estimate: Returns the newest estimate of this host's clock.
        monotonic_ns: ``CLOCK_MONOTONIC`` of this host.
        watch: Returns the events of this host's clocks since the last call.
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
        self._first_call_ns: int | None = None
        self._renewals = list(RENEWAL_AGES_NS)
        self._started_ns = monotonic_ns()
        self._renewed_ns = self._started_ns
        self._reported_ns: int | None = None
        self._pending_rows: list[Row] = []
        for row in journal.clock_rows():
            stretch = Stretch(
                begin_ns=row["begin_ns"], offset_ns=row["offset_ns"], drift_ppb=row["drift_ppb"]
            )
            self._add((row["host"], row["boot_id"]), stretch)

    def clock_map(
        self, identity: SpoolIdentity, *, declared_error_ns: int = UNKNOWN_ERROR_NS
    ) -> ClockMap:
        """Return the map for the host and boot of a process; later stretches are added to it.

        Args:
            declared_error_ns: Error of its host's Unix time, if this is another host than ours.

        Raises:
            RetryLaterError: This host's clock is still being aligned.
        """
        key = storable_name(identity.host), identity.boot_id.hex()
        known = self._maps.get(key)
        if known is not None:
            return known
        estimate = self._first_estimate() if key == self._own else None
        if estimate is None:
            offset_ns = identity.anchor_unix_ns - identity.anchor_monotonic_ns
            stretch = Stretch(begin_ns=identity.anchor_monotonic_ns, offset_ns=offset_ns)
            error_ns = declared_error_ns
        else:
            now_ns = self._monotonic_ns()
            stretch = _along(estimate, now_ns)
            error_ns = estimate.error_ns(MonotonicNs(now_ns))
        self._record(key, stretch)
        self._report(key, stretch, at_ns=stretch.begin_ns, error_ns=error_ns)
        return self._maps[key]

    def renew(self) -> None:
        """Follow the newest estimate and report the error of the map, if either is due."""
        known, estimate = self._maps.get(self._own), self._estimate()
        if known is None or estimate is None:
            return
        now_ns = self._monotonic_ns()
        is_known = estimate.num_probes >= FIRST_PROBES
        if is_known and now_ns > known.newest.begin_ns and self._is_due(now_ns):
            for stretch in next_stretches(known, estimate, now_ns + LEAD_NS):
                self._record(self._own, stretch)
            self._renewed_ns = now_ns
            self._reported_ns = None
        if self._reported_ns is None or now_ns - self._reported_ns >= REPORT_PERIOD_NS:
            self._reported_ns = now_ns
            at = MonotonicNs(now_ns)
            error_ns = abs(known.unix_at(now_ns) - estimate.unix_ns(at)) + estimate.error_ns(at)
            self._report(self._own, known.newest, at_ns=now_ns, error_ns=error_ns)

    def unix_now(self) -> int:
        """Return the current Unix time by this host's map.

        The map is made with the first row of a run. Before that, the time is that of the newest
        estimate; without one, that of the wall clock.
        """
        known, now_ns = self._maps.get(self._own), self._monotonic_ns()
        if known is not None:
            return known.unix_at(now_ns)
        estimate = self._estimate()
        return time.time_ns() if estimate is None else estimate.unix_ns(MonotonicNs(now_ns))

    def take_events(self) -> list[tuple[int, ClockEvent]]:
        """Return the events of this host's clocks, each with its Unix time."""
        known = self._maps.get(self._own)
        found = self._watch()
        return [] if known is None else [(known.unix_at(event.at_ns), event) for event in found]

    def take_rows(self) -> list[Row]:
        """Return the rows of table ``clock`` that are not sent yet."""
        taken, self._pending_rows = self._pending_rows, []
        return taken

    def _first_estimate(self) -> ClockEstimate | None:
        """Return the first estimate that is good enough; None if there is none in time.

        Raises:
            RetryLaterError: The wait is not over.
        """
        now_ns = self._monotonic_ns()
        if self._first_call_ns is None:
            self._first_call_ns = now_ns
        found = self._estimate()
        has_waited = now_ns - self._first_call_ns >= FIRST_WAIT_NS
        if not has_waited and (found is None or found.num_probes < FIRST_PROBES):
            raise RetryLaterError(
                "this host's clock is being aligned", pause_s=0.1, is_run_only=True
            )
        return found

    def _is_due(self, now_ns: int) -> bool:
        if self._renewals and now_ns - self._started_ns >= self._renewals[0]:
            while self._renewals and now_ns - self._started_ns >= self._renewals[0]:
                del self._renewals[0]
            return True
        return now_ns - self._renewed_ns >= RENEWAL_NS

    def _record(self, key: tuple[str, str], stretch: Stretch) -> None:
        row = {
            "host": key[0],
            "boot_id": key[1],
            "begin_ns": stretch.begin_ns,
            "offset_ns": stretch.offset_ns,
            "drift_ppb": stretch.drift_ppb,
        }
        self._journal.add_clock(row)
        self._add(key, stretch)

    def _add(self, key: tuple[str, str], stretch: Stretch) -> None:
        known = self._maps.get(key)
        if known is None:
            self._maps[key] = ClockMap([stretch])
        else:
            known.add(stretch)

    def _report(self, key: tuple[str, str], stretch: Stretch, *, at_ns: int, error_ns: int) -> None:
        unix_ns = self._maps[key].unix_at(at_ns)
        self._pending_rows.append(
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
    """Return the stretches that bring a map to an estimate: a slew of `SLEW_NS`, or a step.

    Args:
        begin_ns: Monotonic time of the first change, later than all times mapped so far.
    """
    begin_unix_ns = known.unix_at(begin_ns)
    slew_end_ns = begin_ns + SLEW_NS
    along = _along(estimate, slew_end_ns)
    slewed_ns = slew_end_ns + along.offset_ns - begin_unix_ns
    drift_ppb = (slewed_ns - SLEW_NS) * PPB // SLEW_NS
    if abs(drift_ppb - estimate.fit.drift_ppb) > MAX_SLEW_PPB:
        return [_along(estimate, begin_ns)]
    slew = Stretch(begin_ns=begin_ns, offset_ns=begin_unix_ns - begin_ns, drift_ppb=drift_ppb)
    return [slew, along]


def _along(estimate: ClockEstimate, begin_ns: int) -> Stretch:
    offset_ns = estimate.unix_ns(MonotonicNs(begin_ns)) - begin_ns
    return Stretch(begin_ns=begin_ns, offset_ns=offset_ns, drift_ppb=estimate.fit.drift_ppb)


def exchange_over(link: Link) -> Callable[[], ProbeReply]:
    """Return a function that sends one probe and returns the reply, for `ClockSync`.

    It raises `OSError` if there is no reply and `ClockReplyError` if it is not valid.
    """

    def exchange() -> ProbeReply:
        try:
            answer = link.post("/v1/clock", b"", content_type="application/json")
        except RetryLaterError as error:
            raise OSError(error.reason) from error
        if answer.status != HTTPStatus.OK:
            raise OSError(f"the collector answers {answer.status}")
        try:
            return parse_reply(json.loads(answer.body))
        except (ValueError, RecursionError) as error:
            raise ClockReplyError("not JSON") from error

    return exchange


class ProbeThread:
    """Thread that probes the collector, so that no transfer delays a probe.

    Args:
        clock: Used by this thread only.
    """

    def __init__(self, clock: ClockSync) -> None:
        self._clock = clock
        self._latest: ClockEstimate | None = None
        self._events: deque[ClockEvent] = deque(maxlen=MAX_EVENTS)
        self._is_stopping = threading.Event()
        self._is_suspended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clock-probes", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, without waiting for a probe in progress."""
        self._is_stopping.set()

    def latest(self) -> ClockEstimate | None:
        """Return the newest estimate; None if there is none yet."""
        return self._latest

    def take_events(self) -> list[ClockEvent]:
        """Return the events that the probes showed since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def forget(self) -> None:
        """Drop all probes, because the host was suspended."""
        self._is_suspended.set()

    def _run(self) -> None:
        num_since = 0
        while not self._is_stopping.wait(POLL_PERIOD_S):
            if self._is_suspended.is_set():
                self._is_suspended.clear()
                self._clock.forget()
            if not self._clock.poll():
                continue
            num_since += 1
            # A fit of many probes takes some ms. With few probes each is fitted: if many agents
            # share a collector, five probes take seconds.
            num_probes = 0 if self._latest is None else self._latest.num_probes
            if num_since >= min(PROBES_PER_FIT, 1 + num_probes // 8):
                self._latest, num_since = self._clock.estimate(), 0
                self._events.extend(self._clock.take_events())
