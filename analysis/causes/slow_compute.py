"""Compute causes: slow ranks, throttled devices, long stages, micro-batches of unequal length."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.grouping import number_rows
from ..replay.model import BACKWARD_KINDS, FORWARD_KINDS, of_kinds
from ..report.text import format_count, format_duration, format_percent
from ..statistics.peer_comparison import Basis
from ..statistics.phases import DUE_RATIO
from .candidate import Candidate
from .clock_throttle import as_one_worker, most_explained
from .lengths_price import equal_durations, equal_experts, speeds_at_equal_lengths
from .slow_ranks import slow_ranks, slow_stages
from .slow_stages import risen_stages

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from numpy.typing import NDArray

    from ..replay.model import ComputeItems, ReplayModel
    from ..replay.what_if import Replayer
    from ..statistics.peer_comparison import Profile
    from ..trace.tables import RankInfo
    from .clock_throttle import Devices
    from .sequence_imbalance import SequenceEffect
    from .slow_ranks import Suspect


EVENED = "; these times are as with micro-batches of equal length"


def compute_candidates(
    profile: Profile,
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
    stages, single = slow_stages(profile), slow_ranks(profile, workers)
    in_slow_stage = {rank for stage in stages for rank in stage.ranks}
    risen = [
        stage
        for stage in risen_stages(profile)
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
        _of_rank(suspect, model, devices, tuple(partners[workers[suspect.ranks[0]]]))
        for suspect in slow
    ]
    found += [_of_stage(suspect, profile, model, ranks) for suspect in stages]
    if profile.is_evened:
        found = [replace(each, evidence=each.evidence + EVENED) for each in found]
    return tuple(found)


def _overlap(one: Suspect, stage: Suspect) -> bool:
    """Tell whether a suspect is among the ranks of a stage in some of the same steps."""
    return (
        set(one.ranks) <= set(stage.ranks)
        and one.first_step <= stage.last_step
        and stage.first_step <= one.last_step
    )


def _of_rank(
    suspect: Suspect, model: ReplayModel, devices: Devices, partners: tuple[int, ...]
) -> Candidate:
    """Turn a slow rank into a candidate: it, or all partners that look like it, or the throttled.

    Args:
        suspect: The rank and its phase.
        model: The operations.
        devices: What their samples tell.
        partners: The ranks, itself included, among which the trace cannot tell.
    """
    phase = (suspect.first_step, suspect.last_step)
    drops = {rank: devices.drop_of(rank, _first_run(suspect)) for rank in partners}
    throttled = tuple(rank for rank, drop in drops.items() if drop is not None)
    found = [drop for drop in drops.values() if drop is not None]
    drop = max(found, key=most_explained, default=None)
    evidence = _rank_evidence(suspect)
    if drop is None:
        evidence = as_one_worker(partners, evidence)
    return Candidate(
        cause="slow-compute" if drop is None else "clock-throttle",
        ranks=throttled or partners,
        steps=phase,
        part=np.isin(model.rank, partners),
        excess_ratio=suspect.excess_ratio,
        threshold=suspect.threshold,
        evidence=evidence,
        sample=drop,
        shown_steps=suspect.shown_steps,
    )


def _first_run(suspect: Suspect) -> tuple[int, int]:
    """Return the first steps in which a rank is slow: between them and the next it is not."""
    if suspect.shown_steps is None:
        return suspect.first_step, suspect.last_step
    return suspect.first_step, suspect.first_step


def _rank_evidence(suspect: Suspect) -> str:
    against = {
        Basis.PEERS: f"for the {suspect.num_peers:,} other ranks of its stage",
        Basis.MATES: "for the others of its stage, which agree with stages of equal work",
        Basis.STAGES: "for the ranks of stages of equal work",
        Basis.EARLIER: "in its own earlier steps",
        Basis.NOBODY: "",
    }[suspect.basis]
    steps = f"steps {suspect.first_step} to {suspect.last_step}"
    when = f"in {steps} ({format_count(suspect.num_steps, 'step')} traced)"
    if suspect.shown_steps is not None:
        when = f"in {len(suspect.shown_steps)} of the {suspect.num_steps} {steps}"
    return (
        f"rank {suspect.ranks[0]}: {_times(suspect)} {against} ({_above(suspect)}),"
        f" {when}; its waits for others are cut out"
    )


def _times(suspect: Suspect) -> str:
    return (
        f"{format_duration(suspect.compute_ns)} of its own compute a step"
        f" against {format_duration(suspect.typical_ns)}"
    )


def _above(suspect: Suspect) -> str:
    above = f"+{format_percent(suspect.excess_ratio)}"
    if suspect.deviation > 0:
        above += f", {suspect.excess_ratio / suspect.deviation:.0f} robust deviations"
    return above


def _of_stage(
    suspect: Suspect, profile: Profile, model: ReplayModel, ranks: Mapping[int, RankInfo]
) -> Candidate:
    """Tell a stage with more work from one whose ranks have all become slow.

    Work does not change hands in mid-run: a stage on one host of several that
    is slow for a while, or of which some ranks are not, has slow ranks.
    """
    stage = int(profile.stage[np.flatnonzero(profile.ranks == suspect.ranks[0])[0]])
    whole = (int(profile.steps[0]), int(profile.steps[-1]))
    mine = {ranks[rank].host for rank in suspect.ranks}
    one_host = len(mine) == 1 and len({info.host for info in ranks.values()}) > 1
    partial = len(suspect.ranks) < int((profile.stage == stage).sum())
    passing = (suspect.first_step, suspect.last_step) != whole
    is_slow = partial or (one_host and passing)
    subject = f"{'' if partial else 'all '}{len(suspect.ranks):,} traced ranks of stage {stage}"
    against = "the other stages"
    if suspect.basis is Basis.EARLIER:
        against = "in their own other steps, as no other stage does"
    where = f" on host {min(mine)}" if is_slow and one_host else ""
    return Candidate(
        cause="slow-compute" if is_slow else "stage-imbalance",
        ranks=suspect.ranks,
        steps=(suspect.first_step, suspect.last_step),
        part=np.isin(model.rank, suspect.ranks),
        excess_ratio=suspect.excess_ratio,
        threshold=suspect.threshold,
        evidence=(
            f"{subject}{where} compute longer than {against}: {_times(suspect)}"
            f" ({_above(suspect)}), in steps {suspect.first_step} to {suspect.last_step}"
        ),
    )


def sequence_candidate(
    effect: SequenceEffect,
    replayer: Replayer,
    blamed: Collection[int],
    *,
    slow: NDArray[np.bool_],
    experts: NDArray[np.bool_] | None = None,
    evened: ComputeItems | None = None,
) -> Candidate | None:
    """Find out whether micro-batches of unequal length cost the job much.

    Args:
        effect: How far they vary, by `analysis.causes.sequence_imbalance`.
        replayer: Prices it, by `analysis.causes.lengths_price`.
        blamed: Ranks that are slow for a while: their speed is not told by what they compute.
        slow: Shape (ops,): what they do in these steps, which varies with that.
        experts: Shape (ops,): their compute, which goes with what the router sends.
        evened: Compute by micro-batch as if lengths were equal, where that is known.

    Returns:
        None where the spread costs less than `DUE_RATIO` of a usual step.
    """
    model = replayer.model
    chosen = of_kinds(model, FORWARD_KINDS | BACKWARD_KINDS) & model.on_device
    chosen &= ~slow
    if experts is not None:
        chosen &= ~experts
    speed = None if evened is None else speeds_at_equal_lengths(evened, model, blamed)
    evened_ns = _evened(model, chosen, speed)
    if experts is not None:
        others = experts & ~slow
        chosen, evened_ns = equal_experts(model, others, chosen, evened_ns)
    without = replayer.full_with(evened_ns)
    # Of a usual step: the pauses of some, a checkpoint's, do not make lengths more equal.
    usual_ns = float(np.median(without))
    won_ns = float((replayer.full_recorded() - without).mean())
    lost = won_ns / usual_ns if usual_ns > 0 else 0.0
    if lost < DUE_RATIO:
        return None
    steps = model.operations.steps
    what = (
        f"compute follows the sum of squared lengths (correlation {effect.correlation:.2f})"
        if effect.by_lengths
        else f"forward and backward vary together (correlation {effect.correlation:.2f})"
    )
    return Candidate(
        cause="sequence-imbalance",
        ranks=(),
        steps=(steps[0], steps[-1]),
        part=chosen,
        usual_ns=evened_ns,
        excess_ratio=lost,
        threshold=DUE_RATIO,
        evidence=(
            f"micro-batches differ by {format_percent(effect.spread_ratio)} in compute on all ranks"
            f" alike, and {what}: with equal ones a step would be"
            f" {format_percent(1 - 1 / (1 + lost))} shorter"
        ),
    )


def _evened(
    model: ReplayModel, chosen: NDArray[np.bool_], speed: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    """Return the durations with every chosen piece as it would be with equal lengths."""
    operations = model.operations
    rows = np.flatnonzero(chosen)
    label = operations.label if model.work is None else model.work
    duration = operations.duration_ns.copy()
    duration[rows] = equal_durations(
        duration[rows],
        rank=model.rank[rows],
        step=operations.step[rows],
        label=number_rows(model.stage[rows], label[rows])[0],
        span=None if model.span is None else model.span[rows],
        speed=None if speed is None else speed[rows],
    )
    return duration
