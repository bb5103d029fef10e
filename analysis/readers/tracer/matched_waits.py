"""What a traced run's graph and waits are built from: spans on one line, waits joined to their
communications.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, NONE, SpanFlag, SpanKind

from ...arrays.grouping import factorize, is_one_of, max_over_group, sorted_unique
from ...arrays.intervals import NOT_FOUND, Line, find_covering, keep_outermost
from ...arrays.sorting import argsort_rows, find_positions, stable_argsort
from ..waits import instance_keys, is_one_sided
from .inferred_waits import MIN_STEPS, RankActivity, UnwaitedComm, infer_waits
from .pieces import COMPUTE_KINDS, HOST_KINDS, RankSteps, place_rank_steps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...trace.tables import SpanTable, StepTable
    from ..waits import WaitSplit

WAIT = KIND_CODES[SpanKind.WAIT]
LAUNCH_SLACK_NS = 1_000
"""What two clock reads on one host take, with room to spare."""

QUEUE_SLACK_NS = 20_000
"""A communication that begins within this of the end before it on its stream may have queued: a
stream that stood still for longer waited for something. Source: `tracer/device`, the same bound."""

_COMPUTE = [KIND_CODES[kind] for kind in COMPUTE_KINDS]
_HOST = [KIND_CODES[kind] for kind in HOST_KINDS]

_ASYNC_MASK = SpanFlag.ASYNC | SpanFlag.END_BOUND

_DEVICE_TIMED = SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN | SpanFlag.END_BOUND
"""One of these is set in whatever was timed on a device, if only roughly."""


@dataclass(frozen=True, slots=True)
class MatchedWaits:
    """Communications of the steps that take part, and the waits for them."""

    spans: SpanTable
    line: Line
    windows: RankSteps
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

    wait_start: NDArray[np.int64]
    """Shape (waits,): where on the line a rank was blocked: by wait records, synchronous
    communications that have none, and `infer_waits`."""

    wait_end: NDArray[np.int64]

    wait_comm: NDArray[np.int64]
    """Shape (waits,): index into ``comm`` of what was waited for, or `NOT_FOUND`."""

    @property
    def waits_for_nobody(self) -> NDArray[np.bool_]:
        """Tell buffered sends, and members of rooted collectives that left before others entered.

        Shape (communications,).
        """
        return self.buffered | self.one_sided

    def blocked(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (start, end) on the line of each wait."""
        return self.wait_start, self.wait_end


def match_waits(
    spans: SpanTable, steps: StepTable, numbers: NDArray[np.int32], split: WaitSplit
) -> tuple[MatchedWaits, list[str]]:
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
    windows = place_rank_steps(steps, line, find_positions(steps.step, numbers).astype(np.int32))
    usable = np.isin(spans.step, numbers)
    comm = np.flatnonzero((split.instance != NOT_FOUND) & usable)
    launch = line.place(spans.rank[comm], _launch_times(spans, comm))
    comm_window = find_covering(windows.start, windows.end, launch)
    inside = comm_window != NOT_FOUND
    comm, comm_window = comm[inside], comm_window[inside]
    launch = _snap_to_borders(spans, line, launch[inside])

    recorded = np.flatnonzero((spans.kind == WAIT) & usable)
    both = np.concatenate((comm, recorded))
    key = instance_keys(spans, both) if len(both) else np.zeros(0, dtype=np.int64)
    member, num_members = factorize(key, spans.rank[both])
    of_member = np.full(num_members, NOT_FOUND)
    of_member[member[: len(comm)]] = np.arange(len(comm))
    recorded_comm = of_member[member[len(comm) :]]

    waited = np.zeros(len(comm), dtype=np.bool_)
    waited[recorded_comm[recorded_comm != NOT_FOUND]] = True
    alone = np.flatnonzero(~waited & ((spans.flags[comm] & SpanFlag.ASYNC) == 0))
    warnings = []
    unknown = int((recorded_comm == NOT_FOUND).sum())
    if unknown:
        warnings.append(f"{unknown} waits name a communication that was not recorded")
    rows = np.concatenate((recorded, comm[alone]))
    start = line.place(spans.rank[rows], spans.start_ns[rows])
    end = start + spans.duration_ns[rows]
    untold = np.flatnonzero(~waited & ((spans.flags[comm] & _ASYNC_MASK) == SpanFlag.ASYNC))
    others, since, until = untold[:0], untold[:0], untold[:0]
    if len(untold) and len(numbers) >= MIN_STEPS:
        found, since, until = infer_waits(
            spans,
            windows,
            UnwaitedComm(
                comm=comm[untold],
                window=comm_window[untold],
                launch=launch[untold],
                end=line.place(spans.rank, spans.start_ns + spans.duration_ns)[comm[untold]],
            ),
            _find_activity(spans, line, (start, end), comm),
        )
        others = untold[found]
    return MatchedWaits(
        spans=spans,
        line=line,
        windows=windows,
        split=split,
        comm=comm,
        comm_window=comm_window,
        launch=launch,
        buffered=_is_buffered(spans, split, comm),
        one_sided=is_one_sided(spans, split)[comm],
        wait_start=np.concatenate((start, since)),
        wait_end=np.concatenate((end, until)),
        wait_comm=np.concatenate((recorded_comm, alone, others)),
    ), warnings


def _find_activity(
    spans: SpanTable,
    line: Line,
    blocked: tuple[NDArray[np.int64], NDArray[np.int64]],
    comm: NDArray[np.int64],
) -> RankActivity:
    """Return what ranks are known to do, or to wait for, and when hosts that compute launched.

    Where a device computes, its host's own time and launches tell nothing of
    its stream. Where nobody noted the launch of a communication that queued,
    it may have been long before that began.
    """
    compute = is_one_of(spans.kind, _COMPUTE)
    by_host = compute & ((spans.flags & SpanFlag.DEVICE_END_KNOWN) == 0)
    on_host = np.isin(spans.rank, sorted_unique(spans.rank[by_host]))
    doing = np.flatnonzero(compute | (is_one_of(spans.kind, _HOST) & on_host))
    start = line.place(spans.rank[doing], spans.start_ns[doing])
    end = start + spans.duration_ns[doing]
    kept = keep_outermost(start, end)
    launched = comm[on_host[comm]]
    at_ns = np.where(spans.launch_ns > 0, spans.launch_ns, spans.start_ns)[launched]
    marks = line.place(spans.rank[launched], at_ns)
    unsure = _is_queued(spans, launched) & (spans.launch_ns[launched] <= 0)
    return RankActivity(
        start=np.concatenate((start[kept], blocked[0])),
        end=np.concatenate((end[kept], blocked[1])),
        marks=marks,
        unsure=np.sort(marks[unsure]),
    )


def _snap_to_borders(spans: SpanTable, line: Line, launch: NDArray[np.int64]) -> NDArray[np.int64]:
    """Move launches within `LAUNCH_SLACK_NS` of a border of the compute around them there."""
    compute = np.flatnonzero(is_one_of(spans.kind, _COMPUTE))
    start = line.place(spans.rank[compute], spans.start_ns[compute])
    end = start + spans.duration_ns[compute]
    kept = keep_outermost(start, end)
    start, end = start[kept], end[kept]
    around = find_covering(start, end, launch)
    inside = around != NOT_FOUND
    first, last = start[around[inside]], end[around[inside]]
    at = launch[inside]
    at = np.where(at - first <= LAUNCH_SLACK_NS, first, at)
    launch[inside] = np.where(last - at <= LAUNCH_SLACK_NS, last, at)
    return launch


def _is_buffered(spans: SpanTable, split: WaitSplit, comm: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell the sends that had ended before their receive began. Shape as ``comm``.

    The split gave those that only seem so, by their clocks, a wait.
    """
    start = spans.start_ns[comm]
    sends = (spans.src_rank[comm] == spans.rank[comm]) & (spans.dst_rank[comm] != NONE)
    arrival = max_over_group(split.instance[comm], start)
    buffered: NDArray[np.bool_] = sends & (start + spans.duration_ns[comm] < arrival)
    buffered &= split.wait_ns[comm] == 0
    return buffered


def _launch_times(spans: SpanTable, comm: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return when each communication was launched, on the clock of its rank's compute.

    That is its start where nobody noted the launch. A host may launch long
    before its device comes to it, even in the step before. Then the launch is
    where the device's stream stood as it came. A begin that is only a lower
    bound was itself taken there, and an idle stream begins what it is given at
    once. Of what had to queue behind another communication the launch lies
    between those of its neighbours (`_queued_launch_times`).
    """
    start = spans.start_ns[comm]
    launch: NDArray[np.int64] = np.where(spans.launch_ns[comm] > 0, spans.launch_ns[comm], start)
    flags = spans.flags[comm]
    on_device = ((flags & SpanFlag.HOST_CLOCK) == 0) & ((flags & _DEVICE_TIMED) != 0)
    begin_known = (flags & SpanFlag.DEVICE_BEGIN_KNOWN) != 0
    compute = np.flatnonzero(
        is_one_of(spans.kind, _COMPUTE) & ((spans.flags & SpanFlag.DEVICE_BEGIN_KNOWN) != 0)
    )
    queued = np.zeros(len(comm), dtype=np.bool_)
    queued[on_device & begin_known] = _is_queued(spans, comm[on_device & begin_known])
    found = np.where(on_device, start, launch)
    rows = np.flatnonzero(queued)
    if len(rows) and len(compute):
        at_once = comm[on_device & ~queued]
        found[rows] = _queued_launch_times(spans, comm[rows], launch[rows], (compute, at_once))
    return found


def _is_queued(spans: SpanTable, comm: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell which communications began as the one before on their stream ended.

    A stream is a rank's track, a pair's own for p2p. Shape as ``comm``.
    """
    stream, _ = factorize(
        spans.rank[comm], spans.track[comm], spans.src_rank[comm], spans.dst_rank[comm]
    )
    order = argsort_rows(stream, spans.start_ns[comm])
    row = comm[order]
    late = spans.start_ns[row[1:]] - (spans.start_ns + spans.duration_ns)[row[:-1]]
    queued = np.zeros(len(comm), dtype=np.bool_)
    queued[order[1:]] = (stream[order[1:]] == stream[order[:-1]]) & (np.abs(late) <= QUEUE_SLACK_NS)
    return queued


def _queued_launch_times(
    spans: SpanTable,
    comm: NDArray[np.int64],
    launch: NDArray[np.int64],
    known: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> NDArray[np.int64]:
    """Return where a rank's stream stood as it came to launches whose work had to queue.

    A stream comes to launches in the order in which its host made them. So this
    one lies between the last known one before it and the first after it, where
    it lay in the host's time, and not after the work began.

    Args:
        spans: The table.
        comm: Rows of the queued communications.
        launch: Shape as ``comm``: their host's launch.
        known: Rows of compute, and of communications that began at once.
    """
    marks = np.concatenate(known)
    host = np.where(spans.launch_ns[marks] > 0, spans.launch_ns[marks], spans.start_ns[marks])
    begin = int(min(host.min(), launch.min()))
    length = int(max(host.max(), launch.max())) - begin + 1
    key = spans.rank[marks].astype(np.int64) * length + (host - begin)
    order = stable_argsort(key)
    marks, host, key = marks[order], host[order], key[order]
    after = np.searchsorted(key, spans.rank[comm].astype(np.int64) * length + (launch - begin))
    before, after = np.maximum(after - 1, 0), np.minimum(after, len(marks) - 1)
    rank, start = spans.rank, spans.start_ns
    has_before, has_after = rank[marks[before]] == rank[comm], rank[marks[after]] == rank[comm]
    has_before &= host[before] < launch
    has_after &= host[after] >= launch
    low, high = start[marks[before]], start[marks[after]]
    share = (launch - host[before]) / np.maximum(host[after] - host[before], 1)
    between = low + np.rint(share * (high - low)).astype(np.int64)
    come = np.where(has_before & has_after & (high >= low), between, low + launch - host[before])
    come = np.where(has_before, come, launch)
    return np.minimum(come, start[comm])
