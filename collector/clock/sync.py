"""Keep a host's clock tied to the collector's, with an error bound, from one probe to the next."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import NS_PER_S, MonotonicNs, UnixNs

from ..errors import ClockReplyError
from ..names import storable_name
from .fit import MAX_DRIFT_PPB, ClockFit, fit_clock
from .map import PPB
from .probe import Probe, ProbeReply
from .watch import ClockEvent, ClockEventKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_EVENTS = 64

MAX_ASKED_NS = 60 * NS_PER_S
"""A collector that asks to be left alone for longer is asked after so long all the same."""

MAX_DOUBLINGS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeConfig:
    """How often to probe, and how long a probe counts.

    Jitter of 1 ms needs some 256 probes over the time that is fitted for 50 us at the 99th
    percentile. So the pause grows with the time probed, from ``first_pause_ns`` to
    ``pause_ns``: at each age a share of 1 / ``first_probes`` of it.
    """

    first_probes: int = 256
    first_pause_ns: int = NS_PER_S // 20
    change_pause_ns: int = NS_PER_S // 2
    """Least pause once another collector's clock answers: all hosts see that at one moment, and
    that collector has just started. Twice the steady rate; the map goes on meanwhile."""

    pause_ns: int = NS_PER_S
    window_ns: int = 600 * NS_PER_S
    max_probes: int = 1024

    def __post_init__(self) -> None:
        for name in (
            "first_probes",
            "first_pause_ns",
            "change_pause_ns",
            "pause_ns",
            "window_ns",
            "max_probes",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockEstimate:
    """How a host's monotonic clock stands to Unix time on the reference, and how sure that is."""

    fit: ClockFit
    reference_id: str
    delay_ns: int
    """Lowest round trip among the probes that count."""

    num_probes: int

    def unix_ns(self, at_ns: MonotonicNs) -> UnixNs:
        """Return a moment of the host's clock as Unix time on the reference."""
        drifted_ns = (at_ns - self.fit.at_ns) * self.fit.drift_ppb // PPB
        return UnixNs(at_ns + self.fit.offset_ns + drifted_ns)

    def error_ns(self, at_ns: MonotonicNs) -> int:
        """Return how far `unix_ns` may be off: the fit's error and what its age adds."""
        age_ns = abs(at_ns - self.fit.at_ns)
        return self.fit.clock_error_ns + age_ns * self.fit.drift_error_ppb // PPB + 1

    def row(self, host: str, boot_id: str, *, at_ns: MonotonicNs) -> dict[str, Any]:
        """Return the row of ``clock`` that goes with a batch.

        Args:
            host: Name of the host.
            boot_id: Its boot, in hex.
            at_ns: Moment of the batch that is farthest from the fit.
        """
        unix_ns = self.unix_ns(at_ns)
        return {
            "host": storable_name(host),
            "boot_id": boot_id,
            "at_ns": unix_ns,
            "offset_ns": unix_ns - at_ns,
            "drift_ppb": self.fit.drift_ppb,
            "clock_error_ns": self.error_ns(at_ns),
        }


class ClockSync:
    """Probes the reference and keeps what the probes of the last minutes allow.

    Args:
        exchange: Sends one probe to the collector and returns its reply. Raises `OSError`
            where none came in time, `ClockReplyError` where it is none.
        monotonic_ns: ``CLOCK_MONOTONIC`` of this host.
        config: How often, how long.
        uniform: Draws a number between two bounds.
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
        """Probes without a reply that could be used."""

    def poll(self) -> bool:
        """Probe if it is time to; return whether a usable reply came."""
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
        """Probe once; return whether a usable reply came."""
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
            # The collector took longer to answer than the whole exchange: no clock does that.
            self._failed()
            return False
        self._num_failed_in_a_row = 0
        self._take(probe, reply.reference_id)
        self._not_before_ns = probe.returned_ns + min(reply.pause_ns, MAX_ASKED_NS)
        return True

    def forget(self) -> None:
        """Begin anew: the host was suspended, so its clock stood still for a while."""
        self._begin_window(None, self._config.first_pause_ns)

    def estimate(self) -> ClockEstimate | None:
        """Return what the probes say; None before the first, and after `forget` until the next.

        Old probes that the newest contradict are left out for good, and an event tells it.
        """
        if self._fitted is None and self._probes:
            self._fitted = self._fit()
        return self._fitted

    def take_events(self) -> tuple[ClockEvent, ...]:
        """Return what happened since the last call; the last `MAX_EVENTS` of it."""
        taken = tuple(self._events)
        self._events.clear()
        return taken

    def _failed(self) -> None:
        """Wait for longer after each failure in a row, and not for as long as all others."""
        self.num_failed += 1
        self._num_failed_in_a_row += 1
        doublings = min(self._num_failed_in_a_row, MAX_DOUBLINGS)
        pause_ns = min(self._config.first_pause_ns << doublings, self._config.pause_ns)
        drawn_ns = round(self._uniform(pause_ns / 2, pause_ns))
        self._not_before_ns = self._monotonic_ns() + drawn_ns

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
            self._note(
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

    def _fit(self) -> ClockEstimate:
        probes = list(self._probes)
        fit = fit_clock(probes)
        if fit is None:
            probes, fit = newest_agreeing(probes)
            self._tell_step(probes, fit)
            self._probes = deque(probes, maxlen=self._config.max_probes)
        assert self._reference_id is not None  # noqa: S101  # set with the first probe
        return ClockEstimate(
            fit=fit,
            reference_id=self._reference_id,
            delay_ns=min(probe.delay_ns for probe in probes),
            num_probes=len(probes),
        )

    def _tell_step(self, kept: Sequence[Probe], fit: ClockFit) -> None:
        before = fit_clock(list(self._probes)[: -len(kept)])
        shift_ns = None
        if before is not None:
            age_ns = fit.at_ns - before.at_ns
            shift_ns = fit.offset_ns - before.offset_ns - age_ns * before.drift_ppb // PPB
        by = "" if shift_ns is None else f" by about {shift_ns / NS_PER_S:.6f} s"
        self._note(
            ClockEventKind.OFFSET_STEP,
            kept[-1],
            shift_ns,
            f"the collector's clock stepped against this host's{by}: older probes are left out",
        )

    def _note(self, kind: ClockEventKind, probe: Probe, shift_ns: int | None, text: str) -> None:
        self._events.append(
            ClockEvent(kind=kind, at_ns=probe.returned_ns, shift_ns=shift_ns, text=text)
        )


def newest_agreeing(probes: Sequence[Probe]) -> tuple[list[Probe], ClockFit]:
    """Return the longest run of newest probes that one line fits, with its fit.

    Args:
        probes: The newest last; a line fits this one alone.
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
        raise ValueError("no line fits the newest probe alone")
    return kept, fit
