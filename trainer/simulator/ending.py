"""Crash and hang: the end of a run in which one rank stops first and the others follow."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import SpanFlag

from ..faults.spec import HANG_CAUSES, CrashKind
from .chance import Purpose, stream
from .tables import Event

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..faults.spec import Fault
    from .cluster import Cluster
    from .recorder import SpanColumns

MIN_CASCADE_NS, MAX_CASCADE_NS = 1_000_000_000, 10_000_000_000
"""Delay until another rank fails after the first one crashed."""

SILENCE_NS = 60_000_000_000
"""Time from the start of a hang to the last heartbeat of the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The exception that ended a process."""

    type: str
    message: str


FAILURES = {
    CrashKind.CUDA_OOM: Failure(
        type="torch.OutOfMemoryError",
        message="CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"
        " 79.10 GiB of which 1.21 GiB is free.",
    ),
    CrashKind.HOST_OOM: Failure(
        type="RuntimeError",
        message="DataLoader worker (pid 4711) is killed by signal: Killed. Out of memory.",
    ),
    CrashKind.XID: Failure(
        type="torch.AcceleratorError",
        message="CUDA error: uncorrectable ECC error encountered (NVRM: Xid 48)",
    ),
    CrashKind.EXCEPTION: Failure(
        type="ValueError", message="loss is nan in micro-batch 3: stopping this rank"
    ),
}
CASCADE = Failure(
    type="torch.distributed.DistBackendError",
    message="NCCL error: remote process exited or there was a network error",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The crash or hang that ended a run."""

    fault: Fault
    last_seen: NDArray[np.int64]
    """Shape (ranks,): when each rank was last seen, true ns from the start of the run."""

    @property
    def is_hang(self) -> bool:
        """True for a hang, False for a crash."""
        return self.fault.cause in HANG_CAUSES


def ending_of(cluster: Cluster, fault: Fault, *, stopped_at: int) -> Ending:
    """Return the ending after one rank stopped at ``stopped_at``."""
    num_ranks = cluster.scenario.world_size
    if fault.cause in HANG_CAUSES:
        last_seen = np.full(num_ranks, stopped_at + SILENCE_NS)
    else:
        rng = stream(cluster.scenario.seed, Purpose.ENDING)
        last_seen = stopped_at + rng.integers(MIN_CASCADE_NS, MAX_CASCADE_NS, num_ranks)
        last_seen[fault.ranks[0]] = stopped_at
    return Ending(fault=fault, last_seen=last_seen)


def cut_off(spans: SpanColumns, ending: Ending) -> SpanColumns:
    """Return the spans that were recorded before each rank was last seen.

    A span that had not ended by then is open in a hang, and ended by an exception in a crash.
    """
    spans = spans.rows(spans.start < ending.last_seen[spans.rank])
    last = ending.last_seen[spans.rank]
    cut = spans.end > last
    flag = SpanFlag.OPEN if ending.is_hang else SpanFlag.ERROR
    return replace(
        spans,
        end=np.minimum(spans.end, last),
        launch=np.minimum(spans.launch, last),
        flags=np.where(cut, spans.flags | int(flag), spans.flags).astype(np.uint16),
    )


def exit_events(ending: Ending, at_ns: NDArray[np.int64]) -> tuple[Event, ...]:
    """Return the exit event of each process, by its time on its own clock; none in a hang."""
    if ending.is_hang:
        return ()
    order = np.argsort(ending.last_seen, kind="stable")
    return tuple(_exit_event(ending, rank, int(at_ns[rank])) for rank in order.tolist())


def _exit_event(ending: Ending, rank: int, at_ns: int) -> Event:
    is_first = rank == ending.fault.ranks[0]
    failure = FAILURES[ending.fault.crash_kind] if is_first else CASCADE
    exception = {
        "type": failure.type,
        "message": failure.message,
        "traceback": f"Traceback (most recent call last):\n  {failure.type}: {failure.message}\n",
    }
    return Event(
        rank=rank,
        at_ns=at_ns,
        kind="exit",
        text=f"{failure.type}: {failure.message}",
        data=json.dumps({"state": "failed", "exception": exception}),
    )
