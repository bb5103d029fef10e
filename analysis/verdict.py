"""The verdict: what is wrong with a run, which ranks it holds up, and what fixing it saves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.tracer.span import NONE

from .causes import crash, hang
from .causes.detector import Subject
from .causes.order import CAUSES
from .report.report import Severity, format_hosts, placements_of
from .report.text import (
    format_count,
    format_names,
    format_percent,
    format_price,
    format_ranges,
    format_ranks,
    format_seconds,
    format_steps,
)
from .statistics.thresholds import THRESHOLDS
from .trace.tables import format_of

if TYPE_CHECKING:
    from .report.report import Finding, RunReport

MIN_WAIT_RATIO = 0.01
"""Share of a step that a rank must wait for a culprit to count as held up."""

AXIS_NAMES = {
    "dp": "data-parallel",
    "tp": "tensor-parallel",
    "pp": "pipeline",
    "cp": "context-parallel",
}


def verdict_sentence(report: RunReport, *, others: str = "below") -> str:
    """Return the verdict: the top finding, the ranks that it holds up, and what a fix saves.

    Args:
        others: Place of the further findings.
    """
    finding = report.top_finding
    if finding.cause == "healthy":
        harmless = sorted({_harmless(report, other) for other in report.findings[1:]})
        also = f" Also found: {', '.join(harmless)}." if harmless else ""
        return f"Healthy{_as_far_as_imported(report)}: {finding.evidence}.{also}"
    if finding.cause == "insufficient-evidence":
        return f"Insufficient evidence: {finding.evidence}."
    num_others = len(report.findings) - 1
    more = f" {format_count(num_others, 'more finding')} {others}." if num_others else ""
    who = f"{_culprit(report, finding)}{_before_it_moved(report, finding)}"
    return f"{who}{_held_up(report, finding)}{_gain(report, finding)}{more}"


def verdict_line(report: RunReport) -> str:
    """Return the verdict in a few words, for a line that is read while it changes.

    "slow-compute on rank 2 costs 140 ms (35 %)", "healthy".
    """
    finding = report.top_finding
    if finding.cause in {"healthy", "insufficient-evidence"}:
        return finding.cause.replace("-", " ")
    named = "rank" if len(finding.ranks) == 1 else "ranks"
    where = f" on {named} {format_ranges(finding.ranks, max_ranges=2)}" if finding.ranks else ""
    price = report.price(finding)
    if price is None:
        return f"{finding.cause}{where}"
    seconds, share = format_seconds(price.seconds), format_percent(price.share)
    return f"{finding.cause}{where} costs {seconds} ({share})"


def _as_far_as_imported(report: RunReport) -> str:
    """Return which part of a job an import holds; empty if it is all of it."""
    num, size = len(report.coords), report.world_size
    if num * report.layout.tp >= size or format_of(report).is_tp_collapsed:
        return ""
    others = "the other was" if size - num == 1 else "the others were"
    show = "shows" if num == 1 else "show"
    return f" as far as {num} of {format_count(size, 'rank')} {show} ({others} not imported)"


def _harmless(report: RunReport, finding: Finding) -> str:
    if finding.severity is Severity.MINOR:
        return f"{finding.cause} (minor)"
    saved_s, actual_s = finding.saved_s, report.step_time_s.actual
    if not saved_s or not actual_s:
        return finding.cause
    return f"{finding.cause} ({format_percent(saved_s / actual_s)} of the step time)"


def _culprit(report: RunReport, finding: Finding) -> str:
    when = ""
    if finding.steps is not None and finding.steps != (report.steps[0], report.steps[-1]):
        when = f" in {format_steps(finding.steps)}"
    cause = CAUSES[finding.cause]
    if cause.subject is Subject.STAGE:
        stage = report.coords[finding.ranks[0]].pp
        return f"Stage {stage} has more work than the others ({format_ranks(finding.ranks)}){when}."
    if cause.subject is Subject.JOB or not finding.ranks:
        return f"{cause.sentence} ({cause.name}){when}{_reason(finding)}."
    if cause.subject is Subject.LINK and (link := _link(report, finding.ranks)):
        hosts = format_hosts(finding, report.placements)
        where = f", on {hosts}," if hosts else "," if "," in link else ""
        return f"{link}{where} is slow{when} ({cause.name})."
    verb = cause.one if len(finding.ranks) == 1 else cause.several
    if cause is hang.CAUSE and hang.HAD_ENDED in finding.evidence:
        verb = "ended before the others"
    return f"{_ranks_at_fault(report, finding)} {verb}{when} ({cause.name}){_reason(finding)}."


def _reason(finding: Finding) -> str:
    reason = crash.reason_in(finding.evidence) if finding.cause == crash.CAUSE.name else ""
    return f": {reason}" if reason else ""


def _before_it_moved(report: RunReport, finding: Finding) -> str:
    """Return as which other ranks the same devices show the cause, before or after a restart."""

    def devices(blamed: Finding) -> set[tuple[str, int]]:
        of_rank = placements_of(blamed, report.placements).of_rank
        return {of_rank.get(rank, ("", NONE)) for rank in blamed.ranks}

    if len(report.placements) <= 1 or not CAUSES[finding.cause].has_place:
        return ""
    devices_now = devices(finding)
    others = [
        other
        for other in report.findings
        if other.cause == finding.cause
        and other.ranks != finding.ranks
        and devices(other) == devices_now
    ]
    if not others or any("" in (host, local) or local == NONE for host, local in devices_now):
        return ""
    times = ", ".join(
        f"{format_ranks(other.ranks)} in {format_steps(other.steps)}"
        for other in others
        if other.steps
    )
    names = format_names([f"{host}, local rank {local}" for host, local in sorted(devices_now)])
    subject = "The same device" if len(devices_now) == 1 else "The same devices"
    verb = "has" if len(devices_now) == 1 else "have"
    return f" {subject} ({names}) {verb} this finding as {times}, too."


def _ranks_at_fault(report: RunReport, finding: Finding) -> str:
    """Return the ranks with their hosts, a single one with its position in the layout."""
    name, hosts = format_ranks(finding.ranks), format_hosts(finding, report.placements)
    coords = report.coords.get(finding.ranks[0])
    if coords is not None and report.has_layout and len(finding.ranks) == 1:
        position = f"dp {coords.dp}, stage {coords.pp}"
        if format_of(report).is_tp_collapsed:
            return f"The worker at {position} ({name})"
        if report.layout.tp > 1:
            position += f", tp {coords.tp}"
        hosts = f"{hosts}, {position}" if hosts else position
    if hosts:
        name = f"{name} ({hosts})"
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
    return f"A link of {group}, {format_count(len(ranks), 'rank')}"


def _held_up(report: RunReport, finding: Finding) -> str:
    pronoun, cause = _pronoun(finding), CAUSES[finding.cause]
    if cause is hang.CAUSE:
        is_waited_for = finding.ranks and hang.TOO_MANY not in finding.evidence
        place = ""
        if hang.OTHER_ORDER in finding.evidence:
            place = f", which {'is' if len(finding.ranks) == 1 else 'are'} in another communication"
        return f" All other ranks wait for {pronoun}{place}." if is_waited_for else ""
    if cause.subject is Subject.JOB or cause.ends_run or finding.saved_s is None:
        return ""  # of a misconfiguration it is not known whether it costs anything
    culprits = set(finding.ranks)
    lost = [
        (entry.rank, report.share_held_up(entry, finding))
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
    is_several = len(finding.ranks) > 1 and CAUSES[finding.cause].subject is Subject.RANKS
    return "them" if is_several else "it"


def _gain(report: RunReport, finding: Finding) -> str:
    """Return what fixing the finding would save; empty if that is unknown or next to nothing."""
    price = report.price(finding)
    if price is None or price.share < THRESHOLDS.minor_share:
        return ""
    text = format_price(price.seconds, price.share, since=price.since)
    saved_s, actual_s = finding.saved_s, report.step_time_s.actual
    if saved_s is not None and actual_s and price.since in report.steps[1:]:
        mean = f"{format_seconds(saved_s)} ({format_percent(saved_s / actual_s)})"
        text += f", {mean} in the mean of all steps"
    elif finding.shown_saved_s is not None and not report.is_open(finding):
        shown = format_seconds(finding.shown_saved_s)
        text += f" in the mean of all steps, {shown} in those that show it"
    return f" Fixing {_pronoun(finding)} would save {text}."
