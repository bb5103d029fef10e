"""The verdict: one sentence that a person woken at night reads first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis.words import NS_PER_S, duration_text, name_ranks

if TYPE_CHECKING:
    from analysis.report import Finding, RunReport


def verdict_sentence(report: RunReport) -> str:
    """Say which rank is truly slow, which only wait for it, and what mending it would win."""
    finding = report.top_finding
    if finding.cause == "healthy":
        return f"Healthy: {finding.evidence}."
    if finding.cause == "insufficient-evidence":
        return f"Insufficient evidence: {finding.evidence}."
    others = len(report.findings) - 1
    more = f" {others} more finding{'s' * (others > 1)} below." if others else ""
    return f"{_subject(report, finding)}{_starved(report, finding)}{_gain(report, finding)}{more}"


def _subject(report: RunReport, finding: Finding) -> str:
    when = ""
    if finding.steps is not None and finding.steps != (report.steps[0], report.steps[-1]):
        when = f" in steps {finding.steps[0]} to {finding.steps[1]}"
    name = name_ranks(finding.ranks)
    if finding.cause == "stage-imbalance":
        stage = report.coords[finding.ranks[0]].pp
        return f"Stage {stage} has more work than the others ({name}){when}."
    coords = report.coords[finding.ranks[0]]
    place = f"dp {coords.dp}, stage {coords.pp}"
    if report.layout.tp > 1 and report.source_format == "rankscope":
        place += f", tp {coords.tp}"
    if report.source_format == "bytedance":
        name = f"the worker at {place} ({name})"
        return f"{name[0].upper()}{name[1:]} is truly slow{when} ({finding.cause})."
    return f"{name[0].upper()}{name[1:]} ({place}) is truly slow{when} ({finding.cause})."


def _starved(report: RunReport, finding: Finding) -> str:
    culprits = set(finding.ranks)
    waiting = [
        (entry.rank, sum(part.ratio for part in entry.waits_on if part.rank in culprits))
        for entry in report.starved
        if entry.rank not in culprits
    ]
    waiting = [(rank, share) for rank, share in waiting if share >= 0.01]  # noqa: PLR2004
    if not waiting:
        return ""
    rank, worst = max(waiting, key=lambda entry: entry[1])
    if len(waiting) == 1:
        return f" Rank {rank} only waits for it, {worst:.0%} of its step."
    return (
        f" {len(waiting)} other ranks only wait for it, rank {rank} most: {worst:.0%} of its step."
    )


def _gain(report: RunReport, finding: Finding) -> str:
    if finding.recoverable_ratio is None or finding.slowdown is None:
        return ""
    share = finding.recoverable_ratio
    part = "all" if share >= 1.0 else f"{share:.0%}"
    lost = ""
    times = report.step_time_s
    if times.replayed is not None and times.ideal is not None and share > 0:
        won = share * (times.replayed - times.ideal)
        lost = f", {duration_text(won * NS_PER_S)} a step"
    return f" Mending it wins back {part} of the time lost to slowness{lost}."
