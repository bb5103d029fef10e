"""A real agent with a fake collector and, if a test asks for it, a faulty journal."""

from __future__ import annotations

import random
import socket
import sqlite3
import time
from functools import partial
from typing import TYPE_CHECKING, Literal

from rankscope.collector.agent.agent import NodeAgent, ranks_in
from rankscope.collector.agent.clock import AgentClocks
from rankscope.collector.agent.journal import Journal
from rankscope.collector.agent.link import Deadlines, Link
from rankscope.collector.agent.outbox import DeadLetters, Outbox
from rankscope.collector.agent.quota import SpoolQuota
from rankscope.collector.agent.retry import Delivery
from rankscope.collector.identity import segment_id
from rankscope.collector.spool.liveness import boot_id
from tests.faults.checker import check, content_hash, key_of
from tests.support.collector.fake_collector import TOKEN
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

    from rankscope.collector.clock.watch import ClockEvent
    from tests.faults.checker import Oracle
    from tests.support.collector.fake_collector import Stored

WAIT_S = 60.0
LONG = Deadlines(connect_s=30, stall_s=30, answer_s=30)
SHORT = Deadlines(connect_s=0.3, stall_s=0.3, answer_s=0.3)


class Pauses:
    """A clock of the agent's pauses that skips them."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


OPEN_RIGS: list[Rig] = []
"""Those that a failed test left open; a fixture closes them."""


def state_of(spool: Path) -> Path:
    """Return the state folder of the agent of a spool."""
    return spool.with_name(f"{spool.name}-state")


class Rig:
    """The parts of one agent process.

    Args:
        spool: Its spool; the state folder is beside it.
        url: Address of the collector, or several.
        connect: Opens the journal's database.
        max_spool_bytes: Quota of the spool; None: no quota.
        environment: Variables that name the token.
        deadlines: Timeouts of the parts of an exchange.
        own: Name and boot id of its host.
        watch: Returns the events of its clocks.
    """

    def __init__(
        self,
        spool: Path,
        url: str | Sequence[str],
        *,
        connect: Callable[..., sqlite3.Connection] = sqlite3.connect,
        max_spool_bytes: int | None = None,
        environment: dict[str, str] | None = None,
        deadlines: Deadlines = LONG,
        own: tuple[str, bytes] | None = None,
        watch: Callable[[], Sequence[ClockEvent]] = tuple,
    ) -> None:
        self.lines: list[str] = []
        self.pauses = Pauses()
        self.state = state_of(spool)
        self.state.mkdir(parents=True, exist_ok=True)
        held = {"RANKSCOPE_TOKEN": TOKEN} if environment is None else environment
        urls = [url] if isinstance(url, str) else url
        self.link = Link(urls, agent="test/0", environment=held, deadlines=deadlines)
        self.journal = Journal(self.state, connect=connect)
        self.outbox = Outbox(
            self.link,
            self.journal,
            delivery=Delivery(pause=lambda _s: None),
            dead_letters=DeadLetters(self.state / "dead"),
            say=self.lines.append,
            find_ranks=lambda run_id: ranks_in(spool, run_id),
        )
        clocks = AgentClocks(
            self.journal,
            own=own or (socket.gethostname(), boot_id()),
            estimate=lambda: None,
            monotonic_ns=lambda: round(self.pauses() * 1e9),
            watch=watch,
        )
        quota = None
        if max_spool_bytes is not None:
            quota = SpoolQuota(spool, max_spool_bytes, self.journal, monotonic_s=self.pauses)
        self.agent = NodeAgent(
            spool, self.outbox, clocks, say=self.lines.append, quota=quota, monotonic_s=self.pauses
        )
        OPEN_RIGS.append(self)

    def turn(self) -> float:
        """Take a turn, and skip the pause after it."""
        pause_s = self.agent.turn()
        self.pauses.now_s += pause_s
        return pause_s

    def turn_until(self, is_done: Callable[[], bool]) -> None:
        """Take turns until ``is_done`` returns True; fail if it does not in time."""
        deadline_s = time.monotonic() + WAIT_S
        while not is_done():
            assert time.monotonic() < deadline_s, self.lines
            self.turn()

    def shorten_deadlines(self, deadlines: Deadlines = SHORT) -> None:
        """Use short deadlines from now on. Earlier, a slow machine would look like a fault."""
        self.link._deadlines = deadlines
        self.link._answer_s = deadlines.answer_s

    def close(self) -> None:
        """End as a killed process does, without a message to the collector."""
        self.agent.close()
        self.journal.close()
        self.link.close()
        if self in OPEN_RIGS:
            OPEN_RIGS.remove(self)


class FaultyConnection(sqlite3.Connection):
    """A database whose commits call `fault`, before and after; what it raises is raised."""

    fault: Callable[[], None]

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        if exc_type is None:
            try:
                self.fault()
            except BaseException:
                self.rollback()
                raise
        super().__exit__(exc_type, exc, traceback)
        if exc_type is None:
            self.fault()
        return False


def faulty(fault: Callable[[], None]) -> Callable[..., sqlite3.Connection]:
    """Return what opens a database whose commits call ``fault``, before and after."""
    factory = type("Faulty", (FaultyConnection,), {"fault": staticmethod(fault)})
    return partial(sqlite3.connect, factory=factory)


def write_spans(
    builder: SpoolBuilder, oracle: Oracle, num_spans: int, *, chooser: random.Random | None = None
) -> None:
    """Write spans of one process and record each in the oracle."""
    chooser = chooser or random.Random(0)
    for _ in range(num_spans):
        if builder.next_row == builder.capacity:
            builder.seal()
            builder.new_segment()
        number = int(builder.segment.stem.removeprefix("seg-"))
        name, step = f"op-{chooser.randrange(50)}", chooser.randrange(5)
        duration_ns = chooser.randrange(1, 10**6)
        run_id, epoch, rank = builder.identity
        segment = segment_id(builder.process.hex, number)
        oracle.attempt(
            key_of(run_id, epoch, rank, segment, builder.next_row),
            content_hash(name, step, duration_ns),
        )
        builder.span(name, step=step, start_ns=5_000, duration_ns=duration_ns)


def write_ended(
    spool: Path, oracle: Oracle, num_spans: int, *, run_id: str = "run", rank: int = 0
) -> None:
    """Write spans of a process that has ended."""
    builder = SpoolBuilder(spool, run_id=run_id, rank=rank)
    write_spans(builder, oracle, num_spans)
    builder.end()


def any_unanswered(rig: Rig) -> bool:
    return bool(rig.journal.unanswered("run"))


def any_settled(rig: Rig) -> bool:
    return bool(rig.journal.end_rows("run"))


def assert_clean(tmp_path: Path, stored: Stored, **account: int) -> None:
    verdict = check(tmp_path / "oracle", stored.rows, **account)
    assert verdict.is_clean, verdict
