"""Compile operations into few schedules, each replayed for many steps at once.

Steps of equal structure share a schedule. Where the data-parallel replicas of
a step look alike too, the schedule holds one replica's nodes, and operations
that all replicas share (a gradient reduction, say) wait across the lanes.
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
"""Lanes replayed together: their ends stay in a core's cache."""

WHOLE_STEP_COLUMNS = 64
"""Whole steps replayed side by side: their ends take 64 times the memory of one."""

NO_OPERATION = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepClass:
    """Steps of equal structure."""

    schedule: Schedule
    operation: NDArray[np.int64]
    """Shape (nodes, replicas, steps): whose duration the node takes; `NO_OPERATION`: none."""

    step_index: NDArray[np.int64]
    """Shape (steps,): indices into the program's steps."""

    closing: NDArray[np.int64]
    """Nodes whose last end is the step's end."""

    gap: NDArray[np.int64]
    """Shape (nodes, replicas, steps): whose launch gap is added; empty in a device replay.

    Without `Program.has_arrivals` no member of a group has one.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """All steps of some operations, ready to replay with any durations."""

    classes: tuple[StepClass, ...]
    num_steps: int
    replicas: NDArray[np.int64]
    """The data-parallel positions, ascending."""

    has_arrivals: bool
    """Whether members of groups may have launch gaps."""

    def step_times(
        self, duration_ns: NDArray[np.float64], gap_ns: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """Replay every step.

        Args:
            duration_ns: Shape (ops,): durations and transfers.
            gap_ns: Shape (ops,): launch gaps, for a program compiled with them; without
                `has_arrivals` those of members of groups are not looked at.

        Returns:
            Shape (steps,): time from each step's start to the last end of an
            operation that closes it, in ns.
        """
        times = np.zeros(self.num_steps)
        padded = np.append(duration_ns, 0.0)
        gaps = None if gap_ns is None else np.append(gap_ns, 0.0)
        for found in self.classes:
            num_replicas = found.operation.shape[1]
            at_once = max(1, COLUMNS_AT_ONCE // num_replicas)
            for first in range(0, len(found.step_index), at_once):
                lanes = slice(first, first + at_once)
                durations = padded[found.operation[:, :, lanes]]
                if gaps is not None:
                    durations += gaps[found.gap[:, :, lanes]]
                ends = replay(found.schedule, durations)
                times[found.step_index[lanes]] = ends[found.closing].max(axis=(0, 1), initial=0.0)
        return times

    def isolated_step_times(
        self,
        recorded_ns: NDArray[np.float64],
        ideal_ns: NDArray[np.float64],
        replica: NDArray[np.int32],
    ) -> NDArray[np.float64]:
        """Replay every step once for each replica, that one as recorded and all others ideal.

        The ideal replicas of a step all look alike, so one of them stands for
        all: the cost is that of two replays, however many replicas there are.
        Steps whose replicas differ in structure cost a whole replay for each.

        Args:
            recorded_ns: Shape (ops,): durations of the replica put back.
            ideal_ns: Shape (ops,): durations of all others; equal for operations of equal label.
            replica: Shape (ops,): the data-parallel position that the program was compiled by.

        Returns:
            Shape (replicas, steps), in the order of ``replicas``, in ns.
        """
        replicas = self.replicas
        if len(replicas) == 1:  # there are no others
            return self.step_times(recorded_ns)[None]
        times = np.zeros((len(replicas), self.num_steps))
        recorded, ideal = np.append(recorded_ns, 0.0), np.append(ideal_ns, 0.0)
        for found in self.classes:
            if found.operation.shape[1] != len(replicas):
                times[:, found.step_index] = self._whole(found, recorded, ideal, replica)
                continue
            at_once = max(1, COLUMNS_AT_ONCE // (2 * len(replicas)))
            for first in range(0, len(found.step_index), at_once):
                lanes = found.operation[:, :, first : first + at_once]
                num_nodes, num_replicas, num_lanes = lanes.shape
                durations = np.empty((num_nodes, 2, num_replicas, num_lanes))
                durations[:, 0] = recorded[lanes]
                durations[:, 1] = ideal[lanes[:, :1]]
                ends = replay(
                    found.schedule, durations.reshape(num_nodes, 2, num_replicas * num_lanes)
                )
                last = (
                    ends[found.closing]
                    .max(axis=(0, 1), initial=0.0)
                    .reshape(num_replicas, num_lanes)
                )
                times[:, found.step_index[first : first + at_once]] = last
        return times

    def isolated_cost(self) -> int:
        """Return how many durations `isolated_step_times` replays."""
        num = len(self.replicas)
        return sum(
            found.operation.size * (2 if found.operation.shape[1] == num else num)
            for found in self.classes
        )

    def _whole(
        self,
        found: StepClass,
        recorded: NDArray[np.float64],
        ideal: NDArray[np.float64],
        replica: NDArray[np.int32],
    ) -> NDArray[np.float64]:
        """Replay whole steps once for each replica, some replicas side by side in lanes.

        Returns:
            Shape (replicas, steps of the class), in ns.
        """
        times = np.empty((len(self.replicas), len(found.step_index)))
        at_once = max(1, WHOLE_STEP_COLUMNS // len(found.step_index))
        operation = found.operation[:, 0]
        of_node = np.append(replica, -1)[operation]
        usual, own = ideal[operation], recorded[operation]
        for first in range(0, len(self.replicas), at_once):
            chosen = self.replicas[first : first + at_once]
            durations = np.where(of_node[:, None] == chosen[:, None], own[:, None], usual[:, None])
            num_nodes, num_chosen, num_lanes = durations.shape
            ends = replay(found.schedule, durations.reshape(num_nodes, 1, num_chosen * num_lanes))
            last = ends[found.closing].max(axis=(0, 1), initial=0.0)
            times[first : first + at_once] = last.reshape(len(chosen), -1)
        return times


class _Gaps(Enum):
    """Whose launch gaps a replay holds."""

    NONE = 0
    OF_THE_REST = 1
    """Of operations without a group."""

    OF_ALL = 2


def compile_program(
    operations: Operations, *, host_gaps: bool, late_members: bool = True
) -> Program:
    """Compile ``operations`` for replay.

    Args:
        operations: What to replay.
        host_gaps: Whether launch gaps take part (the *full* replay) or not
            (the *device* replay).
        late_members: Whether members of groups have launch gaps. Where none has, the replay is
            a third smaller without a node for each.

    Raises:
        CycleError: Operations of a step wait for each other.
    """
    replicas = np.flatnonzero(np.bincount(operations.replica))
    replica = find_positions(operations.replica, replicas)
    num_steps = len(operations.steps)
    whole = operations
    gaps = _Gaps.OF_ALL if late_members else _Gaps.OF_THE_REST
    gaps = gaps if host_gaps else _Gaps.NONE
    left = np.ones(num_steps, dtype=np.bool_)
    classes: list[StepClass] = []
    if len(replicas) > 1 and _may_have_equal_replicas(operations, replica, len(replicas)):
        frame = partition_operations(whole, replica, len(replicas))
        signature, alike = hash_structures(whole, frame)
        by_step = signature.reshape(num_steps, len(replicas))
        alike &= (by_step == by_step[:, :1]).all(axis=1)
        classes += _compile(whole, frame, by_step[:, 0], np.flatnonzero(alike), gaps)
        left = ~alike
    if left.any():
        frame = partition_operations(whole, np.zeros(len(whole), dtype=np.int64), 1)
        # The only step is like no other: nothing to tell apart.
        alone = num_steps == 1
        signature = np.zeros(1, dtype=np.uint64) if alone else hash_structures(whole, frame)[0]
        classes += _compile(whole, frame, signature, np.flatnonzero(left), gaps)
    return Program(
        classes=tuple(classes),
        num_steps=num_steps,
        replicas=replicas,
        has_arrivals=gaps is _Gaps.OF_ALL,
    )


def _may_have_equal_replicas(
    operations: Operations, replica: NDArray[np.int64], num_replicas: int
) -> bool:
    """Tell whether some step's replicas have equally many operations: without, none are alike."""
    instance = operations.step * np.int64(num_replicas) + replica
    num_instances = len(operations.steps) * num_replicas
    num_each = np.bincount(instance, minlength=num_instances).reshape(-1, num_replicas)
    return bool((num_each == num_each[:, :1]).all(axis=1).any())


def _compile(
    operations: Operations,
    frame: Partition,
    signature: NDArray[np.uint64],
    steps: NDArray[np.int64],
    gaps: _Gaps,
) -> list[StepClass]:
    """Build one class for each distinct signature among ``steps``."""
    if not len(steps):
        return []
    edge_instance = frame.instance[operations.dst]
    by_instance = stable_argsort(edge_instance)
    edge_instance = edge_instance[by_instance]
    classes = []
    kinds, kind_of_step = np.unique(signature[steps], return_inverse=True)
    for kind in range(len(kinds)):
        members = steps[kind_of_step == kind]
        instance = int(members[0]) * frame.num_replicas
        nodes = frame.operations[frame.first[instance] : frame.first[instance + 1]]
        low, high = np.searchsorted(edge_instance, [instance, instance + 1])
        edges = by_instance[low:high]
        graph = _Graph(
            num_ops=len(nodes),
            src=frame.local[operations.src[edges]],
            dst=frame.local[operations.dst[edges]],
            lead=frame.lead[nodes],
            across=frame.beyond[nodes]
            if frame.num_replicas > 1
            else np.zeros(len(nodes), np.bool_),
        )
        classes.append(_step_class(operations, frame, graph, members, nodes, gaps))
    return classes


def find_gates_with_early_members(
    dst: NDArray[np.int64], members: NDArray[np.int64], gate: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the gates that wait for something, and have a member that waits for nothing.

    That member is there when the step begins. It makes a difference where a
    negative transfer lets all others arrive before.

    Args:
        dst: Shape (edges,): the operations that wait.
        members: Shape (members,): the operations with a group.
        gate: Shape (members,): each one's gate.
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
    """One instance's operations before its groups have become nodes."""

    num_ops: int
    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    lead: NDArray[np.int64]
    across: NDArray[np.bool_]


def _step_class(
    operations: Operations,
    frame: Partition,
    graph: _Graph,
    steps: NDArray[np.int64],
    nodes: NDArray[np.int64],
    gaps: _Gaps,
) -> StepClass:
    """Turn groups into gates and order the result.

    A member of a group is two nodes (three with a launch gap): the *gate* of the
    group waits for all that any member waits for, and the member's own node
    waits for the gate alone. With gaps of members, each waits in a node of its
    own before the gate, so that a late launch delays the group.
    """
    members = np.flatnonzero(graph.lead >= 0)
    gate_of_lead, num_leads = factorize(graph.lead[members])
    gate = graph.num_ops + gate_of_lead
    num_nodes = graph.num_ops + num_leads
    arrival = np.arange(graph.num_ops)
    src, dst = [graph.src], []
    if gaps is _Gaps.OF_ALL:
        arrival[members] = num_nodes + np.arange(len(members))
        num_nodes += len(members)
        src += [arrival[members], gate]
        dst += [gate, members]
    else:
        arrival[members] = gate
        src.append(gate)
        dst.append(members)
    dst.insert(0, arrival[graph.dst])
    if gaps is not _Gaps.OF_ALL:
        at_start = find_gates_with_early_members(graph.dst, members, gate)
        src.append(np.full(len(at_start), num_nodes))
        dst.append(at_start)
        num_nodes += int(len(at_start) > 0)
    across = np.zeros(num_nodes, dtype=np.bool_)
    across[gate] = graph.across[members]
    # Several members of a group may wait for one operation: twice the same edge does no harm.
    all_src, all_dst = np.concatenate(src), np.concatenate(dst)
    del src, dst  # of a large step 50 MB, while as much again is made of them
    schedule = order_by_level(num_nodes, all_src, all_dst, across=across)

    instances = steps[None, :] * frame.num_replicas + np.arange(frame.num_replicas)[:, None]
    rows = frame.operations[
        frame.first[instances][None, :, :] + np.arange(graph.num_ops)[:, None, None]
    ]
    shape = (num_nodes, frame.num_replicas, len(steps))
    operation = np.full(shape, NO_OPERATION, dtype=np.int64)
    operation[schedule.position[: graph.num_ops]] = rows
    has_gaps = gaps is not _Gaps.NONE
    gap = np.full(shape if has_gaps else (0, 0, 0), NO_OPERATION, dtype=np.int64)
    if has_gaps:
        with_gap = np.flatnonzero((graph.lead < 0) | (gaps is _Gaps.OF_ALL))
        gap[schedule.position[arrival[with_gap]]] = rows[with_gap]
    return StepClass(
        schedule=schedule,
        operation=operation,
        step_index=steps,
        closing=schedule.position[np.flatnonzero(operations.closes_step[nodes])],
        gap=gap,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTimes:
    """Times of a run's operations, from their step's start; shape (ops,) each, in ns."""

    start_ns: NDArray[np.float64]
    """When it began; of a communication when this member arrived."""

    gate_ns: NDArray[np.float64]
    """When the last member of its group had arrived; else its start."""

    end_ns: NDArray[np.float64]


def operation_times(
    program: Program,
    operations: Operations,
    duration_ns: NDArray[np.float64],
    gap_ns: NDArray[np.float64],
) -> OperationTimes:
    """Replay a run and keep each operation's times.

    Args:
        program: The operations, compiled with their launch gaps.
        operations: What was compiled.
        duration_ns: Shape (ops,): durations and transfers.
        gap_ns: Shape (ops,): launch gaps.
    """
    ends, arrived = np.zeros(len(operations)), np.zeros(len(operations))
    durations, gaps = np.append(duration_ns, 0.0), np.append(gap_ns, 0.0)
    for found in program.classes:
        at_once = max(1, COLUMNS_AT_ONCE // found.operation.shape[1])
        for first in range(0, len(found.step_index), at_once):
            operation = found.operation[:, :, first : first + at_once]
            gap = found.gap[:, :, first : first + at_once]
            node_ends = replay(found.schedule, durations[operation] + gaps[gap])
            ends[operation[operation >= 0]] = node_ends[operation >= 0]
            arrived[gap[gap >= 0]] = node_ends[gap >= 0]
    if not program.has_arrivals:
        reaches = operations.group[operations.dst] != NO_GROUP
        np.maximum.at(arrived, operations.dst[reaches], ends[operations.src[reaches]])
    gate = ends - duration_ns
    return OperationTimes(
        start_ns=np.where(operations.group == NO_GROUP, gate, arrived),
        gate_ns=gate,
        end_ns=ends,
    )
