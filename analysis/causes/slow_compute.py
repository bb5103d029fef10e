"""Compute causes: slow ranks, throttled devices, long stages, micro-batches of unequal length."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..report.text import format_count
from ..statistics.peers import Basis
from ..statistics.phases import MIN_EXCESS_RATIO, find_recurring_phases
from . import clock_throttle, data_stall, gc_pause, host_stall
from .candidate import Candidate, is_brief, merge_hosts, share_steps
from .clock_throttle import Devices, as_one_worker, explain_by_clock, max_explained
from .detector import Cause
from .stage_imbalance import (
    SlowRanks,
    find_slow_stages,
    find_stages_turned_slow,
    format_compute,
    format_excess,
    stage_candidate,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..replay.model import ReplayModel
    from ..statistics.peers import ComputeProfile
    from ..statistics.phases import Phase
    from ..trace.tables import RankInfo
    from .detector import Case

EQUALIZED = "; these times are as with micro-batches of equal length"


CAUSE = Cause(
    name="slow-compute",
    one="computes slower than its peers",
    several="compute slower than their peers",
    has_place=True,
)

SLOW_DEVICE = frozenset({CAUSE, clock_throttle.CAUSE})
"""Causes that lie in a rank's own device."""

HOLDS_PARTNERS_UP = frozenset({host_stall.CAUSE, data_stall.CAUSE, gc_pause.CAUSE})
"""Causes that make a rank's partners look slow if their communication is not traced."""


def detect(case: Case, found: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add ranks and stages that compute slowly; throttled devices and long stages among them."""
    return (*found, *find_slow_compute(case, case.profile, found))


def find_slow_compute(
    case: Case, profile: ComputeProfile, found: Sequence[Candidate]
) -> tuple[Candidate, ...]:
    """Find what computes slowly, be its cause the device, its clock or the stage's work.

    Args:
        case: The run.
        profile: Its compute: as recorded, or as with micro-batches of equal length.
        found: What hosts do explains the compute of partners.
    """
    model = case.reading.model
    devices = Devices(ranks=case.ranks, samples=case.context.samples, step_ns=case.step_ns)
    compute = find_compute_candidates(
        profile, model, case.ranks, workers=case.workers, devices=devices
    )
    stalled = [each for each in found if each.cause in HOLDS_PARTNERS_UP]
    compute = drop_waiting_partners(compute, stalled, case.workers)
    merged = merge_workers(compute, case.workers)
    explained = explain_by_clock(merged, profile, model, workers=case.workers, devices=devices)
    return merge_hosts(explained, case.ranks)


def find_compute_candidates(
    profile: ComputeProfile,
    model: ReplayModel,
    ranks: Mapping[int, RankInfo],
    *,
    workers: Mapping[int, tuple[int, ...]],
    devices: Devices,
) -> tuple[Candidate, ...]:
    """Find slow ranks and long stages.

    A slow rank whose clock is lower meanwhile than it was, or than its peers',
    is throttled; how much of it that explains, `analysis.causes.clock_throttle` says.

    Args:
        profile: Compute of each rank against its peers.
        model: The operations.
        ranks: Where each rank runs.
        workers: What each rank shares with the partners that look just like it.
        devices: Readings of the devices, if any.
    """
    stages, single = find_slow_stages(profile), find_slow_ranks(profile, workers)
    in_slow_stage = {rank for stage in stages for rank in stage.ranks}
    risen = [
        stage
        for stage in find_stages_turned_slow(profile)
        if in_slow_stage.isdisjoint(stage.ranks)
        and {rank for each in single if _overlap(each, stage) for rank in each.ranks}
        < set(stage.ranks)
    ]
    stages = (*stages, *risen)
    slow = [
        suspect
        for suspect in single
        if (suspect.basis is not Basis.STAGES or not in_slow_stage.issuperset(suspect.ranks))
        and not any(_overlap(suspect, stage) for stage in risen)
    ]
    partners: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in profile.ranks.tolist():
        partners[workers[rank]].append(rank)
    found = [
        _rank_candidate(suspect, model, devices, tuple(partners[workers[suspect.ranks[0]]]))
        for suspect in slow
    ]
    found += [stage_candidate(suspect, profile, model, ranks, if_slow=CAUSE) for suspect in stages]
    if profile.is_equalized:
        found = [replace(each, evidence=each.evidence + EQUALIZED) for each in found]
    return tuple(found)


def _overlap(one: SlowRanks, stage: SlowRanks) -> bool:
    """Tell whether a suspect is among the ranks of a stage in some of the same steps."""
    return (
        set(one.ranks) <= set(stage.ranks)
        and one.first_step <= stage.last_step
        and stage.first_step <= one.last_step
    )


def _rank_candidate(
    suspect: SlowRanks, model: ReplayModel, devices: Devices, partners: tuple[int, ...]
) -> Candidate:
    """Turn a slow rank into a candidate: it, or all partners that look like it, or the throttled.

    Args:
        suspect: The rank and its phase.
        model: The operations.
        devices: What their samples tell.
        partners: The ranks, itself included, among which the trace cannot tell.
    """
    phase = (suspect.first_step, suspect.last_step)
    drops = {rank: devices.find_drop(rank, _first_steps(suspect)) for rank in partners}
    throttled = tuple(rank for rank, drop in drops.items() if drop is not None)
    found = [drop for drop in drops.values() if drop is not None]
    drop = max(found, key=max_explained, default=None)
    evidence = _rank_evidence(suspect)
    if drop is None:
        evidence = as_one_worker(partners, evidence)
    return Candidate(
        cause=CAUSE,
        ranks=throttled or partners,
        steps=phase,
        part=np.isin(model.rank, partners),
        excess_ratio=suspect.excess_ratio,
        threshold=suspect.threshold,
        evidence=evidence,
        sample=drop,
        shown_steps=suspect.shown_steps,
    )


def _first_steps(suspect: SlowRanks) -> tuple[int, int]:
    """Return the first steps in which a rank is slow: between them and the next it is not."""
    if suspect.shown_steps is None:
        return suspect.first_step, suspect.last_step
    return suspect.first_step, suspect.first_step


def _rank_evidence(suspect: SlowRanks) -> str:
    against = {
        Basis.PEERS: f"for the {suspect.num_peers:,} other ranks of its stage",
        Basis.FEW_PEERS: "for the others of its stage, which agree with stages of equal work",
        Basis.STAGES: "for the ranks of stages of equal work",
        Basis.EARLIER: "in its own earlier steps",
        Basis.NOTHING: "",
    }[suspect.basis]
    steps = f"steps {suspect.first_step} to {suspect.last_step}"
    when = f"in {steps} ({format_count(suspect.num_steps, 'step')} traced)"
    if suspect.shown_steps is not None:
        when = f"in {len(suspect.shown_steps)} of the {suspect.num_steps} {steps}"
    return (
        f"rank {suspect.ranks[0]}: {format_compute(suspect)} {against} ({format_excess(suspect)}),"
        f" {when}; its waits for others are cut out"
    )


def find_slow_ranks(
    profile: ComputeProfile, workers: Mapping[int, tuple[int, ...]] | None = None
) -> tuple[SlowRanks, ...]:
    """Find the ranks whose compute is longer than their peers', persistently or in some steps.

    Args:
        profile: Compute of each rank against its peers.
        workers: What each rank shares with the partners that look just like it: a slow one makes
            them all longer; None: nothing.
    """
    few = np.array([basis not in (Basis.PEERS, Basis.FEW_PEERS) for basis in profile.basis])
    alike = None
    if workers is not None:
        shared = [workers[rank] for rank in profile.ranks.tolist()]
        numbers = {worker: number for number, worker in enumerate(dict.fromkeys(shared))}
        alike = np.array([numbers[worker] for worker in shared])
    phases = find_recurring_phases(profile.excess_ratio, has_few_peers=few, partners=alike)
    return tuple(_suspect(profile, phase) for phase in phases)


def _suspect(profile: ComputeProfile, phase: Phase) -> SlowRanks:
    """Measure the slow phase of one rank."""
    row, columns = phase.row, np.arange(phase.first, phase.last + 1)
    if phase.columns is not None:
        columns = np.array(phase.columns)
    return SlowRanks(
        ranks=(int(profile.ranks[row]),),
        first_step=int(profile.steps[phase.first]),
        last_step=int(profile.steps[phase.last]),
        num_steps=phase.num_steps,
        excess_ratio=phase.excess_ratio,
        deviation=phase.deviation,
        threshold=phase.threshold,
        typical_ns=float(np.nanmedian(profile.expected_ns[row, columns])),
        compute_ns=float(np.nanmedian(profile.total_ns[row, columns])),
        num_peers=int((profile.stage == profile.stage[row]).sum()) - 1,
        basis=profile.basis[row],
        shown_steps=None if phase.columns is None else tuple(profile.steps[columns].tolist()),
    )


def ranks_without_peers(profile: ComputeProfile) -> tuple[int, ...]:
    """Name the ranks that differ from the few there are to compare with, but have too few peers.

    With one or two peers nobody can say which of them is slow.
    """
    level = np.nanmedian(profile.total_ns, axis=1)
    found = []
    for row, basis in enumerate(profile.basis):
        if basis not in (Basis.EARLIER, Basis.NOTHING):
            continue
        mates = np.flatnonzero(profile.stage == profile.stage[row])
        fastest = level[mates].min()
        if level[row] > fastest * (1.0 + MIN_EXCESS_RATIO):
            found.append(int(profile.ranks[row]))
    return tuple(found)


def merge_workers(
    found: Sequence[Candidate], workers: Mapping[int, tuple[int, ...]]
) -> tuple[Candidate, ...]:
    """Tell partners that are slow at the same time once: each names them all already."""
    kept: list[Candidate] = []
    for each in found:
        for place, other in enumerate(kept):
            if _same_worker(each, other, workers) and share_steps(each, other):
                kept[place] = max(other, each, key=lambda one: one.excess_ratio / one.threshold)
                break
        else:
            kept.append(each)
    return tuple(kept)


def drop_waiting_partners(
    found: Sequence[Candidate],
    stalled: Sequence[Candidate],
    workers: Mapping[int, tuple[int, ...]],
) -> tuple[Candidate, ...]:
    """Drop slow compute that is only the wait for a stalled or pausing partner.

    A pause, or input missed now and then, explains no more than a few steps, and nothing where a
    rank shares its worker with nobody: its own stall lies outside its compute.
    """
    size = Counter(workers.values())
    return tuple(
        each
        for each in found
        if not any(
            size[workers[each.ranks[0]]] > 1
            and _same_worker(each, other, workers)
            and share_steps(each, other)
            and (is_brief(each) or not _is_intermittent(other))
            for other in stalled
        )
    )


def _is_intermittent(candidate: Candidate) -> bool:
    return candidate.cause is gc_pause.CAUSE or candidate.shown_steps is not None


def _same_worker(one: Candidate, other: Candidate, workers: Mapping[int, tuple[int, ...]]) -> bool:
    mine = {workers[rank] for rank in one.ranks}
    return len(mine) == 1 and bool(mine & {workers[rank] for rank in other.ranks})
