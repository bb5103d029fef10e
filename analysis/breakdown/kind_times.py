"""Time of each rank by kind of span in one step: busy, waiting, transferring, exposed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, KINDS, SpanKind

from ..arrays.grouping import sorted_unique
from ..arrays.intervals import NOT_FOUND, Line, find_covering, merge_intervals
from ..replay.model import COMPUTE_KINDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..drawing.timeline import StepTimeline

_COMPUTE_CODES = np.array(
    sorted(KIND_CODES[kind] for kind in KINDS if kind.value in COMPUTE_KINDS), dtype=np.int8
)
_WAIT = KIND_CODES[SpanKind.WAIT]

Intervals = tuple["NDArray[np.int64]", "NDArray[np.int64]"]
"""Starts and ends on a `Line`: sorted, without overlap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTimes:
    """One row per (rank, kind) that the step has spans of, ordered by these."""

    rank: NDArray[np.int32]
    kind: NDArray[np.int8]
    """Codes into `tracer.span.KINDS`."""

    num_spans: NDArray[np.int64]
    num_unsplit: NDArray[np.int64]
    """Communication spans whose wait is unknown: ``wait_ns`` and ``transfer_ns`` omit them."""

    busy_ns: NDArray[np.int64]
    """Time with at least one span of the kind."""

    wait_ns: NDArray[np.int64]
    """Sum over the communication spans of the kind: from their start to the arrival."""

    transfer_ns: NDArray[np.int64]
    """The same from the arrival to their end; negative if clocks disagree, never clamped."""

    exposed_ns: NDArray[np.int64]
    """Busy time of a communication kind that no compute of the rank covers; else 0."""

    def __len__(self) -> int:
        return len(self.rank)


def sum_kind_times(timeline: StepTimeline) -> KindTimes:
    """Return the times of one step by rank and kind.

    Compute covers a communication while both run. A compute span does not cover while its thread
    is blocked in a ``wait``, nor does it cover a communication that is nested in it.
    """
    spans = timeline.spans
    key = spans.rank.astype(np.int64) * len(KINDS) + spans.kind
    keys = sorted_unique(key)
    cell = np.searchsorted(keys, key)
    comm = timeline.communication
    split = comm & (timeline.wait_ns >= 0)
    line = Line.over(spans.rank, spans.start_ns, spans.start_ns + spans.duration_ns)
    start = line.place(spans.rank, spans.start_ns)
    end = start + spans.duration_ns
    blocked = (comm & (spans.depth > 0)) | (spans.kind == _WAIT)
    compute = np.isin(spans.kind, _COMPUTE_CODES) & ~comm
    covering_compute = _subtract(
        merge_intervals(start[compute], end[compute]), merge_intervals(start[blocked], end[blocked])
    )
    num = len(keys)
    busy, exposed = np.zeros(num, np.int64), np.zeros(num, np.int64)
    for code in np.flatnonzero(np.bincount(spans.kind, minlength=len(KINDS))).tolist():
        own = spans.kind == code
        whole = merge_intervals(start[own], end[own])
        _add_by_rank(busy, keys, line, code, whole)
        if (own & comm).any():
            moving = merge_intervals(start[own & comm], end[own & comm])
            _add_by_rank(exposed, keys, line, code, _subtract(moving, covering_compute))
    return KindTimes(
        rank=(keys // len(KINDS)).astype(np.int32),
        kind=(keys % len(KINDS)).astype(np.int8),
        num_spans=np.bincount(cell, minlength=num),
        num_unsplit=np.bincount(cell[comm & ~split], minlength=num),
        busy_ns=busy,
        wait_ns=_sums(cell[split], timeline.wait_ns[split], num),
        transfer_ns=_sums(cell[split], timeline.transfer_ns[split], num),
        exposed_ns=exposed,
    )


def _subtract(whole: Intervals, part: Intervals) -> Intervals:
    if not len(part[0]) or not len(whole[0]):
        return whole
    # np.unique would hash, which takes ten times as long here.
    borders = np.sort(np.concatenate((*whole, *part)))
    borders = borders[np.diff(borders, prepend=borders[0] - 1) > 0]
    first, last = borders[:-1], borders[1:]
    left = (find_covering(*whole, first) != NOT_FOUND) & (find_covering(*part, first) == NOT_FOUND)
    return first[left], last[left]


def _add_by_rank(
    sums: NDArray[np.int64], keys: NDArray[np.int64], line: Line, code: int, found: Intervals
) -> None:
    rank = line.ranks[found[0] // line.stride_ns].astype(np.int64)
    np.add.at(sums, np.searchsorted(keys, rank * len(KINDS) + code), found[1] - found[0])


def _sums(cell: NDArray[np.intp], value: NDArray[np.int64], num: int) -> NDArray[np.int64]:
    """Return exact sums by cell; np.bincount with weights would round above 2^53."""
    found = np.zeros(num, dtype=np.int64)
    np.add.at(found, cell, value)
    return found
