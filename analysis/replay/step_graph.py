"""When each operation of some steps begins and ends in the full replay, and how late it may end.

`analysis.replay.program` replays whole runs for their step times alone. Here every
operation's own times are kept, of the steps that are looked at closely.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.grouping import NO_GROUP
from ..arrays.sorting import argsort_rows, find_positions
from ..report.text import format_ranks
from ..trace.errors import EmptyRunError
from .schedule import UNORDERED, node_levels, order_by_level, replay

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .model import ReplayModel
    from .operations import Operations


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGraph:
    """Operations of some steps as nodes that begin when all before them have ended.

    The first nodes are the operations. A member of a communication has a node
    more, its *arrival*, which takes its launch gap; the group's *gate* waits
    for all arrivals, and the members for the gate. Each step's *sink* waits
    for the operations that close it.
    """

    steps: tuple[int, ...]
    rows: NDArray[np.int64]
    """Shape (ops,): the operations' rows in the run's `Operations`, ascending."""

    step_index: NDArray[np.int64]
    """Shape (ops,): index into ``steps``."""

    arrival: NDArray[np.int64]
    """Shape (ops,): the node at which the operation arrives; its own where it has no group."""

    sink: NDArray[np.int64]
    """Shape (steps,): the node at which the step ends."""

    num_nodes: int
    src: NDArray[np.int64]
    dst: NDArray[np.int64]

    def node_lengths(
        self, duration_ns: NDArray[np.float64], gap_ns: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return what each node takes; durations and gaps have one row an operation of the run."""
        lengths = np.zeros(self.num_nodes)
        lengths[: len(self.rows)] = duration_ns[self.rows]
        lengths[self.arrival] += gap_ns[self.rows]
        return lengths

    def node_ends(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return when each node ends, each step from 0, in ns.

        Raises:
            CycleError: Operations of a step wait for each other.
        """
        return _longest_paths(self.num_nodes, (self.src, self.dst), lengths)

    def node_tails(self, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the time from when each node begins to its step's end if nothing else were late.

        Minus infinity where nothing that closes the step follows.
        """
        leads_on = np.zeros(self.num_nodes, dtype=np.bool_)
        leads_on[self.src] = True
        leads_on[self.sink] = True
        lengths = np.where(leads_on, lengths, -np.inf)
        return _longest_paths(self.num_nodes, (self.dst, self.src), lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedTimes:
    """Times of the operations of some steps in a replay, from each step's start, in ns."""

    steps: tuple[int, ...]
    rows: NDArray[np.int64]
    """Shape (ops,): rows in the run's `Operations`."""

    step_index: NDArray[np.int64]
    """Shape (ops,): index into ``steps``."""

    start_ns: NDArray[np.float64]
    """Shape (ops,): when it began; of a communication when this member arrived."""

    gate_ns: NDArray[np.float64]
    """Shape (ops,): when the last member of its group had arrived; else its start."""

    end_ns: NDArray[np.float64]
    """Shape (ops,)."""

    step_ns: NDArray[np.float64]
    """Shape (steps,): the step's length."""


def build_step_graph(model: ReplayModel, steps: Sequence[int] | None = None) -> StepGraph:
    """Build the graph of some steps.

    Args:
        model: A run's operations.
        steps: Step numbers; None: all of the run.

    Raises:
        EmptyRunError: A step takes no part in the replay.
    """
    operations = model.operations
    numbers = operations.steps if steps is None else tuple(sorted(set(steps)))
    for step in numbers:
        if step not in operations.steps:
            raise EmptyRunError(
                f"step {step} takes no part in the replay: it was not recorded, or left out"
                " (see quality.warnings)"
            )
    wanted = np.array([operations.steps.index(step) for step in numbers], dtype=np.int64)
    rows = np.flatnonzero(np.isin(operations.step, wanted))
    step_index = find_positions(operations.step[rows], wanted)
    arrival, gate, num_gates = _gates(operations.group[rows])
    num_before_sinks = len(rows) + int((gate >= 0).sum()) + num_gates
    sink = num_before_sinks + np.arange(len(numbers))
    src, dst = _edges(operations, rows, arrival, gate)
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
) -> ReplayedTimes:
    """Replay the steps of a graph.

    Args:
        graph: The steps.
        duration_ns: Shape (operations of the run,): durations and transfers.
        gap_ns: Shape (operations of the run,): launch gaps.

    Source:
        arXiv 2505.05713: a communication ends its own transfer after the last member's arrival.
    """
    ends = graph.node_ends(graph.node_lengths(duration_ns, gap_ns))
    num = len(graph.rows)
    gate = ends[:num] - duration_ns[graph.rows]
    in_group = graph.arrival != np.arange(num)
    return ReplayedTimes(
        steps=graph.steps,
        rows=graph.rows,
        step_index=graph.step_index,
        start_ns=np.where(in_group, ends[graph.arrival], gate),
        gate_ns=gate,
        end_ns=ends[:num],
        step_ns=ends[graph.sink],
    )


def node_slack(
    graph: StepGraph, duration_ns: NDArray[np.float64], gap_ns: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return how much later each operation may end without moving its step's end.

    That is ``T - (its end + the longest way from there to the end)``: 0 on a
    critical path, infinite where nothing that closes the step follows.

    Args:
        graph: The steps.
        duration_ns: Shape (operations of the run,): durations and transfers.
        gap_ns: Shape (operations of the run,): launch gaps.

    Returns:
        Shape (ops,), in the order of ``graph.rows``, in ns.

    Source:
        Kelley and Walker, "Critical-path planning and scheduling" (1959): total float.
    """
    lengths = graph.node_lengths(duration_ns, gap_ns)
    ends, tails = graph.node_ends(lengths), graph.node_tails(lengths)
    through = (ends + (tails - lengths))[: len(graph.rows)]
    found: NDArray[np.float64] = ends[graph.sink][graph.step_index] - through
    return found


def _gates(group: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Number arrivals and gates after the operations.

    Returns:
        Shape (ops,) each: arrival node, gate node (-1 without a group); how many gates.
    """
    num = len(group)
    members = np.flatnonzero(group != NO_GROUP)
    found, of_member = np.unique(group[members], return_inverse=True)
    arrival, gate = np.arange(num), np.full(num, -1, dtype=np.int64)
    arrival[members] = num + np.arange(len(members))
    gate[members] = num + len(members) + of_member
    return arrival, gate, len(found)


def _edges(
    operations: Operations,
    rows: NDArray[np.int64],
    arrival: NDArray[np.int64],
    gate: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    number = np.full(len(operations), -1, dtype=np.int64)
    number[rows] = np.arange(len(rows))
    inside = number[operations.dst] >= 0
    members = np.flatnonzero(gate >= 0)
    src = (number[operations.src[inside]], arrival[members], gate[members])
    dst = (arrival[number[operations.dst[inside]]], gate[members], members)
    return np.concatenate(src), np.concatenate(dst)


def _longest_paths(
    num_nodes: int,
    edges: tuple[NDArray[np.int64], NDArray[np.int64]],
    lengths: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the longest way up to and through each node."""
    schedule = order_by_level(num_nodes, *edges, across=np.zeros(num_nodes, dtype=np.bool_))
    ordered = np.empty(num_nodes)
    ordered[schedule.position] = lengths
    ends: NDArray[np.float64] = replay(schedule, ordered.reshape(-1, 1, 1))[schedule.position, 0, 0]
    return ends


@dataclass(frozen=True, slots=True, kw_only=True)
class IdealTimeline:
    """One step's operations, real and ideal; columns of equal length, ordered by (rank, start).

    All times are in ns from the step's start. Both start and end at the edges
    of an operation's bar: of a communication from this member's arrival, so
    that the bar holds its wait.
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
    """In the ideal full replay: launch gaps at their median."""

    ideal_gate_ns: NDArray[np.int64]
    """When the last member of its communication arrived, else its start."""

    ideal_end_ns: NDArray[np.int64]
    actual_ns: int
    """The step as recorded: last end - first start."""

    ideal_ns: int

    def __len__(self) -> int:
        return len(self.operation)


def ideal_timeline(model: ReplayModel, step: int) -> IdealTimeline:
    """Replay one step with ideal durations and keep each operation's times.

    Args:
        model: A run's operations.
        step: Its number.

    Raises:
        EmptyRunError: The step takes no part in the replay.
        CycleError: Operations of the step wait for each other.
    """
    times = replayed_times(build_step_graph(model, [step]), model.ideal_ns, model.ideal_gap_ns)
    operations = model.operations
    order = argsort_rows(model.rank[times.rows], times.start_ns, times.end_ns)
    rows = times.rows[order]
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
        ideal_ns=int(np.rint(times.step_ns[0])),
    )


def _whole_ns(time_ns: NDArray[np.float64]) -> NDArray[np.int64]:
    whole: NDArray[np.int64] = np.rint(time_ns).astype(np.int64)
    return whole


def find_cycles(model: ReplayModel) -> dict[int, str]:
    """Find the steps that no replay can order.

    Args:
        model: A run's operations.

    Returns:
        By step number: which ranks wait for each other, and in what.
    """
    found = {}
    for step in model.operations.steps:
        circle = _describe_cycle(model, step)
        if circle is not None:
            found[step] = circle
    return found


def _describe_cycle(model: ReplayModel, step: int) -> str | None:
    graph = build_step_graph(model, (step,))
    open_ = node_levels(graph.num_nodes, graph.src, graph.dst) == UNORDERED
    if not open_.any():
        return None
    nodes = _walk_cycle(graph.src, graph.dst, open_)
    of_node = np.full(graph.num_nodes, -1, dtype=np.int64)
    of_node[graph.arrival] = graph.rows
    of_node[: len(graph.rows)] = graph.rows
    rows = of_node[nodes]
    rows = rows[rows >= 0]
    ranks = tuple(np.unique(model.rank[rows]).tolist())
    kinds = sorted({model.kinds[kind] for kind in model.kind[rows].tolist()})
    who = f"{format_ranks(ranks)} wait" if len(ranks) > 1 else f"rank {ranks[0]} waits"
    return f"{who} in a circle ({', '.join(kinds)})"


def _walk_cycle(
    src: NDArray[np.int64], dst: NDArray[np.int64], open_: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return the nodes of one circle: every node left has a predecessor that is left."""
    inside = open_[src] & open_[dst]
    before = np.full(len(open_), UNORDERED, dtype=np.int64)
    before[dst[inside]] = src[inside]
    node = int(np.flatnonzero(open_)[0])
    place: dict[int, int] = {}
    while node not in place:
        place[node] = len(place)
        node = int(before[node])
    path = np.fromiter(place, dtype=np.int64, count=len(place))
    return path[place[node] :]
