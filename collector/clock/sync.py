"""Estimate of a host's clock relative to the collector's, kept up to date by probes."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rankscope.tracer.span import NS_PER_S, MonotonicNs, UnixNs

from ..errors import ClockReplyError
from .fit import MAX_DRIFT_PPB, ClockFit, fit_clock
from .map import PPB
from .probe import Probe, ProbeReply
from .watch import ClockEvent, ClockEventKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_EVENTS = 64

MAX_ASKED_NS = 60 * NS_PER_S
"""Longest pause that a collector's reply can impose."""

MAX_DOUBLINGS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeConfig:
    """Rate of probes, and the window in which they count.

    With 1 ms of jitter, an error of 50 us at the 99th percentile needs some 256 probes in the
    window. So the pause is the time since the first probe / ``first_probes``, between
    ``first_pause_ns`` and ``pause_ns``.
    """

    first_probes: int = 256
    first_pause_ns: int = NS_PER_S // 20
    change_pause_ns: int = NS_PER_S // 2
    """Least pause after the reference clock changed. All hosts see that at the same moment, and
    the collector has just started, so this is only twice the steady rate."""

    pause_ns: int = NS_PER_S
    window_ns: int = 600 * NS_PER_S
    max_probes: int = 1024

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockEstimate:
    """Offset of the reference from a host's monotonic clock, with its error."""

    fit: ClockFit
    reference_id: str
    delay_ns: int
    """Lowest delay of the probes in the window."""

    num_probes: int

    def unix_ns(self, at_ns: MonotonicNs) -> UnixNs:
        """Return a time of the host's clock as Unix time of the reference."""
        drifted_ns = (at_ns - self.fit.at_ns) * self.fit.drift_ppb // PPB
        return UnixNs(at_ns + self.fit.offset_ns + drifted_ns)

    def error_ns(self, at_ns: MonotonicNs) -> int:
        """Return the error bound of `unix_ns`: the fit's error plus the drift since."""
        age_ns = abs(at_ns - self.fit.at_ns)
        return self.fit.clock_error_ns + age_ns * self.fit.drift_error_ppb // PPB + 1


class ClockSync:
    """Probes the reference clock and estimates the offset of this host's clock.

    Args:
        exchange: Sends one probe to the collector and returns its reply. Raises `OSError` if no
            reply came in time, `ClockReplyError` if it is not valid.
    """

    def __init__(
        self,
        exchange: Callable[[], ProbeReply],
        *,
        monotonic_ns: Callable[[], int],
        config: ProbeConfig | None = None,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._exchange = exchange
        self._uniform = uniform
        self._monotonic_ns = monotonic_ns
        self._config = config or ProbeConfig()
        self._probes: deque[Probe] = deque(maxlen=self._config.max_probes)
        self._events: deque[ClockEvent] = deque(maxlen=MAX_EVENTS)
        self._reference_id: str | None = None
        self._fitted: ClockEstimate | None = None
        self._began_ns: int | None = None
        self._next_ns: int | None = None
        self._not_before_ns = 0
        self._num_failed_in_a_row = 0
        self._least_pause_ns = self._config.first_pause_ns
        self.num_failed = 0
        """Probes without a valid reply."""

    def poll(self) -> bool:
        """Probe if a probe is due; return whether a valid reply came."""
        now_ns = self._monotonic_ns()
        if now_ns < self._not_before_ns or (self._next_ns is not None and now_ns < self._next_ns):
            return False
        if self._began_ns is None:
            self._began_ns = now_ns
        pause_ns = (now_ns - self._began_ns) // self._config.first_probes
        pause_ns = min(max(pause_ns, self._least_pause_ns), self._config.pause_ns)
        self._next_ns = now_ns + pause_ns
        return self.probe()

    def probe(self) -> bool:
        """Probe once; return whether a valid reply came."""
        sent_ns = self._monotonic_ns()
        try:
            reply = self._exchange()
        except (OSError, ClockReplyError):
            self._failed()
            return False
        probe = Probe(
            sent_ns=MonotonicNs(sent_ns),
            received_ns=reply.received_ns,
            replied_ns=reply.replied_ns,
            returned_ns=MonotonicNs(self._monotonic_ns()),
        )
        trip_ns = probe.returned_ns - probe.sent_ns
        if probe.delay_ns + trip_ns * MAX_DRIFT_PPB // PPB < 0:
            # The collector reports a longer time than the whole exchange took.
            self._failed()
            return False
        self._num_failed_in_a_row = 0
        self._take(probe, reply.reference_id)
        self._not_before_ns = probe.returned_ns + min(reply.pause_ns, MAX_ASKED_NS)
        return True

    def forget(self) -> None:
        """Drop all probes, because the host was suspended and its monotonic clock stopped."""
        self._begin_window(None, self._config.first_pause_ns)

    def estimate(self) -> ClockEstimate | None:
        """Return the estimate from the probes in the window; None if there are none.

        Old probes that contradict the newest are dropped, and an event reports it.
        """
        if self._fitted is not None or not self._probes:
            return self._fitted
        probes = list(self._probes)
        fit = fit_clock(probes)
        if fit is None:
            probes, fit = newest_agreeing(probes)
            self._add_step_event(probes, fit)
            self._probes = deque(probes, maxlen=self._config.max_probes)
        assert self._reference_id is not None  # noqa: S101  # set with the first probe
        self._fitted = ClockEstimate(
            fit=fit,
            reference_id=self._reference_id,
            delay_ns=min(probe.delay_ns for probe in probes),
            num_probes=len(probes),
        )
        return self._fitted

    def take_events(self) -> tuple[ClockEvent, ...]:
        """Return the events since the last call, `MAX_EVENTS` at most."""
        taken = tuple(self._events)
        self._events.clear()
        return taken

    def _failed(self) -> None:
        """Set the pause after a failure: it doubles with each one in a row, with jitter."""
        self.num_failed += 1
        self._num_failed_in_a_row += 1
        doublings = min(self._num_failed_in_a_row, MAX_DOUBLINGS)
        pause_ns = min(self._config.first_pause_ns << doublings, self._config.pause_ns)
        jittered_ns = round(self._uniform(pause_ns / 2, pause_ns))
        self._not_before_ns = self._monotonic_ns() + jittered_ns

    def _begin_window(self, next_ns: int | None, least_pause_ns: int) -> None:
        self._probes.clear()
        self._fitted = None
        self._began_ns = None
        self._next_ns = next_ns
        self._least_pause_ns = least_pause_ns

    def _take(self, probe: Probe, reference_id: str) -> None:
        if self._reference_id not in {None, reference_id}:
            pause_ns = self._config.change_pause_ns
            self._begin_window(probe.returned_ns + pause_ns, pause_ns)
            self._add_event(
                ClockEventKind.REFERENCE_CHANGE,
                probe,
                None,
                f"the host's clock now follows collector clock {reference_id} instead of"
                f" {self._reference_id}",
            )
        self._reference_id = reference_id
        self._probes.append(probe)
        oldest_ns = probe.returned_ns - self._config.window_ns
        while self._probes[0].sent_ns < oldest_ns and len(self._probes) > 1:
            self._probes.popleft()
        self._fitted = None

    def _add_step_event(self, kept: Sequence[Probe], fit: ClockFit) -> None:
        before = fit_clock(list(self._probes)[: -len(kept)])
        shift_ns = None
        if before is not None:
            age_ns = fit.at_ns - before.at_ns
            shift_ns = fit.offset_ns - before.offset_ns - age_ns * before.drift_ppb // PPB
        by = "" if shift_ns is None else f" by about {shift_ns / NS_PER_S:.6f} s"
        self._add_event(
            ClockEventKind.OFFSET_STEP,
            kept[-1],
            shift_ns,
            f"the collector's clock stepped relative to this host's{by}: older probes are dropped",
        )

    def _add_event(
        self, kind: ClockEventKind, probe: Probe, shift_ns: int | None, text: str
    ) -> None:
        self._events.append(
            ClockEvent(kind=kind, at_ns=probe.returned_ns, shift_ns=shift_ns, text=text)
        )


def newest_agreeing(probes: Sequence[Probe]) -> tuple[list[Probe], ClockFit]:
    """Return the largest number of newest probes that one line fits, with the fit.

    Args:
        probes: The newest last.

    Raises:
        ValueError: No line fits even the newest probe.
    """
    fewest, most = 1, len(probes)
    while fewest < most:
        middle = (fewest + most + 1) // 2
        if fit_clock(probes[-middle:]) is None:
            most = middle - 1
        else:
            fewest = middle
    kept = list(probes[-fewest:])
    fit = fit_clock(kept)
    if fit is None:
        raise ValueError("no line fits the newest probe")
    return kept, fit
