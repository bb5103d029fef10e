"""Text of a diagnosis for a terminal: the verdict first, then the numbers behind it."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

from rankscope.analysis.report.text import (
    MAX_NAMED,
    UNKNOWN,
    format_account,
    format_count,
    format_most_dropped,
    format_percent,
    format_range,
    format_ranges,
    format_seconds,
    format_slowdown,
)

from .lines import format_table

if TYPE_CHECKING:
    from rankscope.analysis.report.report import (
        Bandwidth,
        Finding,
        RunReport,
        Starved,
        WaterfallSummary,
    )

INDENT = "  "
LABEL_WIDTH = 13
MAX_STARVED = 10
MAX_BANDWIDTHS = 8
MIN_BANDWIDTH_BYTES = 100_000
"""The time of smaller transfers is mostly latency, so their bandwidth means nothing."""

MAX_WAITS_ON = 3
MIN_RATIO = 0.0005
"""Smaller parts of the waterfall would be printed as 0.0 %."""


def report_text(
    report: RunReport, *, verdict: str, width: int, follows: tuple[str, ...] = ()
) -> str:
    """Return a diagnosis as lines of at most ``width`` columns; tables may be wider.

    Args:
        report: The diagnosis.
        verdict: The diagnosis in one sentence.
        width: Columns of the terminal.
        follows: A sentence for each finding about whether it follows its host or its position; ""
            if unknown. Empty if all are unknown.
    """
    blocks = [
        wrap(verdict, width),
        wrap(_format_run(report), width),
        _format_times(report, width),
        _format_findings(report.findings, follows or ("",) * len(report.findings), width),
        _format_starved(report.starved),
        _format_waterfall(report.waterfall, width),
        _format_bandwidth(report.bandwidth),
        _format_quality(report, width),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _format_run(report: RunReport) -> str:
    sizes = report.layout.to_dict().items()
    axes = [f"{axis} {size}" for axis, size in sizes if size > 1]
    layout = f" ({' x '.join(axes)})" if axes else ""
    if not axes and not report.has_layout:
        layout = " (parallel layout unknown)"
    steps = format_count(len(report.steps), "step")
    if report.steps:
        steps += f" ({report.steps[0]} to {report.steps[-1]})"
    ranks = format_count(report.world_size, "rank")
    spans = format_count(report.num_spans, "span")
    parts = [f"run {report.run}: {ranks}{layout}, {steps}, {spans}"]
    if len(report.epochs) > 1:
        parts.append(f"{len(report.epochs)} epochs")
    if report.paced:
        parts.append("paced: compute padded to set times")
    if report.warmup_steps:
        parts.append(f"without warm-up steps {format_ranges(sorted(report.warmup_steps))}")
    return "; ".join(parts)


def _format_times(report: RunReport, width: int) -> list[str]:
    times, mfu = report.step_time_s, report.mfu
    rows = {
        "step time": f"recorded {format_seconds(times.actual)}, replayed"
        f" {format_seconds(times.replayed)}, ideal {format_seconds(times.ideal)}"
        " (as if every rank ran like the median)",
        "slowdown": f"{format_slowdown(report.slowdown)}: {_format_percent(report.waste_ratio)} of"
        " the step time is lost",
        "recoverable": ""
        if report.m_w is None and report.m_s is None
        else f"{_format_percent(report.m_w)} of that by fixing the worst 3 % of the workers (M_W),"
        f" {_format_percent(report.m_s)} by fixing the last stage (M_S)",
        "worst worker": _format_culprits(report),
        "host delays": f"{format_slowdown(report.launch_slowdown)}; replay error"
        f" {_format_percent(report.replay_error_ratio)}",
        "MFU": f"{UNKNOWN}: {report.missing_mfu}"
        if mfu is None
        else f"{_format_percent(mfu.mean)} ({mfu.convention})",
    }
    lines = []
    for label, text in rows.items():
        if text:
            lines += _wrap(text, width, label.ljust(LABEL_WIDTH))
    return lines


def _format_culprits(report: RunReport) -> str:
    """Return the worst worker, and the steps in which the paper's estimate names another one."""
    found = report.culprits
    if found is None:
        return ""
    exact = _format_worker(report, found.by_exact)
    if found.by_shortcut != found.by_exact:
        exact += f", by the paper's estimate {_format_worker(report, found.by_shortcut)}"
    return f"{exact}; the estimate differs in {found.num_different:,} of {found.num_steps:,} steps"


def _format_worker(report: RunReport, worker: tuple[int, int]) -> str:
    dp, stage = worker
    return f"dp {dp}, stage {stage}" if report.has_layout else f"rank {dp}"


def _format_findings(
    findings: tuple[Finding, ...], follows: tuple[str, ...], width: int
) -> list[str]:
    header = ("finding", "severity", "ranks", "steps", "slowdown", "recoverable", "confidence")
    rows = [
        (
            finding.cause,
            finding.severity or UNKNOWN,
            format_ranges(finding.ranks, max_ranges=MAX_NAMED),
            format_range(finding.steps),
            format_slowdown(finding.slowdown),
            _format_percent(finding.recoverable_ratio),
            f"{finding.confidence:.2f}",
        )
        for finding in findings
    ]
    head, *lines = format_table(header, rows, right="llllrrr")
    body = [head]
    for line, finding, followed in zip(lines, findings, follows, strict=True):
        body.append(line)
        body.extend(_paragraph(finding.evidence, width))
        body.extend(_paragraph(followed, width))
    return body


def _format_starved(starved: tuple[Starved, ...]) -> list[str]:
    if not starved:
        return []
    rows = [
        (
            str(rank.rank),
            _format_percent(rank.wait_ratio),
            ", ".join(
                f"rank {root.rank} {_format_percent(root.ratio)}"
                for root in rank.waits_on[:MAX_WAITS_ON]
            )
            or UNKNOWN,
        )
        for rank in starved[:MAX_STARVED]
    ]
    lines = format_table(("waiting rank", "share of step", "waits for"), rows, right="rrl")
    if len(starved) > MAX_STARVED:
        lines.append(f"{INDENT}and {len(starved) - MAX_STARVED:,} more")
    return lines


def _format_bandwidth(found: tuple[Bandwidth, ...]) -> list[str]:
    large = (one for one in found if one.num_bytes >= MIN_BANDWIDTH_BYTES)
    largest = sorted(large, key=lambda one: -one.num_bytes * one.num_instances)[:MAX_BANDWIDTHS]
    if not largest:
        return []
    rows = [
        (
            one.name if one.kind in one.name else f"{one.kind} {one.name}",
            str(one.num_members),
            {True: "several", False: "one", None: UNKNOWN}[one.across_hosts],
            f"{one.num_bytes / 1e6:,.4g}",
            f"{one.transfer_ns / 1e6:.3g}",
            f"{one.algorithm_bytes_per_s / 1e9:.3g}",
            UNKNOWN if one.bus_bytes_per_s is None else f"{one.bus_bytes_per_s / 1e9:.3g}",
        )
        for one in largest
    ]
    header = ("transfer", "ranks", "hosts", "MB", "median ms", "GB/s", "bus GB/s")
    return format_table(header, rows, right="lrlrrrr")


def _format_waterfall(waterfall: WaterfallSummary | None, width: int) -> list[str]:
    if waterfall is None:
        return []
    rows = [
        (_format_part(part), _format_percent(ratio), _format_waits(part, waterfall))
        for part, ratio in waterfall.mean_ratio.items()
        if ratio is None or ratio >= MIN_RATIO
    ]
    lines = format_table(("part of the step time", "share", ""), rows, right="lr")
    bubble = waterfall.bubble
    if bubble is None:
        return lines
    text = (
        f"bubble: {_format_percent(bubble.measured_ratio)} of the useful compute; expected"
        f" (p - 1) / (v m) = {_format_percent(bubble.formula_ratio)} for p = {bubble.num_stages}"
        f" stages, v = {bubble.num_chunks} chunks, m = {bubble.num_microbatches} micro-batches"
    )
    return [*lines, *_paragraph(text, width)]


def _format_part(part: str) -> str:
    if part.startswith("bubble_"):
        return f"bubble, {part.removeprefix('bubble_').replace('_', '-')}"
    return part.replace("_", " ")


def _format_waits(part: str, waterfall: WaterfallSummary) -> str:
    if part != "waiting":
        return ""
    shown = [entry for entry in waterfall.waiting_on if entry.ratio >= MIN_RATIO][:MAX_WAITS_ON]
    return ", ".join(f"for rank {entry.rank} {_format_percent(entry.ratio)}" for entry in shown)


def _format_quality(report: RunReport, width: int) -> list[str]:
    quality = report.quality
    error_ns = quality.clock_error_ns
    clock = UNKNOWN if error_ns is None else f"{error_ns / 1e3:.3g} us"
    summary = (
        f"data quality: coverage {_format_percent(quality.coverage_ratio)},"
        f" clock error {clock}; {format_account(quality.account)}"
    )
    if most := format_most_dropped(quality.account_by_rank):
        summary += f" ({most})"
    lines = wrap(summary, width, break_on_hyphens=False)
    for warning in quality.warnings:
        lines.extend(_paragraph(warning, width, mark="! "))
    return lines


def _paragraph(text: str, width: int, *, mark: str = "") -> list[str]:
    return _wrap(text, width, INDENT + mark)


def _wrap(text: str, width: int, first: str) -> list[str]:
    """Return a text as lines of a width, the first with a prefix, the others indented like it."""
    return wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_on_hyphens=False,
    )


def _format_percent(ratio: float | None) -> str:
    return format_percent(ratio, digits=1)
