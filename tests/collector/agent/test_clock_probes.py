from __future__ import annotations

import threading
import time

from rankscope.collector.agent.clock_probes import ProbeThread
from rankscope.collector.clock.probe import ProbeReply
from rankscope.collector.clock.sync import HostClock, ProbeConfig
from rankscope.tracer.span import UnixNs
from tests.support.tracer.recording import wait_until


def test_what_the_first_probes_say_is_known_at_once() -> None:
    # GIVEN a collector that answers two probes, and then stands
    answers = iter(range(2))
    is_over = threading.Event()

    def exchange() -> ProbeReply:
        if next(answers, None) is None:
            is_over.wait()
            raise ConnectionResetError
        at = UnixNs(time.monotonic_ns())
        return ProbeReply(reference_id="r", received_ns=at, replied_ns=at)

    config = ProbeConfig(first_pause_ns=1, pause_ns=1)
    probes = ProbeThread(HostClock(exchange, monotonic_ns=time.monotonic_ns, config=config))
    probes.start()

    # THEN both count, though a third never comes
    def is_known() -> bool:
        latest = probes.latest()
        return latest is not None and latest.num_probes == 2

    try:
        wait_until(is_known)
    finally:
        probes.stop()
        is_over.set()
