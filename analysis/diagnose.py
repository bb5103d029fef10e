"""From slow ranks and stages to findings: what each costs, and the evidence in a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from analysis.profile import Basis
from analysis.report import Finding
from analysis.suspects import slow_ranks, slow_stages, unexplained
from analysis.words import duration_text
from analysis.whatif import ratio, recoverable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from analysis.profile import Profile
    from analysis.suspects import Suspect
    from analysis.whatif import Replayer


def diagnose(profile: Profile, replayer: Replayer, slowdown: float | None) -> tuple[Finding, ...]:
    """Return the findings of a run, the most recoverable first; never none.

    Args:
        profile: Compute of each rank against its peers.
        replayer: Prices each finding.
        slowdown: S of the run.
    """
    stages = slow_stages(profile)
    in_slow_stage = {rank for stage in stages for rank in stage.ranks}
    ranks = tuple(
        rank
        for rank in slow_ranks(profile)
        if rank.basis is not Basis.STAGES or not in_slow_stage.issuperset(rank.ranks)
    )
    findings = [_finding("slow-compute", rank, profile, replayer) for rank in ranks]
    findings += [_finding("stage-imbalance", stage, profile, replayer) for stage in stages]
    unclear = set(unexplained(profile)) - in_slow_stage
    unclear -= {rank for suspect in ranks for rank in suspect.ranks}
    if unclear and not ranks:
        findings.append(_too_few_peers(tuple(sorted(unclear)), profile))
    if not findings:
        return (_no_slow_rank(profile, slowdown),)
    return tuple(
        sorted(findings, key=lambda finding: (-(finding.recoverable_ratio or 0.0), finding.ranks))
    )


def insufficient(evidence: str) -> Finding:
    """Return the finding that says that nothing can be said, and why."""
    return Finding(
        cause="insufficient-evidence",
        ranks=(),
        steps=None,
        slowdown=None,
        recoverable_ratio=None,
        confidence=1.0,
        evidence=evidence,
    )


def _finding(cause: str, suspect: Suspect, profile: Profile, replayer: Replayer) -> Finding:
    part = np.isin(replayer.model.rank, suspect.ranks)
    recorded, ideal = replayer.full_recorded().mean(), replayer.full_ideal().mean()
    return Finding(
        cause=cause,
        ranks=suspect.ranks,
        steps=(suspect.first_step, suspect.last_step),
        slowdown=ratio(float(replayer.put_back(part).mean()), float(replayer.ideal().mean())),
        recoverable_ratio=recoverable(
            float(recorded), float(replayer.full_without(part).mean()), float(ideal)
        ),
        confidence=confidence(suspect.excess_ratio, suspect.threshold),
        evidence=_evidence(cause, suspect, profile),
    )


def confidence(excess_ratio: float, threshold: float) -> float:
    """Return how sure a finding is: 0.5 at its threshold, and halving the doubt with each more."""
    return float(1.0 - 0.5 ** (excess_ratio / threshold))


def _evidence(cause: str, suspect: Suspect, profile: Profile) -> str:
    times = (
        f"{duration_text(suspect.compute_ns)} of its own compute a step"
        f" against {duration_text(suspect.typical_ns)}"
    )
    above = f"+{suspect.excess_ratio:.0%}"
    if suspect.deviation > 0:
        above += f", {suspect.excess_ratio / suspect.deviation:.0f} robust deviations"
    if cause == "stage-imbalance":
        stage = int(profile.stage[np.flatnonzero(profile.ranks == suspect.ranks[0])[0]])
        return (
            f"all {len(suspect.ranks)} traced ranks of stage {stage} compute longer than the other"
            f" stages: {times} ({above})"
        )
    against = {
        Basis.PEERS: f"for the {suspect.num_peers} other ranks of its stage",
        Basis.MATES: "for the others of its stage, which agree with stages of equal work",
        Basis.STAGES: "for the ranks of stages of equal work",
        Basis.EARLIER: "in its own earlier steps",
        Basis.NOBODY: "",
    }[suspect.basis]
    steps = _count(suspect.num_steps, "step")
    return (
        f"rank {suspect.ranks[0]}: {times} {against} ({above}),"
        f" in steps {suspect.first_step} to {suspect.last_step} ({steps} traced);"
        " its waits for others are cut out"
    )


def _no_slow_rank(profile: Profile, slowdown: float | None) -> Finding:
    """Return `healthy`, or that nobody could be compared."""
    excess: NDArray[np.float64] = profile.excess_ratio
    compared = ~np.isnan(excess).all(axis=1)
    if not compared.any() or len(profile.ranks) == 1:
        return insufficient(
            f"{_count(len(profile.ranks), 'rank')} over {_count(len(profile.steps), 'step')}:"
            " there is nobody to compare with, and nothing changed from step to step"
        )
    levels = np.nanmedian(excess[compared], axis=1)
    worst = int(levels.argmax())
    text = (
        f"no rank's own compute stands clear of its peers': the largest median excess is"
        f" {levels[worst]:+.1%} on rank {int(profile.ranks[compared][worst])}"
    )
    if slowdown is not None:
        text += f"; S = {slowdown:.3f}"
    return Finding(
        cause="healthy",
        ranks=(),
        steps=(int(profile.steps[0]), int(profile.steps[-1])),
        slowdown=slowdown,
        recoverable_ratio=None,
        confidence=float(np.clip(1.0 - max(levels[worst], 0.0) / 0.2, 0.5, 1.0)),
        evidence=text,
    )


def _too_few_peers(ranks: tuple[int, ...], profile: Profile) -> Finding:
    listed = ", ".join(map(str, ranks))
    return insufficient(
        f"rank {listed} computes more than 10 % longer than the one or two ranks of its stage;"
        f" with fewer than 3 peers among {len(profile.ranks)} ranks nobody can say which is slow"
    )


def _count(num: int, word: str) -> str:
    return f"{num} {word}" if num == 1 else f"{num} {word}s"
