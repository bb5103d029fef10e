"""The words of the overview: verdict, key figures, findings, who starves, data quality."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import dash_mantine_components as dmc  # type: ignore[import-untyped]
from dash import dcc, html

from rankscope.analysis.report.liveness import RECENT_NS, SILENT_NS, RankLiveness, SilentRank
from rankscope.analysis.report.text import (
    MAX_NAMED,
    UNKNOWN,
    format_count,
    format_duration,
    format_percent,
    format_range,
    format_ranges,
    format_seconds,
    format_slowdown,
)
from rankscope.tracer.span import NS_PER_S

from ..address import Page, View, write_address
from ..text import visible
from .components import card, labelled
from .placeholders import known_figures

if TYPE_CHECKING:
    from dash.development.base_component import Component

    from rankscope.analysis.report.progress import AnalysisFailed, AnalysisInProgress
    from rankscope.analysis.report.report import Finding, RunReport, Starved

_CALM = {"healthy": "calm", "insufficient-evidence": "unsure"}
_CAUSE = re.compile(r"(\([a-z]+(?:-[a-z]+)+\)\.?)")
"""A cause as the verdict names it, with its brackets and the full stop behind them."""

_MOST_STARVED = 8
_MOST_BLAMED = 2
_MOST_WARNINGS = 12


def verdict_card(
    report: RunReport, sentence: str, *, num_spans: int | None = None
) -> list[Component]:
    """Return the verdict in large words, and what it rests on in small ones.

    Args:
        report: The diagnosis.
        sentence: It in one sentence.
        num_spans: Of the whole run; None: not known.
    """
    top = report.top_finding
    sizes = " x ".join(
        f"{axis.upper()} {size}" for axis, size in report.layout.to_dict().items() if size > 1
    )
    facts = [
        format_count(report.world_size, "rank"),
        sizes or ("no parallel axis" if report.has_layout else "layout not told"),
        *_analysed(report, num_spans),
        f"confidence {top.confidence:.2f}",
    ]
    return [
        html.Div(
            [
                html.P(top.cause, className="verdict-cause"),
                html.H1(unbroken(visible_sentence(sentence)), className="verdict-sentence"),
                html.P([html.Span(fact) for fact in facts], className="facts"),
            ],
            className=f"verdict {_CALM.get(top.cause, 'alarm')}",
        )
    ]


def _analysed(report: RunReport, num_spans: int | None) -> list[str]:
    """Say of how many steps and spans the verdict speaks, and where these are not all."""
    if not report.num_earlier_steps:
        return [format_count(len(report.steps), "step"), format_count(report.num_spans, "span")]
    known = "" if num_spans is None else f" of {num_spans:,}"
    return [f"{_last_steps(report)} analysed", f"{report.num_spans:,}{known} spans"]


def _last_steps(report: RunReport) -> str:
    num = len(report.steps)
    which = "last step" if num == 1 else f"last {num:,} steps"
    return f"{which} of {num + report.num_earlier_steps:,}"


def key_figures(report: RunReport) -> list[Component]:
    """Return the run's numbers, each with what it means."""
    mfu = None if report.mfu is None else report.mfu.mean
    return [
        _figure("step time", format_seconds(report.step_time_s.actual), "mean, recorded"),
        _figure("ideal", format_seconds(report.step_time_s.ideal), "all ranks alike"),
        _figure("slowdown", format_slowdown(report.slowdown), "replayed over ideal"),
        _figure("waste", format_percent(report.waste_ratio, digits=1), "of GPU time"),
        _figure("MFU", format_percent(mfu, digits=1), "mean" if report.mfu else mfu_reason(report)),
        _figure("launch", format_slowdown(report.launch_slowdown), "recorded over replayed"),
    ]


def early_figures(found: AnalysisInProgress | AnalysisFailed) -> list[Component]:
    """Return those of the run's numbers that need no diagnosis."""
    return [_figure(*words) for words in known_figures(found)]


def mfu_reason(report: RunReport) -> str:
    """Say why the run has no MFU."""
    warnings = report.quality.warnings
    said = next((warning for warning in warnings if warning.startswith("MFU")), None)
    if said is not None:
        return visible(said)
    if not report.has_layout:
        return "the parallel layout is unknown"
    return "FLOPs per token or the device's peak are unknown"


def findings_table(report: RunReport, *, base_path: str) -> Component:
    """Return the findings as rows, the largest share first."""
    head = {
        "cause": "",
        "ranks": "",
        "steps": "",
        "slowdown": "number",
        "recoverable": "number",
        "confidence": "number",
        "evidence": "",
    }
    return html.Div(
        dmc.Table(
            [
                dmc.TableThead(
                    dmc.TableTr(
                        [dmc.TableTh(word, className=style) for word, style in head.items()]
                    )
                ),
                dmc.TableTbody(
                    [_finding(report, finding, base_path) for finding in report.findings]
                ),
            ],
            tabularNums=True,
            verticalSpacing="xs",
            className="findings",
        ),
        className="scrolls",
        tabIndex=0,
        role="region",
        **labelled("findings"),
    )


def starved_list(starved: tuple[Starved, ...]) -> list[Component]:
    """Return the ranks that wait most, each with those it waits for."""
    if not starved:
        return [html.P("No rank waits for another beyond the noise.", className="quiet")]
    top = sorted(starved, key=lambda one: -one.wait_ratio)[:_MOST_STARVED]
    rows: list[Component] = [_starved(one) for one in top]
    if len(starved) > len(top):
        more = f"{len(top)} of {len(starved):,} waiting ranks, the longest waits first."
        rows.append(html.P(more, className="quiet"))
    return rows


def quality_list(report: RunReport) -> list[Component]:
    """Return how far the result can be trusted."""
    quality = report.quality
    clock = quality.clock_error_ns
    rows = [
        ("dropped spans", f"{quality.dropped_spans:,}", quality.dropped_spans > 0),
        ("clock error", UNKNOWN if clock is None else f"± {format_duration(clock)}", clock is None),
        (
            "coverage",
            format_percent(quality.coverage_ratio, digits=1),
            (quality.coverage_ratio or 0) < 1,
        ),
        ("replay error", format_percent(report.replay_error_ratio, digits=2), False),
        ("epochs", ", ".join(map(str, report.epochs)), len(report.epochs) > 1),
    ]
    parts: list[Component] = [
        html.Dl(
            [
                html.Div([html.Dt(word), html.Dd(value, className="attention" if bad else "")])
                for word, value, bad in rows
            ],
            className="pairs",
        )
    ]
    if report.mfu is not None:
        parts.append(html.P(f"MFU: {visible(report.mfu.convention)}", className="quiet"))
    return parts + _notices(report)


def visible_sentence(sentence: str) -> str:
    """Return a long sentence from outside, inert and uncut."""
    return " ".join(visible(word) for word in sentence.split())


def unbroken(sentence: str) -> list[Component | str]:
    """Return the sentence with its names of causes in one piece: no line ends at their hyphens."""
    parts = _CAUSE.split(sentence)
    return [
        html.Span(part, className="unbroken") if place % 2 else part
        for place, part in enumerate(parts)
        if part
    ]


def _notices(report: RunReport) -> list[Component]:
    notices = list(report.quality.warnings[:_MOST_WARNINGS])
    if len(report.quality.warnings) > _MOST_WARNINGS:
        notices.append(f"{len(report.quality.warnings) - _MOST_WARNINGS} more warnings")
    if report.paced:
        notices.insert(
            0,
            "Paced run: the trainer padded its compute segments to a set time, because the"
            " machine has fewer cores than ranks. Times show the pads, not the hardware.",
        )
    if report.num_earlier_steps:
        notices.append(
            f"Long run: verdict, ideal and findings are of the {_last_steps(report)}, as many as"
            " are analysed at once. MFU is of all."
        )
    if report.warmup_steps:
        span = format_range((min(report.warmup_steps), max(report.warmup_steps)))
        notices.append(f"Start-up (step {span}) is shown, and left out of the diagnosis.")
    return [html.Ul([html.Li(visible_sentence(notice)) for notice in notices], className="notices")]


def _figure(word: str, value: str, meaning: str) -> Component:
    return html.Div(
        [
            html.Span(word, className="figure-word"),
            html.Span(value, className="figure-value"),
            html.Span(meaning, className="figure-meaning", title=meaning),
        ],
        className="figure",
    )


def _finding(report: RunReport, finding: Finding, base_path: str) -> Component:
    cells = [
        dmc.TableTd(html.Span(finding.cause, className=f"cause {_CALM.get(finding.cause, '')}")),
        dmc.TableTd(format_ranges(finding.ranks, max_ranges=MAX_NAMED), className="of-ranks"),
        dmc.TableTd(_steps_link(report, finding, base_path), className="steps"),
        dmc.TableTd(format_slowdown(finding.slowdown), className="number of-slowdown"),
        dmc.TableTd(format_percent(finding.recoverable_ratio), className="number of-recoverable"),
        dmc.TableTd(f"{finding.confidence:.2f}", className="number of-confidence"),
        dmc.TableTd(visible_sentence(finding.evidence), className="evidence"),
    ]
    row: Component = dmc.TableTr(cells)
    return row


def _steps_link(report: RunReport, finding: Finding, base_path: str) -> Component | str:
    if finding.steps is None:
        return format_range(None)
    view = View(page=Page.TIMELINE, run=report.run, epoch=report.epochs[-1], step=finding.steps[1])
    return dcc.Link(
        format_range(finding.steps),
        href=write_address(view, base_path=base_path),
        title=f"Show step {finding.steps[1]} on the timeline",
    )


def _starved(one: Starved) -> Component:
    blamed = ", ".join(
        f"rank {on.rank} ({format_percent(on.ratio)})" for on in one.waits_on[:_MOST_BLAMED]
    )
    width = f"{100 * min(max(one.wait_ratio, 0.0), 1.0):.1f}%"
    return html.Div(
        [
            html.Span(f"rank {one.rank}", className="starved-rank"),
            html.Span(
                html.Span(className="bar-fill", style={"width": width}), className="bar-track"
            ),
            html.Span(format_percent(one.wait_ratio), className="starved-ratio"),
            html.Span(f"on {blamed}" if blamed else "on nobody known", className="starved-on"),
        ],
        className="starved",
    )


MINUTE_S, HOUR_S = 60, 3600
HEAD = {"rank": "number", "host": "", "state": "", "step": "number", "silent for": "number"}


def heard_card(heard: RankLiveness | None) -> list[Component]:
    """Return nothing where nobody tells of a rank, or none is heard: the run says that itself."""
    if heard is None or heard.num_silent == heard.num_ranks:
        return []
    if not heard.is_uneven:
        line = (
            f"{heard.num_recent:,} of {format_count(heard.num_ranks, 'rank')} heard within"
            f" {RECENT_NS // NS_PER_S} s"
        )
        return [html.P(line, className="quiet all-heard")]
    return [
        card(
            html.H2("Last heard"),
            html.P(_sentence(heard), className="about"),
            html.Div(
                _table(heard.silent),
                className="scrolls",
                tabIndex=0,
                role="region",
                **labelled("ranks that fell silent"),
            ),
            class_name="heard",
        )
    ]


def age_text(age_ns: int) -> str:
    """Return how long ago something was, in the two units that count."""
    seconds = age_ns // NS_PER_S
    if seconds < MINUTE_S:
        return f"{seconds} s"
    if seconds < HOUR_S:
        return f"{seconds // MINUTE_S} min {seconds % MINUTE_S} s"
    return f"{seconds // HOUR_S:,} h {seconds % HOUR_S // MINUTE_S} min"


def _sentence(heard: RankLiveness) -> str:
    told = (
        f"{heard.num_silent:,} of {format_count(heard.num_ranks, 'rank')} silent for more than"
        f" {SILENT_NS // NS_PER_S} s, while {heard.num_recent:,} were heard within"
        f" {RECENT_NS // NS_PER_S} s."
    )
    if heard.num_silent > len(heard.silent):
        told += f" The {len(heard.silent)} longest silences:"
    return told


def _table(silent: tuple[SilentRank, ...]) -> Component:
    table: Component = dmc.Table(
        [
            dmc.TableThead(
                dmc.TableTr([dmc.TableTh(word, className=style) for word, style in HEAD.items()])
            ),
            dmc.TableTbody([_row(one) for one in silent]),
        ],
        tabularNums=True,
        verticalSpacing=1,
        className="silent-ranks",
    )
    return table


def _row(one: SilentRank) -> Component:
    row: Component = dmc.TableTr(
        [
            dmc.TableTd(str(one.rank), className="number"),
            dmc.TableTd(visible(one.host)),
            dmc.TableTd(visible(one.state)),
            dmc.TableTd(UNKNOWN if one.step is None else f"{one.step:,}", className="number"),
            dmc.TableTd(age_text(one.age_ns), className="number"),
        ]
    )
    return row
