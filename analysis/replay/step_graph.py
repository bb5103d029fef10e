"""Graph of single steps: start, end and slack of each operation, ideal timeline, cycles.

`analysis.replay.program` replays whole runs; here each step has a graph of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.grouping import NO_GROUP
from ..arrays.sorting import argsort_rows, find_positions
from ..report.text import format_ranks
from ..trace.errors import EmptyRunError
from . import loop
from .program import OperationTimes, sort_graph, try_to_sort

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .model import ReplayModel


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGraph:
    """Operations of some steps as nodes, each of which begins when its predecessors have ended.

    The first nodes are the operations. A member of a communication has one node more, its
    *arrival*, which takes its launch gap. The group's *gate* waits for all arrivals, and the
    members wait for the gate. Each step's *sink* waits for the operations that close it.
    """

    steps: tuple[int, ...]
    rows: NDArray[np.int64]
    """Shape (ops,): the operations' rows in the run's `Operations`, ascending."""

    step_index: NDArray[np.int64]
    """Shape (ops,): index into ``steps``."""

    arrival: NDArray[np.int64]
    """Shape (ops,): the operation's arrival node; its own node without a group."""

    sink: NDArray[np.int64]
    """Shape (steps,): the node whose end is the step's end."""

    num_nodes: int
    src: NDArray[np.int64]
    dst: NDArray[np.int64]

    def node_lengths(
        self, duration_ns: NDArray[np.float64], gap_ns: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return each node's length, given durations and gaps of all operations of the run."""
        lengths = np.zeros(self.num_nodes)
        lengths[: len(self.rows)] = duration_ns[self.rows]
        lengths[self.arrival] += gap_ns[self.rows]
        return lengths

    def node_ends(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the end of each node, in ns from its step's start.

        Raises:
            CycleError: Operations of a step depend on each other.
        """
        return longest_paths(self.num_nodes, (self.src, self.dst), lengths)

    def node_tails(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the length of the longest path from the start of each node to its step's end.

        Minus infinity if no operation that closes the step follows.
        """
        has_successor = np.zeros(self.num_nodes, dtype=np.bool_)
        has_successor[self.src] = True
        has_successor[self.sink] = True
        lengths = np.where(has_successor, lengths, -np.inf)
        return longest_paths(self.num_nodes, (self.dst, self.src), lengths)


def find_step(model: ReplayModel, step: int) -> int:
    """Return the index of a step.

    Raises:
        EmptyRunError: The step is not part of the replay.
    """
    if step not in model.operations.steps:
        raise EmptyRunError(
            f"step {step} is not part of the replay: it was not recorded, or was left out"
            " (see quality.warnings)"
        )
    return model.operations.steps.index(step)


def build_step_graph(model: ReplayModel, steps: Sequence[int] | None = None) -> StepGraph:
    """Build the graph of some steps.

    Raises:
        EmptyRunError: A step is not part of the replay.
    """
    operations = model.operations
    numbers = operations.steps if steps is None else tuple(sorted(set(steps)))
    wanted = np.array([find_step(model, step) for step in numbers], dtype=np.int64)
    rows = np.flatnonzero(np.isin(operations.step, wanted))
    step_index = find_positions(operations.step[rows], wanted)
    # Arrival and gate nodes are numbered after the operations.
    num, group = len(rows), operations.group[rows]
    members = np.flatnonzero(group != NO_GROUP)
    groups, of_member = np.unique(group[members], return_inverse=True)
    arrival, gate = np.arange(num), np.full(num, -1, dtype=np.int64)
    arrival[members] = num + np.arange(len(members))
    gate[members] = num + len(members) + of_member
    num_before_sinks = num + len(members) + len(groups)
    sink = num_before_sinks + np.arange(len(numbers))
    number = np.full(len(operations), -1, dtype=np.int64)
    number[rows] = np.arange(num)
    inside = number[operations.dst] >= 0
    src = np.concatenate((number[operations.src[inside]], arrival[members], gate[members]))
    dst = np.concatenate((arrival[number[operations.dst[inside]]], gate[members], members))
    closing = np.flatnonzero(operations.closes_step[rows])
    return StepGraph(
        steps=numbers,
        rows=rows,
        step_index=step_index,
        arrival=arrival,
        sink=sink,
        num_nodes=num_before_sinks + len(numbers),
        src=np.concatenate((src, closing)),
        dst=np.concatenate((dst, sink[step_index[closing]])),
    )


def replayed_times(
    graph: StepGraph, duration_ns: NDArray[np.float64], gap_ns: NDArray[np.float64]
) -> tuple[OperationTimes, NDArray[np.float64]]:
    """Replay the steps of a graph.

    Args:
        duration_ns: Shape (operations of the run,): durations and transfers.
        gap_ns: Shape (operations of the run,): launch gaps.

    Returns:
        The times of the graph's operations, and the duration of each step, shape (steps,), ns.

    Source:
        arXiv 2505.05713: a communication ends its own transfer after the last member's arrival.
    """
    ends = graph.node_ends(graph.node_lengths(duration_ns, gap_ns))
    num = len(graph.rows)
    gate = ends[:num] - duration_ns[graph.rows]
    in_group = graph.arrival != np.arange(num)
    start = np.where(in_group, ends[graph.arrival], gate)
    times = OperationTimes(start_ns=start, gate_ns=gate, end_ns=ends[:num])
    return times, ends[graph.sink]


def node_slack(
    graph: StepGraph, duration_ns: NDArray[np.float64], gap_ns: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return how much later each operation may end without delaying its step's end.

    That is ``T - (its end + the longest path from there to the step's end)``: 0 on a critical
    path, infinite if no operation that closes the step follows.

    Args:
        duration_ns: Shape (operations of the run,): durations and transfers.
        gap_ns: Shape (operations of the run,): launch gaps.

    Returns:
        Shape (ops,), ns, in the order of ``graph.rows``.

    Source:
        Kelley and Walker, "Critical-path planning and scheduling" (1959): total float.
    """
    lengths = graph.node_lengths(duration_ns, gap_ns)
    ends, tails = graph.node_ends(lengths), graph.node_tails(lengths)
    through = (ends + (tails - lengths))[: len(graph.rows)]
    found: NDArray[np.float64] = ends[graph.sink][graph.step_index] - through
    return found


def longest_paths(
    num_nodes: int,
    edges: tuple[NDArray[np.int64], NDArray[np.int64]],
    lengths: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the length of the longest path that ends with each node."""
    graph = sort_graph(num_nodes, *edges)
    by_position, ends = np.empty((2, num_nodes))
    loop.functions.replay(graph, 0, num_nodes, lengths, None, None, by_position)
    ends[graph.order] = by_position
    return ends


@dataclass(frozen=True, slots=True, kw_only=True)
class IdealTimeline:
    """One step's operations, recorded and ideal; columns of equal length, by (rank, start).

    All times are in ns from the step's start. Start and end are the edges of the bar to draw: the
    bar of a communication starts at this member's arrival, so it includes the wait.
    """

    step: int
    operation: NDArray[np.int64]
    """Row in the run's `Operations`."""

    rank: NDArray[np.int32]
    kind: NDArray[np.int16]
    """Code into ``kinds``."""

    kinds: tuple[str, ...]
    start_ns: NDArray[np.int64]
    """As recorded."""

    end_ns: NDArray[np.int64]
    ideal_start_ns: NDArray[np.int64]
    """In the ideal full replay, with launch gaps at their median."""

    ideal_gate_ns: NDArray[np.int64]
    """Arrival of the last member of its communication; its start without one."""

    ideal_end_ns: NDArray[np.int64]
    actual_ns: int
    """Recorded duration of the step: last end - first start."""

    ideal_ns: int

    def __len__(self) -> int:
        return len(self.operation)


def ideal_timeline(model: ReplayModel, step: int) -> IdealTimeline:
    """Replay one step with ideal durations and keep each operation's times.

    Raises:
        EmptyRunError: The step is not part of the replay.
        CycleError: Operations of the step depend on each other.
    """
    graph, operations = build_step_graph(model, [step]), model.operations
    times, step_ns = replayed_times(graph, model.ideal_ns, model.ideal_gap_ns)
    order = argsort_rows(model.rank[graph.rows], times.start_ns, times.end_ns)
    rows = graph.rows[order]
    start, end = operations.start_ns[rows], operations.end_ns[rows]
    begin = int(start.min())
    return IdealTimeline(
        step=step,
        operation=rows,
        rank=model.rank[rows],
        kind=model.kind[rows],
        kinds=model.kinds,
        start_ns=start - begin,
        end_ns=end - begin,
        ideal_start_ns=_whole_ns(times.start_ns[order]),
        ideal_gate_ns=_whole_ns(times.gate_ns[order]),
        ideal_end_ns=_whole_ns(times.end_ns[order]),
        actual_ns=int(end.max()) - begin,
        ideal_ns=round(float(step_ns[0])),
    )


def _whole_ns(time_ns: NDArray[np.float64]) -> NDArray[np.int64]:
    whole: NDArray[np.int64] = np.rint(time_ns).astype(np.int64)
    return whole


def find_cycles(model: ReplayModel) -> dict[int, str]:
    """Find the steps whose operations depend on each other, so that no replay can order them.

    Returns:
        By step number: the ranks of a cycle, and the kinds of its operations.
    """
    described = {step: _describe_cycle(model, step) for step in model.operations.steps}
    return {step: cycle for step, cycle in described.items() if cycle is not None}


def _describe_cycle(model: ReplayModel, step: int) -> str | None:
    graph = build_step_graph(model, (step,))
    found, num_sorted = try_to_sort(graph.num_nodes, graph.src, graph.dst)
    if num_sorted == graph.num_nodes:
        return None
    unordered = np.ones(graph.num_nodes, dtype=np.bool_)
    unordered[found.order[:num_sorted]] = False
    nodes = _walk_cycle(graph.src, graph.dst, unordered)
    node_row = np.full(graph.num_nodes, -1, dtype=np.int64)
    node_row[graph.arrival] = graph.rows
    node_row[: len(graph.rows)] = graph.rows
    rows = node_row[nodes]
    rows = rows[rows >= 0]
    ranks = tuple(np.unique(model.rank[rows]).tolist())
    kinds = sorted({model.kinds[kind] for kind in model.kind[rows].tolist()})
    who = f"{format_ranks(ranks)} wait" if len(ranks) > 1 else f"rank {ranks[0]} waits"
    return f"{who} in a cycle ({', '.join(kinds)})"


def _walk_cycle(
    src: NDArray[np.int64], dst: NDArray[np.int64], unordered: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return the nodes of one cycle. Every unordered node has an unordered predecessor."""
    inside = unordered[src] & unordered[dst]
    predecessor = np.full(len(unordered), -1, dtype=np.int64)
    predecessor[dst[inside]] = src[inside]
    node = int(np.flatnonzero(unordered)[0])
    index: dict[int, int] = {}
    while node not in index:
        index[node] = len(index)
        node = int(predecessor[node])
    path = np.fromiter(index, dtype=np.int64, count=len(index))
    return path[index[node] :]
