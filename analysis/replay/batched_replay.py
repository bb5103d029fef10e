"""Replay lane programs: when each node ends, in all lanes at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .batched_program import LaneProgram, Phase

    Row = NDArray[np.float64]
    """Shape (lanes,), or (1,) where all lanes agree: numpy's broadcasting does the rest."""

START = np.zeros(1)
"""When a step's first operations begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """Some lanes of one shape, with the durations that they are replayed with."""

    program: LaneProgram
    durations: Sequence[Row]
    """By operation."""

    todo: Sequence[Phase]
    """What to compute; all other nodes keep their ends."""

    ends: list[Row]
    """By node; filled in by the replay."""


class Meet(Protocol):
    """Says when a meeting is over."""

    def __call__(self, tracks: Sequence[int], arrivals: Sequence[Row], /) -> Sequence[Row]:
        """Return for each track when the meeting is over in its lanes.

        Args:
            tracks: Which of the replayed tracks take part.
            arrivals: When their lanes arrive.
        """
        ...


def replay_tracks(tracks: Sequence[Track], meet: Meet) -> None:
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
            _run(track, track.todo[number].nodes)
        for key in keys:
            present = [k for k, track in enumerate(tracks) if key in track.todo[number].meetings]
            gates = [tracks[k].todo[number].meetings[key] for k in present]
            ends = [tracks[k].ends for k in present]
            over = meet(present, [of[gate] for of, gate in zip(ends, gates, strict=True)])
            for of, gate, end in zip(ends, gates, over, strict=True):
                of[gate] = end


def _run(track: Track, nodes: Sequence[int]) -> None:
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
