"""Cards of the overview: verdict, key figures, liveness, findings, waiting ranks, data quality."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import dash_mantine_components as dmc  # type: ignore[import-untyped]
from dash import dcc, html

from rankscope.analysis.report.advice import advise
from rankscope.analysis.report.liveness import RECENT_NS, SILENT_NS
from rankscope.analysis.report.report import NOT_MEASURED, Severity
from rankscope.analysis.report.text import (
    FINDING_COLUMNS,
    MAX_NAMED,
    UNKNOWN,
    format_age,
    format_count,
    format_duration,
    format_excluded,
    format_finding,
    format_most_dropped,
    format_percent,
    format_range,
    format_ranges,
    format_seconds,
)
from rankscope.analysis.severity import MATTERS, ends_run
from rankscope.tracer.span import NS_PER_S

from ..address import INCIDENT, View, view_finding, write_address
from ..text import escape
from .components import (
    card,
    decorative,
    link_ranks,
    rank_link,
    rank_links,
    table,
    with_code,
)
from .placeholders import known_figures
from .proof_picture import proof_picture

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dash.development.base_component import Component

    from rankscope.analysis.report.liveness import RankLiveness, StepSilence
    from rankscope.analysis.report.report import (
        Finding,
        Quality,
        RunReport,
        Starved,
    )
    from rankscope.dashboard.records.progress import AnalysisFailed, AnalysisInProgress

    from .components import Cell

_STYLE_BY_CAUSE = {"healthy": "calm", "insufficient-evidence": "unsure"}
_CAUSE = re.compile(r"(\([a-z]+(?:-[a-z]+)+\)\.?)")
"""A cause in a verdict, with its parentheses and the full stop behind them."""

_BEFORE_UNIT = re.compile(r"(?<=\d) (?=%|[mun]?s\b)")
"""Where a line of a large title must not end."""

_MAX_STARVED = 8
_MAX_WAITS_ON = 2
_MAX_WARNINGS = 12

_MAX_PROOFS = 5
"""Further findings whose proof can be opened."""

_MAX_PARTS = 4
"""Findings that are parts of their own in the bar of the step time."""


def verdict_card(
    report: RunReport,
    sentence: str,
    *,
    num_spans: int | None = None,
    silence: StepSilence | None = None,
    is_lost: bool = False,
) -> list[Component]:
    """Return the verdict in large letters, and its basis in small ones.

    The verdict is about steps that have ended. If no step ends any more, it is not shown as good.

    Args:
        num_spans: Spans of the whole run; None: unknown.
        silence: Since when a running job has ended no step; None: it goes on, or has ended.
        is_lost: Whether the run stopped reporting without an end.
    """
    top = report.top_finding
    sizes = " x ".join(
        f"{axis.upper()} {size}" for axis, size in report.layout.to_dict().items() if size > 1
    )
    cause = "no rank is slow" if top.severity is Severity.MINOR else top.cause
    style = cause_style(top.cause, top.severity)
    if style != "alarm" and (silence is not None or is_lost):
        cause, style = "lost" if is_lost else "silent", "unsure"
        after = f" after step {report.steps[-1]:,}" if report.steps else ""
        stop = f"The run stopped reporting{after}, without an end."
        sentence = f"{stop if is_lost else f'No step has ended{after}.'} Until then: {sentence}"
    # No figure below shows why a run ended, as they do the evidence of other findings.
    why = f"{top.evidence[:1].upper()}{top.evidence[1:]}." if ends_run(top) else ""
    reason = [html.P(_linked(report, why), className="verdict-reason")] if why else []
    facts = [
        format_count(report.world_size, "rank"),
        sizes or ("no parallel axis" if report.has_layout else "parallel layout unknown"),
        *_analysed(report, num_spans),
        f"confidence {top.confidence:.2f}",
    ]
    return [
        html.Div(
            [
                html.P(cause, className="verdict-cause"),
                html.H1(
                    _linked(report, _BEFORE_UNIT.sub("\u00a0", sentence)),
                    className="verdict-sentence",
                ),
                *reason,
                *_drain_line(report),
                html.P([html.Span(fact) for fact in facts], className="facts"),
            ],
            className=f"verdict {style}",
        )
    ]


def proof_cards(
    report: RunReport, *, incidents: Sequence[int | None] = (), beneath: Sequence[Component] = ()
) -> list[Component]:
    """Return what proves the top finding and what to do about it, and the same of the others.

    Of a healthy run, all that has a proof can be opened, such as its checkpoints; what is minor
    cannot.

    Args:
        incidents: Number of the incident of each finding, to which its proof leads; empty: to none.
        beneath: What follows the first picture, where advice longer than it leaves space.
    """
    number_of = dict(zip(map(id, report.findings), incidents, strict=False))

    def row(finding: Finding, beneath: Sequence[Component] = ()) -> Component:
        number = number_of.get(id(finding))
        return _proof_row(report, finding, incident=number, beneath=beneath)

    top = [finding for finding in report.findings if finding.severity in MATTERS][:1]
    others = [
        finding
        for finding in report.findings
        if finding not in top
        and (finding.severity in MATTERS or (finding.card and finding.severity is Severity.NONE))
    ]
    shown = [
        html.Details(
            [
                html.Summary(
                    [
                        html.Span(
                            finding.cause,
                            className=f"cause {cause_style(finding.cause, finding.severity)}",
                        ),
                        f" {format_ranges(finding.ranks, max_ranges=MAX_NAMED)}",
                    ]
                ),
                row(finding),
            ],
            className="more-proofs",
        )
        for finding in others[:_MAX_PROOFS]
    ]
    first = [row(finding, beneath) for finding in top]
    return [*(first or beneath), *shown]


def _proof_row(
    report: RunReport, finding: Finding, *, incident: int | None, beneath: Sequence[Component]
) -> Component:
    number = report.findings.index(finding)
    shown = proof_picture(f"overview-proof-{number}", report, finding)
    buttons: list[Component] = []
    if incident is not None:
        view = View(page=INCIDENT, run=report.run, show=str(incident))
        buttons.append(
            dcc.Link(
                "Incident: cost, history, notes", href=write_address(view), className="button small"
            )
        )
    if finding.steps:
        buttons.append(
            dcc.Link(
                ["Show it in the timeline", html.Kbd("P")],
                href=write_address(_place_of(report, finding)),
                className="button small proof-link",
            )
        )
    picture = card(
        html.Div([html.H2("Proof"), *buttons], className="titled"),
        html.P("No quantity shows it.", className="quiet") if shown is None else shown,
        *host_notes(report, finding),
        label=f"proof of {finding.cause}",
    )
    # On a phone and for a screen reader, the advice is before what follows.
    parts = [picture, *_advice_card(report, finding)]
    if beneath:
        parts.append(html.Div(list(beneath), className="beneath"))
    return html.Div(parts, className="proof-row")


def _drain_line(report: RunReport) -> list[Component]:
    """Return whether to take the host of the top finding out of use: the first decision."""
    top = report.top_finding
    advice = advise(top.cause, run=report.run, ranks=top.ranks, hosts=top.hosts)
    if advice is None or top.severity not in MATTERS:
        return []
    (question, answer), *_ = advice.parts
    text = [html.B(f"{escape(question)} "), *with_code(answer)]
    return [html.P(text, className="verdict-drain")]


def host_notes(report: RunReport, finding: Finding) -> list[Component]:
    """Return what the readings, logs and stacks of a finding's hosts say."""
    if not finding.host_notes:
        return []
    lines = [
        html.Li(
            [html.B(f"{note.source}: "), *link_ranks(escape_sentence(note.text), report.run)],
            className="quiet" if note.source == NOT_MEASURED else "",
        )
        for note in finding.host_notes
    ]
    return [html.Ul(lines, className="notices")]


def _advice_card(report: RunReport, finding: Finding) -> list[Component]:
    advice = advise(finding.cause, run=report.run, ranks=finding.ranks, hosts=finding.hosts)
    if advice is None:
        return []
    # That of the top finding is in the verdict.
    parts = advice.parts[1:] if finding is report.top_finding else advice.parts
    commands = "\n".join(escape_sentence(command) for command in advice.commands)
    more = format_count(advice.num_more_hosts, "more host")
    return [
        card(
            html.H2("What to do"),
            *(
                html.P([html.B(f"{escape(name)} "), *with_code(escape_sentence(text))])
                for name, text in parts
            ),
            *([html.Pre(commands, className="commands", tabIndex=0)] if commands else []),
            *([html.P(f"Likewise {more}.", className="quiet")] if advice.num_more_hosts else []),
            class_name="advice",
        )
    ]


def key_figures(report: RunReport) -> list[Component]:
    """Return the step time as a bar of its parts, and the MFU."""
    mfu = None if report.mfu is None else report.mfu.mean
    text = escape(report.missing_mfu.partition(":")[0])
    if report.mfu is not None:
        text = f"mean of {format_count(len(report.mfu.by_step), 'step')}"
    return [_step_bar(report), *_figures({"MFU": (format_percent(mfu, digits=1), text)})]


def missing_mfu(report: RunReport) -> str:
    """Return why the MFU is unknown, as a sentence; "" if it is known."""
    return "" if report.mfu else f"MFU {UNKNOWN}: {escape_sentence(report.missing_mfu)}."


def steps_note(report: RunReport) -> str:
    """Return what the figure of step time and MFU lacks, and why; "" if it is complete."""
    covers = f"Step time covers only the {last_steps(report)}."
    return " ".join(filter(None, [covers if report.num_earlier_steps else "", missing_mfu(report)]))


def _step_bar(report: RunReport) -> Component:
    """Return the mean step time as a bar: its ideal, the loss by each finding, and the rest."""
    word = f"step time, mean of the {last_steps(report)}" if report.num_earlier_steps else ""
    head = [
        html.Span(word or "step time", className="figure-word"),
        html.Span(format_seconds(report.step_time_s.actual), className="figure-value"),
    ]
    parts = report.step_parts
    if not parts:
        reason = html.Span("recorded mean; no step could be replayed", className="figure-meaning")
        return html.Div([*head, reason], className="figure step-parts")
    shown = [part for part in parts if part.name not in ("ideal", "other")]
    few, rest = shown[:_MAX_PARTS], shown[_MAX_PARTS:]
    rows = [
        ("ideal", parts[0].seconds, "ideal"),
        *((f"{part.name}{_of_ranks(part.ranks)}", part.seconds, "lost") for part in few),
    ]
    if rest:
        count = format_count(len(rest), "more finding")
        rows.append((count, sum(part.seconds for part in rest), "lost more"))
    if round(parts[-1].seconds * NS_PER_S):  # times are whole nanoseconds
        rows.append(("other", parts[-1].seconds, "other"))
    whole_s = sum(seconds for _, seconds, _ in rows) or 1.0

    def share(seconds: float) -> str:
        return f"{100 * seconds / whole_s:.6f}"  # numbers that sum to less than 1 leave space

    bar = html.Div(
        [
            html.Span(className=f"part {style}", style={"flexGrow": share(seconds)}, title=name)
            for name, seconds, style in rows
        ],
        className="parts-bar",
        **decorative(),
    )
    terms = [
        html.Span(
            [
                html.Span(className=f"part-key {style}", **decorative()),
                html.B(format_seconds(seconds)),
                html.Span(link_ranks(f" {name}", report.run)),
            ],
            className="part-term",
        )
        for name, seconds, style in rows
    ]
    between = [html.Span(sign, className="part-sign") for sign in ("=", *["+"] * (len(rows) - 1))]
    line = [part for pair in zip(between, terms, strict=True) for part in pair]
    head.append(html.Span(line, className="parts-line"))
    return html.Div([html.Div(head, className="parts-head"), bar], className="figure step-parts")


def _of_ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    word = "rank" if len(ranks) == 1 else "ranks"
    return f" ({word} {format_ranges(ranks, max_ranges=2)})"


def early_figures(found: AnalysisInProgress | AnalysisFailed) -> list[Component]:
    """Return the run's numbers as far as they are known without a diagnosis."""
    return _figures(known_figures(found))


def liveness_card(
    liveness: RankLiveness | None, silence: StepSilence | None = None, *, run: str | None
) -> list[Component]:
    """Return how long no step has ended, and which ranks are silent while others go on."""
    ranks = _rank_liveness(liveness, run)
    if silence is None:
        return ranks
    line = (
        f"No step has ended for {format_age(silence.age_ns)}. The last one was step"
        f" {silence.last_step:,}; a step takes {format_duration(silence.step_time_ns)}."
    )
    return [html.P(line, className="silence"), *ranks]


def _rank_liveness(liveness: RankLiveness | None, run: str | None) -> list[Component]:
    """Return a line while all ranks go on, and a table of the silent ones otherwise.

    Nothing if there are no heartbeats, or no rank goes on: the run's state then says so.
    """
    if liveness is None or liveness.num_silent == liveness.num_ranks:
        return []
    ranks = format_count(liveness.num_ranks, "rank")
    if not liveness.is_uneven:
        line = (
            f"{liveness.num_recent:,} of {ranks} sent a heartbeat within {RECENT_NS // NS_PER_S} s"
        )
        return [html.P(line, className="quiet all-live")]
    sentence = (
        f"{liveness.num_silent:,} of {ranks} silent for more than {SILENT_NS // NS_PER_S} s;"
        f" {liveness.num_recent:,} sent a heartbeat within {RECENT_NS // NS_PER_S} s."
    )
    if liveness.num_silent > len(liveness.silent):
        sentence += f" The {len(liveness.silent)} longest silences:"
    rows: list[list[Cell]] = [
        [
            rank_link(run, silent.rank),
            escape(silent.host),
            escape(silent.state),
            UNKNOWN if silent.step is None else f"{silent.step:,}",
            format_age(silent.age_ns),
        ]
        for silent in liveness.silent
    ]
    head = {"rank": "number", "host": "", "state": "", "step": "number", "silent for": "number"}
    return [
        card(
            html.H2("Silent ranks"),
            html.P(sentence, className="about"),
            table("silent ranks", head, rows, class_name="silent-ranks"),
            class_name="liveness",
        )
    ]


def findings_table(report: RunReport) -> Component:
    """Return a row for each finding, the largest share first."""
    numbers = FINDING_COLUMNS[-2:]
    head = {name: "number" if name in numbers else "" for name in (*FINDING_COLUMNS, "evidence")}
    rows = [
        [
            html.Span(
                finding.cause, className=f"cause {cause_style(finding.cause, finding.severity)}"
            ),
            dmc.TableTd(finding.severity or UNKNOWN, className="severity"),
            dmc.TableTd(
                rank_links(report.run, finding.ranks, max_ranges=MAX_NAMED), className="of-ranks"
            ),
            dmc.TableTd(_steps_link(report, finding), className="steps"),
            *(
                dmc.TableTd(text, className=f"number of-{name.split()[0]}")
                for name, text in zip(
                    numbers, format_finding(finding, report.price(finding))[-2:], strict=True
                )
            ),
            dmc.TableTd(_linked(report, finding.evidence), className="evidence"),
        ]
        for finding in report.findings
    ]
    return table("findings", head, rows, class_name="findings")


def starved_list(report: RunReport) -> list[Component]:
    """Return the ranks that wait most, each with the ranks and links that caused it."""
    starved = report.starved
    if not starved:
        return [html.P("No rank waits for another beyond the noise.", className="quiet")]
    longest = report.longest_waits[:_MAX_STARVED]
    rows: list[Component] = [_starved_row(one, report) for one in longest]
    if len(starved) > len(longest):
        more = f"{len(longest)} of {len(starved):,} waiting ranks."
        rows.append(html.P(more, className="quiet"))
    return rows


def quality_list(report: RunReport) -> list[Component]:
    """Return how far the result can be trusted."""
    quality = report.quality
    clock = quality.clock_error_ns
    rows = [
        *_account_rows(quality),
        ("clock error", UNKNOWN if clock is None else f"± {format_duration(clock)}", clock is None),
        (
            "coverage",
            format_percent(quality.coverage_ratio, digits=1),
            (quality.coverage_ratio or 0) < 1,
        ),
        ("replay error", format_percent(report.replay_error_ratio, digits=2), False),
        (
            "epoch" if len(report.epochs) == 1 else "epochs",
            ", ".join(map(str, report.epochs)),
            len(report.epochs) > 1,
        ),
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
        parts.append(html.P(f"MFU: {escape(report.mfu.convention)}", className="quiet"))
    notices = [html.Li(_linked(report, notice)) for notice in _notices(report)]
    return [*parts, html.Ul(notices, className="notices")]


def _account_rows(quality: Quality) -> list[tuple[str, str, bool]]:
    """Return the account of the records: produced = stored + dropped + buffered."""
    account = quality.account
    dropped = f"{account.num_dropped:,}"
    if account.dropped:
        reasons = ", ".join(f"{num:,} {escape(reason)}" for reason, num in account.dropped.items())
        dropped += f" ({reasons})"
    if most := format_most_dropped(quality.account_by_rank):
        dropped += f"; {most}"
    return [
        ("records produced", _format_number(account.produced), account.produced is None),
        ("= stored", _format_number(account.stored), False),
        ("+ dropped", dropped, account.num_dropped > 0),
        ("+ still buffered", _format_number(account.buffered), False),
    ]


def _format_number(num: int | None) -> str:
    return UNKNOWN if num is None else f"{num:,}"


def escape_sentence(sentence: str) -> str:
    """Return a long sentence from outside, escaped and whole."""
    return " ".join(escape(word) for word in sentence.split())


def unbroken(sentence: str) -> list[Component | str]:
    """Return a sentence whose causes are not broken at their hyphens at the end of a line."""
    parts = _CAUSE.split(sentence)
    return [
        html.Span(part, className="unbroken") if place % 2 else part
        for place, part in enumerate(parts)
        if part
    ]


def _linked(report: RunReport, sentence: str) -> list[Component | str]:
    """Return a sentence with its ranks as links, and its causes unbroken."""
    max_rank = max(report.coords, default=report.world_size - 1)
    return [
        part
        for piece in link_ranks(escape_sentence(sentence), report.run, max_rank=max_rank)
        for part in (unbroken(piece) if isinstance(piece, str) else [piece])
    ]


def _analysed(report: RunReport, num_spans: int | None) -> list[str]:
    """Return how many steps and spans the verdict rests on, and of how many."""
    if not report.num_earlier_steps:
        return [format_count(len(report.steps), "step"), format_count(report.num_spans, "span")]
    total = "" if num_spans is None else f" of {num_spans:,}"
    return [f"{last_steps(report)} analysed", f"{report.num_spans:,}{total} spans"]


def last_steps(report: RunReport) -> str:
    """Return which steps of a long run are analysed, such as "last 30 steps of 1,000"."""
    num = len(report.steps)
    steps = "last step" if num == 1 else f"last {num:,} steps"
    return f"{steps} of {num + report.num_earlier_steps:,}"


def _notices(report: RunReport) -> list[str]:
    warnings = report.quality.warnings
    notices = list(warnings[:_MAX_WARNINGS])
    if len(warnings) > _MAX_WARNINGS:
        notices.append(f"{len(warnings) - _MAX_WARNINGS} more warnings")
    if report.paced:
        notices.insert(
            0,
            "Paced run: compute was padded to set times, because the machine has fewer cores than"
            " ranks. Times show the padding, not the hardware.",
        )
    if report.num_earlier_steps:
        notices.append(
            f"Part of the run: verdict, ideal and findings cover the {last_steps(report)}, to"
            " limit the time of an analysis. MFU covers all steps."
        )
    notices += [f"{name}: {steps}, in no other number." for name, steps in format_excluded(report)]
    return notices


def _figures(figures: Mapping[str, tuple[str, str]]) -> list[Component]:
    return [
        html.Div(
            [
                html.Span(name, className="figure-word"),
                html.Span(value, className="figure-value"),
                html.Span(meaning, className="figure-meaning", title=meaning),
            ],
            className="figure",
        )
        for name, (value, meaning) in figures.items()
    ]


def cause_style(cause: str, severity: str | None) -> str:
    """Return the style of a finding's cause; that of no verdict if it is empty.

    Args:
        severity: One of `Severity`; None or "" if it was not graded, as of a finding of a live run.
    """
    if not cause:
        return "pending"
    usual = "calm" if severity in (Severity.MINOR, Severity.NONE) else "alarm"
    return _STYLE_BY_CAUSE.get(cause, usual)


def _steps_link(report: RunReport, finding: Finding) -> Component | str:
    if finding.steps is None:
        return format_range(None)
    view = _place_of(report, finding)
    return dcc.Link(
        format_range(finding.steps),
        href=write_address(view),
        title=f"Show step {view.step}, the longest of them, with the ranks marked"
        if finding.proof is None
        else f"Show the proof in step {finding.proof.step}, with the ranks marked",
    )


def _place_of(report: RunReport, finding: Finding) -> View:
    """Return the view of the step that shows a finding: that of its proof, or the longest one."""
    first, last = finding.steps or (0, 0)
    seconds = report.actual_s_by_step
    shown = [step for step in report.steps if first <= step <= last and step in seconds]
    worst = max(shown, key=seconds.__getitem__, default=last)
    return view_finding(View(run=report.run, epoch=report.epochs[-1], step=worst), finding)


def _starved_row(one: Starved, report: RunReport) -> Component:
    causes = ", ".join(
        f"{report.name_waited_for(on)} ({format_percent(on.ratio)})"
        for on in one.waits_on[:_MAX_WAITS_ON]
    )
    words = link_ranks(f"for {causes}", report.run) if causes else "cause unknown"
    on = html.Span(words, className="starved-on")
    return wait_row(report.run, f"rank {one.rank}", one.wait_ratio, on)


def wait_row(run: str, name: str, ratio: float, *more: Component) -> Component:
    """Return a row with a bar that shows which share of a step is waited."""
    width = f"{100 * min(max(ratio, 0.0), 1.0):.1f}%"
    return html.Div(
        [
            html.Span(link_ranks(name, run), className="starved-rank"),
            html.Span(
                html.Span(className="bar-fill", style={"width": width}), className="bar-track"
            ),
            html.Span(format_percent(ratio), className="starved-ratio"),
            *more,
        ],
        className="starved",
    )
