"""One step's dependency graph as a `networkx.DiGraph`, for a closer look than a verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

import networkx as nx
import numpy as np

from analysis.errors import EmptyRunError, GraphTooLargeError
from analysis.operations import NO_GROUP

if TYPE_CHECKING:
    from analysis.model import ReplayModel

MOST_NODES = 200_000
"""A larger graph takes gigabytes as Python objects; the replay's arrays hold any size."""


def dependency_graph(model: ReplayModel, step: int) -> nx.DiGraph[int]:
    """Return who waits for whom in one step.

    A node is an operation: ``rank``, ``kind``, ``start_ns`` and ``end_ns`` as
    recorded, ``work_ns`` (a compute operation's duration, a communication's
    transfer) and ``instance`` (equal for the members of one communication,
    None for all else). An edge leads from what was waited for to what waited;
    the members of an instance wait for all that any of them waits for.

    Args:
        model: A run's operations.
        step: Its number.

    Raises:
        EmptyRunError: The step takes no part in the replay.
        GraphTooLargeError: It has more than `MOST_NODES` operations.
    """
    operations = model.operations
    if step not in operations.steps:
        raise EmptyRunError(
            f"step {step} takes no part in the replay: it was not recorded, or left out"
            " (see quality.warnings)"
        )
    rows = np.flatnonzero(operations.step == operations.steps.index(step))
    if len(rows) > MOST_NODES:
        raise GraphTooLargeError(step, len(rows))
    graph: nx.DiGraph[int] = nx.DiGraph()
    for row in rows.tolist():
        instance = int(operations.group[row])
        graph.add_node(
            row,
            rank=int(model.rank[row]),
            kind=model.kinds[model.kind[row]],
            start_ns=int(operations.start_ns[row]),
            end_ns=int(operations.end_ns[row]),
            work_ns=float(operations.duration_ns[row]),
            instance=None if instance == NO_GROUP else instance,
        )
    inside = np.isin(operations.dst, rows)
    graph.add_edges_from(
        zip(operations.src[inside].tolist(), operations.dst[inside].tolist(), strict=True)
    )
    return graph
