"""Few compiled schedules that replay all steps of a run, many steps at once.

Steps of equal structure share a schedule. If the data-parallel replicas of a step have equal
structure too, the schedule holds the nodes of one replica, and an operation that all replicas
share (for example a gradient reduction) takes its maximum across them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.grouping import NO_GROUP, factorize
from ..arrays.sorting import find_positions, stable_argsort
from .schedule import Schedule, order_by_level, replay
from .step_shapes import Partition, hash_structures, partition_operations

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .operations import Operations


COLUMNS_AT_ONCE = 512
"""Columns replayed together: their ends stay in a core's cache."""

WHOLE_STEP_COLUMNS = 64
"""Whole steps replayed side by side: their ends take 64 times the memory of one."""

NO_OPERATION = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Steps of one shape, with the schedule that replays them."""

    schedule: Schedule
    operation: NDArray[np.int64]
    """Shape (nodes, replicas, steps): the operation whose duration the node takes, or
    `NO_OPERATION`."""

    step_index: NDArray[np.int64]
    """Shape (steps,): indices into the program's steps."""

    closing: NDArray[np.int64]
    """Nodes whose last end is the step's end."""

    gap: NDArray[np.int64]
    """Shape (nodes, replicas, steps): the operation whose launch gap is added; empty in a device
    replay. Without `Program.has_arrivals`, members of groups have no gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """All steps of some operations, ready to replay with any durations."""

    shapes: tuple[StepShape, ...]
    num_steps: int
    replicas: NDArray[np.int64]
    """Data-parallel positions, ascending."""

    has_arrivals: bool
    """Whether members of groups may have launch gaps."""

    def step_times(
        self, duration_ns: NDArray[np.float64], gap_ns: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """Replay every step.

        Args:
            duration_ns: Shape (ops,): durations and transfers.
            gap_ns: Shape (ops,): launch gaps, if the program was compiled with them. Those of
                members of groups are ignored without `has_arrivals`.

        Returns:
            Shape (steps,), ns: time from each step's start to the last end of an operation that
            closes it.
        """
        times = np.zeros(self.num_steps)
        padded = np.append(duration_ns, 0.0)
        gaps = None if gap_ns is None else np.append(gap_ns, 0.0)
        for shape in self.shapes:
            num_replicas = shape.operation.shape[1]
            at_once = max(1, COLUMNS_AT_ONCE // num_replicas)
            for first in range(0, len(shape.step_index), at_once):
                steps = slice(first, first + at_once)
                durations = padded[shape.operation[:, :, steps]]
                if gaps is not None:
                    durations += gaps[shape.gap[:, :, steps]]
                ends = replay(shape.schedule, durations)
                times[shape.step_index[steps]] = ends[shape.closing].max(axis=(0, 1), initial=0.0)
        return times

    def isolated_step_times(
        self,
        recorded_ns: NDArray[np.float64],
        ideal_ns: NDArray[np.float64],
        replica: NDArray[np.int32],
    ) -> NDArray[np.float64]:
        """Replay every step once per replica, with that one as recorded and all others ideal.

        The ideal replicas of a step are equal, so one of them represents all: the cost is that of
        two replays, for any number of replicas. A step whose replicas differ in structure costs a
        whole replay for each.

        Args:
            recorded_ns: Shape (ops,): durations of the replica put back.
            ideal_ns: Shape (ops,): durations of all others; equal for operations of equal label.
            replica: Shape (ops,): the data-parallel position that the program was compiled by.

        Returns:
            Shape (replicas, steps), ns, in the order of ``replicas``.
        """
        replicas = self.replicas
        if len(replicas) == 1:  # there are no others
            return self.step_times(recorded_ns)[None]
        times = np.zeros((len(replicas), self.num_steps))
        recorded, ideal = np.append(recorded_ns, 0.0), np.append(ideal_ns, 0.0)
        for shape in self.shapes:
            if shape.operation.shape[1] != len(replicas):
                times[:, shape.step_index] = self._replay_whole_steps(
                    shape, recorded, ideal, replica
                )
                continue
            at_once = max(1, COLUMNS_AT_ONCE // (2 * len(replicas)))
            for first in range(0, len(shape.step_index), at_once):
                operation = shape.operation[:, :, first : first + at_once]
                num_nodes, num_replicas, num_steps = operation.shape
                durations = np.empty((num_nodes, 2, num_replicas, num_steps))
                durations[:, 0] = recorded[operation]
                durations[:, 1] = ideal[operation[:, :1]]
                ends = replay(
                    shape.schedule, durations.reshape(num_nodes, 2, num_replicas * num_steps)
                )
                last = (
                    ends[shape.closing]
                    .max(axis=(0, 1), initial=0.0)
                    .reshape(num_replicas, num_steps)
                )
                times[:, shape.step_index[first : first + at_once]] = last
        return times

    def isolated_cost(self) -> int:
        """Return the number of durations that `isolated_step_times` replays."""
        num = len(self.replicas)
        return sum(
            shape.operation.size * (2 if shape.operation.shape[1] == num else num)
            for shape in self.shapes
        )

    def _replay_whole_steps(
        self,
        shape: StepShape,
        recorded: NDArray[np.float64],
        ideal: NDArray[np.float64],
        replica: NDArray[np.int32],
    ) -> NDArray[np.float64]:
        """Replay whole steps once per replica, some replicas side by side.

        Returns:
            Shape (replicas, steps of the shape), ns.
        """
        times = np.empty((len(self.replicas), len(shape.step_index)))
        at_once = max(1, WHOLE_STEP_COLUMNS // len(shape.step_index))
        operation = shape.operation[:, 0]
        node_replica = np.append(replica, -1)[operation]
        others, own = ideal[operation], recorded[operation]
        for first in range(0, len(self.replicas), at_once):
            chosen = self.replicas[first : first + at_once]
            is_own = node_replica[:, None] == chosen[:, None]
            durations = np.where(is_own, own[:, None], others[:, None])
            num_nodes, num_chosen, num_steps = durations.shape
            ends = replay(shape.schedule, durations.reshape(num_nodes, 1, num_chosen * num_steps))
            last = ends[shape.closing].max(axis=(0, 1), initial=0.0)
            times[first : first + at_once] = last.reshape(len(chosen), -1)
        return times


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTimes:
    """Replayed times of a run's operations, from their step's start; shape (ops,) each, in ns."""

    start_ns: NDArray[np.float64]
    """Start; of a communication the arrival of this member."""

    gate_ns: NDArray[np.float64]
    """Arrival of the last member of its group; its start without a group."""

    end_ns: NDArray[np.float64]


def operation_times(
    program: Program,
    operations: Operations,
    duration_ns: NDArray[np.float64],
    gap_ns: NDArray[np.float64],
) -> OperationTimes:
    """Replay a run and keep each operation's times.

    `analysis.replay.step_graph` does the same for single steps, with their slack. For a whole run
    this is many times cheaper, because steps and replicas of equal structure are replayed
    together.

    Args:
        program: The operations, compiled with their launch gaps.
        operations: The operations that were compiled.
        duration_ns: Shape (ops,): durations and transfers.
        gap_ns: Shape (ops,): launch gaps.
    """
    ends, arrived = np.zeros(len(operations)), np.zeros(len(operations))
    durations, gaps = np.append(duration_ns, 0.0), np.append(gap_ns, 0.0)
    for shape in program.shapes:
        at_once = max(1, COLUMNS_AT_ONCE // shape.operation.shape[1])
        for first in range(0, len(shape.step_index), at_once):
            operation = shape.operation[:, :, first : first + at_once]
            gap = shape.gap[:, :, first : first + at_once]
            node_ends = replay(shape.schedule, durations[operation] + gaps[gap])
            ends[operation[operation >= 0]] = node_ends[operation >= 0]
            arrived[gap[gap >= 0]] = node_ends[gap >= 0]
    if not program.has_arrivals:
        into_group = operations.group[operations.dst] != NO_GROUP
        np.maximum.at(arrived, operations.dst[into_group], ends[operations.src[into_group]])
    gate = ends - duration_ns
    return OperationTimes(
        start_ns=np.where(operations.group == NO_GROUP, gate, arrived),
        gate_ns=gate,
        end_ns=ends,
    )


class _Gaps(Enum):
    """Operations whose launch gaps a replay adds."""

    NONE = 0
    WITHOUT_GROUP = 1
    ALL = 2


def compile_program(
    operations: Operations, *, host_gaps: bool, late_members: bool = True
) -> Program:
    """Compile ``operations`` for replay.

    Args:
        operations: The operations to replay.
        host_gaps: True for the *full* replay, which adds launch gaps; False for the *device*
            replay, which does not.
        late_members: Whether members of groups have launch gaps. If none has, the replay is a
            third smaller without a node for each.

    Raises:
        CycleError: Operations of a step depend on each other.
    """
    replicas = np.flatnonzero(np.bincount(operations.replica))
    replica = find_positions(operations.replica, replicas)
    num_steps = len(operations.steps)
    gaps = _Gaps.ALL if late_members else _Gaps.WITHOUT_GROUP
    gaps = gaps if host_gaps else _Gaps.NONE
    left = np.ones(num_steps, dtype=np.bool_)
    shapes: list[StepShape] = []
    if len(replicas) > 1 and _may_have_equal_replicas(operations, replica, len(replicas)):
        by_replica = partition_operations(operations, replica, len(replicas))
        structure, divides = hash_structures(operations, by_replica)
        by_step = structure.reshape(num_steps, len(replicas))
        divides &= (by_step == by_step[:, :1]).all(axis=1)
        shapes += _compile(operations, by_replica, by_step[:, 0], np.flatnonzero(divides), gaps)
        left = ~divides
    if left.any():
        whole = partition_operations(operations, np.zeros(len(operations), dtype=np.int64), 1)
        # A single step needs no hash: there is no other to compare it with.
        is_single = num_steps == 1
        structure = np.zeros(1, np.uint64) if is_single else hash_structures(operations, whole)[0]
        shapes += _compile(operations, whole, structure, np.flatnonzero(left), gaps)
    return Program(
        shapes=tuple(shapes),
        num_steps=num_steps,
        replicas=replicas,
        has_arrivals=gaps is _Gaps.ALL,
    )


def _may_have_equal_replicas(
    operations: Operations, replica: NDArray[np.int64], num_replicas: int
) -> bool:
    """Return whether the replicas of any step have equal numbers of operations."""
    subgraph = operations.step * np.int64(num_replicas) + replica
    num_subgraphs = len(operations.steps) * num_replicas
    num_each = np.bincount(subgraph, minlength=num_subgraphs).reshape(-1, num_replicas)
    return bool((num_each == num_each[:, :1]).all(axis=1).any())


def _compile(
    operations: Operations,
    partition: Partition,
    structure: NDArray[np.uint64],
    steps: NDArray[np.int64],
    gaps: _Gaps,
) -> list[StepShape]:
    """Compile one shape for each distinct structure among ``steps``."""
    if not len(steps):
        return []
    edge_subgraph = partition.subgraph[operations.dst]
    by_subgraph = stable_argsort(edge_subgraph)
    edge_subgraph = edge_subgraph[by_subgraph]
    shapes = []
    structures, structure_of_step = np.unique(structure[steps], return_inverse=True)
    for k in range(len(structures)):
        members = steps[structure_of_step == k]
        subgraph = int(members[0]) * partition.num_replicas
        nodes = partition.operations[partition.first[subgraph] : partition.first[subgraph + 1]]
        low, high = np.searchsorted(edge_subgraph, [subgraph, subgraph + 1])
        edges = by_subgraph[low:high]
        graph = _Graph(
            num_ops=len(nodes),
            src=partition.local[operations.src[edges]],
            dst=partition.local[operations.dst[edges]],
            lead=partition.lead[nodes],
            across=partition.beyond[nodes]
            if partition.num_replicas > 1
            else np.zeros(len(nodes), np.bool_),
        )
        shapes.append(_compile_shape(operations, partition, graph, members, nodes, gaps))
    return shapes


def find_gates_with_early_members(
    dst: NDArray[np.int64], members: NDArray[np.int64], gate: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the gates with a dependency that also have a member without one.

    Such a member arrives at the step's start. That matters if a negative transfer lets all other
    members arrive earlier.

    Args:
        dst: Shape (edges,): the operations that wait.
        members: Shape (members,): the operations with a group.
        gate: Shape (members,): the gate of each member.
    """
    waits = np.zeros(1 + max(int(dst.max(initial=0)), int(members.max(initial=0))), dtype=np.bool_)
    waits[dst] = True
    late = waits[members]
    has_late, has_early = np.zeros((2, int(gate.max(initial=0)) + 1), dtype=np.bool_)
    has_late[gate[late]] = True
    has_early[gate[~late]] = True
    return np.flatnonzero(has_late & has_early)


@dataclass(frozen=True, slots=True)
class _Graph:
    """Operations of one subgraph, before its groups become nodes."""

    num_ops: int
    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    lead: NDArray[np.int64]
    across: NDArray[np.bool_]


def _compile_shape(
    operations: Operations,
    partition: Partition,
    graph: _Graph,
    steps: NDArray[np.int64],
    nodes: NDArray[np.int64],
    gaps: _Gaps,
) -> StepShape:
    """Turn groups into gates and order the result.

    A group has a *gate* that waits for the dependencies of all its members, and each member's own
    node waits for the gate alone. With gaps of members there is one node more per member, which
    takes its launch gap and which the gate waits for, so that a late launch delays the group.
    """
    members = np.flatnonzero(graph.lead >= 0)
    gate_of_lead, num_leads = factorize(graph.lead[members])
    gate = graph.num_ops + gate_of_lead
    num_nodes = graph.num_ops + num_leads
    arrival = np.arange(graph.num_ops)
    src, dst = [graph.src], []
    if gaps is _Gaps.ALL:
        arrival[members] = num_nodes + np.arange(len(members))
        num_nodes += len(members)
        src += [arrival[members], gate]
        dst += [gate, members]
    else:
        arrival[members] = gate
        src.append(gate)
        dst.append(members)
    dst.insert(0, arrival[graph.dst])
    if gaps is not _Gaps.ALL:
        early = find_gates_with_early_members(graph.dst, members, gate)
        src.append(np.full(len(early), num_nodes))
        dst.append(early)
        num_nodes += int(len(early) > 0)
    across = np.zeros(num_nodes, dtype=np.bool_)
    across[gate] = graph.across[members]
    # Members of a group may wait for one operation. A repeated edge does no harm.
    all_src, all_dst = np.concatenate(src), np.concatenate(dst)
    del src, dst  # 50 MB of a large step, and the schedule needs as much again
    schedule = order_by_level(num_nodes, all_src, all_dst, across=across)

    num_replicas = partition.num_replicas
    subgraphs = steps[None, :] * num_replicas + np.arange(num_replicas)[:, None]
    rows = partition.operations[
        partition.first[subgraphs][None, :, :] + np.arange(graph.num_ops)[:, None, None]
    ]
    shape = (num_nodes, num_replicas, len(steps))
    operation = np.full(shape, NO_OPERATION, dtype=np.int64)
    operation[schedule.position[: graph.num_ops]] = rows
    has_gaps = gaps is not _Gaps.NONE
    gap = np.full(shape if has_gaps else (0, 0, 0), NO_OPERATION, dtype=np.int64)
    if has_gaps:
        with_gap = np.flatnonzero((graph.lead < 0) | (gaps is _Gaps.ALL))
        gap[schedule.position[arrival[with_gap]]] = rows[with_gap]
    return StepShape(
        schedule=schedule,
        operation=operation,
        step_index=steps,
        closing=schedule.position[np.flatnonzero(operations.closes_step[nodes])],
        gap=gap,
    )
