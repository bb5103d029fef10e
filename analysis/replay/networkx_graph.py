"""Dependency graph of some steps as a `networkx.DiGraph`.

A module of its own, so that only its caller imports networkx.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import networkx as nx
import numpy as np

from ..arrays.grouping import NO_GROUP
from ..trace.errors import GraphTooLargeError
from .step_graph import build_step_graph, node_slack

if TYPE_CHECKING:
    from collections.abc import Collection

    from .model import ReplayModel

MOST_NODES = 200_000
"""As Python objects a larger graph takes gigabytes. The replay's arrays have no such limit."""


def dependency_graph(
    model: ReplayModel,
    step: int | Collection[int],
    *,
    ranks: Collection[int] | None = None,
) -> nx.DiGraph[int]:
    """Return the operations of one or several steps, and what each of them waits for.

    A node is an operation, with ``step``, ``rank``, ``kind``, ``start_ns`` and ``end_ns`` as
    recorded, ``work_ns`` (the duration of compute, the transfer of communication), ``instance``
    (equal for the members of one communication, else None), ``slack_ns`` (how much later it may
    end in the full replay without delaying the step's end; infinite if no operation that closes
    the step follows) and ``critical`` (no slack). An edge leads from the operation waited for to
    the one that waits. The members of an instance wait for all that any of them waits for.

    Args:
        ranks: Only the operations of these ranks, and the edges between them; None for all. Slack
            is that of the whole step in any case.

    Raises:
        EmptyRunError: A step is not part of the replay.
        GraphTooLargeError: There are more than `MOST_NODES` operations.
    """
    numbers = [step] if isinstance(step, int) else sorted(set(step))
    steps = build_step_graph(model, numbers)
    operations = model.operations
    slack_ns = node_slack(steps, operations.duration_ns, operations.gap_ns)
    rows = steps.rows
    if ranks is not None:
        chosen = np.isin(model.rank[rows], list(ranks))
        rows, slack_ns = rows[chosen], slack_ns[chosen]
    if len(rows) > MOST_NODES:
        raise GraphTooLargeError(numbers[0], len(rows))
    graph: nx.DiGraph[int] = nx.DiGraph()
    for row, slack in zip(rows.tolist(), slack_ns.tolist(), strict=True):
        instance = int(operations.group[row])
        graph.add_node(
            row,
            step=operations.steps[operations.step[row]],
            rank=int(model.rank[row]),
            kind=model.kinds[model.kind[row]],
            start_ns=int(operations.start_ns[row]),
            end_ns=int(operations.end_ns[row]),
            work_ns=float(operations.duration_ns[row]),
            instance=None if instance == NO_GROUP else instance,
            slack_ns=slack,
            critical=slack == 0,
        )
    is_node = np.zeros(len(operations), dtype=np.bool_)
    is_node[rows] = True
    inside = is_node[operations.src] & is_node[operations.dst]
    edges = (each[inside].tolist() for each in (operations.src, operations.dst))
    graph.add_edges_from(zip(*edges, strict=True))
    return graph
