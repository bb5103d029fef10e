"""The verdict: one sentence that a person woken at night reads first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.tracer.span import NS_PER_S

from .report.text import format_duration, format_percent, format_ranks

if TYPE_CHECKING:
    from .report.report import Finding, RunReport


LEAST_GAIN = 0.005
"""Share of the lost time below which nothing is said of a gain."""

VERBS = {
    "slow-compute": ("is truly slow", "are truly slow"),
    "clock-throttle": ("is slow: its clock is throttled", "are slow: their clocks are throttled"),
    "slow-link": ("has a slow connection", "are joined by a slow link"),
    "host-stall": ("launches late: its host stalls", "launch late: their host stalls"),
    "data-stall": ("waits for its input", "wait for their input"),
    "launch-skew": ("enters collectives late", "enter collectives late, now one and now another"),
    "misconfiguration": ("is configured unlike the others", "are configured unlike the others"),
    "crash": ("failed first", "failed first"),
    "hang": ("hangs, and all others wait for it", "hang, and all others wait for them"),
}
"""What is wrong with one rank, and with several."""

WHAT = {
    "gc-pause": "Garbage collection stops ranks in turn, and all wait for each of them",
    "network-degradation": "The network is slow",
    "sequence-imbalance": "Micro-batches of unequal length make ranks wait for each other",
    "layout": "The parallel layout itself costs time",
    "launch-skew": "Ranks enter collectives late, now one and now another",
    "data-stall": "The job waits for its input",
    "checkpoint": "Checkpoints take time",
    "misconfiguration": "The job is configured unlike before",
}
NOT_OF_RANKS = frozenset({"gc-pause", "network-degradation", "sequence-imbalance", "layout"})
"""Causes that are no matter of the ranks they show on."""

ONE_THING = NOT_OF_RANKS | {"stage-imbalance", "slow-link"}
"""Causes whose sentence speaks of one thing, however many ranks it names."""

ENDINGS = frozenset({"crash", "hang"})
"""Causes for which the waits of the steps before tell nothing."""


def verdict_sentence(report: RunReport) -> str:
    """Say which rank is truly slow, which only wait for it, and what mending it would win."""
    finding = report.top_finding
    if finding.cause == "healthy":
        beside = ", ".join(sorted({other.cause for other in report.findings[1:]}))
        return f"Healthy: {finding.evidence}." + (f" Told beside it: {beside}." if beside else "")
    if finding.cause == "insufficient-evidence":
        return f"Insufficient evidence: {finding.evidence}."
    others = len(report.findings) - 1
    more = f" {others} more finding{'s' * (others > 1)} below." if others else ""
    return f"{_subject(report, finding)}{_starved(report, finding)}{_gain(report, finding)}{more}"


def _subject(report: RunReport, finding: Finding) -> str:
    when = ""
    if finding.steps is not None and finding.steps != (report.steps[0], report.steps[-1]):
        first, last = finding.steps
        when = f" in step {first}" if first == last else f" in steps {first} to {last}"
    if finding.cause == "stage-imbalance":
        stage = report.coords[finding.ranks[0]].pp
        return f"Stage {stage} has more work than the others ({format_ranks(finding.ranks)}){when}."
    if finding.cause in NOT_OF_RANKS or not finding.ranks:
        return f"{WHAT[finding.cause]} ({finding.cause}){when}."
    return f"{_culprit(report, finding)} {_verb(finding)}{when} ({finding.cause})."


def _culprit(report: RunReport, finding: Finding) -> str:
    """Name who is at fault, a single one with its place in the layout."""
    name = format_ranks(finding.ranks)
    coords = report.coords.get(finding.ranks[0])
    if coords is not None and report.has_layout and len(finding.ranks) == 1:
        place = f"dp {coords.dp}, stage {coords.pp}"
        if report.layout.tp > 1 and report.source_format == "rankscope":
            place += f", tp {coords.tp}"
        if report.source_format == "bytedance":
            return f"The worker at {place} ({name})"
        name = f"{name} ({place})"
    return f"{name[0].upper()}{name[1:]}"


def _verb(finding: Finding) -> str:
    one, several = VERBS.get(finding.cause, VERBS["slow-compute"])
    return one if len(finding.ranks) == 1 else several


def _starved(report: RunReport, finding: Finding) -> str:
    culprits = set(finding.ranks)
    if finding.cause in NOT_OF_RANKS | ENDINGS:
        return ""
    waiting = [
        (entry.rank, sum(part.ratio for part in entry.waits_on if part.rank in culprits))
        for entry in report.starved
        if entry.rank not in culprits
    ]
    waiting = [(rank, share) for rank, share in waiting if share >= 0.01]  # noqa: PLR2004
    if not waiting:
        return ""
    rank, worst = max(waiting, key=lambda entry: entry[1])
    what = _pronoun(finding)
    if len(waiting) == 1:
        return f" Rank {rank} only waits for {what}, {format_percent(worst)} of its step."
    return (
        f" {len(waiting):,} other ranks only wait for {what},"
        f" rank {rank} most: {format_percent(worst)} of its step."
    )


def _pronoun(finding: Finding) -> str:
    """Stand in for the subject: several ranks, or one rank, stage, link, network, ..."""
    is_one = len(finding.ranks) == 1 or finding.cause in ONE_THING or not finding.ranks
    return "it" if is_one else "them"


def _gain(report: RunReport, finding: Finding) -> str:
    if finding.recoverable_ratio is None or finding.slowdown is None:
        return ""
    share = finding.recoverable_ratio
    if share < LEAST_GAIN:
        return ""
    part = "all" if share >= 1.0 else format_percent(share)
    lost = ""
    times = report.step_time_s
    if times.actual is not None and times.ideal is not None:
        # The share is of the full replay, launch gaps included, which is the recorded time.
        won = share * (times.actual - times.ideal)
        lost = f", {format_duration(won * NS_PER_S)} a step"
    return f" Mending {_pronoun(finding)} wins back {part} of the time lost to slowness{lost}."
