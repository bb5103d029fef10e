"""Agent process: send the records of this host's ranks to a collector."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import BadInputError
from ..extras import installed_version
from ..terminal.lines import say
from .signals import stop_event

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rankscope.collector.agent.agent import NodeAgent
    from rankscope.collector.agent.clock import AgentClocks, ProbeThread
    from rankscope.collector.agent.journal import Journal
    from rankscope.collector.agent.link import Link

    from .loops import Loop

DRAIN_S = 3.0
"""Time for the current requests after a stop signal."""

CLOSE_S = 2.0
"""Time for the agent's thread to end after its connection was closed."""

SIGNAL_POLL_S = 0.5
LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """Flags of `rankscope agent`."""

    spool: Path
    collectors: tuple[str, ...]
    state: Path | None = None
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    samples: bool = True
    kernel_log: Path | None = None
    """None: the kernel's own."""

    logs: tuple[str, ...] = ()
    """Patterns of the paths of the ranks' logs."""

    max_spool_bytes: int | None = None


def run_agent(options: AgentOptions) -> None:
    """Send records until SIGINT or SIGTERM, then end within seconds.

    Raises:
        BadInputError: Another agent uses the state folder, or it cannot be written.
        AgentConfigError: An address, a certificate or the state folder cannot be used.
        TokenFileError: The token cannot be read.
        JournalError: The journal cannot be opened.
    """
    from rankscope.collector.agent.link import Link, TlsFiles
    from rankscope.collector.http.tokens import read_client_token

    from ..memory import use_one_allocator
    from .loops import memory_loop

    use_one_allocator()
    if read_client_token() is None:
        say("no token: the collector will refuse all requests. Set RANKSCOPE_TOKEN_FILE")
    tls = TlsFiles(ca=options.ca, certificate=options.certificate, key=options.key)
    name = f"{socket.gethostname()}/{installed_version()}"
    with ExitStack() as stack:
        stopping = stack.enter_context(stop_event())
        state = _state_folder(options)
        say(f"state in {state}")
        stack.enter_context(_locked(state))
        link = Link(options.collectors, agent=name, tls=tls)
        probe_link = Link(options.collectors, agent=name, tls=tls)
        stack.callback(link.close)
        stack.callback(probe_link.close)
        journal = _open_journal(state, stack)
        clocks, probes = _open_clocks(probe_link, journal)
        agent = _assemble(options, state, link=link, journal=journal, clocks=clocks)
        sample_loops = _sample_loops(options, agent, clocks, stack, link=link)
        loops = [memory_loop(), *sample_loops]
        probes.start()
        stack.callback(probes.stop)
        for loop in loops:
            loop.start()
            stack.callback(loop.stop)
        later = "" if options.spool.is_dir() else ", which does not exist yet,"
        say(f"sending {options.spool}{later} to {options.collectors[0]}")
        _run_until(stopping, agent, link)


def _run_until(stopping: threading.Event, agent: NodeAgent, link: Link) -> None:
    """Run the agent in a thread, so that a signal ends it whatever it waits for."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            agent.run(stopping)
        except BaseException as error:  # noqa: BLE001  # raised again below
            failure.append(error)
            stopping.set()

    thread = threading.Thread(target=run, name="agent", daemon=True)
    thread.start()
    # The kernel may deliver a signal to another thread. Python runs the handler in this thread
    # only, and only when it is awake: without a timeout it would sleep forever.
    while not stopping.wait(SIGNAL_POLL_S):
        pass
    thread.join(DRAIN_S)
    link.close()
    thread.join(CLOSE_S)
    if failure:
        raise failure[0]
    say("stopped. The next start sends again what the collector has not acknowledged")


def _assemble(
    options: AgentOptions, state: Path, *, link: Link, journal: Journal, clocks: AgentClocks
) -> NodeAgent:
    from rankscope.collector.agent.agent import NodeAgent, ranks_in
    from rankscope.collector.agent.outbox import DeadLetters, Outbox
    from rankscope.collector.agent.quota import SpoolQuota
    from rankscope.collector.agent.retry import Delivery

    dead_letters = DeadLetters(state / "dead")
    outbox = Outbox(
        link,
        journal,
        delivery=Delivery(),
        dead_letters=dead_letters,
        say=say,
        find_ranks=lambda run_id: ranks_in(options.spool, run_id),
    )
    limit = options.max_spool_bytes
    quota = None if limit is None else SpoolQuota(options.spool, limit, journal)
    return NodeAgent(options.spool, outbox, clocks, say=say, quota=quota)


def _open_clocks(link: Link, journal: Journal) -> tuple[AgentClocks, ProbeThread]:
    from time import monotonic_ns

    from rankscope.collector.agent.clock import AgentClocks, ProbeThread, exchange_over
    from rankscope.collector.clock.sync import ClockSync
    from rankscope.collector.clock.watch import ClockEvent, ClockEventKind, ClockWatch
    from rankscope.collector.spool.liveness import boot_id

    probes = ProbeThread(ClockSync(exchange_over(link), monotonic_ns=monotonic_ns))
    clock_watch = ClockWatch()

    def watch() -> list[ClockEvent]:
        found = clock_watch.poll()
        if any(event.kind is ClockEventKind.SUSPEND for event in found):
            probes.forget()
        return [*found, *probes.take_events()]

    clocks = AgentClocks(
        journal,
        own=(socket.gethostname(), boot_id()),
        estimate=probes.latest,
        monotonic_ns=monotonic_ns,
        watch=watch,
    )
    return clocks, probes


def _sample_loops(
    options: AgentOptions,
    agent: NodeAgent,
    clocks: AgentClocks,
    stack: ExitStack,
    *,
    link: Link,
) -> list[Loop]:
    if not options.samples:
        return []
    from rankscope.collector.agent.outbox import RunRowSender
    from rankscope.collector.host.host_events import HostEventRows
    from rankscope.collector.host.kernel_log import KERNEL_LOG
    from rankscope.collector.read.host_checks import TABLE

    from .host_sampling import HostSampling

    sampling = HostSampling(
        options.spool,
        kernel_log=options.kernel_log or KERNEL_LOG,
        rank_logs=options.logs,
        unix_ns=clocks.unix_now,
    )
    stack.callback(sampling.close)
    agent.send_rows("samples", sampling.samples)
    events = HostEventRows(socket.gethostname(), unix_ns=clocks.unix_now)
    agent.send_host_events(sampling.events, events)
    beats = RunRowSender(link, say=say, on_answer=sampling.watch.take_answer)
    agent.send_heartbeats(sampling.heartbeats, beats)
    agent.send_with(sampling.checks, RunRowSender(link, say=say, table=TABLE))
    return [*sampling.loops]


def _open_journal(state: Path, stack: ExitStack) -> Journal:
    from rankscope.collector.agent.journal import Journal

    journal = Journal(state)
    stack.callback(journal.close)
    if journal.num_damaged:
        say(f"{state / 'journal'}: skipped {journal.num_damaged} damaged lines")
    if journal.damaged is not None:
        say(
            f"{journal.path} was damaged and was moved to {journal.damaged}:"
            " the collector is asked which rows it has"
        )
    return journal


def _state_folder(options: AgentOptions) -> Path:
    from rankscope.collector.agent.state_folder import (
        FORMER_FOLDER,
        default_state_folder,
        open_state_folder,
    )

    state = options.state or default_state_folder(options.spool, os.environ)
    open_state_folder(state)
    former = options.spool / FORMER_FOLDER
    if options.state is None and os.path.lexists(former):
        say(
            f"{former} is the state of an earlier release and is not used, since other users may"
            " write to the spool: the collector is asked which rows it has. Delete the folder when"
            " its dead letters are no longer needed"
        )
    return state


@contextmanager
def _locked(state: Path) -> Iterator[None]:
    """Lock the state folder: two agents would send the same rows in different cuts.

    Raises:
        BadInputError: Another agent holds the lock, or the folder cannot be written.
    """
    try:
        descriptor = os.open(state / "lock", LOCK_FLAGS, 0o600)
    except OSError as error:
        raise BadInputError(f"--state {state} cannot be written ({error.strerror})") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInputError(f"another agent uses --state {state}: stop it first") from None
        yield
    finally:
        os.close(descriptor)
