"""Hosts that a restart exchanged, and whether the steps after it are shorter."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ..report.text import format_change, format_count, format_names, format_ranges, format_seconds
from ..statistics.step_change import StepChange, compare_step_times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..report.report import RankPlacements, RunReport

NOISE = {True: ", beyond noise", False: ", within noise", None: ", noise unknown"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Steps before and after a change."""

    mean_s: tuple[float, float] | None
    """Mean step before and after; None if the steps of one of them were not kept."""

    change: StepChange

    @property
    def text(self) -> str:
        """Half a sentence: "a step is 26 % faster (460 to 340 ms, beyond noise)"."""
        if self.mean_s is None:
            return "no step to compare"
        before, after = map(format_seconds, self.mean_s)
        change = format_change(self.change.ratio)
        return f"a step is {change} ({before} to {after}{NOISE[self.change.is_significant]})"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMove:
    """A restart of a job on other hosts."""

    epoch: int
    """The first one on the new hosts."""

    left: tuple[str, ...]
    """Hosts that it no longer uses."""

    joined: tuple[str, ...]
    """Hosts that it did not use before."""

    ranks: tuple[int, ...]
    """Ranks on another host than before, and those that are new."""

    step_times: StepTimes


def find_moves(report: RunReport) -> tuple[HostMove, ...]:
    """Return the restarts on other hosts among the steps of a report, in their order."""
    moves = []
    for before, after in pairwise(report.placements):
        old, new = (
            {rank: host for rank, (host, _) in place.of_rank.items()} for place in (before, after)
        )
        ranks = tuple(sorted(rank for rank, host in new.items() if old.get(rank) != host))
        left, joined = ({*old.values()} - {*new.values()}, {*new.values()} - {*old.values()})
        if ranks or left:
            moves.append(
                HostMove(
                    epoch=after.epochs[0],
                    left=tuple(sorted(left)),
                    joined=tuple(sorted(joined)),
                    ranks=ranks,
                    step_times=compare_placements(report, [before], [after]),
                )
            )
    return tuple(moves)


def compare_placements(
    report: RunReport, before: Sequence[RankPlacements], after: Sequence[RankPlacements]
) -> StepTimes:
    """Return the mean step of some placements of the ranks against that of later ones."""
    first, second = (
        [
            seconds
            for place in places
            for step in place.steps
            if (seconds := report.actual_s_by_step.get(step)) is not None
        ]
        for places in (before, after)
    )
    means = (sum(first) / len(first), sum(second) / len(second)) if first and second else None
    return StepTimes(mean_s=means, change=compare_step_times(first, second))


def format_move(move: HostMove) -> str:
    """Return one sentence about a restart on other hosts."""
    parts = [f"without {format_names(move.left)}"] if move.left else []
    parts += [f"with {format_names(move.joined)}"] if move.joined else []
    if not parts:
        parts = [f"with {format_count(len(move.ranks), 'rank')} on other hosts"]
    elif move.ranks:
        ranks = "rank" if len(move.ranks) == 1 else "ranks"
        parts[-1] += f" ({ranks} {format_ranges(move.ranks, max_ranges=4)} moved)"
    return f"epoch {move.epoch} runs {' and '.join(parts)}: {move.step_times.text}"
