"""Agents of several hosts in one process: ``python -m tests.faults.many_agents URL FOLDER FIRST
NUM``.

Each has the parts of `rankscope agent --no-samples`: a spool, a journal, a connection and a clock.
Ends with SIGTERM.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING

from rankscope.collector.agent.agent import NodeAgent, ranks_in
from rankscope.collector.agent.clock import AgentClocks, ProbeThread, exchange_over
from rankscope.collector.agent.journal import Journal
from rankscope.collector.agent.link import Link
from rankscope.collector.agent.outbox import DeadLetters, Outbox
from rankscope.collector.agent.retry import Delivery
from rankscope.collector.clock.sync import ClockSync, ProbeConfig
from rankscope.collector.spool.liveness import boot_id

if TYPE_CHECKING:
    from collections.abc import Sequence

SOON_STEADY = ProbeConfig(first_probes=4)
"""Makes an agent probe once per second when it is 4 s old, instead of 256 s."""


def spool_of(folder: Path, number: int) -> Path:
    """Return the spool of a host."""
    return folder / f"host-{number:03d}"


def start_agent(
    url: str, folder: Path, number: int, *, stack: ExitStack, probing: ProbeConfig
) -> NodeAgent:
    """Return an agent with running probes; ``stack`` ends it."""
    spool = spool_of(folder, number)
    state = spool.with_name(f"{spool.name}-state")
    state.mkdir(parents=True, exist_ok=True)
    name = f"host-{number:03d}/test"

    def say(line: str) -> None:
        sys.stderr.write(f"{name}: {line}\n")

    link, probe_link = Link([url], agent=name), Link([url], agent=name)
    journal = Journal(state)
    probes = ProbeThread(
        ClockSync(exchange_over(probe_link), monotonic_ns=monotonic_ns, config=probing)
    )
    clocks = AgentClocks(
        journal,
        own=(socket.gethostname(), boot_id()),
        estimate=probes.latest,
        monotonic_ns=monotonic_ns,
        watch=probes.take_events,
    )
    outbox = Outbox(
        link,
        journal,
        delivery=Delivery(),
        dead_letters=DeadLetters(state / "dead"),
        say=say,
        find_ranks=lambda run_id: ranks_in(spool, run_id),
    )
    probes.start()
    for end in (journal.close, probe_link.close, link.close, probes.stop):
        stack.callback(end)
    return NodeAgent(spool, outbox, clocks, say=say)


def main(arguments: Sequence[str]) -> None:
    """Send until SIGTERM."""
    url, folder, first, num = arguments[0], Path(arguments[1]), int(arguments[2]), int(arguments[3])
    probing = SOON_STEADY if "--soon-steady" in arguments else ProbeConfig()
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    with ExitStack() as stack:
        agents = [
            start_agent(url, folder, number, stack=stack, probing=probing)
            for number in range(first, first + num)
        ]
        threads = [threading.Thread(target=agent.run, args=(stopping,)) for agent in agents]
        for thread in threads:
            thread.start()
        while not stopping.wait(0.5):  # The handler runs in this thread, and not during a sleep.
            pass
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main(sys.argv[1:])
