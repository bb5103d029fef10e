"""Read every source once a second, whatever one of them does."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..names import storable_name
from ..read.samples import sample_rows, write_samples
from .dcgm import DcgmSource
from .gpu import GpuSource
from .heartbeat import HeartbeatSource
from .nic import NicSource
from .rdma import RdmaSource
from .sample import Sample, SourceAbsentError
from .system import CpuSource, DiskSource, MemorySource, ProcessSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..identity import Row
    from ..store.store import Store
    from .heartbeat import Heartbeat
    from .sample import Source


TIMEOUT_S = 0.5
"""How long one round waits for its slowest source."""

MAX_SAMPLES = 4096
"""Of one source in one round: 64 ports of 64 counters."""

ABSENT_ROUNDS = 60
"""Rounds until a source that was absent is asked again."""

COST_NAME = "sampler-cpu-ns"


@dataclass(slots=True)
class SourceAccount:
    """What became of one source's readings so far."""

    num_rounds: int = 0
    """Readings that came in time."""

    num_failed: int = 0
    """Readings that raised."""

    num_late: int = 0
    """Rounds in which the source did not answer in time, or was still at an earlier one."""

    num_dropped: int = 0
    """Samples that were beyond `MAX_SAMPLES` or no finite number."""

    is_absent: bool = False
    """Whether the host does not have it."""

    cpu_ns: int = 0
    """Processor time of its readings."""


class Sampler:
    """Reads sources in a thread each, and hands on what came in time.

    A source that raises, hangs or floods costs its own samples and no other's.
    There is never more than one thread and one unfinished reading a source, so
    the memory is bounded.

    Args:
        sources: What to read; each is this sampler's alone.
        sink: Takes the samples of each round. What it raises is counted and told, and the
            round's samples are lost.
        unix_ns: Clock that the samples bear: one time a round.
        say: Told one plain line when a source, or the sink, first fails in a new way.
        timeout_s: How long a round waits for its sources, all together.
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
        self._told: dict[str, str] = {}
        self.num_lost = 0
        """Samples that the sink did not take."""

    @property
    def accounts(self) -> dict[str, SourceAccount]:
        """What became of each source's readings, by its name."""
        return {worker.source.name: worker.account for worker in self._workers}

    @property
    def cpu_ns(self) -> int:
        """Processor time of all finished readings so far."""
        return sum(worker.account.cpu_ns for worker in self._workers)

    def turn(self) -> None:
        """Read every source once, and hand on what came in time. Never raises."""
        at_ns = self._unix_ns()
        deadline_s = time.monotonic() + self._timeout_s
        asked = [worker for worker in self._workers if worker.ask(at_ns)]
        found: list[Sample] = []
        for worker in self._workers:
            account = worker.account
            if worker in asked:
                worker.wait(deadline_s - time.monotonic())
            elif account.is_absent:
                continue
            found += worker.take()
            self._tell(worker.source.name, worker.trouble)
        found.append(Sample(at_ns, COST_NAME, float(self.cpu_ns)))
        self._hand_on(found)

    def close(self) -> None:
        """End the threads of the sources that are not in a reading; the others die with us."""
        for worker in self._workers:
            worker.close()

    def _hand_on(self, found: Sequence[Sample]) -> None:
        try:
            self._sink(found)
        except Exception as error:  # noqa: BLE001  # the next round may succeed
            self.num_lost += len(found)
            self._tell("samples", f"samples can't be stored: {error}")
        else:
            self._told.pop("samples", None)

    def _tell(self, name: str, trouble: str | None) -> None:
        if trouble is not None and self._told.get(name) != trouble:
            self._told[name] = trouble
            self._say(trouble)


class _Worker:
    """One source and the thread that reads it, which starts with the first reading."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.account = SourceAccount()
        self.trouble: str | None = None
        """Why the last reading brought nothing; None when it did."""

        self._changed = threading.Condition()
        self._asked_ns: int | None = None
        self._is_busy = False
        self._is_closing = False
        self._outcome: list[Sample] | Exception | None = None
        self._cpu_ns = 0
        self._rounds_to_skip = 0
        self._thread: threading.Thread | None = None

    def ask(self, at_ns: int) -> bool:
        """Begin a reading; return whether one was begun."""
        if self._rounds_to_skip:
            self._rounds_to_skip -= 1
            return False
        with self._changed:
            if self._is_busy:
                return False
            self._outcome = None  # one that came too late
            self._is_busy = True
            self._asked_ns = at_ns
            self._changed.notify_all()
        if self._thread is None:
            name = f"sample-{self.source.name}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        return True

    def wait(self, timeout_s: float) -> None:
        """Wait until the reading is done, or the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_busy, timeout=max(timeout_s, 0.0))

    def take(self) -> list[Sample]:
        """Return what the reading brought, and note in the account what became of it."""
        with self._changed:
            is_busy, outcome, self._outcome = self._is_busy, self._outcome, None
            self.account.cpu_ns = self._cpu_ns
        account, name = self.account, self.source.name
        account.is_absent = isinstance(outcome, SourceAbsentError)
        if is_busy or outcome is None:
            account.num_late += 1
            self.trouble = f"{name}: did not answer in time: no samples of it until it does"
            return []
        if isinstance(outcome, SourceAbsentError):
            self._rounds_to_skip = ABSENT_ROUNDS - 1
            self.trouble = str(outcome)
            return []
        if isinstance(outcome, Exception):
            account.num_failed += 1
            self.trouble = f"{name}: {type(outcome).__name__}: {outcome}: no samples of it"
            return []
        account.num_rounds += 1
        self.trouble = None
        kept = [sample for sample in outcome[:MAX_SAMPLES] if math.isfinite(sample.value)]
        account.num_dropped += len(outcome) - len(kept)
        return kept

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked_ns is not None or self._is_closing)
                at_ns, self._asked_ns = self._asked_ns, None
            if at_ns is None:
                return
            outcome: list[Sample] | Exception
            try:
                outcome = self.source.read(at_ns)
            except Exception as error:  # noqa: BLE001  # another's reading must go on
                outcome = error
            with self._changed:
                self._outcome = outcome
                self._is_busy = False
                self._cpu_ns = time.thread_time_ns()
                self._changed.notify_all()


NO_RUN = ""
"""Whatever runs on the host reads them: see `collector.read.samples.read_samples`."""


def store_sink(store: Store, *, host: str) -> Callable[[Sequence[Sample]], None]:
    """Return what writes samples into ``store``; it raises `StoreError` where it can't.

    Args:
        store: The open store.
        host: As the spool's headers call it.
    """
    stored_host = storable_name(host)

    def write(samples: Sequence[Sample]) -> None:
        rows = sample_rows(
            NO_RUN,
            host=[stored_host] * len(samples),
            device=np.array([sample.device for sample in samples], dtype=np.int32),
            at_ns=np.array([sample.at_ns for sample in samples], dtype=np.int64),
            name=[storable_name(sample.name) for sample in samples],
            value=np.array([sample.value for sample in samples], dtype=np.float64),
        )
        write_samples(store, rows)

    return write


def buffer_sink(
    add: Callable[[Sequence[Row]], None], *, host: str
) -> Callable[[Sequence[Sample]], None]:
    """Return what hands samples on to ``add`` as rows of table ``samples``.

    Args:
        add: Takes rows; it must not wait for anybody.
        host: As the spool's headers call it.
    """
    told_host = storable_name(host)

    def write(samples: Sequence[Sample]) -> None:
        add(
            [
                {
                    "run_id": NO_RUN,
                    "host": told_host,
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
    dcgm_url: str | None = None,
    on_heartbeats: Callable[[Sequence[Heartbeat]], None] = lambda _beats: None,
) -> list[Source]:
    """Return everything that this host can be asked once a second.

    Args:
        spool: Where its ranks write: heartbeats and local ranks come from there.
        dcgm_url: Ask this exporter of the devices, and not the driver.
        on_heartbeats: Takes the heartbeats of each second.

    Raises:
        DcgmError: The exporter's address is none.
    """
    rdma = RdmaSource()
    heartbeat = HeartbeatSource(spool, sink=on_heartbeats, traffic_bytes=rdma.traffic_bytes)
    devices: Source = (
        GpuSource(local_rank_of=heartbeat.local_rank_of_device)
        if dcgm_url is None
        else DcgmSource(dcgm_url, local_rank_of=heartbeat.local_rank_of_device)
    )
    folders = [Path("/")] + ([spool] if spool.is_dir() else [])
    return [
        heartbeat,
        CpuSource(),
        ProcessSource(local_rank_of=heartbeat.local_rank_of_process),
        MemorySource(),
        DiskSource(folders),
        NicSource(),
        rdma,
        devices,
    ]
