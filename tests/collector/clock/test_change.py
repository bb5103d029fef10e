"""Another collector's clock answers, as after a restart: all hosts see it at the same moment."""

from __future__ import annotations

from rankscope.collector.clock.probe import ProbeReply
from rankscope.collector.clock.sync import HostClock
from rankscope.tracer.span import UnixNs

MS, S = 1_000_000, 1_000_000_000
TURN_NS = 10 * MS
STEADY_NS = 300 * S


class Host:
    """A host whose probes come back at once from whichever collector stands there."""

    def __init__(self) -> None:
        self.now_ns = 5 * S
        self.reference_id = "first"
        self.clock = HostClock(self._exchange, monotonic_ns=lambda: self.now_ns)

    def run(self, for_ns: int) -> list[int]:
        """Return when it probed."""
        sent_ns = []
        end_ns = self.now_ns + for_ns
        while self.now_ns < end_ns:
            if self.clock.poll():
                sent_ns.append(self.now_ns)
            self.now_ns += TURN_NS
        return sent_ns

    def _exchange(self) -> ProbeReply:
        at = UnixNs(self.now_ns)
        return ProbeReply(reference_id=self.reference_id, received_ns=at, replied_ns=at)


def test_a_collector_that_was_restarted_is_probed_at_most_twice_as_often_as_before() -> None:
    # GIVEN a host that has come to one probe a second
    host = Host()
    host.run(STEADY_NS)
    assert len(host.run(10 * S)) == 10

    # WHEN its collector is restarted
    host.reference_id = "second"
    sent_ns = host.run(20 * S)

    # THEN no second sees more than two probes, and the window is as full as ever after two minutes
    assert 38 <= len(sent_ns) <= 40
    for begin_ns in sent_ns:
        assert sum(begin_ns <= at_ns < begin_ns + S for at_ns in sent_ns) <= 2
    host.run(110 * S)
    found = host.clock.estimate()
    assert found is not None
    assert found.reference_id == "second"
    assert 250 <= found.num_probes <= 260

    # AND it comes back to one a second
    host.run(130 * S)
    assert len(host.run(10 * S)) == 10


def test_a_host_that_was_suspended_alone_probes_as_often_as_at_its_start() -> None:
    host = Host()
    host.run(STEADY_NS)
    host.reference_id = "second"
    host.run(STEADY_NS)

    host.clock.forget()

    assert len(host.run(S)) == 20
