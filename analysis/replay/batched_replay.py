"""Replay of compiled shapes: the end of each node, in all columns at once.

A range of steps is replayed with all its replicas. *Together*, operations are put back in all
replicas at once. *Alone* gives, for each replica, the step's time if only that replica had them
put back. Up to the first shared collective that they move both are equal, so only what follows it
is replayed again. There, the other replicas of a step are all ideal and equal, so one column
represents all of one shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from .batched_program import Round, ShapeProgram

    Row = NDArray[np.float64]
    """Shape (columns,), or (1,) if all columns are equal: numpy broadcasts it."""

    Ends = list[list[Row]]
    """By shape, by node."""

START = np.zeros(1)
"""Start of a step's first operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeReplay:
    """Replay of some columns of one shape."""

    program: ShapeProgram
    durations: Sequence[Row]
    """By operation."""

    rounds: Sequence[Round]
    """The nodes to compute; all others keep their ends."""

    ends: list[Row]
    """By node; filled in by the replay."""


class Exchange(Protocol):
    """Exchange of arrivals between the columns of several shapes at one shared collective."""

    def __call__(self, replays: Sequence[int], arrivals: Sequence[Row], /) -> Sequence[Row]:
        """Return, for each replay, the arrival of the last member in each column.

        Args:
            replays: Indices of the replays that take part.
            arrivals: The arrivals of their own columns.
        """
        ...


def replay_rounds(replays: Sequence[ShapeReplay], exchange: Exchange) -> None:
    """Compute the end of each node if it begins as soon as its predecessors have ended.

    That is ``end[n] = max(end[p] for p in predecessors(n)) + duration[n]``, and at a shared
    collective the maximum over all columns that take part.

    Args:
        replays: Their ``ends`` are filled in.
        exchange: Returns the last arrivals at a shared collective.
    """
    for number in range(max(len(replay.rounds) for replay in replays)):
        keys = {key: None for replay in replays for key in replay.rounds[number].shared}
        for replay in replays:
            _replay_nodes(replay, replay.rounds[number].nodes)
        for key in keys:
            present = [k for k, each in enumerate(replays) if key in each.rounds[number].shared]
            gates = [replays[k].rounds[number].shared[key] for k in present]
            ends = [replays[k].ends for k in present]
            last = exchange(present, [own[gate] for own, gate in zip(ends, gates, strict=True)])
            for own, gate, end in zip(ends, gates, last, strict=True):
                own[gate] = end


def _replay_nodes(replay: ShapeReplay, nodes: Sequence[int]) -> None:
    """Compute some nodes of one shape; the inner loop of every replay."""
    predecessors, ends, durations = replay.program.predecessors, replay.ends, replay.durations
    num_ops, maximum = replay.program.num_ops, np.maximum
    for node in nodes:
        sources = predecessors[node]
        if len(sources) == 1:
            begin = ends[sources[0]]
        elif sources:
            begin = maximum(ends[sources[0]], ends[sources[1]])
            for source in sources[2:]:
                begin = maximum(begin, ends[source])
        else:
            begin = START
        ends[node] = begin + durations[node] if node < num_ops else begin


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeColumns:
    """The columns of one shape in a range of steps."""

    program: ShapeProgram
    recorded: Sequence[Row]
    """By operation, each of shape (columns,): durations and transfers."""

    ideal: Sequence[Row]
    """By operation, each of shape (1,)."""

    step: NDArray[np.int64]
    """Shape (columns,): index of the step in the range, ascending."""

    replica: NDArray[np.int64]
    """Shape (columns,): index of the replica."""

    begins: NDArray[np.int64]
    """The first column of each step that has any."""

    @property
    def steps(self) -> NDArray[np.int64]:
        """The steps that have a column."""
        return self.step[self.begins]

    def put_back(self, labels: int) -> list[Row]:
        """Return the ideal durations, with the recorded ones of some labels put back."""
        return [
            recorded if labels >> label & 1 else ideal
            for label, recorded, ideal in zip(
                self.program.label, self.recorded, self.ideal, strict=True
            )
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRange:
    """Consecutive steps with all their replicas."""

    shapes: Sequence[ShapeColumns]
    num_steps: int

    def replay(self, durations: Sequence[Sequence[Row]]) -> Ends:
        """Replay all columns with these durations, by shape and operation."""
        return self._replay_together(
            durations,
            [shape.program.rounds for shape in self.shapes],
            [[START] * len(shape.program.predecessors) for shape in self.shapes],
        )

    def ideal(self) -> Ends:
        """Replay with all durations ideal."""
        return self.replay([shape.ideal for shape in self.shapes])

    def put_back(self, labels: int, ideal: Ends) -> Ends:
        """Replay with the recorded durations of some labels and all else ideal.

        Args:
            labels: The labels to put back.
            ideal: The ends if all durations are ideal.
        """
        return self._replay_together(
            [shape.put_back(labels) for shape in self.shapes],
            [shape.program.rounds_moved_by(labels, through_shared=False) for shape in self.shapes],
            ideal,
        )

    def step_times(self, ends: Ends) -> NDArray[np.float64]:
        """Return the last end of the operations that close each step. Shape (steps,)."""
        return self._latest_by_step(
            range(len(self.shapes)),
            [last_end(shape.program, own) for shape, own in zip(self.shapes, ends, strict=True)],
        )

    def alone(self, number: int, labels: int, own: Sequence[Row], ideal: Ends) -> Row:
        """Replay each column of one shape with some labels put back in it alone.

        Args:
            number: Index of the shape.
            labels: The labels to put back.
            own: The shape's ends with the same labels put back in all replicas.
            ideal: The ends if all durations are ideal.

        Returns:
            The last end of the operations that close the step, for each column.
        """
        shape = self.shapes[number]
        durations = shape.put_back(labels)
        replays = [_replay_after_collectives(shape.program, labels, durations, list(own))]
        masks: list[NDArray[np.bool_] | None] = [None]
        for k, other in enumerate(self.shapes):
            num_others = np.bincount(other.step, minlength=self.num_steps)[shape.step]
            is_present = num_others > (1 if k == number else 0)
            if is_present.any():
                ends = _repeat_for_columns(other, shape, ideal[k])
                replays.append(_replay_after_collectives(other.program, labels, other.ideal, ends))
                masks.append(None if is_present.all() else is_present)
        replay_rounds(replays, _exchange_present(masks))
        last = last_end(shape.program, replays[0].ends)
        for replay, mask in zip(replays[1:], masks[1:], strict=True):
            last = np.maximum(last, _masked(mask, last_end(replay.program, replay.ends)))
        return last

    def _replay_together(
        self, durations: Sequence[Sequence[Row]], rounds: Sequence[Sequence[Round]], ends: Ends
    ) -> Ends:
        """Replay all columns; nodes that are not in ``rounds`` keep their ends."""
        replays = [
            ShapeReplay(program=shape.program, durations=own, rounds=todo, ends=list(kept))
            for shape, own, todo, kept in zip(self.shapes, durations, rounds, ends, strict=True)
        ]
        replay_rounds(replays, self._exchange)
        return [replay.ends for replay in replays]

    def _exchange(self, present: Sequence[int], arrivals: Sequence[Row]) -> Sequence[Row]:
        if len({float(arrival[0]) for arrival in arrivals if len(arrival) == 1}) == 1 and all(
            len(arrival) == 1 for arrival in arrivals
        ):
            return arrivals
        latest = self._latest_by_step(present, arrivals)
        return [latest[self.shapes[k].step] for k in present]

    def _latest_by_step(self, numbers: Sequence[int], rows: Sequence[Row]) -> NDArray[np.float64]:
        """Return the largest value over the columns of each step, in some shapes."""
        latest = np.full(self.num_steps, -np.inf)
        for k, row in zip(numbers, rows, strict=True):
            shape = self.shapes[k]
            by_step = np.maximum.reduceat(row, shape.begins) if len(row) > 1 else row
            latest[shape.steps] = np.maximum(latest[shape.steps], by_step)
        return latest


def _replay_after_collectives(
    program: ShapeProgram, labels: int, durations: Sequence[Row], ends: list[Row]
) -> ShapeReplay:
    """Return a replay of only those nodes that ``labels`` move through a shared collective."""
    rounds = program.rounds_moved_by(labels, through_shared=True)
    return ShapeReplay(program=program, durations=durations, rounds=rounds, ends=ends)


def last_end(program: ShapeProgram, ends: Sequence[Row]) -> Row:
    """Return the last end of the operations that close the step."""
    last = ends[program.closing[0]]
    for node in program.closing[1:]:
        last = np.maximum(last, ends[node])
    return last


def _repeat_for_columns(other: ShapeColumns, shape: ShapeColumns, ends: Sequence[Row]) -> list[Row]:
    """Return the ends of ``other``, equal within a step, for each column of ``shape``."""
    steps = other.steps
    index = np.minimum(np.searchsorted(steps, shape.step), len(steps) - 1)
    first_column = other.begins[index]
    return [row if len(row) == 1 else row[first_column] for row in ends]


def _exchange_present(
    masks: Sequence[NDArray[np.bool_] | None],
) -> Callable[[Sequence[int], Sequence[Row]], Sequence[Row]]:
    """Return an exchange column by column, in which a replay is absent from masked columns.

    Args:
        masks: Columns in which each replay is present; None for all.
    """

    def exchange(present: Sequence[int], arrivals: Sequence[Row]) -> Sequence[Row]:
        latest = _masked(masks[present[0]], arrivals[0])
        for k, arrival in zip(present[1:], arrivals[1:], strict=True):
            latest = np.maximum(latest, _masked(masks[k], arrival))
        return [latest] * len(arrivals)

    return exchange


def _masked(mask: NDArray[np.bool_] | None, row: Row) -> Row:
    return row if mask is None else np.where(mask, row, -np.inf)
