"""The diagnosis for a person at a terminal: the verdict first, then what it rests on."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

from rankscope.analysis.report.text import (
    MAX_NAMED,
    UNKNOWN,
    format_percent,
    format_range,
    format_ranges,
)

from .lines import aligned

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankscope.analysis.report.report import (
        Bandwidth,
        Finding,
        RunReport,
        Starved,
        WaterfallSummary,
    )

INDENT = "  "
MAX_STARVED = 10
MAX_BANDWIDTHS = 8
LEAST_BULK_BYTES = 100_000
"""Smaller transfers are all latency: their bandwidth says nothing."""

MAX_WAITS_ON = 3
LEAST_SHARE = 0.0005
"""A part of the waterfall that would print as 0.0 % is left out."""


def report_text(
    report: RunReport, *, verdict: str, width: int, follows: tuple[str, ...] = ()
) -> str:
    """Return the diagnosis as lines of at most ``width`` columns, tables excepted.

    Args:
        report: The finished diagnosis.
        verdict: It in one sentence.
        width: Columns of the terminal.
        follows: For each finding, whether it follows its host or its position, "" where nothing is
            known of it; empty: of none.
    """
    blocks = [
        wrap(verdict, width),
        wrap(_what_was_seen(report), width),
        _times(report, width),
        _findings(report.findings, follows or ("",) * len(report.findings), width),
        _starved(report.starved),
        _waterfall(report.waterfall, width),
        _bandwidth(report.bandwidth),
        _quality(report, width),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _what_was_seen(report: RunReport) -> str:
    sizes = report.layout.to_dict().items()
    axes = [f"{axis} {size}" for axis, size in sizes if size > 1]
    layout = f" ({' x '.join(axes)})" if axes else "" if report.has_layout else " (layout not told)"
    steps = f"{len(report.steps)} steps"
    if report.steps:
        steps += f" ({report.steps[0]} to {report.steps[-1]})"
    spans = f"{report.num_spans:,} spans"
    parts = [f"run {report.run}: {report.world_size:,} ranks{layout}, {steps}, {spans}"]
    if len(report.epochs) > 1:
        parts.append(f"{len(report.epochs)} epochs")
    if report.paced:
        parts.append("paced: the trainer padded its compute to set times")
    if report.warmup_steps:
        parts.append(f"warm-up left out: {_steps(report.warmup_steps)}")
    return "; ".join(parts)


def _times(report: RunReport, width: int) -> list[str]:
    times = report.step_time_s
    rows = [
        (
            "step time",
            f"actual {_seconds(times.actual)}",
            f"replayed {_seconds(times.replayed)}",
            f"ideal {_seconds(times.ideal)}",
        ),
        (
            "slowdown",
            f"S {_number(report.slowdown)}",
            f"waste {_percent(report.waste_ratio)}",
            f"M_W {_number(report.m_w)}, M_S {_number(report.m_s)}",
        ),
        (
            "replay",
            f"launch {_number(report.launch_slowdown)}",
            f"error {_percent(report.replay_error_ratio)}",
            "",
        ),
    ]
    lines = aligned(rows[0], rows[1:])
    lines += wrap(_culprits(report), width, subsequent_indent=" " * 11)
    mfu = report.mfu
    told = UNKNOWN if mfu is None else f"mean {_percent(mfu.mean)} ({mfu.convention})"
    return [*lines, *wrap(f"MFU        {told}", width, subsequent_indent=" " * 11)]


def _culprits(report: RunReport) -> str:
    """Say how often the paper's shortcut for S_w and the exact value blame different workers."""
    found = report.culprits
    if found is None:
        return ""
    told = (
        f"worst S_w  shortcut and exact value name different workers in {found.num_different:,} of"
        f" {found.num_steps:,} steps; over all steps "
    )
    shortcut, exact = _worker(report, found.by_shortcut), _worker(report, found.by_exact)
    return f"{told}both {exact}" if shortcut == exact else f"{told}{shortcut} and {exact}"


def _worker(report: RunReport, worker: tuple[int, int]) -> str:
    dp, stage = worker
    return f"dp {dp}, stage {stage}" if report.has_layout else f"rank {dp}"


def _findings(findings: tuple[Finding, ...], follows: tuple[str, ...], width: int) -> list[str]:
    header = ("finding", "ranks", "steps", "slowdown", "recoverable", "confidence")
    rows = [
        (
            finding.cause,
            format_ranges(finding.ranks, max_ranges=MAX_NAMED),
            format_range(finding.steps),
            _number(finding.slowdown),
            _percent(finding.recoverable_ratio),
            f"{finding.confidence:.2f}",
        )
        for finding in findings
    ]
    head, *lines = aligned(header, rows, right="lllrrr")
    body = [head]
    for line, finding, followed in zip(lines, findings, follows, strict=True):
        body.append(line)
        body.extend(_paragraph(finding.evidence, width))
        body.extend(_paragraph(followed, width))
    return body


def _starved(starved: tuple[Starved, ...]) -> list[str]:
    if not starved:
        return []
    rows = [
        (
            str(rank.rank),
            _percent(rank.wait_ratio),
            ", ".join(
                f"rank {root.rank} {_percent(root.ratio)}" for root in rank.waits_on[:MAX_WAITS_ON]
            )
            or UNKNOWN,
        )
        for rank in starved[:MAX_STARVED]
    ]
    lines = aligned(("waiting rank", "of the step", "on"), rows, right="rrl")
    if len(starved) > MAX_STARVED:
        lines.append(f"{INDENT}and {len(starved) - MAX_STARVED:,} more")
    return lines


def _bandwidth(found: tuple[Bandwidth, ...]) -> list[str]:
    bulky = (one for one in found if one.num_bytes >= LEAST_BULK_BYTES)
    largest = sorted(bulky, key=lambda one: -one.num_bytes * one.num_instances)[:MAX_BANDWIDTHS]
    if not largest:
        return []
    rows = [
        (
            one.name if one.kind in one.name else f"{one.kind} {one.name}",
            str(one.num_members),
            {True: "several", False: "one", None: UNKNOWN}[one.across_hosts],
            f"{one.num_bytes / 1e6:.3g}",
            f"{one.transfer_ns / 1e6:.3g}",
            f"{one.algorithm_bytes_per_s / 1e9:.3g}",
            UNKNOWN if one.bus_bytes_per_s is None else f"{one.bus_bytes_per_s / 1e9:.3g}",
        )
        for one in largest
    ]
    header = ("transfer", "ranks", "hosts", "MB", "median ms", "GB/s", "bus GB/s")
    return aligned(header, rows, right="lrlrrrr")


def _waterfall(waterfall: WaterfallSummary | None, width: int) -> list[str]:
    if waterfall is None:
        return []
    rows = [
        (_part_name(part), _percent(ratio), _about_part(part, waterfall))
        for part, ratio in waterfall.mean_ratio.items()
        if ratio is None or ratio >= LEAST_SHARE
    ]
    lines = aligned(("where the time goes", "of it", ""), rows, right="lr")
    bubble = waterfall.bubble
    if bubble is None:
        return lines
    told = (
        f"bubble: {_percent(bubble.measured_ratio)} of the useful compute;"
        f" (p - 1) / (v m) is {_percent(bubble.formula_ratio)} for p = {bubble.num_stages} stages,"
        f" v = {bubble.num_chunks}, m = {bubble.num_microbatches}"
    )
    return [*lines, *_paragraph(told, width)]


def _part_name(part: str) -> str:
    if part.startswith("bubble_"):
        return f"bubble, {part.removeprefix('bubble_').replace('_', '-')}"
    return part.replace("_", " ")


def _about_part(part: str, waterfall: WaterfallSummary) -> str:
    if part != "waiting":
        return ""
    shown = [entry for entry in waterfall.waiting_on if entry.ratio >= LEAST_SHARE][:MAX_WAITS_ON]
    return ", ".join(f"on rank {entry.rank} {_percent(entry.ratio)}" for entry in shown)


def _quality(report: RunReport, width: int) -> list[str]:
    quality = report.quality
    error_ns = quality.clock_error_ns
    clock = UNKNOWN if error_ns is None else f"{error_ns / 1e3:.3g} us"
    summary = (
        f"quality: coverage {_percent(quality.coverage_ratio)},"
        f" dropped spans {quality.dropped_spans:,}, clock error {clock}"
    )
    lines = wrap(summary, width)
    for warning in quality.warnings:
        lines.extend(_paragraph(warning, width, mark="! "))
    return lines


def _paragraph(text: str, width: int, *, mark: str = "") -> list[str]:
    first = INDENT + mark
    return wrap(text, width, initial_indent=first, subsequent_indent=" " * len(first))


def _steps(steps: Iterable[int]) -> str:
    return f"steps {format_ranges(sorted(steps))}"


def _seconds(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{seconds:.4g} s"


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}"


def _percent(ratio: float | None) -> str:
    return format_percent(ratio, digits=1)
