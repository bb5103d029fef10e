"""Take bursts of readings that somebody on this host asks for by a file."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.tracer.spool import open_spool_file

from ..errors import CollectorError
from ..host.bursts import Burst, take_burst
from ..host.cpu import CpuSource
from ..host.disk import DiskSource
from ..host.nic import NicSource
from ..host.rdma import RdmaSource
from ..host.sample import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..host.sample import Source

MS = 1_000_000
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


class BurstRequestError(CollectorError):
    """A file asks for a burst in another form than there is."""


class BurstDesk:
    """Looks for ``burst.json`` and takes what it asks for in a thread, one burst at a time.

    Args:
        path: ``{"source": "rdma", "period_ms": 2, "duration_ms": 1000}``; it is removed when it
            is taken.
        sink: Takes the samples, and three more that say what the burst cost and left out.
        say: Tells a line.
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

    def look(self) -> None:
        """Begin the burst that is asked for, unless one is under way. Never raises."""
        if self._thread is not None and self._thread.is_alive():
            return
        try:
            with os.fdopen(open_spool_file(self._path), "rb") as file:
                text = file.read(MAX_REQUEST_BYTES)
            self._path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            self._say(f"{self._path} can't be read and removed ({error.strerror}): no burst")
            return
        self._thread = threading.Thread(target=self._take, args=(text,), name="burst", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the burst under way is over."""
        if self._thread is not None:
            self._thread.join()

    def _take(self, text: bytes) -> None:
        try:
            name, period_ns, duration_ns = _request(text)
            burst = take_burst(SOURCES[name](), period_ns=period_ns, duration_ns=duration_ns)
        except CollectorError as error:
            self._say(f"{self._path.name}: {error}")
            return
        self._sink([*burst.samples, *_account(burst, time.time_ns())])
        self._say(
            f"{self._path.name}: {burst.num_rounds} readings of {name}, {burst.num_missed} missed,"
            f" {100 * burst.cpu_ratio:.1f} % of a processor"
        )


def _request(text: bytes) -> tuple[str, int, int]:
    try:
        document: Any = json.loads(text)
        name = document["source"]
        times_ns = [round(document[key] * MS) for key in ("period_ms", "duration_ms")]
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        raise BurstRequestError(
            'asks for no burst: write {"source": ..., "period_ms": ..., "duration_ms": ...}'
        ) from None
    if name not in SOURCES:
        raise BurstRequestError(f"asks for {str(name)[:40]!r}: there are {', '.join(SOURCES)}")
    return name, times_ns[0], times_ns[1]


def _account(burst: Burst, at_ns: int) -> list[Sample]:
    return [
        Sample(at_ns, COST_NAME, burst.cpu_ratio),
        Sample(at_ns, MISSED_NAME, float(burst.num_missed)),
        Sample(at_ns, DROPPED_NAME, float(burst.num_dropped)),
    ]
