"""Borders of steps: on the device's clock, by what partners do, and over all ranks of a job.

A module of its own, because waterfall and MFU need the same borders.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, NONE, SpanFlag, SpanKind

from ...arrays.grouping import factorize, is_one_of, sorted_unique
from ...arrays.sorting import argsort_rows
from ...replay.model import COMPUTE_CODES
from ..waits import instance_keys, is_communication

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...trace.tables import SpanTable, StepTable

STREAM_CODES = (*COMPUTE_CODES, KIND_CODES[SpanKind.WAIT])
"""Kinds of a compute stream's own operations. Asynchronous communication may outlast its step, so
it shows where a step begins, but not where it ends."""

_DEVICE_TIMED = SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN | SpanFlag.END_BOUND


def is_device_timed(flags: NDArray[np.uint16]) -> NDArray[np.bool_]:
    """Return which spans were timed on a device, if only roughly. Shape as given."""
    timed: NDArray[np.bool_] = ((flags & SpanFlag.HOST_CLOCK) == 0) & ((flags & _DEVICE_TIMED) != 0)
    return timed


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSteps:
    """Steps over all their ranks, ordered by (epoch, step); columns of shape (steps,)."""

    epoch: NDArray[np.int32]
    step: NDArray[np.int32]
    start_ns: NDArray[np.int64]
    """First begin of a rank."""

    end_ns: NDArray[np.int64]
    """Last end of a rank: the mark from which the next step's time counts."""

    overlap_ns: NDArray[np.int64]
    """Time from the first begin to the last end of the step before, if that is later; else 0."""

    @property
    def duration_ns(self) -> NDArray[np.int64]:
        """Time of each step: between the last ends of two steps, without a pause between them."""
        return self.end_ns - self.start_ns - self.overlap_ns


def measure_steps(steps: StepTable) -> JobSteps:
    """Return the steps of a job, with the time that each shares with the one before.

    The stages of a pipeline need not meet at the end of a step: one begins the next step while
    another one still computes. What two steps share is time of the earlier one, so the steps' times
    sum to the time that the job took. A step whose predecessor has no row lasts from its first
    begin; so does one that does not end after its predecessor, because the two have no order.
    """
    number, num = factorize(steps.epoch, steps.step)
    row = np.zeros(num, dtype=np.int64)
    row[number] = np.arange(len(number))
    start = np.full(num, np.iinfo(np.int64).max)
    end = np.full(num, np.iinfo(np.int64).min)
    np.minimum.at(start, number, steps.start_ns)
    np.maximum.at(end, number, steps.end_ns)
    epoch, step = steps.epoch[row], steps.step[row]
    follows = (epoch[1:] == epoch[:-1]) & (step[1:] == step[:-1] + 1) & (end[1:] > end[:-1])
    overlap = np.zeros(num, dtype=np.int64)
    overlap[1:] = np.where(follows, np.maximum(end[:-1] - start[1:], 0), 0)
    return JobSteps(epoch=epoch, step=step, start_ns=start, end_ns=end, overlap_ns=overlap)


def align_steps(spans: SpanTable, steps: StepTable) -> StepTable:
    """Return steps with the borders that all of the analysis uses: of device, then of partners."""
    return align_steps_to_partners(spans, align_steps_to_device(spans, steps))


def align_steps_to_device(spans: SpanTable, steps: StepTable) -> StepTable:
    """Return the steps with their borders on the device.

    A host that runs ahead ends a step while its device still computes it. If the device of a rank
    computes outside the step that its spans belong to, the rank's steps end with the last
    operation of their stream, and begin at the end of the step before. A step without one before
    it begins with the first operation of its stream: how long the device was idle until then is
    unknown. Steps of other ranks do not change.
    """
    first, last = _find_stream_bounds(spans, steps)
    known = last >= 0
    outside = known & ((first < steps.start_ns) | (last > steps.end_ns))
    if not outside.any():
        return steps
    rank, _ = factorize(steps.epoch, steps.rank)
    moves = np.bincount(rank, weights=outside).astype(np.bool_)[rank] & known
    order = argsort_rows(rank, steps.step)
    start, end = steps.start_ns.copy(), steps.end_ns.copy()
    start[moves], end[moves] = first[moves], last[moves]
    before, after = order[:-1], order[1:]
    follows = (rank[before] == rank[after]) & (steps.step[before] + 1 == steps.step[after])
    follows &= moves[before] & moves[after]
    start[after[follows]] = end[before[follows]]
    return replace(steps, start_ns=start, end_ns=end)


def align_steps_to_partners(spans: SpanTable, steps: StepTable) -> StepTable:
    """Return steps that begin with what partners do in the same step.

    A tracer's step begins with its first forward, or the fetch of a batch. A stage of a pipeline
    without a library receives its input before, and a rank whose partner loads the batch
    gets it by a broadcast. So what a rank launches after the last compute of a step, and a partner
    in the next step, is the begin of the rank's next step. In the step before, it would be a
    transfer that takes as long as the partner computes.
    """
    rows = _find_trailing(spans)
    if not len(rows):
        return steps
    members = np.flatnonzero(is_communication(spans))
    # By number first: few are left of which the group is looked up among large numbers.
    members = members[np.isin(spans.seq[members], sorted_unique(spans.seq[rows]))]
    members = members[np.isin(spans.group_id[members], sorted_unique(spans.group_id[rows]))]
    instance, num = factorize(instance_keys(spans, members))
    newest = np.full(num, NONE, dtype=np.int64)
    np.maximum.at(newest, instance, spans.step[members])
    is_early = newest[instance[np.searchsorted(members, rows)]] == spans.step[rows] + 1
    if not is_early.any():
        return steps
    key, num = factorize(
        *(
            np.concatenate((of_step, of_span[rows]))
            for of_step, of_span in (
                (steps.epoch, spans.epoch),
                (steps.rank, spans.rank),
                (steps.step, spans.step),
            )
        )
    )
    key, of_step = key[: len(steps)], key[len(steps) :]
    # Behind them, a communication of the step itself shows that the next one has not begun.
    last = np.full(num, np.iinfo(np.int64).min)
    np.maximum.at(last, of_step[~is_early], spans.start_ns[rows[~is_early]])
    begins = is_early & (spans.start_ns[rows] > last[of_step])
    launch_ns = np.where(spans.launch_ns[rows] > 0, spans.launch_ns[rows], spans.start_ns[rows])
    border = np.full(num, np.iinfo(np.int64).max)
    np.minimum.at(border, of_step[begins], launch_ns[begins])
    rank, _ = factorize(steps.epoch, steps.rank)
    order = argsort_rows(rank, steps.step)
    before, after = order[:-1], order[1:]
    moves = (rank[before] == rank[after]) & (steps.step[before] + 1 == steps.step[after])
    moves &= (steps.start_ns[before] < border[key[before]]) & (
        border[key[before]] < steps.end_ns[before]
    )
    start, end = steps.start_ns.copy(), steps.end_ns.copy()
    end[before[moves]] = start[after[moves]] = border[key[before[moves]]]
    return replace(steps, start_ns=start, end_ns=end)


def _find_trailing(spans: SpanTable) -> NDArray[np.int64]:
    """Return the communications of a step that begin after its last compute on their rank."""
    if not len(spans):
        return np.zeros(0, dtype=np.int64)
    columns = spans.epoch, spans.rank, spans.step
    is_first = np.append(True, np.logical_or.reduce([each[1:] != each[:-1] for each in columns]))
    first = np.flatnonzero(is_first)
    computes = is_one_of(spans.kind, COMPUTE_CODES)
    last_ns = np.maximum.reduceat(
        np.where(computes, spans.start_ns + spans.duration_ns, NONE), first
    )
    last_ns = np.repeat(last_ns, np.diff(np.append(first, len(spans))))
    is_known = is_communication(spans) & (spans.group_id != 0) & (spans.seq != NONE)
    return np.flatnonzero(
        is_known & (spans.step >= 0) & (last_ns >= 0) & (spans.start_ns >= last_ns)
    )


def _find_stream_bounds(
    spans: SpanTable, steps: StepTable
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first start and last end on each step's stream; -1 if unknown."""
    first = np.full(len(steps), -1, dtype=np.int64)
    last = first.copy()
    on_stream = is_one_of(spans.kind, STREAM_CODES)
    ends = on_stream & ((spans.flags & SpanFlag.DEVICE_END_KNOWN) != 0)
    if not ends.any() or not len(steps):
        return first, last
    # A communication begins after the stream has reached its launch.
    begins = (on_stream | is_communication(spans)) & is_device_timed(spans.flags)
    rows = np.flatnonzero(begins | ends)
    columns = spans.epoch[rows], spans.rank[rows], spans.step[rows]
    # Spans of one rank in one step follow each other: only their extremes are grouped.
    runs = np.flatnonzero(
        np.append(True, np.logical_or.reduce([each[1:] != each[:-1] for each in columns]))
    )
    start_ns = spans.start_ns[rows]
    end_ns = np.where(ends[rows], start_ns + spans.duration_ns[rows], -1)
    key, num = factorize(
        *(
            np.concatenate((of_step, of_span[runs]))
            for of_step, of_span in zip((steps.epoch, steps.rank, steps.step), columns, strict=True)
        )
    )
    earliest = np.full(num, np.iinfo(np.int64).max)
    latest = np.full(num, -1, dtype=np.int64)
    np.minimum.at(earliest, key[len(steps) :], np.minimum.reduceat(start_ns, runs))
    np.maximum.at(latest, key[len(steps) :], np.maximum.reduceat(end_ns, runs))
    last = latest[key[: len(steps)]]
    first = np.where(last >= 0, earliest[key[: len(steps)]], -1)
    return first, last
