"""Turn dependency graphs into straight lines of row operations, one line for each *shape*.

Replicas (data-parallel positions) of equal structure share a shape, and are
replayed side by side as *lanes*: one numpy row holds a node's end in all of
them. Replicas touch only at *meetings*, collectives over the data-parallel
axis. A meeting parts the line into *phases*: all lanes do a phase, those that
meet take the latest arrival, and the next phase begins. So replicas of
different shapes can take part in one step.
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
"""What tells the meetings of one step apart: (type, stage or -1, number)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The structure that some replicas share. Operations are numbered from 0."""

    label: NDArray[np.int64]
    """Shape (ops,): what the operation is; parts of a run are sets of labels."""

    src: NDArray[np.int64]
    """Shape (edges,): the operation waited for ..."""

    dst: NDArray[np.int64]
    """Shape (edges,): ... by this one."""

    gate: NDArray[np.int64]
    """Shape (ops,): the group of operations that wait for each other's arrival, -1 for none.

    Groups are numbered from 0.
    """

    meeting: Mapping[int, CollectiveKey]
    """The groups that reach over replicas."""

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
    """What is computed between two exchanges of arrivals."""

    nodes: Sequence[int]
    """Each after those that it waits for."""

    meetings: Mapping[CollectiveKey, int]
    """The gates among them that reach over replicas; their arrivals are exchanged at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeProgram:
    """One shape, ready to replay. Nodes are its operations, then a *gate* for each group,
    then perhaps one for the step's begin.

    A gate ends when the last member of its group has arrived. Label sets are
    bits of an int.
    """

    num_ops: int
    before: tuple[tuple[int, ...], ...]
    """The nodes that each node waits for."""

    phases: tuple[Round, ...]
    reach: tuple[int, ...]
    """The labels whose durations can move each node's end."""

    behind: tuple[int, ...]
    """Those of them that can move it through a meeting."""

    label: tuple[int, ...]
    """The label of each operation."""

    closing: tuple[int, ...]

    def moved_by(self, labels: int, *, behind: bool) -> list[Round]:
        """Return what ``labels`` move of each phase; ``behind``: through a meeting.

        A meeting that they move counts as behind itself.
        """
        moved = self.behind if behind else self.reach
        return [
            Round(
                nodes=[node for node in phase.nodes if moved[node] & labels],
                meetings={
                    key: gate for key, gate in phase.meetings.items() if moved[gate] & labels
                },
            )
            for phase in self.phases
        ]


def compile_shapes(shapes: Sequence[Shape]) -> list[ShapeProgram]:
    """Compile shapes whose replicas take part in the same steps.

    Raises:
        CycleError: Operations wait for each other.
    """
    before = [_find_predecessors(shape) for shape in shapes]
    orders = [_sort_topologically(nodes) for nodes in before]
    met = [{len(shape) + gate: key for gate, key in shape.meeting.items()} for shape in shapes]
    phases = _assign_rounds(before, orders, met)
    num_phases = max((max(phase, default=0) for phase in phases), default=0) + 1
    lines = [
        _group_by_round(order, phase, num_phases)
        for order, phase in zip(orders, phases, strict=True)
    ]
    reach, behind = _propagate_labels(shapes, before, lines, met)
    return [
        ShapeProgram(
            num_ops=len(shape),
            before=tuple(before[k]),
            phases=tuple(
                Round(
                    nodes=nodes, meetings={met[k][node]: node for node in nodes if node in met[k]}
                )
                for nodes in lines[k]
            ),
            reach=tuple(reach[k]),
            behind=tuple(behind[k]),
            label=tuple(shape.label.tolist()),
            closing=shape.closing,
        )
        for k, shape in enumerate(shapes)
    ]


def _find_predecessors(shape: Shape) -> list[tuple[int, ...]]:
    """Return what each node waits for: a member of a group for its gate, the gate for the rest.

    A last node, if there is one, stands for the step's begin.
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
    at_start = find_gates_with_early_members(shape.dst, members, num + gate[members]).tolist()
    for node in at_start:
        found[node][len(found)] = None
    if at_start:
        found.append({})
    return [tuple(sources) for sources in found]


def _sort_topologically(before: list[tuple[int, ...]]) -> list[int]:
    """Order nodes so that each follows all it waits for (Kahn's algorithm, first come first)."""
    after: dict[int, list[int]] = defaultdict(list)
    for node, sources in enumerate(before):
        for source in sources:
            after[source].append(node)
    missing = [len(sources) for sources in before]
    order = [node for node, num in enumerate(missing) if not num]
    for node in order:
        for follower in after[node]:
            missing[follower] -= 1
            if not missing[follower]:
                order.append(follower)  # the loop runs on over what it appends
    if len(order) < len(before):
        raise CycleError(len(before) - len(order))
    return order


def _assign_rounds(
    before: list[list[tuple[int, ...]]],
    orders: list[list[int]],
    met: list[dict[int, CollectiveKey]],
) -> list[list[int]]:
    """Return each node's phase: the number of meetings before it on the way with the most.

    A meeting has the same phase in all shapes, so they are gone over until none moves.
    """
    release: dict[CollectiveKey, int] = {}
    num_meetings = len({key for keys in met for key in keys.values()})
    phases = [[0] * len(nodes) for nodes in before]
    for _ in range(num_meetings + 2):
        settled = True
        for phase, nodes, order, keys in zip(phases, before, orders, met, strict=True):
            for node in order:
                sources = nodes[node]
                at = max([phase[p] + (p in keys) for p in sources], default=0)
                if node in keys:
                    latest = max(at, release.get(keys[node], 0))
                    settled &= release.get(keys[node]) == latest
                    release[keys[node]] = at = latest
                phase[node] = at
        if settled:
            return phases
    raise CycleError(num_meetings)


def _group_by_round(order: list[int], phase: list[int], num_phases: int) -> list[list[int]]:
    lines: list[list[int]] = [[] for _ in range(num_phases)]
    for node in order:
        lines[phase[node]].append(node)
    return lines


def _propagate_labels(
    shapes: Sequence[Shape],
    before: list[list[tuple[int, ...]]],
    lines: list[list[list[int]]],
    met: list[dict[int, CollectiveKey]],
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the labels that can move each node, and those that can through a meeting."""
    reach = [[0] * len(nodes) for nodes in before]
    behind = [[0] * len(nodes) for nodes in before]
    for phase in range(len(lines[0]) if lines else 0):
        at_meeting: dict[CollectiveKey, int] = defaultdict(int)
        for k, shape in enumerate(shapes):
            bits = [1 << label for label in shape.label.tolist()]
            for node in lines[k][phase]:
                moved = bits[node] if node < len(shape) else 0
                through = 0
                for source in before[k][node]:
                    moved |= reach[k][source]
                    through |= behind[k][source]
                reach[k][node], behind[k][node] = moved, through
                if node in met[k]:
                    at_meeting[met[k][node]] |= moved
        for k, keys in enumerate(met):
            for node, key in keys.items():
                if key in at_meeting:
                    reach[k][node] |= at_meeting[key]
                    behind[k][node] |= at_meeting[key]
    return reach, behind
