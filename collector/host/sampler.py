"""Sampler: reads all sources of a host once a second, and passes the samples on.

A source that fails, hangs or returns too much affects no other source.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..names import storable_name
from .gpu import GpuSource
from .heartbeat import HeartbeatSource
from .kernel_log import KERNEL_LOG, KernelLogSource
from .nic import NicSource
from .rank_logs import RankLogSource
from .rdma import RdmaSource
from .sample import Sample, SourceAbsentError
from .system import CpuSource, DiskSource, MemorySource, PressureSource, ProcessSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..identity import Row
    from .heartbeat import Heartbeat
    from .host_events import HostEvent
    from .sample import Source


TIMEOUT_S = 0.5
"""Time for which a round waits for its sources."""

MAX_SAMPLES = 4096
"""Samples of one source in one round: 64 ports of 64 counters."""

ABSENT_ROUNDS = 60
"""Rounds until an absent source is tried again."""

COST_NAME = "sampler-cpu-ns"

NO_RUN = ""
"""Run of the samples of a host: all runs on the host use them (`read.samples.read_samples`)."""


@dataclass(slots=True)
class SourceStats:
    """Results of one source's readings so far."""

    num_rounds: int = 0
    """Readings that were complete in time."""

    num_failed: int = 0
    """Readings that raised."""

    num_late: int = 0
    """Rounds in which the source was late, or still busy with an earlier reading."""

    num_dropped: int = 0
    """Samples beyond `MAX_SAMPLES`, or that are not finite."""

    is_absent: bool = False
    """Whether the host does not have the source."""

    cpu_ns: int = 0
    """CPU time of its readings."""


class Sampler:
    """Reads each source in its own thread, and passes on the samples that are complete in time.

    A source has at most one thread and one unfinished reading, so the memory is bounded.

    Args:
        sources: Sources, used by this sampler alone.
        sink: Takes the samples of each round. If it raises, the samples are lost and counted.
        unix_ns: Clock of the samples, read once a round.
        say: Logs one line when a source or the sink fails in a new way.
        timeout_s: Time for which a round waits for all sources together.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        sink: Callable[[Sequence[Sample]], None],
        *,
        unix_ns: Callable[[], int] = time.time_ns,
        say: Callable[[str], None] = lambda _line: None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._workers = [_Worker(source) for source in sources]
        self._sink = sink
        self._unix_ns = unix_ns
        self._say = say
        self._timeout_s = timeout_s
        self._reported: dict[str, str] = {}
        self.num_lost = 0
        """Samples for which the sink raised."""

    @property
    def stats(self) -> dict[str, SourceStats]:
        """Results of the readings by name of the source."""
        return {worker.source.name: worker.stats for worker in self._workers}

    @property
    def cpu_ns(self) -> int:
        """CPU time of all finished readings so far."""
        return sum(worker.stats.cpu_ns for worker in self._workers)

    def turn(self) -> None:
        """Read each source once, and pass the samples on. Never raises."""
        at_ns = self._unix_ns()
        deadline_s = time.monotonic() + self._timeout_s
        started = [worker for worker in self._workers if worker.start(at_ns)]
        found: list[Sample] = []
        for worker in self._workers:
            stats = worker.stats
            if worker in started:
                worker.wait(deadline_s - time.monotonic())
            elif stats.is_absent:
                continue
            found += worker.take()
            self._report(worker.source.name, worker.problem)
        found.append(Sample(at_ns, COST_NAME, float(self.cpu_ns)))
        self._send(found)

    def close(self) -> None:
        """End the threads of idle sources. Threads in a reading end with the process."""
        for worker in self._workers:
            worker.close()

    def _send(self, found: Sequence[Sample]) -> None:
        try:
            self._sink(found)
        except Exception as error:  # noqa: BLE001  # the next round may succeed
            self.num_lost += len(found)
            self._report("samples", f"samples cannot be stored: {error}")
        else:
            self._reported.pop("samples", None)

    def _report(self, name: str, problem: str | None) -> None:
        if problem is not None and self._reported.get(name) != problem:
            self._reported[name] = problem
            self._say(problem)


class _Worker:
    """One source and its thread, which starts with the first reading."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.stats = SourceStats()
        self.problem: str | None = None
        """Reason why the last reading returned no samples; None if it did."""

        self._changed = threading.Condition()
        self._requested_ns: int | None = None
        self._is_busy = False
        self._is_closing = False
        self._outcome: list[Sample] | Exception | None = None
        self._cpu_ns = 0
        self._rounds_to_skip = 0
        self._thread: threading.Thread | None = None

    def start(self, at_ns: int) -> bool:
        """Start a reading; return whether one was started."""
        if self._rounds_to_skip:
            self._rounds_to_skip -= 1
            return False
        with self._changed:
            if self._is_busy:
                return False
            self._outcome = None  # a late one
            self._is_busy = True
            self._requested_ns = at_ns
            self._changed.notify_all()
        if self._thread is None:
            name = f"sample-{self.source.name}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        return True

    def wait(self, timeout_s: float) -> None:
        """Wait until the reading has ended, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_busy, timeout=max(timeout_s, 0.0))

    def take(self) -> list[Sample]:
        """Return the samples of the reading, and count its result."""
        with self._changed:
            is_busy, outcome, self._outcome = self._is_busy, self._outcome, None
            self.stats.cpu_ns = self._cpu_ns
        stats, name = self.stats, self.source.name
        stats.is_absent = isinstance(outcome, SourceAbsentError)
        if is_busy or outcome is None:
            stats.num_late += 1
            self.problem = f"{name}: timeout: no samples of it until it answers"
            return []
        if isinstance(outcome, SourceAbsentError):
            self._rounds_to_skip = ABSENT_ROUNDS - 1
            self.problem = str(outcome)
            return []
        if isinstance(outcome, Exception):
            stats.num_failed += 1
            self.problem = f"{name}: {type(outcome).__name__}: {outcome}: no samples of it"
            return []
        stats.num_rounds += 1
        self.problem = None
        kept = [sample for sample in outcome[:MAX_SAMPLES] if math.isfinite(sample.value)]
        stats.num_dropped += len(outcome) - len(kept)
        return kept

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._requested_ns is not None or self._is_closing)
                at_ns, self._requested_ns = self._requested_ns, None
            if at_ns is None:
                return
            outcome: list[Sample] | Exception
            try:
                outcome = self.source.read(at_ns)
            except Exception as error:  # noqa: BLE001  # other sources must go on
                outcome = error
            with self._changed:
                self._outcome = outcome
                self._is_busy = False
                self._cpu_ns = time.thread_time_ns()
                self._changed.notify_all()


def buffer_sink(
    add: Callable[[Sequence[Row]], None], *, host: str
) -> Callable[[Sequence[Sample]], None]:
    """Return a function that passes samples on as rows of table ``samples``.

    Args:
        add: Takes rows. It must not block.
        host: Host name, as in the headers of the spool.
    """
    stored_host = storable_name(host)

    def write(samples: Sequence[Sample]) -> None:
        add(
            [
                {
                    "run_id": NO_RUN,
                    "host": stored_host,
                    "device": sample.device,
                    "at_ns": sample.at_ns,
                    "name": storable_name(sample.name),
                    "value": sample.value,
                }
                for sample in samples
            ]
        )

    return write


def host_sources(
    spool: Path,
    *,
    on_heartbeats: Callable[[Sequence[Heartbeat]], None] = lambda _beats: None,
    on_events: Callable[[Iterable[HostEvent]], None] = lambda _events: None,
    kernel_log: Path = KERNEL_LOG,
    rank_logs: Sequence[str] = (),
) -> list[Source]:
    """Return all sources of this host.

    Args:
        spool: Folder into which the ranks write: the source of heartbeats and local ranks.
        on_heartbeats: Takes the heartbeats of each second.
        on_events: Takes what the kernel's log and the ranks' logs say, from several threads.
        kernel_log: The kernel's log.
        rank_logs: Patterns of the paths of the ranks' logs.
    """
    rdma = RdmaSource()
    heartbeat = HeartbeatSource(spool, sink=on_heartbeats, traffic_bytes=rdma.traffic_bytes)
    folders = [Path("/")] + ([spool] if spool.is_dir() else [])
    processes = ProcessSource(local_rank_of=heartbeat.local_rank_of_process)
    gpu = GpuSource(local_rank_of=heartbeat.local_rank_of_device)
    return [
        heartbeat,
        CpuSource(),
        processes,
        PressureSource(),
        MemorySource(),
        DiskSource(folders),
        NicSource(),
        rdma,
        gpu,
        KernelLogSource(
            on_events,
            path=kernel_log,
            local_rank_of_pci=gpu.local_rank_of_pci,
            local_rank_of_process=processes.local_rank_of_process,
        ),
        *([RankLogSource(rank_logs, on_events)] if rank_logs else []),
    ]
