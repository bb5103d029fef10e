"""The chain of operations that decides a step's end, and each operation's slack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.sorting import stable_argsort
from .step_graph import build_step_graph, node_slack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .model import ReplayModel
    from .step_graph import StepGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """Rows in order of time, step by step.

    The rows of a step tile it: each begins where the one before it ended, the
    first at 0, the last ends with the step.
    """

    steps: tuple[int, ...]
    step_ns: NDArray[np.float64]
    """Shape (steps,): the replayed step."""

    step: NDArray[np.int32]
    """Shape (rows,): step number."""

    operation: NDArray[np.int64]
    """Shape (rows,): row in the run's `Operations`."""

    rank: NDArray[np.int32]
    kind: NDArray[np.int16]
    """Code into ``kinds``."""

    kinds: tuple[str, ...]
    start_ns: NDArray[np.float64]
    """Shape (rows,): from the step's start. Of a communication when its last member arrived."""

    end_ns: NDArray[np.float64]
    gap_ns: NDArray[np.float64]
    """Shape (rows,): launch gap at the beginning of the row."""

    def __len__(self) -> int:
        return len(self.operation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slack:
    """How much later each operation of some steps may end without moving its step's end."""

    steps: tuple[int, ...]
    rows: NDArray[np.int64]
    """Shape (ops,): rows in the run's `Operations`."""

    step: NDArray[np.int32]
    """Shape (ops,): step number."""

    rank: NDArray[np.int32]
    kind: NDArray[np.int16]
    kinds: tuple[str, ...]
    slack_ns: NDArray[np.float64]
    """Shape (ops,): 0 on a critical path; infinite where nothing that closes the step follows."""


def critical_path(model: ReplayModel, steps: Sequence[int] | None = None) -> CriticalPath:
    """Return the chain of operations that decides the end of each step in the full replay.

    From the operation that ends last the chain goes back, each time to what
    ended last of all that was waited for; of several such to the one on the
    same rank, so that the chain leaves a rank only where another held it up.

    Args:
        model: A run's operations.
        steps: Step numbers; None: all of the run.

    Raises:
        EmptyRunError: A step takes no part in the replay.
        CycleError: Operations of a step wait for each other.
    """
    graph = build_step_graph(model, steps)
    operations = model.operations
    lengths = graph.node_lengths(operations.duration_ns, operations.gap_ns)
    ends = graph.node_ends(lengths)
    of_node = _node_operations(graph)
    rank = np.append(model.rank[graph.rows], -1)[of_node]
    nodes = _walk_back(graph, ends, rank)
    nodes = nodes[(of_node[nodes] >= 0) & (lengths[nodes] != 0)]
    of_row = of_node[nodes]
    row = graph.rows[of_row]
    return CriticalPath(
        steps=graph.steps,
        step_ns=ends[graph.sink],
        step=np.array(graph.steps, dtype=np.int32)[graph.step_index[of_row]],
        operation=row,
        rank=model.rank[row],
        kind=model.kind[row],
        kinds=model.kinds,
        start_ns=ends[nodes] - lengths[nodes],
        end_ns=ends[nodes],
        gap_ns=np.where(graph.arrival[of_row] == nodes, operations.gap_ns[row], 0.0),
    )


def operation_slack(model: ReplayModel, steps: Sequence[int] | None = None) -> Slack:
    """Return how much later each operation may end in the full replay (`step_graph.node_slack`).

    Args:
        model: A run's operations.
        steps: Step numbers; None: all of the run.

    Raises:
        EmptyRunError: A step takes no part in the replay.
        CycleError: Operations of a step wait for each other.
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


def _node_operations(graph: StepGraph) -> NDArray[np.int64]:
    """Return the operation that each node belongs to, -1 for gates and sinks."""
    of_node = np.full(graph.num_nodes, -1, dtype=np.int64)
    num = len(graph.rows)
    of_node[graph.arrival] = np.arange(num)
    of_node[:num] = np.arange(num)
    return of_node


def _walk_back(
    graph: StepGraph, ends: NDArray[np.float64], rank: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Return the nodes of one longest way to each step's sink, in order of time."""
    order = stable_argsort(graph.dst)
    sources = graph.src[order]
    first = np.searchsorted(graph.dst[order], np.arange(graph.num_nodes + 1))
    found: list[int] = []
    for sink in graph.sink.tolist():
        way: list[int] = []
        node = sink
        own_rank = -1
        while first[node] < first[node + 1]:
            before = sources[first[node] : first[node + 1]]
            latest = before[ends[before] == ends[before].max()]
            on_rank = latest[rank[latest] == own_rank]
            node = int(on_rank[0] if len(on_rank) else latest[0])
            own_rank = own_rank if rank[node] < 0 else int(rank[node])
            way.append(node)
        found += reversed(way)
    return np.array(found, dtype=np.int64)
