"""What a traced run's graph and waits are built from: spans on one line, waits joined to their
communications.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.distinct import number_rows
from analysis.intervals import NOWHERE, Line, covering, outermost
from analysis.operations import latest_by_group
from analysis.ordering import places_of, stable_order
from analysis.pieces import COMPUTE_KINDS, Windows, windows_of
from analysis.waits import instance_keys, is_one_sided
from tracer.span import KIND_CODES, NONE, SpanFlag, SpanKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from analysis.source import SpanTable, StepTable
    from analysis.waits import WaitSplit

WAIT = KIND_CODES[SpanKind.WAIT]
LAUNCH_SLACK_NS = 1_000
"""What two clock reads on one host take, with room to spare."""

_COMPUTE = [KIND_CODES[kind] for kind in COMPUTE_KINDS]

_OF_DEVICE = SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN | SpanFlag.END_BOUND
"""One of these is set in whatever was timed on a device, if only roughly."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Communications of the steps that take part, and the waits for them."""

    spans: SpanTable
    line: Line
    windows: Windows
    split: WaitSplit
    comm: NDArray[np.int64]
    """Rows of the communications that take part."""

    comm_window: NDArray[np.int64]
    launch: NDArray[np.int64]
    """Shape (communications,): where on the line each was launched. A launch within
    `LAUNCH_SLACK_NS` of a border of the compute around it counts as there: nothing is computed in
    between, and alike steps look alike."""

    buffered: NDArray[np.bool_]
    """Shape (communications,): sends that had ended before their receive began."""

    one_sided: NDArray[np.bool_]
    """Shape (communications,): `is_one_sided`."""

    wait: NDArray[np.int64]
    """Rows that say where a rank was blocked: wait records, and synchronous communications
    that have none."""

    wait_comm: NDArray[np.int64]
    """Shape (wait rows,): index into ``comm`` of what was waited for, or `NOWHERE`."""

    @property
    def waits_for_nobody(self) -> NDArray[np.bool_]:
        """Tell buffered sends, and members of rooted collectives that left before others entered.

        Shape (communications,).
        """
        return self.buffered | self.one_sided

    def blocked(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (start, end) on the line of each wait."""
        start = self.line.place(self.spans.rank[self.wait], self.spans.start_ns[self.wait])
        return start, start + self.spans.duration_ns[self.wait]


def join_waits(
    spans: SpanTable, steps: StepTable, numbers: NDArray[np.int32], split: WaitSplit
) -> tuple[Joined, list[str]]:
    """Place a run on the line and find what each wait waited for.

    Args:
        spans: The spans.
        steps: Rows of the steps that take part.
        numbers: Their numbers, ascending.
        split: The spans' communication instances.

    Returns:
        The joined run, and what a reader should know of it.
    """
    line = Line.over(
        np.concatenate((spans.rank, steps.rank)),
        np.concatenate((spans.start_ns, steps.start_ns)),
        np.concatenate((spans.start_ns + spans.duration_ns, steps.end_ns)),
    )
    windows = windows_of(steps, line, places_of(steps.step, numbers).astype(np.int32))
    usable = np.isin(spans.step, numbers)
    comm = np.flatnonzero((split.instance != NOWHERE) & usable)
    launch = line.place(spans.rank[comm], _launch_ns(spans, comm))
    comm_window = covering(windows.start, windows.end, launch)
    inside = comm_window != NOWHERE
    comm, comm_window = comm[inside], comm_window[inside]
    launch = _at_borders(spans, line, launch[inside])

    recorded = np.flatnonzero((spans.kind == WAIT) & usable)
    both = np.concatenate((comm, recorded))
    key = instance_keys(spans, both) if len(both) else np.zeros(0, dtype=np.int64)
    member, num_members = number_rows(key, spans.rank[both])
    of_member = np.full(num_members, NOWHERE)
    of_member[member[: len(comm)]] = np.arange(len(comm))
    recorded_comm = of_member[member[len(comm) :]]

    waited = np.zeros(len(comm), dtype=np.bool_)
    waited[recorded_comm[recorded_comm != NOWHERE]] = True
    alone = np.flatnonzero(~waited & ((spans.flags[comm] & SpanFlag.ASYNC) == 0))
    warnings = []
    unknown = int((recorded_comm == NOWHERE).sum())
    if unknown:
        warnings.append(f"{unknown} waits name a communication that was not recorded")
    return Joined(
        spans=spans,
        line=line,
        windows=windows,
        split=split,
        comm=comm,
        comm_window=comm_window,
        launch=launch,
        buffered=_buffered(spans, split, comm),
        one_sided=is_one_sided(spans, split)[comm],
        wait=np.concatenate((recorded, comm[alone])),
        wait_comm=np.concatenate((recorded_comm, alone)),
    ), warnings


def _at_borders(spans: SpanTable, line: Line, launch: NDArray[np.int64]) -> NDArray[np.int64]:
    """Move launches within `LAUNCH_SLACK_NS` of a border of the compute around them there."""
    compute = np.flatnonzero(np.isin(spans.kind, _COMPUTE))
    start = line.place(spans.rank[compute], spans.start_ns[compute])
    end = start + spans.duration_ns[compute]
    kept = outermost(start, end)
    start, end = start[kept], end[kept]
    around = covering(start, end, launch)
    inside = around != NOWHERE
    first, last = start[around[inside]], end[around[inside]]
    at = launch[inside]
    at = np.where(at - first <= LAUNCH_SLACK_NS, first, at)
    launch[inside] = np.where(last - at <= LAUNCH_SLACK_NS, last, at)
    return launch


def _buffered(spans: SpanTable, split: WaitSplit, comm: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell the sends that had ended before their receive began. Shape as ``comm``."""
    start = spans.start_ns[comm]
    sends = (spans.src_rank[comm] == spans.rank[comm]) & (spans.dst_rank[comm] != NONE)
    arrival = latest_by_group(split.instance[comm], start)
    buffered: NDArray[np.bool_] = sends & (start + spans.duration_ns[comm] < arrival)
    return buffered


def _launch_ns(spans: SpanTable, comm: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return when each communication was launched, on the clock of its rank's compute.

    That is its start where nobody noted the launch. A host may launch long
    before its device comes to it, even in the step before. Then the launch is
    where the device's stream stood as it came: as much later than the host's as
    the compute that was launched last before it began after its own launch, but
    not after that compute ended, nor after the communication began. A begin
    that is only a lower bound was itself taken on that stream.
    """
    start = spans.start_ns[comm]
    launch: NDArray[np.int64] = np.where(spans.launch_ns[comm] > 0, spans.launch_ns[comm], start)
    flags = spans.flags[comm]
    on_device = ((flags & SpanFlag.HOST_CLOCK) == 0) & ((flags & _OF_DEVICE) != 0)
    begin_known = (flags & SpanFlag.DEVICE_BEGIN_KNOWN) != 0
    launch = np.where(on_device & ~begin_known, start, launch)
    rows = np.flatnonzero(on_device & begin_known)
    compute = np.flatnonzero(
        np.isin(spans.kind, _COMPUTE) & ((spans.flags & SpanFlag.DEVICE_BEGIN_KNOWN) != 0)
    )
    if not len(rows) or not len(compute):
        return launch
    before = _launched_last_before(spans, compute, comm[rows], launch[rows])
    rows, before = rows[before != NOWHERE], before[before != NOWHERE]
    begin, end = spans.start_ns[before], spans.start_ns[before] + spans.duration_ns[before]
    launched = np.where(spans.launch_ns[before] > 0, spans.launch_ns[before], begin)
    come = launch[rows] + (begin - launched)
    same_step = spans.step[comm[rows]] == spans.step[before]
    earliest = np.where(same_step, begin, end)
    latest = np.where(same_step, np.minimum(start[rows], end), start[rows])
    launch[rows] = np.where(
        begin > launched, np.minimum(np.maximum(come, earliest), latest), launch[rows]
    )
    return launch


def _launched_last_before(
    spans: SpanTable,
    compute: NDArray[np.int64],
    comm: NDArray[np.int64],
    launch: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return the row of compute that each communication's rank launched last before it."""
    theirs = np.where(spans.launch_ns > 0, spans.launch_ns, spans.start_ns)[compute]
    begin = int(min(theirs.min(), launch.min()))
    length = int(max(theirs.max(), launch.max())) - begin + 1

    def placed(rank: NDArray[np.integer], at: NDArray[np.int64]) -> NDArray[np.int64]:
        return rank.astype(np.int64) * length + (at - begin)

    key = placed(spans.rank[compute], theirs)
    order = stable_order(key)
    at = np.searchsorted(key[order], placed(spans.rank[comm], launch), side="left") - 1
    found = compute[order][np.maximum(at, 0)]
    same_rank = (at >= 0) & (spans.rank[found] == spans.rank[comm])
    return np.where(same_rank, found, NOWHERE)
