"""Spans of one rank and one step, some of them communication of one group."""

from __future__ import annotations

import numpy as np

from rankscope.analysis.trace.rows import make_span_table
from rankscope.analysis.trace.tables import GroupInfo, SpanTable, StepTable
from rankscope.tracer.span import KIND_CODES, NONE, SpanFlag, SpanKind
from tests.support.analysis.tables import table_of

ON_DEVICE = SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN
MS = 1_000_000
GROUP = 7
DP = GroupInfo(group_id=GROUP, kind="dp-comm", name="dp", members=(0,))

Row = tuple[SpanKind, int, int, int, int]
"""(kind, start, end, launch on the host, seq); times in ms."""


def tables(*rows: Row, bounds: tuple[int, ...] = ()) -> tuple[SpanTable, StepTable]:
    """Return one rank's spans and its one step.

    Args:
        rows: Spans; communications are of one group.
        bounds: ``seq`` of communications whose end is only a bound.
    """
    kind, start, end, launch, seq = (list(column) for column in zip(*rows, strict=True))
    is_comm = np.array([seq != NONE for seq in seq])

    zeros = np.zeros(len(rows), dtype=np.int32)
    spans = make_span_table(
        epoch=zeros,
        step=zeros,
        rank=zeros,
        kind=np.array([KIND_CODES[each] for each in kind], dtype=np.int8),
        name=zeros,
        track=is_comm.astype(np.int32),
        start_ns=np.array(start, dtype=np.int64) * MS,
        duration_ns=np.array(np.subtract(end, start), dtype=np.int64) * MS,
        launch_ns=np.array(launch, dtype=np.int64) * MS,
        group_id=np.where(is_comm, GROUP, 0).astype(np.uint64),
        seq=np.array(seq, dtype=np.int64),
        flags=np.array([_flags(each, is_bound=each in bounds) for each in seq], dtype=np.uint16),
        names=("",),
        tracks=("compute", "comm"),
    )
    return spans, table_of(StepTable, end_ns=100 * MS)


def _flags(seq: int, *, is_bound: bool) -> int:
    if seq == NONE:
        return int(ON_DEVICE)
    end = SpanFlag.END_BOUND if is_bound else SpanFlag.DEVICE_END_KNOWN
    return int(SpanFlag.DEVICE_BEGIN_KNOWN | end | SpanFlag.ASYNC)
