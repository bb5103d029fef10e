"""Bursts: readings of one source every few milliseconds, for a few seconds, with their cost."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import NS_PER_MS
from rankscope.tracer.spool import open_regular_file

from ..errors import CollectorError
from .nic import NicSource
from .rdma import RdmaSource
from .sample import Sample
from .system import CpuSource, DiskSource

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .sample import Source

MIN_PERIOD_NS = 1 * NS_PER_MS
MAX_PERIOD_NS = 10 * NS_PER_MS
MAX_DURATION_NS = 10_000 * NS_PER_MS
MAX_SAMPLES = 1_000_000
"""Samples of one burst: about 150 MB."""

MAX_REQUEST_BYTES = 4_096
COST_NAME = "burst-cpu-ratio"
MISSED_NAME = "burst-num-missed"
DROPPED_NAME = "burst-num-dropped"

SOURCES: dict[str, Callable[[], Source]] = {
    "cpu": CpuSource,
    "disk": lambda: DiskSource([Path("/")]),
    "nic": NicSource,
    "rdma": RdmaSource,
}


class BurstError(CollectorError):
    """The period or the duration of a burst is out of range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Samples of one burst, and its cost."""

    samples: list[Sample]
    num_rounds: int
    """Readings taken."""

    num_missed: int
    """Readings skipped because the one before took longer than the period."""

    num_dropped: int
    """Samples beyond `MAX_SAMPLES`."""

    cpu_ns: int
    """CPU time of the burst's thread."""

    duration_ns: int

    @property
    def cpu_ratio(self) -> float:
        """Share of one CPU that the burst used."""
        return self.cpu_ns / self.duration_ns if self.duration_ns else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstClocks:
    """Clocks of a burst."""

    monotonic_ns: Callable[[], int] = field(default=time.monotonic_ns)
    """Clock of the schedule."""

    unix_ns: Callable[[], int] = field(default=time.time_ns)
    """Clock of the samples. It is read once, so that a step of it moves no sample."""

    cpu_ns: Callable[[], int] = field(default=time.thread_time_ns)
    """CPU time of this thread."""

    sleep: Callable[[float], None] = field(default=time.sleep)
    """Waits for some seconds."""


REAL_CLOCKS = BurstClocks()


def take_burst(
    source: Source, *, period_ns: int, duration_ns: int, clocks: BurstClocks = REAL_CLOCKS
) -> Burst:
    """Read a source every ``period_ns`` in this thread, and return all samples at the end.

    Readings keep to the grid of the period: a late one does not delay the next. Those that it
    overran are counted and skipped.

    Args:
        source: Source to read; no other thread may use it.
        period_ns: 1 to 10 ms.
        duration_ns: At most 10 s.
        clocks: Clocks of the burst.

    Raises:
        BurstError: The period or the duration is out of range.
        SourceAbsentError: The host does not have the source.
    """
    if not MIN_PERIOD_NS <= period_ns <= MAX_PERIOD_NS:
        raise BurstError(f"the period of a burst must be 1 to 10 ms, not {period_ns} ns")
    if not 0 < duration_ns <= MAX_DURATION_NS:
        raise BurstError(
            f"a burst lasts at most {MAX_DURATION_NS // NS_PER_MS} ms, not {duration_ns} ns"
        )
    monotonic_ns = clocks.monotonic_ns
    began_cpu_ns = clocks.cpu_ns()
    began_ns = monotonic_ns()
    offset_ns = clocks.unix_ns() - began_ns
    samples: list[Sample] = []
    num_rounds = num_missed = num_dropped = 0
    due_ns = began_ns
    while due_ns < began_ns + duration_ns:
        now_ns = monotonic_ns()
        if now_ns < due_ns:
            clocks.sleep((due_ns - now_ns) / 1e9)
            continue
        reading = source.read(now_ns + offset_ns)
        kept = reading[: MAX_SAMPLES - len(samples)]
        samples += kept
        num_dropped += len(reading) - len(kept)
        num_rounds += 1
        overrun = max(monotonic_ns() - due_ns, 0) // period_ns
        remaining = -(-(began_ns + duration_ns - due_ns) // period_ns) - 1
        num_missed += min(overrun, remaining)
        due_ns += (1 + overrun) * period_ns
    return Burst(
        samples=samples,
        num_rounds=num_rounds,
        num_missed=num_missed,
        num_dropped=num_dropped,
        cpu_ns=clocks.cpu_ns() - began_cpu_ns,
        duration_ns=monotonic_ns() - began_ns,
    )


class BurstRequestError(CollectorError):
    """The request of a burst is invalid."""


class BurstRequests:
    """Requests of bursts by a file ``burst.json``. Each burst runs in a thread, one at a time.

    Args:
        path: The file: ``{"source": "rdma", "period_ms": 2, "duration_ms": 1000}``. It is removed
            when its burst starts.
        sink: Takes the samples, and three more with the burst's cost and losses.
        say: Logs a line.
    """

    def __init__(
        self,
        path: Path,
        sink: Callable[[Sequence[Sample]], None],
        *,
        say: Callable[[str], None],
    ) -> None:
        self._path = path
        self._sink = sink
        self._say = say
        self._thread: threading.Thread | None = None

    def poll(self) -> None:
        """Start the requested burst, unless one is running. Never raises."""
        if self._thread is not None and self._thread.is_alive():
            return
        try:
            with os.fdopen(open_regular_file(self._path), "rb") as file:
                text = file.read(MAX_REQUEST_BYTES)
            self._path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            self._say(f"{self._path} cannot be read and removed ({error.strerror}): no burst")
            return
        self._thread = threading.Thread(target=self._run, args=(text,), name="burst", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of a running burst."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, text: bytes) -> None:
        try:
            name, period_ns, duration_ns = _parse_request(text)
            burst = take_burst(SOURCES[name](), period_ns=period_ns, duration_ns=duration_ns)
        except CollectorError as error:
            self._say(f"{self._path.name}: {error}")
            return
        at_ns = time.time_ns()
        cost = [
            Sample(at_ns, COST_NAME, burst.cpu_ratio),
            Sample(at_ns, MISSED_NAME, float(burst.num_missed)),
            Sample(at_ns, DROPPED_NAME, float(burst.num_dropped)),
        ]
        self._sink([*burst.samples, *cost])
        self._say(
            f"{self._path.name}: {burst.num_rounds} readings of {name}, {burst.num_missed} missed,"
            f" {100 * burst.cpu_ratio:.1f} % of a CPU"
        )


def _parse_request(text: bytes) -> tuple[str, int, int]:
    try:
        document: Any = json.loads(text)
        name = document["source"]
        times_ns = [round(document[key] * NS_PER_MS) for key in ("period_ms", "duration_ms")]
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        raise BurstRequestError(
            'invalid request: write {"source": ..., "period_ms": ..., "duration_ms": ...}'
        ) from None
    if name not in SOURCES:
        raise BurstRequestError(
            f"unknown source {str(name)[:40]!r}: give one of {', '.join(SOURCES)}"
        )
    return name, times_ns[0], times_ns[1]
