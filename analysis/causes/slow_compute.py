"""Ranks that compute slowly: slower than their peers, or than they did before.

The same search finds throttled devices (`clock_throttle`) and stages with more work
(`stage_imbalance`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.group_stats import MIN_ROWS_OF_KIND, row_medians, sum_cells
from ..hosts.deviations import HostReadings
from ..replay.model import has_kind
from ..report.text import format_count, format_percent, format_steps
from ..statistics.noise import required_t
from ..statistics.peers import Basis, expect_from_peers, median_of_peers
from ..statistics.phases import find_phases, find_rank_phases
from ..statistics.thresholds import THRESHOLDS
from . import clock_throttle, host_stall, stage_imbalance
from .candidate import (
    Candidate,
    in_shown_steps,
    merge_equal,
    merge_hosts,
    merge_recurring,
    named_ranks,
    rows_of_ranks,
    shows_in,
)
from .clock_throttle import explain_by_clock, find_drop, name_worker
from .detector import INSUFFICIENT_EVIDENCE, Cause, ProofForm, ShownIn
from .stage_imbalance import SlowRanks, find_slow_stages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ..replay.model import ReplayModel
    from ..statistics.peers import ComputeProfile
    from ..statistics.phases import Phase
    from ..trace.tables import RankInfo
    from .detector import Case

EQUALIZED = "; all times as if micro-batches had equal lengths"

CAUSE = Cause(
    name="slow-compute",
    one="computes slowly",
    several="compute slowly",
    shown_in=ShownIn.COMPUTE,
    has_place=True,
    proof_form=ProofForm.COMPUTE,
)

SLOW_DEVICE = frozenset({CAUSE, clock_throttle.CAUSE})
"""Causes in a rank's own device."""


def detect(case: Case, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Add ranks that compute slowly, throttled devices, and stages with more work.

    Also ranks that wait for a CPU where the host computes, which are a `host-stall`.
    """
    compute = find_slow_compute(case, case.profile)
    return (*candidates, *compute, *_find_slow_optimizers(case, compute))


def _find_slow_optimizers(case: Case, compute: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Find ranks that are slow in their optimizer alone, as a share of their whole compute.

    A single step proves nothing: an optimizer is short.
    """
    model, profile = case.reading.model, case.profile
    step = np.array(model.operations.steps)[model.operations.step]
    is_known = np.isin(step, profile.steps) & np.isin(model.rank, profile.ranks)
    kinds = frozenset({"optimizer"})
    rows = np.flatnonzero(has_kind(model, kinds) & model.on_device & is_known)
    total_ns = sum_cells(
        profile.total_ns.shape,
        np.searchsorted(profile.ranks, model.rank[rows]),
        np.searchsorted(profile.steps, step[rows]),
        model.operations.duration_ns[rows],
    )
    if not total_ns.any(axis=1).all():
        return ()
    expected_ns, basis = expect_from_peers(np.where(total_ns > 0, total_ns, np.nan), profile.stage)
    rest_ns = row_medians(profile.total_ns)[:, None]
    whole = replace(
        profile, total_ns=rest_ns + total_ns, expected_ns=rest_ns + expected_ns, basis=basis
    )
    named = named_ranks(compute, SLOW_DEVICE)
    return tuple(
        replace(candidate, evidence=f"{candidate.evidence}; it is slow in its optimizer")
        for candidate in find_slow_compute(case, whole)
        if candidate.cause in SLOW_DEVICE
        and named.isdisjoint(candidate.ranks)
        and shows_in(candidate, model.operations.steps).sum() >= THRESHOLDS.min_lasting_steps
    )


def find_slow_compute(case: Case, profile: ComputeProfile) -> tuple[Candidate, ...]:
    """Find what computes slowly, whether its cause is the device, its clock or the stage's work.

    Args:
        profile: Its compute, as recorded or as if micro-batches had equal lengths.
    """
    model, workers = case.reading.model, case.workers
    stages = find_slow_stages(profile)
    in_slow_stage = {row for stage in stages for row in stage.rows.tolist()}
    partners: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in profile.ranks.tolist():
        partners[workers[rank]].append(rank)
    few = np.array([basis not in (Basis.PEERS, Basis.FEW_PEERS) for basis in profile.basis])
    # A slow rank makes all partners longer, so none of them is noise to another.
    numbers = {worker: number for number, worker in enumerate(partners)}
    number = np.array([numbers[workers[rank]] for rank in profile.ranks.tolist()])
    clearest: dict[tuple[int, ...], Phase] = {}
    for phase in find_rank_phases(
        profile.excess_ratio, has_few_peers=few, partners=number, may_recur=True
    ):
        if profile.basis[phase.row] is Basis.STAGES and phase.row in in_slow_stage:
            continue
        alike = tuple(partners[workers[int(profile.ranks[phase.row])]])
        clearest[alike] = max(clearest.get(alike, phase), phase, key=lambda phase: phase.margin)
    rows = rows_of_ranks(model, list(clearest))
    candidates: list[Candidate] = []
    for alike, phase in clearest.items():
        slow = _rank_candidate(profile, phase, rows[alike], alike)
        # Between the slow steps of an intermittent rank its clock is high: the first one counts.
        read = slow.steps if phase.columns is None else (slow.steps[0], slow.steps[0])
        drops = {rank: drop for rank in alike if (drop := find_drop(case, rank, read))}
        if drops:
            worst = max(drops.values(), key=lambda drop: drop.explained_ratio)
            candidates += explain_by_clock(slow, tuple(drops), worst, model, workers)
        else:
            slow = replace(slow, evidence=name_worker(alike, slow.evidence))
            candidates.append(_explain_by_queue(case, profile, phase, slow))
    whole = [_stage_candidate(stage, model, case.ranks) for stage in stages]
    candidates += [_without_slow_ranks(stage, candidates, model) for stage in whole]
    for host in _find_slow_hosts(profile, case.ranks, number):
        candidates = [*_without_host(candidates, host), _host_candidate(case, host)]
    if profile.is_equalized:
        candidates = [replace(slow, evidence=slow.evidence + EQUALIZED) for slow in candidates]
    merged = merge_equal(merge_hosts(candidates, case.ranks), CAUSE)
    # If most ranks take turns, their work may vary.
    recurring = merge_recurring(
        [slow for slow in merged if slow.cause is CAUSE],
        len(profile.ranks),
        in_turn=INSUFFICIENT_EVIDENCE,
    )
    return (*recurring, *(slow for slow in merged if slow.cause is not CAUSE))


def _explain_by_queue(
    case: Case, profile: ComputeProfile, phase: Phase, slow: Candidate
) -> Candidate:
    """Return slow compute as a `host-stall` if the rank waited for a CPU for most of the excess.

    Where the host computes, what takes a core from a rank makes its compute slow, and nothing is
    wrong with the device. The wait is that of the rank's main thread, beyond the other ranks'.
    """
    (begin_ns, _), (_, end_ns) = (case.step_ns[step] for step in slow.steps)
    readings = HostReadings(
        samples=case.context.samples,
        begin_ns=begin_ns,
        end_ns=end_ns,
        places={rank: (info.host, info.local_rank) for rank, info in case.ranks.items()},
    )
    own, others = readings.queue_wait(slow.ranks)
    usual_ns = profile.expected_ns[phase.row, phase.shown]
    excess_ns = phase.excess_ratio * float(np.nansum(usual_ns))
    waited_ns = ((own or 0.0) - (others or 0.0)) * (end_ns - begin_ns)
    if own is None or waited_ns <= THRESHOLDS.majority_share * excess_ns:
        return slow
    wait = f"it was ready and waited for a CPU for {format_percent(own)} of the time"
    usual = "" if others is None else f", other ranks {format_percent(others)}"
    return replace(slow, cause=host_stall.CAUSE, evidence=f"{slow.evidence}; {wait}{usual}")


def _find_slow_hosts(
    profile: ComputeProfile, ranks: Mapping[int, RankInfo], worker: NDArray[np.int64]
) -> list[SlowRanks]:
    """Find hosts (nearly) all of whose ranks are slow together.

    The median of a host's ranks varies less than each of them: what is noise of one is none of
    eight. Each rank is compared with its stage, and each host with the median of the others. Ranks
    that look the same in the trace count once: one slow rank makes all of them longer.

    Args:
        profile: Compute of each rank against its peers.
        worker: Shape (ranks of the profile,): the same number for ranks that look the same.
    """
    hosts = np.array([ranks[rank].host for rank in profile.ranks.tolist()])
    ratio = np.full_like(profile.total_ns, np.nan)
    for stage in np.unique(profile.stage).tolist():
        rows = np.flatnonzero(profile.stage == stage)
        if len(np.unique(hosts[rows])) > 1:
            ratio[rows] = profile.total_ns[rows] / row_medians(profile.total_ns[rows].T)
    compared = np.flatnonzero(~np.isnan(ratio).all(axis=1) & (hosts != ""))
    _, one_each = np.unique(worker[compared], return_index=True)
    names, sizes = np.unique(hosts[compared[one_each]], return_counts=True)
    names = names[sizes >= THRESHOLDS.min_several]
    if len(names) < THRESHOLDS.min_several:
        return []
    level = np.array([row_medians(ratio[hosts == name].T) for name in names])
    others = median_of_peers(level)
    slow_hosts = []
    for phase in find_phases(
        level / others - 1.0,
        has_few_peers=len(names) < MIN_ROWS_OF_KIND,
        min_steps=THRESHOLDS.min_lasting_steps,
    ):
        rows = np.flatnonzero(hosts == names[phase.row])
        of_host = ratio[rows] / others[phase.row]
        is_longer = row_medians(of_host[:, phase.inside]) - 1.0 >= phase.excess_ratio / 2
        if is_longer.mean() >= THRESHOLDS.whole_share:
            slow_hosts.append(
                SlowRanks(
                    rows=rows,
                    phase=phase,
                    profile=profile,
                    expected_ns=profile.total_ns[rows] / of_host,
                    against="for alike ones on other hosts",
                )
            )
    return slow_hosts


def _without_host(candidates: Sequence[Candidate], host: SlowRanks) -> list[Candidate]:
    """Return candidates without ranks of a slow host that are as slow as it."""
    ranks, (first, last) = set(host.ranks), host.steps
    most = host.phase.excess_ratio + THRESHOLDS.min_excess_ratio
    return [
        candidate
        for candidate in candidates
        if candidate.cause not in SLOW_DEVICE
        or not ranks.issuperset(candidate.ranks)
        or candidate.steps[0] > last
        or candidate.steps[1] < first
        or candidate.excess_ratio >= most
    ]


def _host_candidate(case: Case, host: SlowRanks) -> Candidate:
    """Return a slow host as a candidate; `clock-throttle` if the clock of most ranks is lower."""
    ranks, name = host.ranks, case.ranks[host.ranks[0]].host
    drops = [drop for rank in ranks if (drop := find_drop(case, rank, host.steps))]
    is_throttled = len(drops) > THRESHOLDS.majority_share * len(ranks)
    evidence = f"all {len(ranks):,} ranks of host {name}: {host.evidence}"
    if is_throttled:
        evidence += f"; {max(drops, key=lambda drop: drop.explained_ratio)}"
    return Candidate(
        cause=clock_throttle.CAUSE if is_throttled else CAUSE,
        ranks=ranks,
        steps=host.steps,
        part=np.flatnonzero(np.isin(case.reading.model.rank, ranks)),
        excess_ratio=host.phase.excess_ratio,
        threshold=host.phase.threshold,
        evidence=f"{evidence}, in {format_steps(host.steps)}",
    )


def _without_slow_ranks(
    stage: Candidate, slow: Sequence[Candidate], model: ReplayModel
) -> Candidate:
    """Return a stage without what its ranks that are slower than the stage do in their slow steps.

    Its other ranks show what the work of the stage costs.
    """
    part = stage.part
    for candidate in slow:
        if part is not None and candidate.part is not None:
            part = part[~(in_shown_steps(model, candidate)[part] & np.isin(part, candidate.part))]
    return replace(stage, part=part)


def _rank_candidate(
    profile: ComputeProfile, phase: Phase, part: NDArray[np.int64], partners: tuple[int, ...]
) -> Candidate:
    row, steps = phase.row, phase.steps(profile.steps)
    num_peers = int((profile.stage == profile.stage[row]).sum()) - 1
    slow = SlowRanks(
        rows=np.array([row]),
        phase=phase,
        profile=profile,
        expected_ns=profile.expected_ns[row],
        against={
            Basis.PEERS: f"for the {num_peers:,} other ranks of its stage",
            Basis.FEW_PEERS: "for the others of its stage; the ranks of other stages agree",
            Basis.STAGES: "for ranks of stages of equal work",
            Basis.EARLIER: "in its own first steady steps",
            Basis.NOTHING: "",
        }[profile.basis[row]],
    )
    when = phase.when(profile.steps)
    if phase.columns is None and phase.num_steps > 1:
        when += f" ({format_count(phase.num_steps, 'step')} traced)"
    return Candidate(
        cause=CAUSE,
        ranks=partners,
        steps=steps,
        part=part,
        excess_ratio=phase.excess_ratio,
        threshold=phase.threshold,
        evidence=f"rank {slow.ranks[0]}: {slow.evidence}, {when}",
        shown_steps=phase.shown_steps(profile.steps),
    )


def _stage_candidate(
    slow: SlowRanks, model: ReplayModel, ranks: Mapping[int, RankInfo]
) -> Candidate:
    """Return the slow ranks of a stage as a candidate.

    A stage with more work has it on all ranks and in all steps. So a stage has slow ranks instead
    if some of its ranks are not longer, or if it is on one host of several and slow for a while.
    """
    profile = slow.profile
    stage = int(profile.stage[slow.rows[0]])
    hosts = {ranks[rank].host for rank in slow.ranks}
    is_one_host = len(hosts) == 1 and len({info.host for info in ranks.values()}) > 1
    is_partial = len(slow.rows) < int((profile.stage == stage).sum())
    is_always = slow.phase.num_steps == len(profile.steps)
    is_slow = is_partial or (is_one_host and not is_always)
    subject = f"{'' if is_partial else 'all '}{len(slow.rows):,} traced ranks of stage {stage}"
    if is_slow and is_one_host:
        subject += f" on host {min(hosts)}"
    return Candidate(
        cause=CAUSE if is_slow else stage_imbalance.CAUSE,
        ranks=slow.ranks,
        steps=slow.steps,
        part=np.flatnonzero(np.isin(model.rank, slow.ranks)),
        excess_ratio=slow.phase.excess_ratio,
        threshold=slow.phase.threshold,
        evidence=f"{subject}: {slow.evidence}, in {format_steps(slow.steps)}",
    )


def ranks_without_peers(profile: ComputeProfile) -> tuple[int, ...]:
    """Return the ranks that are longer than the one or two others of their stage.

    With fewer than `min_peers` peers it is unknown which of them is slow. What the noise of the
    steps explains (Student's t, step by step against the fastest of them) is no difference; the
    noise of one or two steps is unknown.
    """
    level = np.nanmedian(profile.total_ns, axis=1)
    ranks = []
    for row, basis in enumerate(profile.basis):
        if basis not in (Basis.EARLIER, Basis.NOTHING):
            continue
        peers = np.flatnonzero(profile.stage == profile.stage[row])
        fastest = peers[level[peers].argmin()]
        if level[row] <= level[fastest] * (1.0 + THRESHOLDS.min_excess_ratio):
            continue
        excess = profile.total_ns[row] / profile.total_ns[fastest] - 1.0
        excess = excess[~np.isnan(excess)]
        freedom = len(excess) - 1
        if freedom > 1:
            error = float(excess.std(ddof=1)) / np.sqrt(len(excess))
            if excess.mean() < required_t(len(peers), freedom) * error:
                continue
        ranks.append(int(profile.ranks[row]))
    return tuple(ranks)
