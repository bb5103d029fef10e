"""Sampler: reads all sources of a host once a second, and passes the samples on.

A source that fails, hangs or returns too much affects no other source.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
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

STUCK_SHARE = 0.2
"""Share of that time after which another thread reads the sources behind a slow one."""

MAX_SAMPLES = 4096
"""Samples of one source in one round: 64 ports of 64 counters."""

ABSENT_ROUNDS = 60
"""Rounds until an absent source is tried again."""

COST_NAME = "sampler-cpu-ns"
FAILED_NAME, LOST_NAME = "sampler-failed-readings", "sampler-lost-samples"

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
    """Reads the sources one after the other in a thread, and passes on what is complete in time.

    A source that takes longer than `STUCK_SHARE` keeps that thread, and another one reads the rest.
    A source has at most one unfinished reading, so threads and memory are bounded.

    Args:
        sources: Sources in the order of their readings, used by this sampler alone.
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
        self._readings = [_Reading(source) for source in sources]
        self._readers = _Readers(timeout_s)
        self._sink = sink
        self._unix_ns = unix_ns
        self._say = say
        self._reported: dict[str, str] = {}
        self._num_lost = 0  # samples for which the sink raised

    @property
    def stats(self) -> dict[str, SourceStats]:
        """Results of the readings by name of the source."""
        return {reading.source.name: reading.stats for reading in self._readings}

    @property
    def cpu_ns(self) -> int:
        """CPU time of all finished readings so far."""
        return sum(reading.stats.cpu_ns for reading in self._readings)

    def turn(self) -> None:
        """Read each source once, and pass the samples on. Never raises."""
        at_ns = self._unix_ns()
        due = [reading for reading in self._readings if reading.is_due()]
        self._readers.read(due, at_ns)
        found: list[Sample] = []
        for reading in due:
            found += reading.take()
            self._report(reading.source.name, reading.problem)
        try:
            self._sink([*found, Sample(at_ns, COST_NAME, float(self.cpu_ns)), *self._losses(at_ns)])
        except Exception as error:  # noqa: BLE001  # the next round may succeed
            self._num_lost += len(found)
            self._report("samples", f"samples cannot be stored: {error}")
        else:
            self._reported.pop("samples", None)

    def _losses(self, at_ns: int) -> list[Sample]:
        """Return the counters of what was lost so far, of the sources that lost something."""
        stats = self.stats
        failed = {name: of.num_failed + of.num_late for name, of in stats.items()}
        num_lost = self._num_lost + sum(of.num_dropped for of in stats.values())
        lost = [Sample(at_ns, f"{FAILED_NAME}:{name}", float(n)) for name, n in failed.items() if n]
        return lost + ([Sample(at_ns, LOST_NAME, float(num_lost))] if num_lost else [])

    def close(self) -> None:
        """End the idle thread. Threads in a reading end with the process."""
        self._readers.close()

    def _report(self, name: str, problem: str | None) -> None:
        if problem is not None and self._reported.get(name) != problem:
            self._reported[name] = problem
            self._say(problem)


class _Reading:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.stats = SourceStats()
        self.problem: str | None = None
        """Reason why the last reading returned no samples; None if it did."""

        self.is_busy = False
        """Whether a thread reads it, or is to read it in this round."""

        self.outcome: list[Sample] | Exception | None = None
        """What the reading of this round returned or raised; None: nothing yet."""

        self._rounds_to_skip = 0

    def is_due(self) -> bool:
        """Return whether it belongs to this round: an absent source is left out of some."""
        self._rounds_to_skip -= 1
        return self._rounds_to_skip < 0

    def read(self, at_ns: int) -> list[Sample] | Exception:
        """Read the source; return the samples, or what it raised."""
        begun_ns = time.thread_time_ns()
        try:
            return self.source.read(at_ns)
        except Exception as error:  # noqa: BLE001  # other sources must go on
            return error
        finally:
            self.stats.cpu_ns += time.thread_time_ns() - begun_ns

    def take(self) -> list[Sample]:
        """Return the samples of this round, and count its result."""
        outcome, self.outcome = self.outcome, None
        stats, name = self.stats, self.source.name
        stats.is_absent = isinstance(outcome, SourceAbsentError)
        self._rounds_to_skip = 0
        if outcome is None:
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


class _Readers:
    """Threads that read sources: one, and another one for each that is stuck in a reading.

    One thread a source, all woken in each round, take 1.5 times the CPU time of one for all.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        lock = threading.Lock()
        self._has_work, self._has_ended = threading.Condition(lock), threading.Condition(lock)
        self._queue: deque[_Reading] = deque()
        self._round: list[_Reading] = []
        self._at_ns = 0
        self._num_rounds = self._num_ended = 0
        self._num_free = 0
        """Threads that read nothing, also those that have not begun to run."""

        self._is_closing = False

    def read(self, readings: Iterable[_Reading], at_ns: int) -> None:
        """Read sources, except those that are still being read, until the time is over."""
        deadline_s = time.monotonic() + self._timeout_s
        with self._has_work:
            self._at_ns, self._num_rounds = at_ns, self._num_rounds + 1
            self._round = [reading for reading in readings if not reading.is_busy]
            self._queue.extend(self._round)
            for reading in self._round:
                reading.is_busy = True
            self._has_work.notify()
            num_ended = self._num_ended
            while not self._is_complete() and (left_s := deadline_s - time.monotonic()) > 0:
                if self._queue and not self._num_free and self._num_ended == num_ended:
                    self._num_free += 1
                    threading.Thread(target=self._run, name="sampler", daemon=True).start()
                num_ended = self._num_ended
                pause_s = min(left_s, STUCK_SHARE * self._timeout_s)
                self._has_ended.wait_for(self._is_complete, timeout=pause_s)
            for reading in self._queue:
                reading.is_busy = False
            self._queue.clear()

    def close(self) -> None:
        with self._has_work:
            self._is_closing = True
            self._has_work.notify_all()

    def _is_complete(self) -> bool:
        return not any(reading.is_busy for reading in self._round)

    def _run(self) -> None:
        while (work := self._next()) is not None:
            reading, at_ns, number = work
            outcome = reading.read(at_ns)
            with self._has_ended:
                reading.is_busy = False
                self._num_free += 1
                self._num_ended += 1
                if number == self._num_rounds:  # else it is late
                    reading.outcome = outcome
                if self._is_complete():
                    self._has_ended.notify()

    def _next(self) -> tuple[_Reading, int, int] | None:
        """Wait for a source to read: with the time and number of the round; None: end the thread.

        One thread waits. Those that were stuck end.
        """
        with self._has_work:
            if self._num_free == 1:
                self._has_work.wait_for(lambda: self._queue or self._is_closing)
            self._num_free -= 1
            if self._is_closing or not self._queue:
                return None
            return self._queue.popleft(), self._at_ns, self._num_rounds


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
        on_events: Takes what the kernel's log and the ranks' logs say, from several threads.
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
