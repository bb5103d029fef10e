"""Steps whose operations wait for each other in a circle: named, and left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..report.text import format_ranks
from .schedule import UNORDERED, levels_of
from .step_graph import graph_of_steps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .model import ReplayModel


def circles(model: ReplayModel) -> dict[int, str]:
    """Find the steps that no replay can order.

    Args:
        model: A run's operations.

    Returns:
        By step number: which ranks wait for each other, and in what.
    """
    found = {}
    for step in model.operations.steps:
        circle = _circle_of(model, step)
        if circle is not None:
            found[step] = circle
    return found


def _circle_of(model: ReplayModel, step: int) -> str | None:
    graph = graph_of_steps(model, (step,))
    open_ = levels_of(graph.num_nodes, graph.src, graph.dst) == UNORDERED
    if not open_.any():
        return None
    nodes = _walk_round(graph.src, graph.dst, open_)
    of_node = np.full(graph.num_nodes, -1, dtype=np.int64)
    of_node[graph.arrival] = graph.rows
    of_node[: len(graph.rows)] = graph.rows
    rows = of_node[nodes]
    rows = rows[rows >= 0]
    ranks = tuple(np.unique(model.rank[rows]).tolist())
    kinds = sorted({model.kinds[kind] for kind in model.kind[rows].tolist()})
    who = f"{format_ranks(ranks)} wait" if len(ranks) > 1 else f"rank {ranks[0]} waits"
    return f"{who} in a circle ({', '.join(kinds)})"


def _walk_round(
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
