"""Text of a diagnosis for a terminal: the verdict first, then the numbers behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.analysis.report.advice import advise
from rankscope.analysis.report.report import MfuShapeName, Severity
from rankscope.analysis.report.text import (
    FINDING_COLUMNS,
    MAX_NAMED,
    UNKNOWN,
    format_account,
    format_bytes,
    format_count,
    format_duration,
    format_excluded,
    format_finding,
    format_hfu,
    format_most_dropped,
    format_part,
    format_percent,
    format_ranges,
    format_seconds,
    format_slowdown,
    format_steps,
    format_time,
)
from rankscope.analysis.severity import MATTERS, ends_run
from rankscope.tracer.span import NONE

from .device_time_text import device_time_lines, kernel_lines
from .goodput_text import goodput_lines
from .lines import DEFAULT_TOP, format_rows, format_table, printable, wrap_text

if TYPE_CHECKING:
    from rankscope.analysis.goodput import Goodput
    from rankscope.analysis.report.report import (
        Bandwidth,
        RunReport,
        Starved,
        WaterfallSummary,
    )

    from .rank_states import RankState

INDENT = "  "
LABEL_WIDTH = 13
ADVICE_WIDTH = 9
MIN_BANDWIDTH_BYTES = 100_000
"""The time of smaller transfers is mostly latency, so their bandwidth means nothing."""

MAX_OPEN = 2
"""Open spans of a rank in a table, the innermost ones."""

MAX_WAITS_ON = 3
MIN_RATIO = 0.0005
"""Smaller parts of the waterfall would be printed as 0.0 %."""

MIN_WAIT_RATIO = 0.005
"""A rank that others wait for less explains nothing of a step."""

FINDING_ALIGNED = "lkllrr"

LEGEND = (
    "GPU slowdown: replayed over ideal step time; replayed is without the delays of the hosts.",
    "Host delays: recorded over replayed step time. Replay error: that of a replay with them.",
    "M_W, M_S, the paper's estimate: arXiv 2505.05713; beyond 0 to 100 % another path is critical.",
    "GB/s: size over median time. Bus GB/s: what each link carried, as in nccl-tests.",
)
"""Meaning of the figures of the details."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The parts of a report that are printed."""

    top: int = DEFAULT_TOP
    """Findings, waiting ranks and transfers that are listed before the rest is counted."""

    rank: int | None = None
    """The only rank to print; None: all."""

    has_details: bool = False
    """Whether the figures of the replay and the bandwidths are printed."""

    table_width: int | None = None
    """Columns that a table may take; None: any."""

    states: tuple[RankState, ...] = ()
    """What ranks were doing at the end of a run that hung or crashed."""

    notes: tuple[str, ...] = ()
    """Sentences about hosts of the run that were excluded."""

    goodput: Goodput | None = None
    """Its parts are printed with details, or if the job was restarted."""


DEFAULT_VIEW = View()


def report_text(
    report: RunReport,
    *,
    verdict: str,
    width: int,
    follows: tuple[str, ...] = (),
    view: View = DEFAULT_VIEW,
) -> str:
    """Return a diagnosis as lines of at most ``width`` columns.

    Args:
        report: The diagnosis.
        verdict: The diagnosis in one sentence; the first lines, up to an empty one.
        width: Columns of the terminal.
        follows: A sentence for each finding about whether it follows its host or its position; ""
            if unknown. Empty if all are unknown.
        view: What is printed.
    """
    blocks = [wrap_text(verdict, width)]
    follows = follows or ("",) * len(report.findings)
    if view.rank is not None:
        blocks += [wrap_text(_format_run(report), width), _format_rank(report, view.rank, width)]
        blocks += [_format_state(state) for state in view.states if state.rank == view.rank]
    else:
        blocks += [
            _format_findings(report, follows, width, view),
            _format_advice(report, width),
            _format_states(view),
            [line for note in view.notes for line in wrap_text(note, width)],
            wrap_text(_format_run(report), width),
            _format_times(report, width, view),
            goodput_lines(
                view.goodput,
                width=width,
                is_whole=view.has_details or len(report.epochs) > 1,
                table_width=view.table_width,
            ),
        ]
        if _explains_waiting(report) or view.has_details:
            blocks.append(_format_starved(report, view))
        if not ends_run(report.top_finding) or view.has_details:
            blocks.append(_format_waterfall(report, width, view))
    blocks.append(device_time_lines(report.device_time, view.rank, width=view.table_width))
    if view.rank is None:
        blocks.append(kernel_lines(report.kernels, top=view.top, width=view.table_width))
    if view.has_details:
        legend = [line for text in LEGEND for line in _paragraph(text, width)]
        blocks += [_format_bandwidth(report.bandwidth, view), legend]
    blocks.append(_format_quality(report, width))
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _format_states(view: View) -> list[str]:
    """Return in what the ranks were at the end, those alike in one row."""
    alike: dict[tuple[str, str], list[int]] = {}
    for state in view.states:
        inside = ", ".join(map(str, state.open[-MAX_OPEN:])) or "nothing recorded"
        alike.setdefault((inside, state.place or UNKNOWN), []).append(state.rank)
    if not alike:
        return []
    rows = [
        (format_ranges(ranks, max_ranges=MAX_NAMED), inside, printable(place))
        for (inside, place), ranks in sorted(alike.items(), key=lambda entry: len(entry[1]))
    ]
    header = ("ranks at the end", "inside", "at")
    lines = format_table(header, rows[: view.top], width=view.table_width)
    return [*lines, *_count_rest(len(rows), view.top)]


def _format_state(state: RankState) -> list[str]:
    """Return the open spans and the stack of one rank at the end."""
    lines = ["inside at the end, the outermost first"] if state.open else []
    lines += [
        f"{INDENT}{span}, step {span.step}, since {format_time(span.start_ns or None)} UTC"
        for span in state.open
    ]
    lines += ["stack at the end, the innermost first"] if state.frames else []
    return [*lines, *(f"{INDENT}{printable(frame)}" for frame in state.frames)]


def _format_shape(report: RunReport) -> str:
    shape = report.mfu_shape
    if shape is None or shape.name is MfuShapeName.STEADY:
        return ""
    causes = f" (typically {shape.causes})" if shape.causes else ""
    return f"; shape: {shape.name}, {shape.text}{causes}"


def _explains_waiting(report: RunReport) -> bool:
    """Return whether ranks wait for what the top finding names.

    A healthy run waits in its bubble; before a hang or a crash, steps were as usual.
    """
    top = report.top_finding
    return top.severity is not Severity.NONE and not ends_run(top)


def _format_rank(report: RunReport, rank: int, width: int) -> list[str]:
    """Return what is known of one rank: position, findings, waiting both ways, its time."""
    coords = report.coords[rank]
    place = f" (dp {coords.dp}, stage {coords.pp}, tp {coords.tp})" if report.has_layout else ""
    own = next((each for each in report.starved if each.rank == rank), None)
    due = {
        each.rank: sum(on.ratio for on in each.waits_on if report.is_due_to(on, rank))
        for each in report.starved
        if each.rank != rank
    }
    held_up = {each: ratio for each, ratio in due.items() if ratio > 0}
    worst = sorted(held_up, key=lambda each: -held_up[each])[:MAX_WAITS_ON]
    named = [finding.cause for finding in report.findings if rank in finding.ranks]
    rows = {
        "findings": ", ".join(named) or "none names it",
        "waits": "for no other rank"
        if own is None
        else f"{_format_percent(own.wait_ratio)} of each step: {_format_roots(report, own)}",
        "holds up": ", ".join(
            f"rank {each} {_format_percent(held_up[each])}" for each in worst
        ) + (f" and {len(held_up) - len(worst):,} more" if len(held_up) > len(worst) else "")
        or "no other rank",
        "its time": _format_own_time(report.waterfall, rank),
    }  # fmt: skip
    if place_text := _format_place(report, rank):
        rows = {"host": place_text, **rows}
    moves = [each.steps for each in report.placements if rank in each.of_rank]
    if len(moves) > 1:
        unknown = f"{UNKNOWN} over several hosts: give --steps {moves[-1][0]}:{moves[-1][-1]}"
        rows |= dict.fromkeys(("waits", "holds up", "its time"), unknown)
    lines = [f"rank {rank}{place}"]
    for label, text in rows.items():
        lines += wrap_text(text, width, first=INDENT + label.ljust(LABEL_WIDTH))
    return lines


def _format_place(report: RunReport, rank: int) -> str:
    """Return the host and the device of a rank; of one that a restart moved, in which steps."""
    known = [
        (each.steps, *each.of_rank[rank]) for each in report.placements if rank in each.of_rank
    ]
    texts = [
        f"{host}{f', local rank {local_rank}' if local_rank != NONE else ''}"
        + (f" in {format_steps((steps[0], steps[-1]))}" if len(known) > 1 else "")
        for steps, host, local_rank in known
        if host
    ]
    return "; ".join(texts)


def _format_own_time(waterfall: WaterfallSummary | None, rank: int) -> str:
    if waterfall is None or rank not in waterfall.ranks:
        return UNKNOWN
    own = waterfall.by_rank_ns[waterfall.ranks.index(rank)].tolist()
    total = sum(own)
    shares = [
        f"{format_part(part)} {_format_percent(time / total)}"
        for part, time in zip(waterfall.parts, own, strict=True)
        if total and time / total >= MIN_RATIO
    ]
    return "; ".join(shares) or UNKNOWN


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
    parts += [f"{name.lower()}: {steps}" for name, steps in format_excluded(report)]
    return "; ".join(parts)


def _format_times(report: RunReport, width: int, view: View) -> list[str]:
    times, mfu = report.step_time_s, report.mfu
    ideal_s = report.reachable_step_s
    whole = times.actual / ideal_s if times.actual and ideal_s else None
    usual = "if every rank ran like the median"
    lost = "" if whole is None else f": {_format_percent(1 - 1 / whole)} of the step time is lost"
    if len(report.coords) == 1:
        usual, lost = "in its faster steps", " of these"
    rows = {
        "step time": f"{format_seconds(times.actual)}; {format_seconds(ideal_s)} {usual}",
        "slowdown": UNKNOWN if whole is None else f"{format_slowdown(whole)}{lost}",
        "MFU": f"{UNKNOWN}: {report.missing_mfu}"
        if mfu is None
        else f"{_format_percent(mfu.mean)}{format_hfu(mfu.mean, mfu.hfu)} ({mfu.convention})"
        f"{_format_shape(report)}",
        "memory": "" if report.memory is None else report.memory.text,
    }
    if view.has_details:
        rows |= {
            "GPU slowdown": f"{format_slowdown(report.slowdown)}:"
            f" {_format_percent(report.waste_ratio)} of the replayed"
            f" {format_seconds(times.replayed)} is lost",
            "host delays": f"{format_slowdown(report.launch_slowdown)}; replay error"
            f" {_format_percent(report.replay_error_ratio)}",
            "recoverable": ""
            if report.m_w is None
            else f"{_format_percent(report.m_w)} of the lost time by fixing the worst 3 % of the"
            " workers (M_W)"
            + (
                f", {_format_percent(report.m_s)} by fixing the last stage (M_S)"
                if report.m_s is not None
                else ""
            ),
            "worst worker": _format_culprits(report),
        }
    lines = []
    for label, text in rows.items():
        if text:
            lines += wrap_text(text, width, first=label.ljust(LABEL_WIDTH))
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
    report: RunReport, follows: tuple[str, ...], width: int, view: View
) -> list[str]:
    """Return the findings; none if the verdict has said all that the only one says."""
    findings = report.findings
    if len(findings) == 1 and findings[0].severity is Severity.NONE and not view.has_details:
        return []
    rows = [format_finding(finding, report.price(finding)) for finding in findings[: view.top]]
    head, *lines = format_rows(FINDING_COLUMNS, rows, right=FINDING_ALIGNED, width=view.table_width)
    body = head.split("\n")
    for line, finding, followed in zip(lines, findings, follows, strict=False):
        body.extend(line.split("\n"))
        body.extend(_paragraph(finding.evidence, width))
        for note in finding.host_notes:
            body.extend(_paragraph(f"{note.source}: {printable(note.text)}", width, mark="- "))
        body.extend(_paragraph(followed, width))
    return [*body, *_count_rest(len(findings), view.top)]


def _format_advice(report: RunReport, width: int) -> list[str]:
    """Return what to do about the top finding; nothing if it does not matter."""
    top = report.top_finding
    advice = advise(top.cause, run=report.run, ranks=top.ranks, hosts=top.hosts)
    if advice is None or top.severity not in MATTERS:
        return []
    lines = [f"what to do about {top.cause}"]
    labels = ("drain?", "confirm", "do", "call")
    for label, (_, text) in zip(labels, advice.parts, strict=True):
        lines += wrap_text(text.replace("`", ""), width, first=INDENT + label.ljust(ADVICE_WIDTH))
    # Not wrapped: a command is copied as a whole.
    return [*lines, *(f"{INDENT}$ {printable(command)}" for command in advice.commands)]


def _format_starved(report: RunReport, view: View) -> list[str]:
    starved = report.longest_waits
    if not starved:
        return []
    rows = [
        (str(rank.rank), _format_percent(rank.wait_ratio), _format_roots(report, rank))
        for rank in starved[: view.top]
    ]
    header = ("waiting rank", "share of step", "waits for")
    lines = format_table(header, rows, right="rrl", width=view.table_width)
    return [*lines, *_count_rest(len(starved), view.top)]


def _format_roots(report: RunReport, starved: Starved) -> str:
    roots = [
        f"{report.name_waited_for(root)} {_format_percent(root.ratio)}"
        for root in starved.waits_on[:MAX_WAITS_ON]
    ]
    return ", ".join(roots) or UNKNOWN


def _count_rest(num: int, top: int) -> list[str]:
    return [f"{INDENT}and {num - top:,} more (--top {num})"] if num > top else []


def _format_bandwidth(found: tuple[Bandwidth, ...], view: View) -> list[str]:
    large = (one for one in found if one.num_bytes >= MIN_BANDWIDTH_BYTES)
    largest = sorted(large, key=lambda one: -one.num_bytes * one.num_instances)[: view.top]
    if not largest:
        return []
    rows = [
        (
            one.name if one.kind in one.name else f"{one.kind} {one.name}",
            str(one.num_members),
            {True: "several", False: "one", None: UNKNOWN}[one.across_hosts],
            format_bytes(one.num_bytes),
            format_duration(one.transfer_ns),
            f"{one.algorithm_bytes_per_s / 1e9:.3g}",
            UNKNOWN if one.bus_bytes_per_s is None else f"{one.bus_bytes_per_s / 1e9:.3g}",
        )
        for one in largest
    ]
    header = ("transfer", "ranks", "hosts", "size", "median", "GB/s", "bus GB/s")
    return format_table(header, rows, right="lrlrrrr", width=view.table_width)


def _format_waterfall(report: RunReport, width: int, view: View) -> list[str]:
    waterfall = report.waterfall
    if waterfall is None:
        return []
    rows = [
        (format_part(part), _format_percent(ratio), _format_waits(part, report, waterfall))
        for part, ratio in waterfall.mean_ratio.items()
        if ratio is None or ratio >= MIN_RATIO
    ]
    header = ("part of the step time", "share", "")
    lines = format_table(header, rows, right="lrl", width=view.table_width)
    bubble = waterfall.bubble
    if bubble is None or not view.has_details:
        return lines
    text = (
        f"bubble: {_format_percent(bubble.measured_ratio)} of the useful compute; expected"
        f" {_format_percent(bubble.formula_ratio)} = {bubble.formula}"
    )
    return [*lines, *_paragraph(text, width)]


def _format_waits(part: str, report: RunReport, waterfall: WaterfallSummary) -> str:
    if part != "waiting":
        return ""
    shown = [entry for entry in waterfall.waiting_on if entry.ratio >= MIN_WAIT_RATIO][
        :MAX_WAITS_ON
    ]
    return ", ".join(
        f"for {report.name_waited_for(entry)} {_format_percent(entry.ratio)}" for entry in shown
    )


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
    lines = wrap_text(summary, width)
    for warning in quality.warnings:
        lines.extend(_paragraph(warning, width, mark="! "))
    return lines


def _paragraph(text: str, width: int, *, mark: str = "") -> list[str]:
    return wrap_text(text, width, first=INDENT + mark)


def _format_percent(ratio: float | None) -> str:
    return format_percent(ratio, digits=1)
