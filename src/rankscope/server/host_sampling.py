"""Samples, heartbeats, lines of logs and examinations of this host, read beside its spool."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

from rankscope.collector.agent.buffer import RowBuffer
from rankscope.collector.host.heartbeat import MAX_HEARTBEATS, heartbeat_sink
from rankscope.collector.host.host_events import HostEventQueue
from rankscope.collector.host.kernel_log import KERNEL_LOG
from rankscope.collector.host.sampler import Sampler, buffer_sink, host_sources
from rankscope.collector.read.host_checks import TABLE

from ..terminal.lines import say
from .host_watch import URGENCY, HostWatch
from .loops import Loop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rankscope.collector.host.heartbeat import Heartbeat
    from rankscope.collector.identity import Row

ROWS_PER_CALL = 10_000


class HostSampling:
    """Reads this host once a second and examines it on occasions; the rows wait in buffers.

    Args:
        spool: Folder of the ranks' records.
        rank_logs: Patterns of the paths of the ranks' logs.
        occasions: Occasions on which the host is examined.
        is_wanted: Returns whether an examination is wanted because of a finding.
        unix_ns: Clock of the rows.
    """

    def __init__(  # effects come in here
        self,
        spool: Path,
        *,
        kernel_log: Path = KERNEL_LOG,
        rank_logs: Sequence[str] = (),
        occasions: Sequence[str] = URGENCY,
        is_wanted: Callable[[], bool] = lambda: False,
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.samples = RowBuffer()
        self.heartbeats = RowBuffer(MAX_HEARTBEATS)
        self.checks = RowBuffer(MAX_HEARTBEATS)
        self.events = HostEventQueue()
        """What the logs of the host say."""

        self.watch = HostWatch(
            self.checks.add,
            spool=spool,
            occasions=occasions,
            is_wanted=is_wanted,
            unix_ns=unix_ns,
            say=say,
        )
        take_beats = heartbeat_sink(self.heartbeats.add)

        def take(found: Sequence[Heartbeat]) -> None:
            take_beats(found)
            self.watch.take(found)

        sources = host_sources(
            spool,
            on_heartbeats=take,
            on_events=self.events.add,
            kernel_log=kernel_log,
            rank_logs=rank_logs,
        )
        sink = buffer_sink(self.samples.add, host=socket.gethostname())
        self.sampler = Sampler(sources, sink, unix_ns=unix_ns, say=say)
        """Its readings go into the buffers."""

        self.loops = (Loop("sampler", self.sampler.turn), Loop("host-checks", self.watch.turn))
        """The loops that read and examine."""

    def store(
        self,
        upsert: Callable[[str, Sequence[Row]], None],
        *,
        placed: Callable[[Sequence[Row]], Sequence[Row]],
    ) -> None:
        """Store the rows of the buffers; those on which ``upsert`` raises stay.

        Args:
            upsert: Stores rows of a table.
            placed: Returns heartbeats with run and epoch as stored (`SpoolTail.placed_heartbeats`).
        """
        for table, buffer in (
            ("samples", self.samples),
            ("heartbeats", self.heartbeats),
            (TABLE, self.checks),
        ):

            def send(rows: Sequence[Row], table: str = table) -> None:
                kept = placed(rows) if table == "heartbeats" else rows
                if kept:
                    upsert(table, kept)

            buffer.send(send, rows_per_call=ROWS_PER_CALL)

    def close(self) -> None:
        """End the threads of the sources."""
        self.sampler.close()
