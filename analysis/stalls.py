"""Host causes: ranks that neither compute nor wait for anybody.

Which cause a gap speaks for depends on where in the step it lies, and on
whether one rank has it throughout or several have it in turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.candidate import Candidate
from analysis.cells import median_by_kind, summed
from analysis.evidence import Place
from analysis.phases import DUE_RATIO, row_medians, standing_out
from analysis.words import count_text, duration_text, name_ranks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from analysis.evidence import GapItems
    from analysis.phases import Phase
    from analysis.profile import Profile

LEAST_PAUSE_NS = 50_000_000
"""A gap this long before compute may be garbage collection. Source: design.md section 5."""

PAUSE_FACTOR = 10.0
"""A pause stands out of the usual gaps before the same kind of compute by this much."""

LEAST_LOSS_RATIO = 0.01
"""Pauses in turn on many ranks are told from this share of the job's time: each may be short
beside its step, but all wait for every one of them."""

ALL_RANKS_SHARE = 0.8
"""Share of the ranks that stand still in the same steps for a common dip."""

HOST_STALL_STEPS = 3
"""Steps in the same place that a host stall takes. Source: design.md section 5."""

ONE_RANK_SHARE = 0.7
"""Share of the lateness of a group that one rank must cause to be held to blame alone."""

WORKING_PLACES = (Place.FORWARD, Place.BACKWARD, Place.LAUNCH, Place.OTHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """Host gaps as matrices over the ranks and steps of a profile."""

    profile: Profile
    gaps: GapItems
    row: NDArray[np.int64]
    """Shape (gaps,): row of the profile, -1 for a rank without compute."""

    column: NDArray[np.int64]
    compute_ns: NDArray[np.float64]
    """Shape (ranks,): usual own compute in a step, what gaps are measured against."""

    num_operations: int

    def total(self, *places: Place) -> NDArray[np.float64]:
        """Return the gaps in these places, shape (ranks, steps), in ns."""
        chosen = self.among(*places)
        shape = self.profile.total_ns.shape
        return summed(shape, self.row[chosen], self.column[chosen], self.gaps.gap_ns[chosen])

    def among(self, *places: Place) -> NDArray[np.bool_]:
        """Tell which gaps lie in these places."""
        return np.isin(self.gaps.place, places) & (self.row >= 0)

    def part(self, chosen: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
        """Return the operations that hold these gaps, shape (ops,); None where none does."""
        operation = self.gaps.operation[chosen]
        operation = operation[operation >= 0]
        if not len(operation):
            return None
        part = np.zeros(self.num_operations, dtype=np.bool_)
        part[operation] = True
        return part


def stalls_of(profile: Profile, gaps: GapItems, num_operations: int) -> Stalls:
    """Lay a run's host gaps out over the ranks and steps of its profile."""
    at = np.minimum(np.searchsorted(profile.ranks, gaps.rank), len(profile.ranks) - 1)
    return Stalls(
        profile=profile,
        gaps=gaps,
        row=np.where(profile.ranks[at] == gaps.rank, at, -1),
        column=np.searchsorted(profile.steps, gaps.step),
        compute_ns=row_medians(profile.total_ns),
        num_operations=num_operations,
    )


def common_dips(stalls: Stalls) -> tuple[Candidate, ...]:
    """Find steps in which nearly all ranks stand still at once: checkpoints, evaluations, input.

    Regular ones, those in ``checkpoint`` spans, and those after a step's
    compute are no alarm; one before it is missing input.
    """
    inside = stalls.total(Place.CHECKPOINT)
    before, after = stalls.total(Place.INPUT), stalls.total(*WORKING_PLACES)
    unusual = before - row_medians(before)[:, None] + after - row_medians(after)[:, None]
    ratio = (inside + unusual) / stalls.compute_ns[:, None]
    dips = np.flatnonzero((ratio >= DUE_RATIO).mean(axis=0) >= ALL_RANKS_SHARE)
    if not len(dips):
        return ()
    level = float(np.median(ratio[:, dips]))
    spaced = np.unique(np.diff(dips))
    in_spans = np.median(inside[:, dips], axis=0) >= np.median(unusual[:, dips], axis=0)
    late = np.median(after[:, dips], axis=0) > np.median(before[:, dips], axis=0)
    is_checkpoint = bool(in_spans.all() or late.all() or (len(dips) > 2 and len(spaced) == 1))  # noqa: PLR2004
    chosen = stalls.among(*Place) & np.isin(stalls.column, dips)
    steps = stalls.profile.steps[dips]
    each = f"every {int(spaced[0])} steps" if len(spaced) == 1 else count_text(len(dips), "step")
    what = "in checkpoint spans" if in_spans.all() else "outside any compute"
    lost = float(np.median((inside + np.maximum(unusual, 0))[:, dips]))
    return (
        Candidate(
            cause="checkpoint" if is_checkpoint else "data-stall",
            ranks=tuple(stalls.profile.ranks.tolist()),
            steps=(int(steps[0]), int(steps[-1])),
            part=stalls.part(chosen),
            excess_ratio=level,
            threshold=DUE_RATIO,
            evidence=(
                f"all ranks stand still together for {duration_text(lost)} {what}, {each},"
                f" in steps {int(steps[0])} to {int(steps[-1])}"
            ),
            on_host=True,
            is_alarm=not is_checkpoint,
        ),
    )


def without_dips(stalls: Stalls, dips: tuple[Candidate, ...]) -> NDArray[np.bool_]:
    """Tell which steps (columns) no common dip explains."""
    if not dips:
        return np.ones(len(stalls.profile.steps), dtype=np.bool_)
    before, rest = stalls.total(Place.INPUT), stalls.total(*WORKING_PLACES, Place.CHECKPOINT)
    total = before + rest
    unusual = (total - row_medians(total)[:, None]) / stalls.compute_ns[:, None]
    usual: NDArray[np.bool_] = (unusual >= DUE_RATIO).mean(axis=0) < ALL_RANKS_SHARE
    return usual


def data_stalls(stalls: Stalls, usual: NDArray[np.bool_]) -> tuple[Candidate, ...]:
    """Find ranks that wait for their input: alone, or all those of a stage.

    Args:
        stalls: The run's gaps.
        usual: Shape (steps,): steps that take part.
    """
    gap = stalls.total(Place.INPUT)
    expected, enough = median_by_kind(gap, stalls.profile.stage)
    expected[~enough] = row_medians(gap)[~enough, None]
    excess = (gap - expected) / stalls.compute_ns[:, None]
    excess[:, ~usual] = np.nan
    found = [
        _stall("data-stall", stalls, (phase,), Place.INPUT, "before its first compute or in data")
        for phase in standing_out(excess, few=~enough)
    ]
    named = {rank for candidate in found for rank in candidate.ranks}
    share = row_medians(gap[:, usual]) / stalls.compute_ns if usual.any() else gap[:, 0] * 0.0
    always = [
        row
        for row in np.flatnonzero(share >= DUE_RATIO).tolist()
        if int(stalls.profile.ranks[row]) not in named
    ]
    if always and usual.sum() >= HOST_STALL_STEPS:
        found.append(_always_late(stalls, np.array(always), share))
    return tuple(found)


def _always_late(stalls: Stalls, rows: NDArray[np.int64], share: NDArray[np.float64]) -> Candidate:
    ranks = tuple(stalls.profile.ranks[rows].tolist())
    steps = stalls.profile.steps
    late = stalls.among(Place.INPUT) & np.isin(stalls.row, rows)
    typical = float(np.median((share * stalls.compute_ns)[rows]))
    return Candidate(
        cause="data-stall",
        ranks=ranks,
        steps=(int(steps[0]), int(steps[-1])),
        part=stalls.part(late),
        excess_ratio=float(np.median(share[rows])),
        threshold=DUE_RATIO,
        evidence=(
            f"{name_ranks(ranks)}: {duration_text(typical)} of every step pass before the first"
            f" compute or in data, {float(np.median(share[rows])):.0%} of the compute"
        ),
        on_host=True,
    )


def host_stalls(stalls: Stalls, usual: NDArray[np.bool_]) -> tuple[Candidate, ...]:
    """Find ranks whose host launches late throughout, in at least `HOST_STALL_STEPS` steps."""
    excess = _working_excess(stalls)
    excess[:, ~usual] = np.nan
    few = ~median_by_kind(excess, stalls.profile.stage)[1]
    where = "between its launches"
    return tuple(
        _stall("host-stall", stalls, (phase,), WORKING_PLACES, where)
        for phase in standing_out(excess, few=few, shortest=HOST_STALL_STEPS)
        if _is_steady(excess[phase.row, phase.first : phase.last + 1])
    )


def _working_excess(stalls: Stalls) -> NDArray[np.float64]:
    gap = stalls.total(*WORKING_PLACES)
    expected, enough = median_by_kind(gap, stalls.profile.stage)
    others = np.median(gap, axis=0)
    expected[~enough] = np.minimum(others, row_medians(gap)[:, None])[~enough]
    excess: NDArray[np.float64] = (gap - expected) / stalls.compute_ns[:, None]
    return excess


def _is_steady(phase: NDArray[np.float64]) -> bool:
    """Tell a stall that is there all the time from pauses now and then."""
    level = float(np.nanmedian(phase))
    return float(np.nanmean(phase >= level / 2)) >= ONE_RANK_SHARE


def _stall(
    cause: str,
    stalls: Stalls,
    phases: tuple[Phase, ...],
    places: Place | tuple[Place, ...],
    where: str,
) -> Candidate:
    profile = stalls.profile
    rows = np.array([phase.row for phase in phases])
    first = min(phase.first for phase in phases)
    last = max(phase.last for phase in phases)
    listed = places if isinstance(places, tuple) else (places,)
    chosen = stalls.among(*listed) & np.isin(stalls.row, rows)
    chosen &= (stalls.column >= first) & (stalls.column <= last)
    level = float(np.median([phase.excess_ratio for phase in phases]))
    extra = level * float(np.median(stalls.compute_ns[rows]))
    ranks = tuple(sorted(profile.ranks[rows].tolist()))
    return Candidate(
        cause=cause,
        ranks=ranks,
        steps=(int(profile.steps[first]), int(profile.steps[last])),
        part=stalls.part(chosen),
        excess_ratio=level,
        threshold=max(phase.threshold for phase in phases),
        evidence=(
            f"{name_ranks(ranks)}: {duration_text(extra)} a step {where} that its peers do not"
            f" lose, {level:.0%} of its compute, in steps {int(profile.steps[first])} to"
            f" {int(profile.steps[last])}; nobody held it up"
        ),
        on_host=True,
    )


def gc_pauses(
    stalls: Stalls, usual: NDArray[np.bool_], blamed: frozenset[int]
) -> tuple[Candidate, ...]:
    """Find garbage collection: ``gc`` spans, or long gaps before forward compute, rank by rank.

    Args:
        stalls: The run's gaps.
        usual: Shape (steps,): steps that take part.
        blamed: Ranks whose gaps are explained already.
    """
    recorded = stalls.among(Place.GC) & (stalls.gaps.gap_ns > 0)
    usual_ns = stalls.gaps.gap_ns[stalls.among(Place.FORWARD)]
    longest = max(LEAST_PAUSE_NS, PAUSE_FACTOR * _typical(usual_ns))
    paused = stalls.among(Place.FORWARD) & (stalls.gaps.gap_ns >= longest)
    paused &= usual[np.minimum(stalls.column, len(usual) - 1)]
    paused &= ~np.isin(stalls.gaps.rank, list(blamed))
    found = []
    if recorded.any():
        found.append(_pauses(stalls, recorded, "in gc spans"))
    if _in_turn(stalls, paused):
        found.append(_pauses(stalls, paused, "before forward compute"))
    return tuple(candidate for candidate in found if candidate is not None)


def _typical(values: NDArray[np.int64]) -> float:
    return float(np.median(values)) if len(values) else 0.0


def _in_turn(stalls: Stalls, chosen: NDArray[np.bool_]) -> bool:
    """Tell whether several ranks have these gaps, now one and now another."""
    if not chosen.any():
        return False
    ranks, counts = np.unique(stalls.gaps.rank[chosen], return_counts=True)
    several = len(ranks) > 1 and counts.max() <= ONE_RANK_SHARE * counts.sum()
    return several and len(np.unique(stalls.gaps.step[chosen])) > 1


def _pauses(stalls: Stalls, chosen: NDArray[np.bool_], where: str) -> Candidate | None:
    profile = stalls.profile
    lost = summed(
        profile.total_ns.shape,
        stalls.row[chosen],
        stalls.column[chosen],
        stalls.gaps.gap_ns[chosen],
    )
    ratio = lost / stalls.compute_ns[:, None]
    # A step waits for the longest of the pauses that its ranks take at different times.
    worst = ratio.max(axis=0)
    level = float(worst.mean())
    if level < LEAST_LOSS_RATIO and float(worst.max()) < DUE_RATIO:
        return None
    long = chosen & (stalls.gaps.gap_ns >= np.median(stalls.gaps.gap_ns[chosen]) / 2)
    steps = np.unique(stalls.gaps.step[long])
    ranks = tuple(np.unique(stalls.gaps.rank[long]).tolist())
    times = stalls.gaps.gap_ns[long]
    return Candidate(
        cause="gc-pause",
        ranks=ranks,
        steps=(int(steps[0]), int(steps[-1])),
        part=stalls.part(chosen),
        excess_ratio=max(level, float(worst.max())),
        threshold=LEAST_LOSS_RATIO if level >= LEAST_LOSS_RATIO else DUE_RATIO,
        evidence=(
            f"{count_text(len(times), 'pause')} of {duration_text(float(np.median(times)))}"
            f" {where} on {count_text(len(ranks), 'rank')} in turn, in"
            f" {count_text(len(steps), 'step')}: the longest of a step take {level:.1%} of the"
            " compute on average"
        ),
        on_host=True,
    )


def launch_skews(
    stalls: Stalls,
    groups: tuple[tuple[int, ...], ...],
    usual: NDArray[np.bool_],
    blamed: frozenset[int],
) -> tuple[Candidate, ...]:
    """Find groups that enter a collective late, now one member and now another.

    Args:
        stalls: The run's gaps.
        groups: Members of each group of collectives that are launched after compute.
        usual: Shape (steps,): steps that take part.
        blamed: Ranks whose gaps are explained already.
    """
    profile = stalls.profile
    lag = stalls.total(Place.LAUNCH) / stalls.compute_ns[:, None]
    lag[np.isin(profile.ranks, list(blamed))] = np.nan
    lag[:, ~usual] = np.nan
    members = [np.flatnonzero(np.isin(profile.ranks, group)) for group in groups]
    members = [rows for rows in members if len(rows) > 1]
    if not members:
        return ()
    late = np.array([_lateness(lag[rows]) for rows in members])
    found = []
    for phase in standing_out(late, few=np.ones(len(late), np.bool_), shortest=HOST_STALL_STEPS):
        rows = members[phase.row]
        columns = np.arange(phase.first, phase.last + 1)
        columns = columns[late[phase.row, columns] >= phase.excess_ratio / 2]
        last = rows[np.nan_to_num(lag[rows][:, columns], nan=-1.0).argmax(axis=0)]
        found.append(_skew(stalls, phase, np.unique(last, return_counts=True), len(rows)))
    return tuple(found)


def _lateness(lag: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return by how much the last member of a group lags behind the middle one, in each step."""
    known = ~np.isnan(lag).all(axis=0)
    late = np.full(lag.shape[1], np.nan)
    late[known] = np.nanmax(lag[:, known], axis=0) - np.nanmedian(lag[:, known], axis=0)
    return late


def _skew(
    stalls: Stalls,
    phase: Phase,
    last: tuple[NDArray[np.int64], NDArray[np.int64]],
    num_members: int,
) -> Candidate:
    profile = stalls.profile
    rows, counts = last
    alone = counts.max() > ONE_RANK_SHARE * counts.sum()
    if alone:
        rows = rows[[int(counts.argmax())]]
    ranks = tuple(profile.ranks[rows].tolist())
    chosen = stalls.among(Place.LAUNCH) & np.isin(stalls.row, rows)
    steps = (int(profile.steps[phase.first]), int(profile.steps[phase.last]))
    lag = phase.excess_ratio * float(np.median(stalls.compute_ns[rows]))
    who = (
        f"{name_ranks(ranks)} launches"
        if alone
        else f"now one and now another of {count_text(len(ranks), 'rank')} launches"
    )
    return Candidate(
        cause="host-stall" if alone else "launch-skew",
        ranks=ranks,
        steps=steps,
        part=stalls.part(chosen),
        excess_ratio=phase.excess_ratio,
        threshold=phase.threshold,
        evidence=(
            f"{who} a collective of {num_members} members {duration_text(lag)} after the middle"
            f" one ({phase.excess_ratio:.0%} of the compute) in steps {steps[0]} to {steps[1]},"
            " while compute is as usual"
        ),
        on_host=True,
    )
