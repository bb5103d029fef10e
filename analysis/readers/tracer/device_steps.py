"""Steps on the clock of the device: where they begin and end for what it computes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, SpanFlag, SpanKind

from ...arrays.grouping import factorize, is_one_of
from ...arrays.sorting import argsort_rows
from ..waits import is_communication

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...trace.tables import SpanTable, StepTable

STREAM_KINDS = [
    KIND_CODES[kind]
    for kind in (SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.OPTIMIZER, SpanKind.WAIT)
]
"""What a compute stream does one after the other. Asynchronous communication may outlast its step,
so it tells no border but where a step begins."""

DEVICE_TIMED = SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN | SpanFlag.END_BOUND
"""One of these is set in whatever was timed on a device, if only roughly."""


def align_steps_to_device(spans: SpanTable, steps: StepTable) -> StepTable:
    """Return the steps with the borders that the device saw.

    A host that runs ahead says that a step ends while the device still
    computes it. Where a rank's device computes outside of the step that it
    computes for, that rank's steps end with the last thing that their stream
    did, and begin where the one before ended. One without a step before it
    begins with the first thing that its stream did: how long the device stood
    idle until then is not known. Other ranks' steps stay as they are.

    Args:
        spans: The spans of these steps.
        steps: One row per (epoch, step, rank), as the host told them.
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


def _find_stream_bounds(
    spans: SpanTable, steps: StepTable
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return when each step's stream first and last did something for it; -1 where unknown."""
    first = np.full(len(steps), -1, dtype=np.int64)
    last = first.copy()
    on_device = ((spans.flags & SpanFlag.HOST_CLOCK) == 0) & ((spans.flags & DEVICE_TIMED) != 0)
    # A communication begins after the stream has come to its launch.
    begins = on_device & (is_one_of(spans.kind, STREAM_KINDS) | is_communication(spans))
    ends = is_one_of(spans.kind, STREAM_KINDS) & ((spans.flags & SpanFlag.DEVICE_END_KNOWN) != 0)
    rows = np.flatnonzero(begins | ends)
    if not ends.any() or not len(steps):
        return first, last
    key, num = factorize(
        np.concatenate((steps.epoch, spans.epoch[rows])),
        np.concatenate((steps.rank, spans.rank[rows])),
        np.concatenate((steps.step, spans.step[rows])),
    )
    begin = np.full(num, np.iinfo(np.int64).max)
    until = np.full(num, -1, dtype=np.int64)
    np.minimum.at(begin, key[len(steps) :], spans.start_ns[rows])
    ended = ends[rows]
    end_ns = (spans.start_ns + spans.duration_ns)[rows]
    np.maximum.at(until, key[len(steps) :][ended], end_ns[ended])
    last = until[key[: len(steps)]]
    first = np.where(last >= 0, begin[key[: len(steps)]], -1)
    return first, last
