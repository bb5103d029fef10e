"""The dependency graph as a `networkx.DiGraph`, for a closer look than a verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

import networkx as nx
import numpy as np

from ..arrays.grouping import NO_GROUP
from ..trace.errors import GraphTooLargeError
from .step_graph import build_step_graph, node_slack

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from .model import ReplayModel

MOST_NODES = 200_000
"""A larger graph takes gigabytes as Python objects; the replay's arrays hold any size."""


def dependency_graph(
    model: ReplayModel,
    step: int | Collection[int],
    *,
    ranks: Collection[int] | None = None,
) -> nx.DiGraph[int]:
    """Return who waits for whom in one step or several.

    A node is an operation: ``step``, ``rank``, ``kind``, ``start_ns`` and
    ``end_ns`` as recorded, ``work_ns`` (a compute operation's duration, a
    communication's transfer), ``instance`` (equal for the members of one
    communication, None for all else), ``slack_ns`` (how much later it may end
    in the full replay without moving the step's end, infinite where nothing
    that closes the step follows) and ``critical`` (no slack). An edge leads
    from what was waited for to what waited; the members of an instance wait
    for all that any of them waits for.

    Args:
        model: A run's operations.
        step: Its number, or several.
        ranks: Only the operations of these ranks, and the edges between them;
            None: all. Slack is that of the whole step all the same.

    Raises:
        EmptyRunError: A step takes no part in the replay.
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
    for row, free in zip(rows.tolist(), slack_ns.tolist(), strict=True):
        graph.add_node(row, **_attributes(model, row), slack_ns=free, critical=free == 0)
    graph.add_edges_from(_edges_between(model, rows))
    return graph


def _attributes(model: ReplayModel, row: int) -> dict[str, object]:
    operations = model.operations
    instance = int(operations.group[row])
    return {
        "step": operations.steps[operations.step[row]],
        "rank": int(model.rank[row]),
        "kind": model.kinds[model.kind[row]],
        "start_ns": int(operations.start_ns[row]),
        "end_ns": int(operations.end_ns[row]),
        "work_ns": float(operations.duration_ns[row]),
        "instance": None if instance == NO_GROUP else instance,
    }


def _edges_between(model: ReplayModel, rows: NDArray[np.int64]) -> list[tuple[int, int]]:
    operations = model.operations
    chosen = np.zeros(len(operations), dtype=np.bool_)
    chosen[rows] = True
    inside = chosen[operations.src] & chosen[operations.dst]
    return list(zip(operations.src[inside].tolist(), operations.dst[inside].tolist(), strict=True))
