"""Dependency graphs compiled to sequences of row operations, one sequence for each *shape*.

Replicas (data-parallel positions) of equal structure have one shape and are replayed side by
side: one numpy row holds a node's end, with a column for each (step, replica). Replicas only
depend on each other through *shared collectives*, those over the data-parallel axis. They divide
the replay into *rounds*: all columns compute a round, exchange their arrivals at its shared
collectives and take the latest, and begin the next round. So replicas of different shapes can
take part in one step.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..trace.errors import CycleError
from .program import find_gates_with_early_members

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

CollectiveKey = tuple[int, int, int]
"""Identity of a shared collective in its step: (type, stage or -1, number)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The structure that some replicas share. Operations are numbered from 0."""

    label: NDArray[np.int64]
    """Shape (ops,): the operation's work; parts of a run are sets of labels."""

    src: NDArray[np.int64]
    """Shape (edges,): the operation waited for ..."""

    dst: NDArray[np.int64]
    """Shape (edges,): ... by this one."""

    gate: NDArray[np.int64]
    """Shape (ops,): the group whose members wait for each other's arrival, numbered from 0; -1
    for none."""

    shared: Mapping[int, CollectiveKey]
    """The groups that are shared collectives."""

    closing: tuple[int, ...]
    """Operations whose last end is the step's end."""

    def __len__(self) -> int:
        return len(self.label)

    def members(self) -> list[list[int]]:
        """Return the operations of each group."""
        found: list[list[int]] = [[] for _ in range(int(self.gate.max(initial=-1)) + 1)]
        for operation in np.flatnonzero(self.gate >= 0).tolist():
            found[self.gate[operation]].append(operation)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The nodes computed between two exchanges of arrivals."""

    nodes: Sequence[int]
    """Each node follows its predecessors."""

    shared: Mapping[CollectiveKey, int]
    """The gates of shared collectives, whose arrivals are exchanged at the round's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeProgram:
    """One shape, ready to replay.

    Nodes are its operations, then a *gate* for each group, then a node for the step's start if a
    gate needs one. A gate ends with the arrival of the last member of its group. Sets of labels
    are bits of an int.
    """

    num_ops: int
    predecessors: tuple[tuple[int, ...], ...]
    """By node."""

    rounds: tuple[Round, ...]
    reach: tuple[int, ...]
    """By node: the labels whose durations can move its end."""

    shared_reach: tuple[int, ...]
    """By node: those of them that can move it through a shared collective."""

    label: tuple[int, ...]
    """By operation."""

    closing: tuple[int, ...]

    def rounds_moved_by(self, labels: int, *, through_shared: bool) -> list[Round]:
        """Return the part of each round whose ends ``labels`` can move.

        Args:
            labels: A set of labels.
            through_shared: Only what they move through a shared collective, including that
                collective itself.
        """
        reach = self.shared_reach if through_shared else self.reach
        return [
            Round(
                nodes=[node for node in each.nodes if reach[node] & labels],
                shared={key: gate for key, gate in each.shared.items() if reach[gate] & labels},
            )
            for each in self.rounds
        ]


def compile_shapes(shapes: Sequence[Shape]) -> list[ShapeProgram]:
    """Compile shapes whose replicas take part in the same steps.

    Raises:
        CycleError: Operations depend on each other.
    """
    predecessors = [_find_predecessors(shape) for shape in shapes]
    orders = [_sort_topologically(nodes) for nodes in predecessors]
    shared = [{len(shape) + gate: key for gate, key in shape.shared.items()} for shape in shapes]
    node_rounds = _assign_rounds(predecessors, orders, shared)
    num_rounds = max((max(rounds, default=0) for rounds in node_rounds), default=0) + 1
    by_round = [
        _group_by_round(order, rounds, num_rounds)
        for order, rounds in zip(orders, node_rounds, strict=True)
    ]
    reach, shared_reach = _propagate_labels(shapes, predecessors, by_round, shared)
    return [
        ShapeProgram(
            num_ops=len(shape),
            predecessors=tuple(predecessors[k]),
            rounds=tuple(
                Round(
                    nodes=nodes,
                    shared={shared[k][node]: node for node in nodes if node in shared[k]},
                )
                for nodes in by_round[k]
            ),
            reach=tuple(reach[k]),
            shared_reach=tuple(shared_reach[k]),
            label=tuple(shape.label.tolist()),
            closing=shape.closing,
        )
        for k, shape in enumerate(shapes)
    ]


def _find_predecessors(shape: Shape) -> list[tuple[int, ...]]:
    """Return the predecessors of each node: of a member only its gate, of a gate all the rest.

    The last node may be the step's start.
    """
    num = len(shape)
    gate = shape.gate
    waits = np.where(gate[shape.dst] >= 0, num + gate[shape.dst], shape.dst)
    found: list[dict[int, None]] = [{} for _ in range(num + int(gate.max(initial=-1)) + 1)]
    for src, dst in zip(shape.src.tolist(), waits.tolist(), strict=True):
        found[dst][src] = None
    members = np.flatnonzero(gate >= 0)
    for operation in members.tolist():
        found[operation][num + int(gate[operation])] = None
    early = find_gates_with_early_members(shape.dst, members, num + gate[members]).tolist()
    for node in early:
        found[node][len(found)] = None
    if early:
        found.append({})
    return [tuple(sources) for sources in found]


def _sort_topologically(predecessors: list[tuple[int, ...]]) -> list[int]:
    """Order nodes so that each follows its predecessors (Kahn's algorithm, first come first)."""
    successors: dict[int, list[int]] = defaultdict(list)
    for node, sources in enumerate(predecessors):
        for source in sources:
            successors[source].append(node)
    missing = [len(sources) for sources in predecessors]
    order = [node for node, num in enumerate(missing) if not num]
    for node in order:
        for successor in successors[node]:
            missing[successor] -= 1
            if not missing[successor]:
                order.append(successor)  # the loop also visits what it appends
    if len(order) < len(predecessors):
        raise CycleError(len(predecessors) - len(order))
    return order


def _assign_rounds(
    predecessors: list[list[tuple[int, ...]]],
    orders: list[list[int]],
    shared: list[dict[int, CollectiveKey]],
) -> list[list[int]]:
    """Return each node's round: the most shared collectives on any path to it.

    A shared collective is in the same round in all shapes, so this iterates until none moves.
    """
    release: dict[CollectiveKey, int] = {}
    num_shared = len({key for keys in shared for key in keys.values()})
    node_rounds = [[0] * len(nodes) for nodes in predecessors]
    for _ in range(num_shared + 2):
        is_settled = True
        for rounds, nodes, order, keys in zip(
            node_rounds, predecessors, orders, shared, strict=True
        ):
            for node in order:
                sources = nodes[node]
                at = max([rounds[p] + (p in keys) for p in sources], default=0)
                if node in keys:
                    latest = max(at, release.get(keys[node], 0))
                    is_settled &= release.get(keys[node]) == latest
                    release[keys[node]] = at = latest
                rounds[node] = at
        if is_settled:
            return node_rounds
    raise CycleError(num_shared)


def _group_by_round(order: list[int], rounds: list[int], num_rounds: int) -> list[list[int]]:
    by_round: list[list[int]] = [[] for _ in range(num_rounds)]
    for node in order:
        by_round[rounds[node]].append(node)
    return by_round


def _propagate_labels(
    shapes: Sequence[Shape],
    predecessors: list[list[tuple[int, ...]]],
    by_round: list[list[list[int]]],
    shared: list[dict[int, CollectiveKey]],
) -> tuple[list[list[int]], list[list[int]]]:
    """Return ``reach`` and ``shared_reach`` of each shape's nodes."""
    reach = [[0] * len(nodes) for nodes in predecessors]
    shared_reach = [[0] * len(nodes) for nodes in predecessors]
    for number in range(len(by_round[0]) if by_round else 0):
        at_collective: dict[CollectiveKey, int] = defaultdict(int)
        for k, shape in enumerate(shapes):
            bits = [1 << label for label in shape.label.tolist()]
            for node in by_round[k][number]:
                own = bits[node] if node < len(shape) else 0
                through_shared = 0
                for source in predecessors[k][node]:
                    own |= reach[k][source]
                    through_shared |= shared_reach[k][source]
                reach[k][node], shared_reach[k][node] = own, through_shared
                if node in shared[k]:
                    at_collective[shared[k][node]] |= own
        for k, keys in enumerate(shared):
            for node, key in keys.items():
                if key in at_collective:
                    reach[k][node] |= at_collective[key]
                    shared_reach[k][node] |= at_collective[key]
    return reach, shared_reach
