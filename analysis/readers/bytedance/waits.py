"""Split a ByteDance step's communication by the groups that the replay infers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import NONE

from ...replay.operations import NO_GROUP, latest_by_group
from ..waits import WaitSplit
from .format import CLOCK_ERROR_TRANSFER_NS
from .reader import read_trace

if TYPE_CHECKING:
    from ...trace.tables import RunInfo, SpanTable


def split_bytedance_waits(run: RunInfo, spans: SpanTable) -> WaitSplit:
    """Split the spans of a run in the ByteDance format like `analysis.readers.waits.split_waits`.

    That format records no groups; these are inferred. Where the inference
    knows none (no-ops, layernorm-grads-all-reduce), the split is unknown.

    Args:
        run: Its layout and the (dp, stage) of each rank.
        spans: Whole steps of the run.

    Returns:
        The split, in the order of ``spans``.

    Source:
        arXiv 2505.05713; a transfer of -10 ms or less is clock error there.
    """
    trace = read_trace(run, spans)
    group = trace.operations.group
    known = group != NO_GROUP
    rows, member = trace.rows.row[known], group[known]
    start, duration = spans.start_ns[rows], spans.duration_ns[rows]
    arrival = latest_by_group(member, start)
    # The lowest of several last arrivals is the largest of the negated ranks.
    rank = spans.rank[rows].astype(np.int64)
    lowest = np.iinfo(np.int64).min
    last = -latest_by_group(member, np.where(start == arrival, -rank, lowest))

    wait_ns = np.full(len(spans), -1, dtype=np.int64)
    transfer_ns, instance = wait_ns.copy(), wait_ns.copy()
    last_rank = np.full(len(spans), NONE, dtype=np.int32)
    wait_ns[rows] = arrival - start
    transfer_ns[rows] = duration - (arrival - start)
    last_rank[rows] = last
    instance[rows] = member
    negative = (wait_ns >= 0) & (transfer_ns <= CLOCK_ERROR_TRANSFER_NS)
    return WaitSplit(
        wait_ns=wait_ns,
        transfer_ns=transfer_ns,
        last_rank=last_rank,
        instance=instance,
        negative=negative,
    )
