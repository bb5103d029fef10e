"""The replicas of a ByteDance trace by their structure, each structure's graph inferred once.

A *sheet* holds all replicas of one shape: a row an operation, a column
(*lane*) one (step, replica). What decides the structure is few: how many
operations of each type a worker has, their chunks, the order in which its
computes began, and which transfers are no-ops.
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
    from .format import Whole

CROSS_REPLICA_TYPES = (PARAMS_ALL_GATHER, GRADS_REDUCE_SCATTER, SEPARATE_GRADS, GRAD_CLIP)
"""Collectives over the data-parallel replicas, the last over all stages too."""

STREAMS = ((FORWARD_COMPUTE, BACKWARD_COMPUTE), (PARAMS_ALL_GATHER, GRADS_REDUCE_SCATTER))
"""Types that share a stream of a worker; of the others the order is that of their numbers."""

TRANSPOSE_COLUMNS = 256
"""Replicas whose columns are turned together: both sides stay in a core's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeTable:
    """All replicas of one shape."""

    shape: Shape
    type: NDArray[np.int64]
    """Shape (ops,)."""

    stage: NDArray[np.int64]
    """Shape (ops,)."""

    start_ns: NDArray[np.int64]
    """Shape (ops, lanes)."""

    end_ns: NDArray[np.int64]
    """Shape (ops, lanes)."""

    step: NDArray[np.int64]
    """Shape (lanes,): index of the step, ascending."""

    replica: NDArray[np.int64]
    """Shape (lanes,): index of the dp position."""

    num_unpaired: int
    """Sends and receives of one lane without a partner, though its worker has operations."""


def build_shape_tables(blocks: Blocks, layout: Layout, keep: NDArray[np.bool_]) -> list[ShapeTable]:
    """Sort replicas by shape.

    Args:
        blocks: The trace.
        layout: Number of stages and of model chunks on each.
        keep: Shape (steps,): steps that take part.
    """
    num_replicas = len(blocks.replicas)
    count = blocks.count.reshape(-1, blocks.count.shape[2])
    taken = np.flatnonzero(np.repeat(keep, num_replicas) & count.any(axis=1))
    overlapped = bool(blocks.count[keep][..., CODE[SEPARATE_GRADS] :: NUM_TYPES].any())
    sheets = []
    for equal_count in _group_equal_columns([count[taken].T]):
        instances = taken[equal_count]
        counts = count[instances[0]]
        start, end, chunk = _gather_times(blocks, instances)
        for lanes in _group_equal_columns(list(_structure_features(counts, start, end, chunk))):
            at = int(lanes[0])
            rows = _single_column_rows(counts, start[:, at], end[:, at], chunk[:, at])
            edges, group, unpaired = infer_dependencies(rows, layout, overlapped=overlapped)
            whole = len(lanes) == len(instances)
            sheets.append(
                ShapeTable(
                    shape=_build_shape(rows, *edges.arrays(), group),
                    type=rows.type.astype(np.int64),
                    stage=rows.stage.astype(np.int64),
                    start_ns=start if whole else start[:, lanes],
                    end_ns=end if whole else end[:, lanes],
                    step=instances[lanes] // num_replicas,
                    replica=instances[lanes] % num_replicas,
                    num_unpaired=len(unpaired),
                )
            )
    return sheets


def _group_equal_columns(tables: list[Whole]) -> list[NDArray[np.int64]]:
    """Return the columns in classes of equal content; the tables stand below each other."""
    same = np.ones(tables[0].shape[1], dtype=np.bool_)
    for table in tables:
        same &= (table == table[:, :1]).all(axis=0)
    classes: dict[bytes, list[int]] = defaultdict(list)
    strange = np.flatnonzero(~same)
    contents = np.concatenate([table[:, strange] for table in tables]).T.copy()
    for column, content in zip(strange.tolist(), contents, strict=True):
        classes[content.tobytes()].append(column)
    return [np.flatnonzero(same), *(np.array(columns) for columns in classes.values())]


def _gather_times(
    blocks: Blocks, instances: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], Whole]:
    """Return start, end and chunk of some replicas' operations, each of shape (ops, lanes)."""
    columns, first = blocks.columns, blocks.first.ravel()[instances]
    num_ops = int(blocks.count.reshape(-1, blocks.count.shape[2])[instances[0]].sum())
    start = np.empty((num_ops, len(instances)), dtype=np.int64)
    end = np.empty_like(start)
    chunk = np.empty(start.shape, dtype=columns.chunk.dtype)

    def fill(lanes: slice) -> None:
        rows = blocks.order[first[lanes, None] + np.arange(num_ops)]
        starts = columns.start_ns[rows]
        start[:, lanes] = starts.T
        starts += columns.duration_ns[rows]
        end[:, lanes] = starts.T
        chunk[:, lanes] = columns.chunk[rows].T

    map_slices(fill, len(instances), rows_at_once=TRANSPOSE_COLUMNS)
    return start, end, chunk


def _structure_features(
    counts: NDArray[np.int64],
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    chunk: Whole,
) -> Iterator[Whole]:
    """Yield what tells shapes of equal counts apart, each of shape (features, lanes)."""
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
    """Return each lane's order of (start, end, row), shape (members, lanes).

    Where the first lane's order leaves no doubt, it is taken instead of sorted anew.
    """
    order = argsort_rows(start[:, 0], end[:, 0])
    ordered = start[order]
    clear = (ordered[1:] > ordered[:-1]).all(axis=0)
    orders = np.broadcast_to(order[:, None], start.shape)
    if clear.all():
        return orders
    orders = orders.copy()
    orders[:, ~clear] = np.lexsort((end[:, ~clear], start[:, ~clear]), axis=0)
    return orders


def _single_column_rows(
    counts: NDArray[np.int64],
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    chunk: Whole,
) -> Rows:
    """Return one replica in one step as a trace of its own."""
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
    meeting: dict[int, CollectiveKey] = {}
    for name in CROSS_REPLICA_TYPES:
        for row in rows.of(name).tolist():
            stage = -1 if name == GRAD_CLIP else int(rows.stage[row])
            meeting[int(gate[row])] = (CODE[name], stage, int(rows.nth[row]))
    return Shape(
        label=rows.stage.astype(np.int64) * NUM_TYPES + rows.type,
        src=src,
        dst=dst,
        gate=gate,
        meeting=meeting,
        closing=tuple(rows.of(OPTIMIZER).tolist()),
    )


def recorded_durations(
    sheets: Sequence[ShapeTable], num_steps: int
) -> tuple[list[NDArray[np.float64]], int]:
    """Return durations of compute, transfers of communication.

    A transfer is ``end - max(start over its group)``; one of -10 ms or less is
    clock error and counts as 0.

    Args:
        sheets: The trace.
        num_steps: Steps that ``ShapeTable.step`` counts.

    Returns:
        By sheet, shape (ops, lanes), in ns; and how many transfers are clock errors.
    """
    over = _collective_arrivals(sheets, num_steps)
    durations, num_clock_errors = [], 0
    for sheet in sheets:
        taken = np.empty(sheet.start_ns.shape)
        for gate, members in enumerate(sheet.shape.members()):
            key = sheet.shape.meeting.get(gate)
            arrival = sheet.start_ns[members].max(axis=0) if key is None else over[key][sheet.step]
            for row in members:
                transfer = sheet.end_ns[row] - arrival
                wrong = transfer <= CLOCK_ERROR_TRANSFER_NS
                num_clock_errors += int(np.count_nonzero(wrong))
                taken[row] = np.where(wrong, 0, transfer)
        for row in np.flatnonzero(sheet.shape.gate < 0).tolist():
            np.subtract(sheet.end_ns[row], sheet.start_ns[row], out=taken[row])
        durations.append(taken)
    return durations, num_clock_errors


def _collective_arrivals(
    sheets: Sequence[ShapeTable], num_steps: int
) -> dict[CollectiveKey, NDArray[np.int64]]:
    """Return when the last member of each meeting started, by step."""
    lowest = np.iinfo(np.int64).min
    over: dict[CollectiveKey, NDArray[np.int64]] = {}
    for sheet in sheets:
        members = sheet.shape.members()
        begins = np.flatnonzero(np.diff(sheet.step, prepend=-1))
        for gate, key in sheet.shape.meeting.items():
            starts = sheet.start_ns[members[gate]].max(axis=0)
            latest = over.setdefault(key, np.full(num_steps, lowest))
            steps = sheet.step[begins]
            latest[steps] = np.maximum(latest[steps], np.maximum.reduceat(starts, begins))
    return over


def ideal_durations(
    sheets: Sequence[ShapeTable], durations: Sequence[NDArray[np.float64]]
) -> NDArray[np.float64]:
    """Return each type's ideal over all dp positions, stages and steps.

    That is the mean duration of compute, the median transfer of communication.

    Returns:
        Shape (types,), in ns; NaN for a type that the trace lacks.
    """
    ideal = np.full(len(TYPES), np.nan)
    for name, code in CODE.items():
        values = [
            taken[sheet.type == code].ravel()
            for sheet, taken in zip(sheets, durations, strict=True)
        ]
        together = np.concatenate(values)
        if len(together) and name in COMMUNICATION:
            ideal[code] = np.median(together, overwrite_input=True)
        elif len(together):
            ideal[code] = together.mean()
    return ideal
