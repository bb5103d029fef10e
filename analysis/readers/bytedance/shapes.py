"""Replicas of a ByteDance trace grouped by shape, and the durations of their operations.

Each shape's dependencies are inferred once. Four features decide the shape: the number of
operations of each type on each worker, their chunks, the order in which the operations of a
stream began, and which transfers are no-ops.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...arrays.sorting import argsort_rows
from ...replay.batched_program import Shape
from .blocks import NUM_TYPES, Rows, map_slices
from .format import (
    BACKWARD_COMPUTE,
    CLOCK_ERROR_TRANSFER_NS,
    CODE,
    COMMUNICATION,
    FORWARD_COMPUTE,
    GRAD_CLIP,
    GRADS_REDUCE_SCATTER,
    OPTIMIZER,
    PARAMS_ALL_GATHER,
    SEPARATE_GRADS,
    TYPES,
)
from .graph import infer_dependencies
from .pipeline import DIRECTIONS, is_real_recv, is_real_send

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from rankscope.tracer.topology import Layout

    from ...replay.batched_program import CollectiveKey
    from .blocks import Blocks
    from .format import IntArray

CROSS_REPLICA_TYPES = (PARAMS_ALL_GATHER, GRADS_REDUCE_SCATTER, SEPARATE_GRADS, GRAD_CLIP)
"""Collectives over the data-parallel replicas; the last is over all stages too."""

STREAMS = ((FORWARD_COMPUTE, BACKWARD_COMPUTE), (PARAMS_ALL_GATHER, GRADS_REDUCE_SCATTER))
"""Types that share a stream of a worker. Operations of other types are ordered by number."""

TRANSPOSE_COLUMNS = 256
"""Columns transposed together: source and target stay in a core's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeTable:
    """All replicas of one shape: one row per operation, one column per (step, replica)."""

    shape: Shape
    type: NDArray[np.int64]
    """Shape (ops,)."""

    stage: NDArray[np.int64]
    """Shape (ops,)."""

    start_ns: NDArray[np.int64]
    """Shape (ops, columns)."""

    end_ns: NDArray[np.int64]
    """Shape (ops, columns)."""

    step: NDArray[np.int64]
    """Shape (columns,): index of the step, ascending."""

    replica: NDArray[np.int64]
    """Shape (columns,): index of the dp position."""

    num_unpaired: int
    """Unpaired sends and receives of each column, as `link_pipeline` returns them."""


def build_shape_tables(blocks: Blocks, layout: Layout, keep: NDArray[np.bool_]) -> list[ShapeTable]:
    """Group the replicas of a trace by shape.

    Args:
        blocks: The trace.
        layout: Number of stages and of model chunks on each.
        keep: Shape (steps,): steps that are replayed.
    """
    num_replicas = len(blocks.replicas)
    count = blocks.count.reshape(-1, blocks.count.shape[2])
    taken = np.flatnonzero(np.repeat(keep, num_replicas) & count.any(axis=1))
    overlapped = bool(blocks.count[keep][..., CODE[SEPARATE_GRADS] :: NUM_TYPES].any())
    tables = []
    for equal_count in _group_equal_columns([count[taken].T]):
        step_dp = taken[equal_count]
        counts = count[step_dp[0]]
        start, end, chunk = _gather_times(blocks, step_dp)
        for columns in _group_equal_columns(list(_structure_features(counts, start, end, chunk))):
            first = int(columns[0])
            rows = _single_column_rows(counts, start[:, first], end[:, first], chunk[:, first])
            edges, group, unpaired = infer_dependencies(rows, layout, overlapped=overlapped)
            whole = len(columns) == len(step_dp)
            tables.append(
                ShapeTable(
                    shape=_build_shape(rows, *edges.arrays(), group),
                    type=rows.type.astype(np.int64),
                    stage=rows.stage.astype(np.int64),
                    start_ns=start if whole else start[:, columns],
                    end_ns=end if whole else end[:, columns],
                    step=step_dp[columns] // num_replicas,
                    replica=step_dp[columns] % num_replicas,
                    num_unpaired=len(unpaired),
                )
            )
    return tables


def _group_equal_columns(tables: list[IntArray]) -> list[NDArray[np.int64]]:
    """Return groups of columns that are equal in all tables."""
    same = np.ones(tables[0].shape[1], dtype=np.bool_)
    for table in tables:
        same &= (table == table[:, :1]).all(axis=0)
    groups: dict[bytes, list[int]] = defaultdict(list)
    rest = np.flatnonzero(~same)
    contents = np.concatenate([table[:, rest] for table in tables]).T.copy()
    for column, content in zip(rest.tolist(), contents, strict=True):
        groups[content.tobytes()].append(column)
    return [np.flatnonzero(same), *(np.array(columns) for columns in groups.values())]


def _gather_times(
    blocks: Blocks, step_dp: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], IntArray]:
    """Return start, end and chunk of some replicas' operations, each of shape (ops, columns)."""
    operations, first = blocks.operations, blocks.first.ravel()[step_dp]
    num_ops = int(blocks.count.reshape(-1, blocks.count.shape[2])[step_dp[0]].sum())
    start = np.empty((num_ops, len(step_dp)), dtype=np.int64)
    end = np.empty_like(start)
    chunk = np.empty(start.shape, dtype=operations.chunk.dtype)

    def fill(columns: slice) -> None:
        rows = blocks.order[first[columns, None] + np.arange(num_ops)]
        times = operations.start_ns[rows]
        start[:, columns] = times.T
        times += operations.duration_ns[rows]
        end[:, columns] = times.T
        chunk[:, columns] = operations.chunk[rows].T

    map_slices(fill, len(step_dp), slice_rows=TRANSPOSE_COLUMNS)
    return start, end, chunk


def _structure_features(
    counts: NDArray[np.int64],
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    chunk: IntArray,
) -> Iterator[IntArray]:
    """Yield the features that distinguish shapes of equal counts, of shape (features, columns)."""
    last = np.cumsum(counts)
    first = last - counts
    for stage in range(0, len(counts), NUM_TYPES):
        rows = {name: slice(first[stage + k], last[stage + k]) for name, k in CODE.items()}
        for names in STREAMS:
            members = np.concatenate([np.arange(rows[n].start, rows[n].stop) for n in names])
            yield _sort_by_start(start[members], end[members])
            yield chunk[members]
        for direction in DIRECTIONS:
            compute = rows[direction.compute]
            if compute.start == compute.stop:
                continue
            recvs, sends = start[rows[direction.recv]], end[rows[direction.send]]
            yield is_real_recv(recvs, start[compute.stop - 1]).astype(np.int8)
            yield is_real_send(sends, end[compute.start]).astype(np.int8)


def _sort_by_start(start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """Argsort each column by (start, end, row). Shape (members, columns).

    A column whose starts ascend in the order of the first column is not sorted again.
    """
    order = argsort_rows(start[:, 0], end[:, 0])
    ordered = start[order]
    ascends = (ordered[1:] > ordered[:-1]).all(axis=0)
    orders = np.broadcast_to(order[:, None], start.shape)
    if ascends.all():
        return orders
    orders = orders.copy()
    orders[:, ~ascends] = np.lexsort((end[:, ~ascends], start[:, ~ascends]), axis=0)
    return orders


def _single_column_rows(
    counts: NDArray[np.int64],
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    chunk: IntArray,
) -> Rows:
    """Return one column as a trace of one replica and one step."""
    num_stages = len(counts) // NUM_TYPES
    block = np.repeat(np.arange(len(counts)), counts)
    stage = block // NUM_TYPES
    first = np.cumsum(counts) - counts
    zeros = np.zeros(len(block), dtype=np.int32)
    return Rows(
        steps=(0,),
        row=np.arange(len(block)),
        step=zeros,
        dp=zeros,
        stage=stage.astype(np.int32),
        type=(block % NUM_TYPES).astype(np.int8),
        start=start,
        end=end,
        chunk=chunk.astype(np.int32),
        worker=stage,
        worker_dp=np.zeros(num_stages, dtype=np.int64),
        worker_stage=np.arange(num_stages, dtype=np.int32),
        nth=np.arange(len(block)) - first[block],
        first=first.reshape(num_stages, NUM_TYPES),
        count=counts.reshape(num_stages, NUM_TYPES),
    )


def _build_shape(
    rows: Rows, src: NDArray[np.int64], dst: NDArray[np.int64], group: NDArray[np.int64]
) -> Shape:
    numbers, gate = np.unique(group, return_inverse=True)
    gate -= int(numbers[0] < 0)
    shared: dict[int, CollectiveKey] = {}
    for name in CROSS_REPLICA_TYPES:
        for row in rows.of(name).tolist():
            stage = -1 if name == GRAD_CLIP else int(rows.stage[row])
            shared[int(gate[row])] = (CODE[name], stage, int(rows.nth[row]))
    return Shape(
        label=rows.stage.astype(np.int64) * NUM_TYPES + rows.type,
        src=src,
        dst=dst,
        gate=gate,
        shared=shared,
        closing=tuple(rows.of(OPTIMIZER).tolist()),
    )


def recorded_durations(
    tables: Sequence[ShapeTable], num_steps: int
) -> tuple[list[NDArray[np.float64]], int]:
    """Return the durations of compute and the transfers of communication.

    A transfer is ``end - max(start over its group)``. One of -10 ms or less is clock error and
    counts as 0.

    Args:
        tables: The trace.
        num_steps: Steps that ``ShapeTable.step`` indexes.

    Returns:
        By table, shape (ops, columns), ns; the number of clock errors.

    Source:
        arXiv 2505.05713, section 3.
    """
    arrivals = _collective_arrivals(tables, num_steps)
    durations, num_clock_errors = [], 0
    for table in tables:
        duration = np.empty(table.start_ns.shape)
        for gate, members in enumerate(table.shape.members()):
            key = table.shape.shared.get(gate)
            if key is None:
                arrival = table.start_ns[members].max(axis=0)
            else:
                arrival = arrivals[key][table.step]
            for row in members:
                transfer = table.end_ns[row] - arrival
                is_clock_error = transfer <= CLOCK_ERROR_TRANSFER_NS
                num_clock_errors += int(np.count_nonzero(is_clock_error))
                duration[row] = np.where(is_clock_error, 0, transfer)
        for row in np.flatnonzero(table.shape.gate < 0).tolist():
            np.subtract(table.end_ns[row], table.start_ns[row], out=duration[row])
        durations.append(duration)
    return durations, num_clock_errors


def _collective_arrivals(
    tables: Sequence[ShapeTable], num_steps: int
) -> dict[CollectiveKey, NDArray[np.int64]]:
    """Return the last arrival of each shared collective, by step."""
    lowest = np.iinfo(np.int64).min
    arrivals: dict[CollectiveKey, NDArray[np.int64]] = {}
    for table in tables:
        members = table.shape.members()
        begins = np.flatnonzero(np.diff(table.step, prepend=-1))
        for gate, key in table.shape.shared.items():
            starts = table.start_ns[members[gate]].max(axis=0)
            latest = arrivals.setdefault(key, np.full(num_steps, lowest))
            steps = table.step[begins]
            latest[steps] = np.maximum(latest[steps], np.maximum.reduceat(starts, begins))
    return arrivals


def ideal_durations(
    tables: Sequence[ShapeTable], durations: Sequence[NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Return the ideal of each type over all dp positions, stages and steps.

    That is the mean duration of compute and the median transfer of communication.

    Returns:
        Shape (types,), ns; NaN for a type that the trace lacks.
    """
    ideal = np.full(len(TYPES), np.nan)
    for name, code in CODE.items():
        values = np.concatenate(
            [
                duration[table.type == code].ravel()
                for table, duration in zip(tables, durations, strict=True)
            ]
        )
        if len(values) and name in COMMUNICATION:
            ideal[code] = np.median(values, overwrite_input=True)
        elif len(values):
            ideal[code] = values.mean()
    return ideal
