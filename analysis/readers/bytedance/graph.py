"""Operations of a ByteDance trace, with dependencies and groups inferred from order and time.

Source: arXiv 2505.05713, sections 3 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...arrays.grouping import NO_GROUP, cumcount, is_one_of, max_over_group
from ...arrays.sorting import argsort_rows
from ...replay.model import ReplayModel
from ...replay.operations import Operations
from .blocks import Rows, map_steps, rows_by_start, sort_rows
from .format import (
    CLOCK_ERROR_TRANSFER_NS,
    CODE,
    COMMUNICATION,
    COMPUTE,
    COMPUTE_CODES,
    FOLDED,
    TYPES,
    OpType,
)
from .pipeline import DIRECTIONS, Edges, link_pipeline

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rankscope.tracer.topology import Layout

    from ...trace.tables import RunInfo
    from .format import Columns

COMMUNICATION_CODES = tuple(CODE[name] for name in COMMUNICATION)

WARM_UP_COMPUTES = 2
"""The first backward transfers wait for the compute this many before the first backward one."""

STREAMS = (
    (OpType.FORWARD_SEND,),
    (OpType.FORWARD_RECV,),
    (OpType.BACKWARD_SEND,),
    (OpType.BACKWARD_RECV,),
    (OpType.PARAMS_ALL_GATHER, OpType.GRADS_REDUCE_SCATTER),
)
"""A worker's streams beside that of its compute: each runs its operations in order of start."""


def infer_dependencies(
    rows: Rows, layout: Layout, *, computes: NDArray[np.int64], overlapped: bool
) -> tuple[Edges, NDArray[np.int64], NDArray[np.int64]]:
    """Infer the dependencies and communication instances of all operations.

    Args:
        computes: Rows of forward and backward compute, by worker, then by start.
        overlapped: Whether the trace has overlapped DP communication.

    Returns:
        The dependencies; the instance of each operation, shape (ops,), or `NO_GROUP`; unpaired
        sends and receives, as `link_pipeline` returns them.
    """
    edges, group = Edges(), np.full(len(rows), NO_GROUP, dtype=np.int64)
    unpaired = [
        link_pipeline(rows, edges, group, direction, layout.pp, layout.vpp)
        for direction in DIRECTIONS
    ]
    edges.chain(computes, rows.worker[computes])
    for stream in STREAMS:
        members = rows_by_start(rows, stream)
        edges.chain(members, rows.worker[members])
    _add_warm_up_edges(rows, edges, computes)
    gathers, gather_chunk = _pick_by_chunk(rows, OpType.PARAMS_ALL_GATHER, last=True)
    forwards, forward_chunk = _pick_by_chunk(rows, OpType.FORWARD_COMPUTE, last=False)
    _, of_gather, of_forward = np.intersect1d(
        gather_chunk, forward_chunk, assume_unique=True, return_indices=True
    )
    edges.add(gathers[of_gather], forwards[of_forward])
    _add_step_end_edges(rows, edges, computes, overlapped=overlapped)
    _number_collectives(rows, group, layout.pp)
    return edges, group, np.concatenate(unpaired)


def _add_warm_up_edges(rows: Rows, edges: Edges, computes: NDArray[np.int64]) -> None:
    """Make a worker's first backward transfers wait for its warm-up.

    They wait for the compute `WARM_UP_COMPUTES` before the first backward-compute.
    """
    worker = rows.worker[computes]
    backward = np.flatnonzero(rows.type[computes] == CODE[OpType.BACKWARD_COMPUTE])
    _, at = np.unique(worker[backward], return_index=True)
    first_backward = backward[at]
    enough = cumcount(worker)[first_backward] >= WARM_UP_COMPUTES
    source = computes[first_backward[enough] - WARM_UP_COMPUTES]
    for name in (OpType.BACKWARD_SEND, OpType.BACKWARD_RECV):
        has_one = rows.count[rows.worker[source], CODE[name]] > 0
        edges.add(source[has_one], rows.first[rows.worker[source[has_one]], CODE[name]])


def _pick_by_chunk(
    rows: Rows, name: str, *, last: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first or last row of a type for each (worker, chunk), and the key of that."""
    members = rows.of(name)
    key = _worker_chunk(rows, members)
    if last:
        members, key = members[::-1], key[::-1]
    keys, at = np.unique(key, return_index=True)
    return members[at], keys


def _worker_chunk(rows: Rows, members: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return a number for the (worker, chunk) of each of some rows."""
    worker = rows.worker[members].astype(np.int64)
    return worker * (int(rows.chunk.max(initial=0)) + 2) + rows.chunk[members] + 1


def _add_step_end_edges(
    rows: Rows, edges: Edges, computes: NDArray[np.int64], *, overlapped: bool
) -> None:
    """Chain the operations after a worker's last compute; ``overlapped`` changes their order."""
    chain = [OpType.GC, OpType.LAYERNORM_GRADS, OpType.EMBEDDING_GRADS]
    chain += [OpType.SEPARATE_GRADS] if overlapped else [OpType.GRADS_REDUCE_SCATTER]
    chain += [OpType.GRAD_CLIP, OpType.OPTIMIZER]
    place = np.full(len(TYPES), -1)
    place[[CODE[name] for name in chain]] = np.arange(1, len(chain) + 1)
    place[[*COMPUTE_CODES]] = 0

    is_last = np.append(rows.worker[computes][1:] != rows.worker[computes][:-1], True)
    is_last = is_last[: len(computes)]  # without computes, np.append left one entry
    members = np.concatenate((computes[is_last], np.flatnonzero(place[rows.type] > 0)))
    members = members[argsort_rows(rows.worker[members], place[rows.type[members]], members)]
    edges.chain(members, rows.worker[members])
    if overlapped:
        last_backward, key = _pick_by_chunk(rows, OpType.BACKWARD_COMPUTE, last=True)
        scatters = rows.of(OpType.GRADS_REDUCE_SCATTER)
        wanted = _worker_chunk(rows, scatters)
        at = np.searchsorted(key, wanted)
        known = (at < len(key)) & (key[np.minimum(at, len(key) - 1)] == wanted)
        edges.add(last_backward[at[known]], scatters[known])
        layernorm = rows.of(OpType.LAYERNORM_GRADS)
        num = rows.count[rows.worker[layernorm], CODE[OpType.GRADS_REDUCE_SCATTER]]
        layernorm, num = layernorm[num > 0], num[num > 0]
        last = rows.first[rows.worker[layernorm], CODE[OpType.GRADS_REDUCE_SCATTER]] + num - 1
        edges.add(last, layernorm)


def _number_collectives(rows: Rows, group: NDArray[np.int64], num_stages: int) -> None:
    """Number the instances of collectives over dp, over first and last stage, over the job."""
    # TP is collapsed, so no group of layernorm-grads-all-reduce was traced.
    step_stage = rows.step.astype(np.int64) * num_stages + rows.stage
    by_dp = rows.worker_dp[rows.worker]
    scopes = (
        (OpType.PARAMS_ALL_GATHER, step_stage),
        (OpType.GRADS_REDUCE_SCATTER, step_stage),
        (OpType.SEPARATE_GRADS, step_stage),
        (OpType.EMBEDDING_GRADS, by_dp),
        (OpType.GRAD_CLIP, rows.step.astype(np.int64)),
    )
    for name, scope in scopes:
        members = rows.of(name)
        if len(members):
            nth = rows.nth(members)
            key = scope[members] * (int(nth.max()) + 1) + nth
            _, instance = np.unique(key, return_inverse=True)
            group[members] = int(group.max(initial=-1)) + 1 + instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Operations of a ByteDance trace, and how they were inferred."""

    operations: Operations
    rows: Rows
    computes: NDArray[np.int64]
    """Rows of forward and backward compute, by worker, then by start."""

    arrival_ns: NDArray[np.int64]
    """Shape (ops,): latest start over the operation's group; its own start without a group."""

    num_clock_errors: int
    """Transfers that were negative by 10 ms or more and count as 0."""

    unpaired: NDArray[np.int64]
    """Sends and receives that are unpaired although the worker at the other end has operations in
    the step."""

    def find_contradictions(self) -> dict[int, str]:
        """Return the steps whose replay would prove nothing, and why."""
        steps, num = np.unique(self.rows.step[self.unpaired], return_counts=True)
        unpaired = {
            self.rows.steps[step]: f"{count} sends and receives have no counterpart"
            for step, count in zip(steps.tolist(), num.tolist(), strict=True)
        }
        return unpaired | self.rows.uneven


def read_trace(run: RunInfo, spans: Columns) -> Trace:
    """Infer groups and dependencies of a ByteDance trace.

    Args:
        spans: Its operations; ``name`` is the type, ``seq`` numbers the operations of one type on
            one worker in one step.

    Returns:
        The operations, sorted by (step, dp, stage, type, seq).
    """
    return infer_trace(run, sort_rows(run, spans))


def infer_trace(run: RunInfo, rows: Rows) -> Trace:
    """Infer groups and dependencies of sorted operations; see `read_trace`."""
    overlapped = bool((rows.type == CODE[OpType.SEPARATE_GRADS]).any())
    num = len(rows)
    group, arrival = np.empty(num, dtype=np.int32), np.empty(num, dtype=np.int64)
    duration, gap = np.empty((2, num))

    def infer(own: Rows, part: slice) -> tuple[NDArray[np.int64], ...]:
        computes = rows_by_start(own, COMPUTE)
        edges, own_group, unpaired = infer_dependencies(
            own, run.layout, computes=computes, overlapped=overlapped
        )
        src, dst = edges.arrays()
        # A block has no more groups than rows.
        group[part] = np.where(own_group == NO_GROUP, NO_GROUP, own_group + part.start)
        arrival[part] = max_over_group(own_group, own.start)
        is_comm = is_one_of(own.type, COMMUNICATION_CODES)
        begin = np.where(is_comm, arrival[part], own.start)
        duration[part] = own.end - begin
        gap[part] = _launch_gaps(own, src, dst)
        clock_error = np.flatnonzero(is_comm & (own.end - begin <= CLOCK_ERROR_TRANSFER_NS))
        duration[part][clock_error] = 0.0
        edge_arrays = [each.astype(np.int32) + np.int32(part.start) for each in (src, dst)]
        return computes + part.start, unpaired + part.start, clock_error, *edge_arrays

    parts = zip(*map_steps(infer, rows), strict=True)
    computes, unpaired, clock_error, src, dst = [np.concatenate(each) for each in parts] or [
        np.zeros(0, dtype=np.int64)
    ] * 5
    operations = Operations(
        steps=rows.steps,
        step=rows.step,
        replica=rows.dp,
        label=rows.type.astype(np.int32) * np.int32(run.layout.pp) + rows.stage,
        group=group,
        duration_ns=duration,
        gap_ns=gap,
        start_ns=rows.start,
        end_ns=rows.end,
        closes_step=rows.type == CODE[OpType.OPTIMIZER],
        src=src,
        dst=dst,
    )
    return Trace(
        operations=operations,
        rows=rows,
        computes=computes,
        arrival_ns=arrival,
        num_clock_errors=len(clock_error),
        unpaired=unpaired,
    )


def build_model(trace: Trace) -> ReplayModel:
    """Return the operations with their ideals, by type over all dp positions, stages and steps.

    The ideal is the mean duration of compute, the median transfer of communication, and the
    median launch gap.
    """
    operations = trace.operations
    kinds = tuple(dict.fromkeys(FOLDED.get(name, name) for name in TYPES))
    kind_of_type = np.array([kinds.index(FOLDED.get(name, name)) for name in TYPES])
    ideal, ideal_gap = np.zeros((2, len(TYPES)))
    for code, name in enumerate(TYPES):
        rows = trace.rows.of(name)
        if len(rows):
            typical = np.median if name in COMMUNICATION else np.mean
            ideal[code] = typical(operations.duration_ns[rows])
            ideal_gap[code] = np.median(operations.gap_ns[rows])
    return ReplayModel(
        operations=operations,
        ideal_ns=ideal[trace.rows.type],
        ideal_gap_ns=ideal_gap[trace.rows.type],
        kind=kind_of_type[trace.rows.type].astype(np.int16),
        kinds=kinds,
        rank=trace.rows.rank,
        dp=trace.rows.dp,
        stage=trace.rows.stage,
        on_device=np.ones(len(operations), dtype=np.bool_),
    )


def _launch_gaps(rows: Rows, src: NDArray[np.int64], dst: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the launch gap of each compute: its start minus the last end of its dependencies.

    Only compute has launch gaps (decision 20): a communication that begins late may have waited
    for something that the format does not record (a barrier, or the host in another receive). A
    compute that began before its dependencies ended has no gap; the error of the full replay shows
    the effect.
    """
    begins = np.flatnonzero(np.diff(rows.step, prepend=-1))
    first = np.minimum.reduceat(rows.start, begins) if len(begins) else rows.start
    ready = np.repeat(first, np.diff(begins, append=len(rows)))
    np.maximum.at(ready, dst, rows.end[src])
    gaps = np.maximum(rows.start - ready, 0)
    gaps[is_one_of(rows.type, COMMUNICATION_CODES)] = 0
    in_ns: NDArray[np.float64] = gaps.astype(np.float64)
    return in_ns
