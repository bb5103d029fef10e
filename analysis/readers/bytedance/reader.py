"""Reader of runs in the ByteDance format, for replay and diagnosis."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.tracer.span import KIND_CODES, SpanKind

from ...arrays.grouping import NO_GROUP, cumcount, is_one_of, max_over_group
from ...arrays.sorting import argsort_rows
from ...replay.model import ComputeItems, Reading, WaitIntervals, remove_overlaps
from ..waits import WaitSplit, split_at_arrivals
from .blocks import map_steps_of, sort_rows
from .evidence import find_gaps, find_transfers
from .format import CLOCK_ERROR_TRANSFER_NS, CODE, COMPUTE, COMPUTE_CODES, OpType
from .graph import build_model, infer_trace, read_trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...trace.tables import RunInfo, SpanTable
    from .graph import Trace

COMPUTES = (SpanKind.FORWARD, SpanKind.BACKWARD)

WITHOUT_LAUNCH = frozenset({*COMPUTE, OpType.OPTIMIZER, OpType.GC})
"""The types that a host launches; the format has no launch times."""

SERIAL_COMMUNICATION = (
    OpType.GRADS_REDUCE_SCATTER,
    OpType.SEPARATE_GRADS,
    OpType.EMBEDDING_GRADS,
    OpType.GRAD_CLIP,
)
"""Communication at the step's end, during which the worker computes nothing."""


def read_bytedance(run: RunInfo, spans: SpanTable) -> Reading:
    """Read a ByteDance trace for replay and diagnosis."""
    rows = sort_rows(run, spans)
    del spans  # unless the caller keeps them, their memory is free for what follows
    trace = infer_trace(run, rows)
    left_out, warnings = trace.find_contradictions(), list(rows.warnings)
    if left_out:
        rows = rows.without(left_out)
        trace = infer_trace(run, rows)
    if trace.num_clock_errors:
        warnings.append(
            f"{trace.num_clock_errors} transfers were negative by 10 ms or more (clock error)"
            " and count as 0"
        )
    # numpy releases the interpreter lock in long operations, so both threads progress.
    with ThreadPoolExecutor(1) as pool:
        transfers = pool.submit(find_transfers, trace)
        model, items, waits, gaps = (
            build_model(trace),
            _items(trace),
            _waits(trace),
            find_gaps(trace),
        )
        return Reading(
            model=model,
            items=items,
            waits=waits,
            gaps=gaps,
            steps=rows.steps,
            actual_ns=rows.bounds_ns[1] - rows.bounds_ns[0],
            bounds_ns=rows.bounds_ns,
            without_launch=WITHOUT_LAUNCH,
            transfers=transfers.result(),
            left_out=left_out,
            warnings=tuple(warnings),
        )


def _items(trace: Trace) -> ComputeItems:
    rows = trace.rows

    def find(own: slice) -> tuple[NDArray[Any], ...]:
        compute = trace.computes[own]
        forward = rows.type[compute] == CODE[OpType.FORWARD_COMPUTE]
        kind = np.where(forward, *(np.int8(KIND_CODES[kind]) for kind in COMPUTES))
        step, rank, chunk = rows.step[compute], rows.rank[compute], rows.chunk[compute]
        order = argsort_rows(step, rank, kind, chunk, rows.start[compute])
        key = (step[order], rank[order], kind[order], chunk[order])
        changes = np.zeros(len(order), dtype=np.bool_)
        for column in key:
            changes[1:] |= column[1:] != column[:-1]
        microbatch = cumcount(np.cumsum(changes, dtype=np.int32)).astype(np.int32)
        return *key, microbatch, (rows.end[compute] - rows.start[compute])[order]

    parts = map_steps_of(find, rows, trace.computes) or [find(slice(0, 0))]
    step, rank, kind, chunk, microbatch, self_ns = map(np.concatenate, zip(*parts, strict=True))
    return ComputeItems(
        step=np.array(rows.steps, dtype=np.int32)[step],
        rank=rank,
        kind=kind,
        chunk=chunk,
        microbatch=microbatch,
        self_ns=self_ns,
    )


def _waits(trace: Trace) -> WaitIntervals:
    """Return the intervals in which workers waited for the last member of a communication.

    A wait before a compute begins with the end of the compute before it, one at the step's end
    with the start of the communication itself.
    """
    rows = trace.rows
    arrival = trace.arrival_ns
    # Communications that a compute waits for, and the end of the compute before that.
    computes, operations = trace.computes, trace.operations
    previous_end = np.full(len(rows), np.iinfo(np.int64).min)
    follows = rows.worker[computes[1:]] == rows.worker[computes[:-1]]
    previous_end[computes[1:][follows]] = rows.end[computes[:-1][follows]]
    is_compute = is_one_of(rows.type, COMPUTE_CODES)
    edges = is_compute[operations.dst] & (operations.group[operations.src] != NO_GROUP)
    consumed, free_ns = operations.src[edges], previous_end[operations.dst[edges]]
    serial = np.flatnonzero(np.isin(rows.type, [CODE[name] for name in SERIAL_COMMUNICATION]))
    comm = np.concatenate((consumed, serial))
    begin = np.concatenate((np.maximum(free_ns, rows.start[consumed]), rows.start[serial]))
    real = arrival[comm] > begin
    return remove_overlaps(
        WaitIntervals(
            rank=rows.rank[comm[real]],
            operation=comm[real],
            start_ns=begin[real],
            end_ns=arrival[comm[real]],
        )
    )


def split_bytedance_waits(run: RunInfo, spans: SpanTable) -> WaitSplit:
    """Split the communication spans of a run into wait and transfer, by inferred groups.

    The split is unknown for operations without a group: no-ops and layernorm-grads-all-reduce.

    Source:
        arXiv 2505.05713; a transfer of -10 ms or less is clock error there.
    """
    trace = read_trace(run, spans)
    known = trace.operations.group != NO_GROUP
    rows, group = trace.rows.row[known], trace.operations.group[known]
    arrival = trace.arrival_ns[known]
    # The lowest of several last ranks is the largest of the negated ones.
    rank = spans.rank[rows].astype(np.int64)
    negated = np.where(spans.start_ns[rows] == arrival, -rank, np.iinfo(np.int64).min)
    return split_at_arrivals(
        spans,
        rows,
        arrival,
        last_rank=-max_over_group(group, negated),
        instance=group,
        tolerance_ns=-CLOCK_ERROR_TRANSFER_NS - 1,
    )
