"""All steps of a run in the order of their replay, ready to replay with any durations."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arrays.grouping import NO_GROUP, code_groups
from ..arrays.sorting import stable_argsort
from ..trace.errors import AnalysisError, CycleError
from . import loop

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
    """Replayed times of some operations, from their step's start; shape (ops,) each, in ns."""

    start_ns: NDArray[np.float64]
    """Start; of a communication the arrival of this member."""

    gate_ns: NDArray[np.float64]
    """Arrival of the last member of its group; its start without a group."""

    end_ns: NDArray[np.float64]


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
        times, buffer = np.zeros(len(self.has_equal_replicas)), self._buffer()
        for step, low, high in self._steps():
            ends = buffer[: high - low]
            loop.functions.replay(self.graph, low, high, duration_ns, gap_ns, None, ends)
            times[step] = self._last_end(step, ends)
        return times

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
        for step, low, high in self._steps():
            loop.functions.replay_parts(
                self.graph, low, high, recorded_ns, ideal_ns, parts, self.operations.closes_step,
                None, 1, num, latest
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

        Returns:
            Shape (changes, steps), ns.
        """
        graph, closes = self.graph, self.operations.closes_step
        times, buffer = np.empty((len(changes), len(self.has_equal_replicas))), self._buffer()
        rows = np.concatenate([change.rows for change in changes])
        by_row = stable_argsort(rows)
        sizes = [len(change.rows) for change in changes]
        variant = np.repeat(np.arange(len(changes), dtype=np.int32), sizes)[by_row]
        new_ns, new_gap_ns = (
            np.concatenate(columns)[by_row] for columns in list(zip(*changes, strict=True))[1:]
        )
        rows = rows[by_row]
        first_of_step = np.searchsorted(rows, self.first_position).tolist()
        for step, low, high in self._steps():
            ends, latest = buffer[: high - low], np.empty(len(changes))
            loop.functions.replay(graph, low, high, duration_ns, gap_ns, None, ends)
            own = slice(first_of_step[step], first_of_step[step + 1])
            if own.start == own.stop:
                times[:, step] = self._last_end(step, ends)
                continue
            first = np.zeros(high - low + 1, dtype=np.int32)
            np.cumsum(np.bincount(rows[own] - low, minlength=high - low), out=first[1:])
            loop.functions.replay_variants(
                graph, low, high, duration_ns, gap_ns, ends, closes, first, int(first[-1]),
                variant[own], new_ns[own], new_gap_ns[own], len(changes), latest
            )  # fmt: skip
            times[:, step] = latest
        return times

    def operation_times(
        self,
        duration_ns: NDArray[np.float64],
        gap_ns: NDArray[np.float64],
        *,
        steps: slice,
    ) -> OperationTimes:
        """Replay some neighbouring steps and keep each operation's times; see `step_times`.

        Args:
            duration_ns: Shape (ops,): durations and transfers of all steps.
            gap_ns: Likewise launch gaps.
            steps: Indices of the steps.

        Returns:
            The times of these steps' operations.
        """
        borders = self.first_position[:-1][steps], self.first_position[1:][steps]
        low, high = (int(borders[0][0]), int(borders[1][-1])) if len(borders[0]) else (0, 0)
        by_position, arrived = np.empty((2, high - low))
        loop.functions.replay(self.graph, low, high, duration_ns, gap_ns, arrived, by_position)
        row = self.graph.order[low:high] - low
        start, end = np.empty((2, high - low))
        start[row], end[row] = arrived, by_position
        return OperationTimes(start_ns=start, gate_ns=end - duration_ns[low:high], end_ns=end)

    def isolated_step_times(
        self,
        recorded_ns: NDArray[np.float64],
        ideal_ns: NDArray[np.float64],
        parts: NDArray[np.uint32],
        num: int,
    ) -> NDArray[np.float64]:
        """Replay every step once per replica, with parts of it as recorded and all others ideal.

        The ideal replicas of a step are equal, so one of them represents all: the cost is that of
        two replays, for any number of replicas. A step whose replicas differ in structure costs a
        whole replay for each.

        Args:
            recorded_ns: Shape (ops,): durations of the replica put back.
            ideal_ns: Shape (ops,): durations of all others; equal for operations of equal label.
            parts: Shape (ops,): bit ``w`` is set if scenario ``w`` puts the operation back.
            num: Number of scenarios, at most `loop.MAX_WIDTH`.

        Returns:
            Shape (scenarios, replicas, steps), ns, in the order of ``replicas``.
        """
        num_replicas = len(self.replicas)
        if num_replicas == 1:  # there are no others
            return self.partial_step_times(recorded_ns, ideal_ns, parts, num)[:, None]
        graph, closes = self.graph, self.operations.closes_step
        times = np.zeros((num, num_replicas, len(self.has_equal_replicas)))
        latest, of_one = np.empty((num, num_replicas)), np.empty(num)
        for step, low, high in self._steps():
            if self.has_equal_replicas[step]:
                loop.functions.replay_parts(
                    graph, low, high, recorded_ns, ideal_ns, parts, closes, self.replica,
                    num_replicas, num, latest
                )  # fmt: skip
                times[:, :, step] = latest
                continue
            for number in range(num_replicas):
                own = np.where(self.replica == number, parts, np.uint32(0))
                loop.functions.replay_parts(
                    graph, low, high, recorded_ns, ideal_ns, own, closes, None, 1, num, of_one
                )
                times[:, number, step] = of_one
        return times

    def isolated_cost(self) -> int:
        """Return the number of durations that `isolated_step_times` replays."""
        num = len(self.replicas)
        times = np.where(self.has_equal_replicas, 2, num)
        return int((np.diff(self.first_position) * times).sum()) if num > 1 else 0

    def _steps(self) -> Iterator[tuple[int, int, int]]:
        for step, (low, high) in enumerate(pairwise(self.first_position.tolist())):
            yield step, low, high

    def _buffer(self) -> NDArray[np.float64]:
        """Return a column for the longest step: it stays in a processor's cache."""
        return np.empty(int(np.diff(self.first_position).max(initial=0)))

    def _last_end(self, step: int, ends: NDArray[np.float64]) -> float:
        begin, end = np.searchsorted(self.closing, self.first_position[step : step + 2])
        at = self.closing[begin:end] - self.first_position[step]
        return float(ends[at].max(initial=0.0))


def compile_program(operations: Operations, *, compare_replicas: bool = False) -> Program:
    """Bring operations into the order of their replay.

    Args:
        compare_replicas: Whether to look for equal replicas, which make `isolated_step_times`
            cheap.

    Raises:
        CycleError: Operations of a step depend on each other.
        AnalysisError: Operations of a step wait for another step.
    """
    replicas = np.flatnonzero(np.bincount(operations.replica))
    number = np.cumsum(np.bincount(operations.replica) > 0, dtype=np.int32) - np.int32(1)
    replica = number[operations.replica]
    code, num_groups = code_groups(operations.group)
    graph, num_sorted = _sort(len(replica), operations.src, operations.dst, code, num_groups)
    if num_sorted < len(replica):
        raise CycleError(len(replica) - num_sorted)
    num_by_step = np.bincount(operations.step, minlength=len(operations.steps))
    first_position = np.concatenate(([0], np.cumsum(num_by_step)))
    # The loop replays one step after the other, and follows these numbers without a look.
    for step, (low, high) in enumerate(pairwise(first_position.tolist())):
        edges = slice(int(graph.first[low]), int(graph.first[high]))
        for numbers in (graph.order[low:high], graph.pred[edges]):
            if len(numbers) and not (low <= numbers.min() and numbers.max() < high):
                raise AnalysisError(f"operations of the step at index {step} wait for another step")
    has_equal_replicas = np.zeros(len(operations.steps), dtype=np.bool_)
    if compare_replicas and len(replicas) > 1:
        subgraph = operations.step * np.int32(len(replicas)) + replica
        num_each = np.bincount(subgraph, minlength=len(operations.steps) * len(replicas))
        by_step = num_each.reshape(-1, len(replicas))
        has_equal_replicas = (by_step == by_step[:, :1]).all(axis=1)
        loop.functions.compare_replicas(
            graph, len(operations.steps), len(replicas),
            np.append(0, np.cumsum(num_each)).astype(np.int32),
            operations.label.astype(np.int32, copy=False), code, num_groups,
            operations.closes_step, has_equal_replicas
        )  # fmt: skip
    return Program(
        operations=operations,
        graph=graph,
        first_position=first_position,
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
    code, num_groups = np.full(num_rows, NO_GROUP, dtype=np.int32), 0
    if group is not None:
        code, num_groups = code_groups(group)
    return _sort(num_rows, src, dst, code, num_groups)


def _sort(
    num_rows: int,
    src: NDArray[np.integer[Any]],
    dst: NDArray[np.integer[Any]],
    code: NDArray[np.int32],
    num_groups: int,
) -> tuple[loop.Graph, int]:
    graph = loop.Graph(
        num_rows=num_rows,
        num_edges=len(src),
        order=np.zeros(num_rows, dtype=np.int32),
        last=np.zeros(num_rows, dtype=np.uint8),
        first=np.zeros(num_rows + 1, dtype=np.int32),
        pred=np.zeros(len(src), dtype=np.int32),
    )
    edges = src.astype(np.int32, copy=False), dst.astype(np.int32, copy=False)
    for rows in edges:
        if len(rows) and not (rows.min() >= 0 and rows.max() < num_rows):
            raise AnalysisError("an operation waits for one that there is not")
    return graph, loop.functions.sort(graph, num_groups, *edges, code)
