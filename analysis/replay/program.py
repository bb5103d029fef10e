"""All steps of a run in the order of their replay, ready to replay with any durations."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arrays.grouping import NO_GROUP, factorize
from ..arrays.sorting import stable_argsort
from ..trace.errors import CycleError
from . import loop
from .equal_replicas import find_steps_of_equal_replicas

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .operations import Operations


class Change(NamedTuple):
    """Other times of some operations."""

    rows: NDArray[np.int64]
    """Shape (rows,): the operations, each once."""

    duration_ns: NDArray[np.float64]
    """Shape (rows,)."""

    gap_ns: NDArray[np.float64]
    """Shape (rows,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTimes:
    """Replayed times of a run's operations, from their step's start; shape (ops,) each, in ns."""

    start_ns: NDArray[np.float64]
    """Start; of a communication the arrival of this member."""

    gate_ns: NDArray[np.float64]
    """Arrival of the last member of its group; its start without a group."""

    end_ns: NDArray[np.float64]

    def of_rows(self, rows: slice) -> OperationTimes:
        """Return the times of some operations."""
        return OperationTimes(
            start_ns=self.start_ns[rows], gate_ns=self.gate_ns[rows], end_ns=self.end_ns[rows]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Some operations in the order of their replay."""

    operations: Operations
    graph: loop.Graph
    first_position: NDArray[np.int64]
    """Shape (steps + 1,): the first position of each step."""

    closing: NDArray[np.int64]
    """Positions of the operations whose last end is the step's end, ascending."""

    replicas: NDArray[np.int64]
    """Data-parallel positions, ascending."""

    replica: NDArray[np.int32]
    """Shape (ops,): index into ``replicas``."""

    has_equal_replicas: NDArray[np.bool_]
    """Shape (steps,): whether the replicas of the step have equal structure."""

    def step_times(
        self, duration_ns: NDArray[np.float64], gap_ns: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """Replay every step.

        Args:
            duration_ns: Shape (ops,): durations and transfers.
            gap_ns: Shape (ops,): launch gaps; None for the *device* replay, which has none.

        Returns:
            Shape (steps,), ns: time from each step's start to the last end of an operation that
            closes it.
        """
        ends = np.empty(self.graph.num_rows)
        loop.replay(self.graph, 0, self.graph.num_rows, duration_ns, gap_ns, None, ends)
        return self._last_by_step(ends)

    def partial_step_times(
        self,
        recorded_ns: NDArray[np.float64],
        ideal_ns: NDArray[np.float64],
        parts: NDArray[np.uint32],
        num: int,
    ) -> NDArray[np.float64]:
        """Replay every step, without launch gaps, in scenarios that are each partly recorded.

        Args:
            recorded_ns: Shape (ops,).
            ideal_ns: Shape (ops,).
            parts: Shape (ops,): bit ``w`` is set if scenario ``w`` has the recorded duration.
            num: Number of scenarios, at most `loop.MAX_WIDTH`.

        Returns:
            Shape (scenarios, steps), ns.
        """
        times, latest = np.empty((num, len(self.has_equal_replicas))), np.empty(num)
        for step, (low, high) in enumerate(pairwise(self.first_position.tolist())):
            loop.replay_parts(
                self.graph, low, high, recorded_ns, ideal_ns, parts, self.operations.closes_step,
                num, latest
            )  # fmt: skip
            times[:, step] = latest
        return times

    def changed_step_times(
        self,
        duration_ns: NDArray[np.float64],
        gap_ns: NDArray[np.float64],
        changes: Sequence[Change],
    ) -> NDArray[np.float64]:
        """Replay every step once with each change alone.

        Only what ends at another time is replayed again, so that many small changes cost little.

        Args:
            duration_ns: Shape (ops,): durations and transfers.
            gap_ns: Shape (ops,): launch gaps.
            changes: Other times of some operations.

        Returns:
            Shape (changes, steps), ns.
        """
        graph, closes = self.graph, self.operations.closes_step
        ends = np.empty(graph.num_rows)
        loop.replay(graph, 0, graph.num_rows, duration_ns, gap_ns, None, ends)
        times = np.repeat(self._last_by_step(ends)[None], len(changes), axis=0)
        first = np.zeros(graph.num_rows + 1, dtype=np.int32)
        for begin in range(0, len(changes), loop.MAX_WIDTH):
            block = changes[begin : begin + loop.MAX_WIDTH]
            latest = np.empty(len(block))
            rows = np.concatenate([change.rows for change in block])
            order = stable_argsort(rows)
            np.cumsum(np.bincount(rows, minlength=graph.num_rows), out=first[1:])
            variant = np.repeat(
                np.arange(len(block), dtype=np.int32), [len(change.rows) for change in block]
            )[order]
            new_duration_ns = np.concatenate([change.duration_ns for change in block])[order]
            new_gap_ns = np.concatenate([change.gap_ns for change in block])[order]
            # Steps have the same rows as positions.
            at = np.searchsorted(rows[order], self.first_position)
            for step in np.flatnonzero(np.diff(at)).tolist():
                low, high = self.first_position[step : step + 2].tolist()
                loop.replay_variants(
                    graph, low, high, duration_ns, gap_ns, ends, closes, first, len(rows), variant,
                    new_duration_ns, new_gap_ns, len(block), latest
                )  # fmt: skip
                times[begin : begin + len(block), step] = latest
        return times

    def operation_times(
        self, duration_ns: NDArray[np.float64], gap_ns: NDArray[np.float64] | None = None
    ) -> OperationTimes:
        """Replay every step and keep each operation's times; see `step_times`."""
        by_position, arrived = np.empty((2, self.graph.num_rows))
        loop.replay(self.graph, 0, self.graph.num_rows, duration_ns, gap_ns, arrived, by_position)
        start, end = np.empty((2, self.graph.num_rows))
        start[self.graph.order], end[self.graph.order] = arrived, by_position
        return OperationTimes(start_ns=start, gate_ns=end - duration_ns, end_ns=end)

    def isolated_step_times(
        self, recorded_ns: NDArray[np.float64], ideal_ns: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Replay every step once per replica, with that one as recorded and all others ideal.

        The ideal replicas of a step are equal, so one of them represents all: the cost is that of
        two replays, for any number of replicas. A step whose replicas differ in structure costs a
        whole replay for each.

        Args:
            recorded_ns: Shape (ops,): durations of the replica put back.
            ideal_ns: Shape (ops,): durations of all others; equal for operations of equal label.

        Returns:
            Shape (replicas, steps), ns, in the order of ``replicas``.
        """
        num = len(self.replicas)
        if num == 1:  # there are no others
            return self.step_times(recorded_ns)[None]
        times = np.empty((num, len(self.has_equal_replicas)))
        own, others = np.empty((2, self.graph.num_rows))
        for low, high in self._ranges(self.has_equal_replicas):
            loop.replay_alone(
                self.graph, low, high, recorded_ns, ideal_ns, self.replica, num, own, others
            )
        equal = self.has_equal_replicas
        times[:, equal] = self._last_by_replica(np.maximum(own, others))[:, equal]
        if not equal.all():
            for number in range(num):
                duration_ns = np.where(self.replica == number, recorded_ns, ideal_ns)
                for low, high in self._ranges(~equal):
                    loop.replay(self.graph, low, high, duration_ns, None, None, own)
                times[number, ~equal] = self._last_by_step(own)[~equal]
        return times

    def isolated_cost(self) -> int:
        """Return the number of durations that `isolated_step_times` replays."""
        num = len(self.replicas)
        times = np.where(self.has_equal_replicas, 2, num)
        return int((np.diff(self.first_position) * times).sum()) if num > 1 else 0

    def _ranges(self, steps: NDArray[np.bool_]) -> list[tuple[int, int]]:
        """Return the ranges of positions of neighbouring steps."""
        edges = np.flatnonzero(np.diff(np.concatenate(([False], steps, [False])).astype(np.int8)))
        first: list[int] = self.first_position[edges].tolist()
        return list(zip(first[::2], first[1::2], strict=True))

    def _last_by_step(self, ends: NDArray[np.float64]) -> NDArray[np.float64]:
        times = np.zeros(len(self.has_equal_replicas))
        _raise_to(times, self._closing_step(), ends[self.closing])
        return times

    def _last_by_replica(self, ends: NDArray[np.float64]) -> NDArray[np.float64]:
        num_steps = len(self.has_equal_replicas)
        times = np.zeros(len(self.replicas) * num_steps)
        replica = self.replica[self.graph.order[self.closing]].astype(np.int64)
        cell = replica * num_steps + self._closing_step()
        by_cell = np.argsort(cell, kind="stable")
        _raise_to(times, cell[by_cell], ends[self.closing][by_cell])
        return times.reshape(len(self.replicas), num_steps)

    def _closing_step(self) -> NDArray[np.int32]:
        step: NDArray[np.int32] = self.operations.step[self.graph.order[self.closing]]
        return step


def _raise_to(
    times: NDArray[np.float64], cell: NDArray[np.integer], ends: NDArray[np.float64]
) -> None:
    """Raise the times of cells to the last end of each. ``cell`` is ascending."""
    if len(cell):
        begins = np.flatnonzero(np.diff(cell, prepend=-1))
        times[cell[begins]] = np.maximum(np.maximum.reduceat(ends, begins), 0.0)


def compile_program(operations: Operations, *, compare_replicas: bool = False) -> Program:
    """Bring operations into the order of their replay.

    Args:
        operations: The operations to replay.
        compare_replicas: Whether to look for equal replicas, which make `isolated_step_times`
            cheap.

    Raises:
        CycleError: Operations of a step depend on each other.
    """
    replicas = np.flatnonzero(np.bincount(operations.replica))
    number = np.cumsum(np.bincount(operations.replica) > 0, dtype=np.int32) - np.int32(1)
    replica = number[operations.replica]
    with ThreadPoolExecutor(1) as pool:
        sorting = pool.submit(
            sort_graph, len(operations), operations.src, operations.dst, operations.group
        )
        has_equal_replicas = np.zeros(len(operations.steps), dtype=np.bool_)
        if compare_replicas and len(replicas) > 1:
            has_equal_replicas = find_steps_of_equal_replicas(operations, replica, len(replicas))
        graph = sorting.result()
    num_by_step = np.bincount(operations.step, minlength=len(operations.steps))
    return Program(
        operations=operations,
        graph=graph,
        first_position=np.concatenate(([0], np.cumsum(num_by_step))),
        closing=np.flatnonzero(operations.closes_step[graph.order]),
        replicas=replicas,
        replica=replica,
        has_equal_replicas=has_equal_replicas,
    )


def sort_graph(
    num_rows: int,
    src: NDArray[np.integer[Any]],
    dst: NDArray[np.integer[Any]],
    group: NDArray[np.integer[Any]] | None = None,
) -> loop.Graph:
    """Sort rows topologically.

    Args:
        num_rows: Rows are numbered ``0 .. num_rows - 1``.
        src: Shape (edges,): the row waited for.
        dst: Shape (edges,): the row that waits.
        group: Shape (rows,): rows of equal group wait for all that any of them waits for;
            `NO_GROUP` for a row of its own. None: all rows are.

    Raises:
        CycleError: Some rows depend on each other.
    """
    graph, num_sorted = try_to_sort(num_rows, src, dst, group)
    if num_sorted < num_rows:
        raise CycleError(num_rows - num_sorted)
    return graph


def try_to_sort(
    num_rows: int,
    src: NDArray[np.integer[Any]],
    dst: NDArray[np.integer[Any]],
    group: NDArray[np.integer[Any]] | None = None,
) -> tuple[loop.Graph, int]:
    """Sort rows as `sort_graph` does; return also how many could be sorted.

    If some could not, the graph's ``order`` begins with those that could, and its edges are not
    filled in.
    """
    code = np.full(num_rows, NO_GROUP, dtype=np.int32)
    num_groups = 0
    if group is not None:
        members = np.flatnonzero(group != NO_GROUP)
        code[members], num_groups = factorize(group[members])
    graph = loop.Graph(
        num_rows=num_rows,
        num_edges=len(src),
        order=np.zeros(num_rows, dtype=np.int32),
        last=np.zeros(num_rows, dtype=np.uint8),
        first=np.zeros(num_rows + 1, dtype=np.int32),
        pred=np.zeros(len(src), dtype=np.int32),
    )
    edges = src.astype(np.int32, copy=False), dst.astype(np.int32, copy=False)
    num_sorted = loop.sort(graph, num_groups, *edges, code)
    return graph, num_sorted
