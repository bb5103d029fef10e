"""Fake network between a host and a collector, for tests of the host's clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.collector.clock.probe import Probe, ProbeReply
from rankscope.collector.clock.sync import ClockSync, ProbeConfig
from rankscope.tracer.span import MonotonicNs, UnixNs

if TYPE_CHECKING:
    from collections.abc import Callable

US = 1_000
MS = 1_000_000
S = 1_000_000_000
UNIX_NS = 1_700_000_000 * S
START_NS = 5_000 * S
Delays = tuple[float, float]


@dataclass(kw_only=True)
class FakeNetwork:
    """A host, a collector and their network; time passes in an exchange and in `run` only."""

    delays: Callable[[], Delays]
    offset_ns: int = UNIX_NS
    drift_ppb: int = 0
    now_ns: int = START_NS
    reference_id: str = "first"
    broken: bool = False
    turn_ns: int = 20 * US
    pause_ns: int = 0

    def clock(self) -> int:
        return self.now_ns

    def true_offset_ns(self, at_ns: int) -> int:
        return self.offset_ns + (at_ns - START_NS) * self.drift_ppb // S

    def exchange(self) -> ProbeReply:
        if self.broken:
            raise ConnectionRefusedError
        there_ns, back_ns = self.delays()
        self.now_ns += round(there_ns)
        received_ns = self.now_ns + self.true_offset_ns(self.now_ns)
        self.now_ns += self.turn_ns
        replied_ns = self.now_ns + self.true_offset_ns(self.now_ns)
        self.now_ns += round(back_ns)
        return ProbeReply(
            reference_id=self.reference_id,
            received_ns=UnixNs(received_ns),
            replied_ns=UnixNs(replied_ns),
            pause_ns=self.pause_ns,
        )

    def run(self, clock: ClockSync, *, for_ns: int, poll_ns: int = 50 * MS) -> list[int]:
        """Poll the clock for a time; return the times of the probes."""
        sent_ns: list[int] = []
        end_ns = self.now_ns + for_ns
        while self.now_ns < end_ns:
            at_ns = self.now_ns
            if clock.poll():
                sent_ns.append(at_ns)
            self.now_ns += poll_ns
        return sent_ns


def steady() -> Delays:
    return 100 * US, 100 * US


def host_clock(network: FakeNetwork, config: ProbeConfig | None = None) -> ClockSync:
    return ClockSync(network.exchange, monotonic_ns=network.clock, config=config)


def probe_at(at_ns: int, *, offset_ns: int, there_ns: int, back_ns: int, turn_ns: int = 0) -> Probe:
    """Return a probe of a reference that is ``offset_ns`` ahead and does not drift."""
    received_ns = at_ns + there_ns + offset_ns
    return Probe(
        sent_ns=MonotonicNs(at_ns),
        received_ns=UnixNs(received_ns),
        replied_ns=UnixNs(received_ns + turn_ns),
        returned_ns=MonotonicNs(at_ns + there_ns + turn_ns + back_ns),
    )
