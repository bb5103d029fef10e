"""Communications of a traced run on one number line, matched with the waits for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, NONE, SpanFlag, SpanKind

from ...arrays.grouping import factorize, is_one_of, max_over_group, sorted_unique
from ...arrays.intervals import NOT_FOUND, Line, find_covering
from ...arrays.sorting import argsort_rows, find_positions, stable_argsort
from ...replay.model import COMPUTE_CODES, INTERRUPTING_CODES
from ...report.text import format_count
from ..waits import instance_keys, is_communication, is_one_sided
from .device_steps import is_device_timed
from .inferred_waits import MIN_STEPS, RankActivity, UnwaitedComm, infer_waits
from .pieces import PlacedSpans, RankSteps, is_idle_span, place_rank_steps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...trace.tables import SpanTable, StepTable
    from ..waits import WaitSplit

WAIT = KIND_CODES[SpanKind.WAIT]
LAUNCH_SLACK_NS = 1_000
"""An upper bound of the time that two clock reads on one host take."""

QUEUE_SLACK_NS = 20_000
"""A communication that begins within this of the end before it on its stream may have queued. A
stream that was idle for longer waited for something. Source: `tracer/device`, the same bound."""

_ASYNC_OR_BOUND = SpanFlag.ASYNC | SpanFlag.END_BOUND


@dataclass(frozen=True, slots=True)
class MatchedWaits:
    """Communications of the steps that are replayed, and the waits for them."""

    spans: SpanTable
    line: Line
    rank_steps: RankSteps
    split: WaitSplit
    compute: PlacedSpans
    """The outermost compute spans of all steps."""

    comm: NDArray[np.int64]
    """Rows of the communications."""

    comm_rank_step: NDArray[np.int64]
    """Shape (communications,): index into ``rank_steps``."""

    launch: NDArray[np.int64]
    """Shape (communications,): position of the launch on the line. A launch within
    `LAUNCH_SLACK_NS` of a border of the compute around it is moved to the border: nothing is
    computed in between, and steps of equal structure stay equal."""

    buffered: NDArray[np.bool_]
    """Shape (communications,): sends that had ended before their receive began."""

    one_sided: NDArray[np.bool_]
    """Shape (communications,): `is_one_sided`."""

    in_several_steps: NDArray[np.bool_]
    """Shape (communications,): members launched it in different steps. A replay of a step can't
    make one of them wait for the others."""

    wait_start: NDArray[np.int64]
    """Shape (waits,): positions on the line at which ranks began to wait: those of wait records,
    of synchronous communications without one, and of `infer_waits`."""

    wait_end: NDArray[np.int64]

    wait_comm: NDArray[np.int64]
    """Shape (waits,): index into ``comm`` of the communication waited for, or `NOT_FOUND`."""

    @property
    def has_no_wait(self) -> NDArray[np.bool_]:
        """Buffered sends, members of rooted collectives that left before others entered, and
        communications in several steps.

        Shape (communications,).
        """
        return self.buffered | self.one_sided | self.in_several_steps


def match_waits(
    spans: SpanTable, steps: StepTable, numbers: NDArray[np.int32], split: WaitSplit
) -> tuple[MatchedWaits, list[str]]:
    """Place a run on the line and find the communication that each wait waited for.

    Returns:
        The matched run, and warnings.
    """
    line = Line.over(
        np.concatenate((spans.rank, steps.rank)),
        np.concatenate((spans.start_ns, steps.start_ns)),
        np.concatenate((spans.start_ns + spans.duration_ns, steps.end_ns)),
    )
    rank_steps = place_rank_steps(steps, line, find_positions(steps.step, numbers).astype(np.int32))
    usable = np.isin(spans.step, numbers)
    comm = np.flatnonzero((split.instance != NOT_FOUND) & usable)
    launch = line.place(spans.rank[comm], _launch_times(spans, comm))
    comm_rank_step = find_covering(rank_steps.start, rank_steps.end, launch)
    inside = comm_rank_step != NOT_FOUND
    comm, comm_rank_step = comm[inside], comm_rank_step[inside]
    compute = PlacedSpans.outermost(
        spans, line, np.flatnonzero(is_one_of(spans.kind, COMPUTE_CODES))
    )
    launch = _snap_to_borders(compute, launch[inside])

    recorded = np.flatnonzero((spans.kind == WAIT) & usable)
    both = np.concatenate((comm, recorded))
    key = instance_keys(spans, both) if len(both) else np.zeros(0, dtype=np.int64)
    member, num_members = factorize(key, spans.rank[both])
    comm_of_member = np.full(num_members, NOT_FOUND)
    comm_of_member[member[: len(comm)]] = np.arange(len(comm))
    recorded_comm = comm_of_member[member[len(comm) :]]

    has_record = np.zeros(len(comm), dtype=np.bool_)
    has_record[recorded_comm[recorded_comm != NOT_FOUND]] = True
    synchronous = np.flatnonzero(~has_record & ((spans.flags[comm] & SpanFlag.ASYNC) == 0))
    warnings = []
    unknown = _count_unknown(spans, recorded[recorded_comm == NOT_FOUND], ~usable)
    if unknown:
        warnings.append(f"{unknown} waits name a communication that was not recorded")
    in_several_steps = _is_in_several_steps(
        split.instance[comm], rank_steps.step_index[comm_rank_step]
    )
    if in_several_steps.any():
        num = len(sorted_unique(split.instance[comm[in_several_steps]]))
        warnings.append(
            f"ranks launched {format_count(num, 'communication')} in different steps: in the"
            " replay, none of these waits for another rank"
        )
    rows = np.concatenate((recorded, comm[synchronous]))
    start = line.place(spans.rank[rows], spans.start_ns[rows])
    end = start + spans.duration_ns[rows]
    is_async = (spans.flags[comm] & _ASYNC_OR_BOUND) == SpanFlag.ASYNC
    unwaited = np.flatnonzero(~has_record & is_async)
    inferred, inferred_start, inferred_end = unwaited[:0], unwaited[:0], unwaited[:0]
    if len(unwaited) and len(numbers) >= MIN_STEPS:
        begin = line.place(spans.rank[comm[unwaited]], spans.start_ns[comm[unwaited]])
        waited, inferred_start, inferred_end = infer_waits(
            spans,
            rank_steps,
            UnwaitedComm(
                comm=comm[unwaited],
                rank_step=comm_rank_step[unwaited],
                launch=launch[unwaited],
                end=begin + spans.duration_ns[comm[unwaited]],
            ),
            _find_activity(spans, line, compute, (start, end), comm),
        )
        inferred = unwaited[waited]
    return MatchedWaits(
        spans=spans,
        line=line,
        rank_steps=rank_steps,
        split=split,
        compute=compute,
        comm=comm,
        comm_rank_step=comm_rank_step,
        launch=launch,
        buffered=_is_buffered(spans, split, comm),
        one_sided=is_one_sided(spans, split)[comm],
        in_several_steps=in_several_steps,
        wait_start=np.concatenate((start, inferred_start)),
        wait_end=np.concatenate((end, inferred_end)),
        wait_comm=np.concatenate((recorded_comm, synchronous, inferred)),
    ), warnings


def _find_activity(
    spans: SpanTable,
    line: Line,
    compute: PlacedSpans,
    waits: tuple[NDArray[np.int64], NDArray[np.int64]],
    comm: NDArray[np.int64],
) -> RankActivity:
    """Return the known activity of all ranks, and the launches of hosts that compute.

    If a device computes, its host's own time and launches say nothing about its stream. If the
    launch of a queued communication was not recorded, it may have been long before its begin.
    """
    computes = is_one_of(spans.kind, COMPUTE_CODES)
    by_host = computes & ((spans.flags & SpanFlag.DEVICE_END_KNOWN) == 0)
    on_host = np.isin(spans.rank, sorted_unique(spans.rank[by_host]))
    by_host = is_one_of(spans.kind, INTERRUPTING_CODES) & on_host
    busy = compute
    if by_host.any():
        busy = PlacedSpans.outermost(spans, line, np.flatnonzero(computes | by_host))
    idle = PlacedSpans.outermost(spans, line, np.flatnonzero(is_idle_span(spans)))
    idle = idle.inside(busy)
    launched = comm[on_host[comm]]
    launch_ns = np.where(spans.launch_ns > 0, spans.launch_ns, spans.start_ns)[launched]
    launches = line.place(spans.rank[launched], launch_ns)
    uncertain = _is_queued(spans, launched) & (spans.launch_ns[launched] <= 0)
    return RankActivity(
        start=np.concatenate((np.sort(np.append(busy.start, idle.end)), waits[0])),
        end=np.concatenate((np.sort(np.append(busy.end, idle.start)), waits[1])),
        launches=launches,
        uncertain=np.sort(launches[uncertain]),
    )


def _snap_to_borders(compute: PlacedSpans, launch: NDArray[np.int64]) -> NDArray[np.int64]:
    """Move launches within `LAUNCH_SLACK_NS` of a border of the compute around them to it."""
    start, end = compute.start, compute.end
    around = find_covering(start, end, launch)
    inside = around != NOT_FOUND
    first, last = start[around[inside]], end[around[inside]]
    position = launch[inside]
    position = np.where(position - first <= LAUNCH_SLACK_NS, first, position)
    launch[inside] = np.where(last - position <= LAUNCH_SLACK_NS, last, position)
    return launch


def _is_buffered(spans: SpanTable, split: WaitSplit, comm: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return the sends that had ended before their receive began. Shape as ``comm``.

    A send that only seems so by a clock error has a wait in the split.
    """
    start = spans.start_ns[comm]
    sends = (spans.src_rank[comm] == spans.rank[comm]) & (spans.dst_rank[comm] != NONE)
    arrival = max_over_group(split.instance[comm], start)
    buffered: NDArray[np.bool_] = sends & (start + spans.duration_ns[comm] < arrival)
    buffered &= split.wait_ns[comm] == 0
    return buffered


def _count_unknown(spans: SpanTable, waits: NDArray[np.int64], left_out: NDArray[np.bool_]) -> int:
    """Return how many of these waits are for no communication of the steps that are left out.

    A job may wait in one step for what it launched in the step before, which may be its start-up.
    """
    if not len(waits):
        return 0
    comm = np.flatnonzero(is_communication(spans) & left_out)
    rows = np.concatenate((comm, waits))
    member, _ = factorize(instance_keys(spans, rows), spans.rank[rows])
    return int((~np.isin(member[len(comm) :], member[: len(comm)])).sum())


def _is_in_several_steps(instance: NDArray[np.int64], step: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return the members of instances that have members in several steps. Shape as ``step``.

    Without a sort, which would take a tenth of the time of an analysis.
    """
    of_instance = np.zeros(int(instance.max(initial=-1)) + 1, dtype=step.dtype)
    of_instance[instance] = step
    differs = np.zeros(len(of_instance), dtype=np.bool_)
    differs[instance[of_instance[instance] != step]] = True
    return differs[instance]


def _launch_times(spans: SpanTable, comm: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the launch time of each communication, on the clock of its rank's compute.

    If the launch was not recorded, that is the communication's start. A host may launch long
    before its device gets there, even in the step before; then the launch is the moment at which
    the device's stream reached it. That is the start too: an idle stream begins new work at once,
    and a begin that is only a lower bound was marked on the stream at the launch. The launch of a
    communication that queued behind another one is between those of its neighbours
    (`_queued_launch_times`).
    """
    start = spans.start_ns[comm]
    launch: NDArray[np.int64] = np.where(spans.launch_ns[comm] > 0, spans.launch_ns[comm], start)
    flags = spans.flags[comm]
    on_device = is_device_timed(flags)
    begin_known = (flags & SpanFlag.DEVICE_BEGIN_KNOWN) != 0
    compute = np.flatnonzero(
        is_one_of(spans.kind, COMPUTE_CODES) & ((spans.flags & SpanFlag.DEVICE_BEGIN_KNOWN) != 0)
    )
    queued = np.zeros(len(comm), dtype=np.bool_)
    queued[on_device & begin_known] = _is_queued(spans, comm[on_device & begin_known])
    reached = np.where(on_device, start, launch)
    rows = np.flatnonzero(queued)
    if len(rows) and len(compute):
        at_once = comm[on_device & ~queued]
        reached[rows] = _queued_launch_times(spans, comm[rows], launch[rows], (compute, at_once))
    return reached


def _is_queued(spans: SpanTable, comm: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return the communications that began as the one before on their stream ended.

    A stream is a rank's track, and for p2p the pair's own. Shape as ``comm``.
    """
    stream, _ = factorize(
        spans.rank[comm], spans.track[comm], spans.src_rank[comm], spans.dst_rank[comm]
    )
    order = argsort_rows(stream, spans.start_ns[comm])
    row = comm[order]
    idle_ns = spans.start_ns[row[1:]] - (spans.start_ns + spans.duration_ns)[row[:-1]]
    follows = stream[order[1:]] == stream[order[:-1]]
    queued = np.zeros(len(comm), dtype=np.bool_)
    queued[order[1:]] = follows & (np.abs(idle_ns) <= QUEUE_SLACK_NS)
    return queued


def _queued_launch_times(
    spans: SpanTable,
    comm: NDArray[np.int64],
    launch: NDArray[np.int64],
    known: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> NDArray[np.int64]:
    """Return the times at which streams reached the launches of queued communications.

    A stream reaches launches in the order in which its host made them. So this one is between the
    last known one before it and the first after it, in proportion to the host's times, and not
    after the communication's begin.

    Args:
        launch: Shape as ``comm``: their launches on the host.
        known: Rows of compute, and of communications that began at once.
    """
    anchors = np.concatenate(known)
    host = np.where(spans.launch_ns[anchors] > 0, spans.launch_ns[anchors], spans.start_ns[anchors])
    begin = int(min(host.min(), launch.min()))
    length = int(max(host.max(), launch.max())) - begin + 1
    key = spans.rank[anchors].astype(np.int64) * length + (host - begin)
    order = stable_argsort(key)
    anchors, host, key = anchors[order], host[order], key[order]
    after = np.searchsorted(key, spans.rank[comm].astype(np.int64) * length + (launch - begin))
    before, after = np.maximum(after - 1, 0), np.minimum(after, len(anchors) - 1)
    rank, start = spans.rank, spans.start_ns
    has_before, has_after = rank[anchors[before]] == rank[comm], rank[anchors[after]] == rank[comm]
    has_before &= host[before] < launch
    has_after &= host[after] >= launch
    low, high = start[anchors[before]], start[anchors[after]]
    share = (launch - host[before]) / np.maximum(host[after] - host[before], 1)
    between = low + np.rint(share * (high - low)).astype(np.int64)
    reached = np.where(has_before & has_after & (high >= low), between, low + launch - host[before])
    reached = np.where(has_before, reached, launch)
    return np.minimum(reached, start[comm])
