"""Critical path of a step, and the slack of its operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from . import loop
from .program import sort_graph
from .step_graph import build_step_graph, node_slack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .model import ReplayModel


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """Chain of operations that decides each step's end; rows in order of time, step by step.

    The rows of a step cover it without gaps: the first begins at 0, each begins at the end of
    the one before, and the last ends with the step.
    """

    steps: tuple[int, ...]
    step_ns: NDArray[np.float64]
    """Shape (steps,): duration of the replayed step."""

    step: NDArray[np.int32]
    """Shape (rows,): step number."""

    operation: NDArray[np.int64]
    """Shape (rows,): row in the run's `Operations`."""

    rank: NDArray[np.int32]
    kind: NDArray[np.int16]
    """Code into ``kinds``."""

    kinds: tuple[str, ...]
    start_ns: NDArray[np.float64]
    """Shape (rows,): from the step's start; of a communication its last member's arrival."""

    end_ns: NDArray[np.float64]
    gap_ns: NDArray[np.float64]
    """Shape (rows,): launch gap at the row's start."""

    def __len__(self) -> int:
        return len(self.operation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slack:
    """Slack of the operations of some steps."""

    steps: tuple[int, ...]
    rows: NDArray[np.int64]
    """Shape (ops,): rows in the run's `Operations`."""

    step: NDArray[np.int32]
    """Shape (ops,): step number."""

    rank: NDArray[np.int32]
    kind: NDArray[np.int16]
    kinds: tuple[str, ...]
    slack_ns: NDArray[np.float64]
    """Shape (ops,): how much later the operation may end without delaying its step's end. 0 on a
    critical path; infinite if no operation that closes the step follows."""


class StepPaths:
    """The graph of some steps, in order of its replay: their critical paths with any times.

    Args:
        model: The operations.
        steps: Numbers of steps; None: all.

    Raises:
        EmptyRunError: A step is not part of the replay.
        CycleError: Operations of a step depend on each other.
    """

    def __init__(self, model: ReplayModel, steps: Sequence[int] | None = None) -> None:
        self._model = model
        self._graph = graph = build_step_graph(model, steps)
        self._sorted = sort_graph(graph.num_nodes, graph.src, graph.dst)
        num = len(graph.rows)
        self._operation = np.full(graph.num_nodes, -1, dtype=np.int64)
        self._operation[graph.arrival] = np.arange(num)
        self._operation[:num] = np.arange(num)
        self._rank = np.append(model.rank[graph.rows], -1)[self._operation][self._sorted.order]
        position = np.empty(graph.num_nodes, dtype=np.int64)
        position[self._sorted.order] = np.arange(graph.num_nodes)
        self._sinks = position[graph.sink]

    def find(self, duration_ns: NDArray[np.float64], gap_ns: NDArray[np.float64]) -> CriticalPath:
        """Return the chain of operations that decides the end of each step; see `critical_path`.

        Args:
            duration_ns: Shape (operations of the model,): durations and transfers.
            gap_ns: Shape (operations of the model,): launch gaps.
        """
        graph, order, model = self._graph, self._sorted.order, self._model
        lengths = graph.node_lengths(duration_ns, gap_ns)
        by_position, ends = np.empty((2, graph.num_nodes))
        loop.functions.replay(self._sorted, 0, graph.num_nodes, lengths, None, None, by_position)
        ends[order] = by_position
        nodes = order[_walk_back(self._sorted, self._sinks, by_position, self._rank)]
        nodes = nodes[(self._operation[nodes] >= 0) & (lengths[nodes] != 0)]
        index = self._operation[nodes]
        row = graph.rows[index]
        return CriticalPath(
            steps=graph.steps,
            step_ns=ends[graph.sink],
            step=np.array(graph.steps, dtype=np.int32)[graph.step_index[index]],
            operation=row,
            rank=model.rank[row],
            kind=model.kind[row],
            kinds=model.kinds,
            start_ns=ends[nodes] - lengths[nodes],
            end_ns=ends[nodes],
            gap_ns=np.where(graph.arrival[index] == nodes, gap_ns[row], 0.0),
        )


def critical_path(model: ReplayModel, steps: Sequence[int] | None = None) -> CriticalPath:
    """Return the chain of operations that decides the end of each step in the full replay.

    The chain goes back from the operation that ends last, each time to the predecessor that ended
    last. Among several of those it prefers the own rank, so it leaves a rank only if another one
    delayed it.

    Raises:
        EmptyRunError: A step is not part of the replay.
        CycleError: Operations of a step depend on each other.
    """
    operations = model.operations
    return StepPaths(model, steps).find(operations.duration_ns, operations.gap_ns)


def operation_slack(model: ReplayModel, steps: Sequence[int] | None = None) -> Slack:
    """Return the slack of each operation in the full replay; see `step_graph.node_slack`.

    Raises:
        EmptyRunError: A step is not part of the replay.
        CycleError: Operations of a step depend on each other.
    """
    graph = build_step_graph(model, steps)
    operations = model.operations
    return Slack(
        steps=graph.steps,
        rows=graph.rows,
        step=np.array(graph.steps, dtype=np.int32)[graph.step_index],
        rank=model.rank[graph.rows],
        kind=model.kind[graph.rows],
        kinds=model.kinds,
        slack_ns=node_slack(graph, operations.duration_ns, operations.gap_ns),
    )


def _walk_back(
    graph: loop.Graph,
    sinks: NDArray[np.int64],
    ends: NDArray[np.float64],
    rank: NDArray[np.int32],
) -> NDArray[np.int64]:
    """Return the positions of one longest path to each sink, in order of time.

    Args:
        sinks: Positions.
        ends: Shape (nodes,), by position.
        rank: Shape (nodes,), by position; -1 for a node of no rank.
    """
    found: list[int] = []
    for sink in sinks.tolist():
        path: list[int] = []
        node = sink
        own_rank = -1
        while graph.first[node] < graph.first[node + 1]:
            predecessors = graph.pred[graph.first[node] : graph.first[node + 1]]
            latest = predecessors[ends[predecessors] == ends[predecessors].max()]
            on_rank = latest[rank[latest] == own_rank]
            node = int(on_rank[0] if len(on_rank) else latest[0])
            own_rank = own_rank if rank[node] < 0 else int(rank[node])
            path.append(node)
        found += reversed(path)
    return np.array(found, dtype=np.int64)
