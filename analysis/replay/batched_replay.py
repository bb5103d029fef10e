"""Replay lane programs: when each node ends, in all lanes at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from .batched_program import Round, ShapeProgram

    Row = NDArray[np.float64]
    """Shape (lanes,), or (1,) where all lanes agree: numpy's broadcasting does the rest."""

    Ends = list[list[Row]]
    """By part, by node."""

START = np.zeros(1)
"""When a step's first operations begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeReplay:
    """Some lanes of one shape, with the durations that they are replayed with."""

    program: ShapeProgram
    durations: Sequence[Row]
    """By operation."""

    todo: Sequence[Round]
    """What to compute; all other nodes keep their ends."""

    ends: list[Row]
    """By node; filled in by the replay."""


class Exchange(Protocol):
    """Says when a meeting is over."""

    def __call__(self, tracks: Sequence[int], arrivals: Sequence[Row], /) -> Sequence[Row]:
        """Return for each track when the meeting is over in its lanes.

        Args:
            tracks: Which of the replayed tracks take part.
            arrivals: When their lanes arrive.
        """
        ...


def replay_rounds(tracks: Sequence[ShapeReplay], meet: Exchange) -> None:
    """Compute when each node ends if it begins as soon as all that it waits for has ended.

    That is ``end[n] = max(end[p] for p before n) + duration[n]``, and at a
    meeting the maximum over all lanes that meet.

    Args:
        tracks: Their ``ends`` are filled in.
        meet: Joins the tracks.
    """
    for number in range(max(len(track.todo) for track in tracks)):
        keys = {key: None for track in tracks for key in track.todo[number].meetings}
        for track in tracks:
            _replay_nodes(track, track.todo[number].nodes)
        for key in keys:
            present = [k for k, track in enumerate(tracks) if key in track.todo[number].meetings]
            gates = [tracks[k].todo[number].meetings[key] for k in present]
            ends = [tracks[k].ends for k in present]
            over = meet(present, [of[gate] for of, gate in zip(ends, gates, strict=True)])
            for of, gate, end in zip(ends, gates, over, strict=True):
                of[gate] = end


def _replay_nodes(track: ShapeReplay, nodes: Sequence[int]) -> None:
    """Compute some nodes of one track; the inner loop of every replay."""
    before, ends, durations = track.program.before, track.ends, track.durations
    num_ops, maximum = track.program.num_ops, np.maximum
    for node in nodes:
        sources = before[node]
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
    """The lanes of one shape in a block."""

    program: ShapeProgram
    recorded: Sequence[Row]
    """By operation, each of shape (lanes,): durations and transfers."""

    ideal: Sequence[Row]
    """By operation, each of shape (1,)."""

    step: NDArray[np.int64]
    """Shape (lanes,): index of the block's step, ascending."""

    replica: NDArray[np.int64]
    """Shape (lanes,): index of the replica."""

    begins: NDArray[np.int64]
    """The first lane of each step that has any."""

    @property
    def steps(self) -> NDArray[np.int64]:
        """Return the steps that have a lane."""
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
    """Some steps with all their replicas."""

    parts: Sequence[ShapeColumns]
    num_steps: int

    def replay(self, durations: Sequence[Sequence[Row]]) -> Ends:
        """Replay all lanes with these durations, by part and operation."""
        return self._together(
            durations,
            [part.program.phases for part in self.parts],
            [[START] * len(part.program.before) for part in self.parts],
        )

    def ideal(self) -> Ends:
        """Replay with all durations ideal."""
        return self.replay([part.ideal for part in self.parts])

    def put_back(self, labels: int, ideal: Ends) -> Ends:
        """Replay with the recorded durations of some labels, all else ideal.

        Args:
            labels: Which.
            ideal: The ends when all are ideal.
        """
        return self._together(
            [part.put_back(labels) for part in self.parts],
            [part.program.moved_by(labels, behind=False) for part in self.parts],
            ideal,
        )

    def step_times(self, ends: Ends) -> NDArray[np.float64]:
        """Return when the last operation that closes each step has ended. Shape (steps,)."""
        return self._latest(
            range(len(self.parts)),
            [last_end(part.program, of) for part, of in zip(self.parts, ends, strict=True)],
        )

    def alone(self, number: int, labels: int, own: Sequence[Row], ideal: Ends) -> Row:
        """Replay each lane of one part with some labels put back in it alone.

        Args:
            number: Which part.
            labels: What is put back.
            own: Its ends with the same labels put back in all replicas.
            ideal: The ends when all are ideal.

        Returns:
            When the last operation that closes each lane's step has ended.
        """
        part = self.parts[number]
        tracks = [_replay_after_collectives(part.program, labels, part.put_back(labels), list(own))]
        there: list[NDArray[np.bool_] | None] = [None]
        for k, other in enumerate(self.parts):
            num_others = np.bincount(other.step, minlength=self.num_steps)[part.step]
            present = num_others > (1 if k == number else 0)
            if present.any():
                ends = _repeat_for_columns(other, part, ideal[k])
                tracks.append(_replay_after_collectives(other.program, labels, other.ideal, ends))
                there.append(None if present.all() else present)
        replay_rounds(tracks, _exchange_present(there))
        last = last_end(part.program, tracks[0].ends)
        for track, present_or_all in zip(tracks[1:], there[1:], strict=True):
            last = np.maximum(last, _masked(present_or_all, last_end(track.program, track.ends)))
        return last

    def _together(
        self, durations: Sequence[Sequence[Row]], todo: Sequence[Sequence[Round]], ends: Ends
    ) -> Ends:
        """Replay all lanes; what is not to do keeps its ends."""
        tracks = [
            ShapeReplay(program=part.program, durations=taken, todo=phases, ends=list(of))
            for part, taken, phases, of in zip(self.parts, durations, todo, ends, strict=True)
        ]
        replay_rounds(tracks, self._meet)
        return [track.ends for track in tracks]

    def _meet(self, taking_part: Sequence[int], arrivals: Sequence[Row]) -> Sequence[Row]:
        if len({float(arrival[0]) for arrival in arrivals if len(arrival) == 1}) == 1 and all(
            len(arrival) == 1 for arrival in arrivals
        ):
            return arrivals
        latest = self._latest(taking_part, arrivals)
        return [latest[self.parts[k].step] for k in taking_part]

    def _latest(self, numbers: Sequence[int], rows: Sequence[Row]) -> NDArray[np.float64]:
        """Return the largest value over the lanes of each step, in some parts."""
        latest = np.full(self.num_steps, -np.inf)
        for k, row in zip(numbers, rows, strict=True):
            part = self.parts[k]
            by_step = np.maximum.reduceat(row, part.begins) if len(row) > 1 else row
            latest[part.steps] = np.maximum(latest[part.steps], by_step)
        return latest


def _replay_after_collectives(
    program: ShapeProgram, labels: int, durations: Sequence[Row], ends: list[Row]
) -> ShapeReplay:
    """Return a track of which only what ``labels`` move through a meeting is computed."""
    todo = program.moved_by(labels, behind=True)
    return ShapeReplay(program=program, durations=durations, todo=todo, ends=ends)


def last_end(program: ShapeProgram, ends: Sequence[Row]) -> Row:
    """Return when the last of the operations that close the step has ended."""
    last = ends[program.closing[0]]
    for node in program.closing[1:]:
        last = np.maximum(last, ends[node])
    return last


def _repeat_for_columns(other: ShapeColumns, part: ShapeColumns, ends: Sequence[Row]) -> list[Row]:
    """Return ends that are alike in each step of ``other``, as the lanes of ``part`` see them."""
    steps = other.steps
    at = np.minimum(np.searchsorted(steps, part.step), len(steps) - 1)
    first_lane = other.begins[at]
    return [row if len(row) == 1 else row[first_lane] for row in ends]


def _exchange_present(
    there: Sequence[NDArray[np.bool_] | None],
) -> Callable[[Sequence[int], Sequence[Row]], Sequence[Row]]:
    """Let tracks meet lane by lane, each only where it is present (None: everywhere)."""

    def meet(taking_part: Sequence[int], arrivals: Sequence[Row]) -> Sequence[Row]:
        latest = _masked(there[taking_part[0]], arrivals[0])
        for k, arrival in zip(taking_part[1:], arrivals[1:], strict=True):
            latest = np.maximum(latest, _masked(there[k], arrival))
        return [latest] * len(arrivals)

    return meet


def _masked(present: NDArray[np.bool_] | None, row: Row) -> Row:
    return row if present is None else np.where(present, row, -np.inf)
