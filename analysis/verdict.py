"""The diagnosis of a run in a sentence or three: who is slow, who is held up, what fixing saves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.tracer.span import NS_PER_S

from .report.text import format_count, format_duration, format_percent, format_ranks, format_steps

if TYPE_CHECKING:
    from .report.report import Finding, RunReport

MIN_GAIN_RATIO = 0.005
"""Share of the lost time below which the verdict mentions no gain: it would read as 0 %."""

MIN_WAIT_RATIO = 0.01
"""Share of a step that a rank must wait for a culprit to count as held up."""

VERBS = {
    "slow-compute": ("computes slower than its peers", "compute slower than their peers"),
    "clock-throttle": (
        "is slow because its clock is throttled",
        "are slow because their clocks are throttled",
    ),
    "slow-link": ("has a slow link", "share a slow link"),
    "host-stall": (
        "launches late because its host stalls",
        "launch late because their host stalls",
    ),
    "data-stall": ("waits for input", "wait for input"),
    "launch-skew": ("enters collectives late", "take turns in entering collectives late"),
    "expert-imbalance": (
        "has experts that get more tokens than others",
        "have experts that get more tokens than others",
    ),
    "misconfiguration": (
        "is configured differently from the other ranks",
        "are configured differently from the other ranks",
    ),
    "crash": ("failed first", "failed first"),
    "hang": ("hangs", "hang"),
}
"""What is wrong with one rank, and with several; `slow-compute` if the cause is not listed."""

SUBJECTLESS = {
    "gc-pause": "Garbage collection pauses ranks in turn, and each pause holds up all others",
    "network-degradation": "The network is slow",
    "sequence-imbalance": "Micro-batches of unequal length make ranks wait for each other",
    "layout": "The parallel layout costs time",
    "launch-skew": "Ranks take turns in entering collectives late",
    "data-stall": "The whole job waits for input",
    "checkpoint": "Checkpoints take time",
    "misconfiguration": "The configuration differs from the previous run",
}
"""The same if the finding names no rank, or if its ranks are not to blame (`BLAMELESS`)."""

BLAMELESS = frozenset({"gc-pause", "network-degradation", "sequence-imbalance", "layout"})
"""Causes that show on ranks and are not caused by them."""

SINGULAR = BLAMELESS | {"stage-imbalance", "slow-link"}
"""Causes whose sentence is about one thing, however many ranks it names."""

ENDINGS = frozenset({"crash", "hang"})
"""Causes that end the job: the waits of the steps before are not about them."""

AXIS_NAMES = {
    "dp": "data-parallel",
    "tp": "tensor-parallel",
    "pp": "pipeline",
    "cp": "context-parallel",
}


def verdict_sentence(report: RunReport) -> str:
    """Return the verdict: the top finding, the ranks that it holds up, and what a fix saves."""
    finding = report.top_finding
    if finding.cause == "healthy":
        others = ", ".join(sorted({other.cause for other in report.findings[1:]}))
        return f"Healthy: {finding.evidence}." + (f" Also found: {others}." if others else "")
    if finding.cause == "insufficient-evidence":
        return f"Insufficient evidence: {finding.evidence}."
    num_others = len(report.findings) - 1
    more = f" {format_count(num_others, 'more finding')} below." if num_others else ""
    return f"{_culprit(report, finding)}{_held_up(report, finding)}{_gain(report, finding)}{more}"


def _culprit(report: RunReport, finding: Finding) -> str:
    """Return what is wrong, with whom, in which steps."""
    when = ""
    if finding.steps is not None and finding.steps != (report.steps[0], report.steps[-1]):
        when = f" in {format_steps(finding.steps)}"
    if finding.cause == "stage-imbalance":
        stage = report.coords[finding.ranks[0]].pp
        return f"Stage {stage} has more work than the others ({format_ranks(finding.ranks)}){when}."
    if finding.cause in BLAMELESS or not finding.ranks:
        return f"{SUBJECTLESS[finding.cause]} ({finding.cause}){when}."
    if finding.cause == "slow-link" and (link := _link(report, finding.ranks)):
        return f"{link} is slow{when} (slow-link)."
    return f"{_ranks_at_fault(report, finding)} {_verb(finding)}{when} ({finding.cause})."


def _ranks_at_fault(report: RunReport, finding: Finding) -> str:
    """Return the ranks, a single one with its position in the layout."""
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


def _link(report: RunReport, ranks: tuple[int, ...]) -> str:
    """Return the link between two ranks, or the group of more; empty for one rank or no group."""
    if len(ranks) == 2:  # noqa: PLR2004
        return f"The link between {format_ranks(ranks)}"
    coords = [report.coords[rank].to_dict() for rank in ranks if rank in report.coords]
    sizes = {axis: report.layout.to_dict()[axis] for axis in AXIS_NAMES}
    varying = [axis for axis in sizes if len({each[axis] for each in coords}) > 1]
    if not report.has_layout or len(varying) != 1 or len(coords) != sizes[varying[0]]:
        return ""
    fixed = ", ".join(
        f"{'stage' if axis == 'pp' else axis} {coords[0][axis]}"
        for axis in ("pp", "dp", "tp", "cp")
        if axis != varying[0] and sizes[axis] > 1
    )
    group = f"{AXIS_NAMES[varying[0]]} group" + (f" ({fixed})" if fixed else "")
    return f"A link of {group}, {format_count(len(ranks), 'rank')},"


def _verb(finding: Finding) -> str:
    one, several = VERBS.get(finding.cause, VERBS["slow-compute"])
    return one if len(finding.ranks) == 1 else several


def _held_up(report: RunReport, finding: Finding) -> str:
    """Return how many ranks wait for the culprits, and which one loses most."""
    pronoun = _pronoun(finding)
    if finding.cause == "hang":
        return f" All other ranks wait for {pronoun}."
    if finding.cause in BLAMELESS | ENDINGS:
        return ""
    culprits = set(finding.ranks)
    lost = [
        (entry.rank, sum(part.ratio for part in entry.waits_on if part.rank in culprits))
        for entry in report.starved
        if entry.rank not in culprits
    ]
    lost = [(rank, ratio) for rank, ratio in lost if ratio >= MIN_WAIT_RATIO]
    if not lost:
        return ""
    rank, most = max(lost, key=lambda entry: entry[1])
    if len(lost) == 1:
        return f" Rank {rank} is held up by {pronoun} ({format_percent(most)} of each step)."
    return (
        f" {format_count(len(lost), 'rank')} are held up by {pronoun};"
        f" rank {rank} loses most ({format_percent(most)} of each step)."
    )


def _pronoun(finding: Finding) -> str:
    is_one = len(finding.ranks) == 1 or finding.cause in SINGULAR or not finding.ranks
    return "it" if is_one else "them"


def _gain(report: RunReport, finding: Finding) -> str:
    """Return what fixing the finding would save; empty if that is unknown or next to nothing."""
    ratio = finding.recoverable_ratio
    if ratio is None or finding.slowdown is None or ratio < MIN_GAIN_RATIO:
        return ""
    fixing = f" Fixing {_pronoun(finding)} would"
    times = report.step_time_s
    if not times.actual or times.ideal is None:
        return f"{fixing} recover {format_percent(ratio)} of the time lost to stragglers."
    # The ratio is of the full replay, launch gaps included: that is the recorded time.
    saved = ratio * (times.actual - times.ideal)
    return (
        f"{fixing} save {format_duration(saved * NS_PER_S)} per step"
        f" ({format_percent(saved / times.actual)})."
    )
