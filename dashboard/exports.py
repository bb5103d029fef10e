"""Files that a page offers to save: tables for a spreadsheet, one report to send, one step's trace.

Each is an address of its own, so that it is read with the rights of the page.
"""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from html import escape as escape_html
from typing import TYPE_CHECKING, Any

from flask import Response, request

from rankscope.analysis.drawing.raster import ALL_ROWS
from rankscope.analysis.drawing.rows import RowOrder, order_ranks
from rankscope.analysis.report.advice import advise
from rankscope.analysis.report.report import RunReport
from rankscope.analysis.report.text import (
    FINDING_COLUMNS,
    FORMULA,
    UNKNOWN,
    format_account,
    format_count,
    format_duration,
    format_finding,
    format_percent,
    format_ranges,
    format_seconds,
    format_time,
)
from rankscope.analysis.severity import MATTERS
from rankscope.analysis.trace.errors import AnalysisError

from .address import PROOF_PATH, TIMELINE, View, read_address
from .figures.proof_card import proof_figure
from .figures.static_svg import static_svg
from .text import escape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flask import Flask

    from rankscope.analysis.report.report import Finding

    from .provider import ReportProvider

RUNS_PATH = "export/runs.csv"
FINDINGS_PATH = "export/findings.csv"
REPORT_PATH = "export/report.html"
TRACE_PATH = "export/step.json"
INCIDENT_PATH = "export/incident.json"

_MAX_ROWS = 20
"""Waiting ranks in the report to send."""

_HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; line-height: 1.3; text-wrap: pretty }
h2 { font-size: 1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0;
  border-bottom: 1px solid #8884 }
.quiet { opacity: .7 } svg { width: 100%; height: 12rem } .proof svg { height: auto }
code { font-size: .9em }
</style>
"""


def register_exports(server: Flask, provider: ReportProvider) -> None:
    """Add the addresses of the files to the application."""

    def runs() -> Response:
        head = ("run", "state", "verdict", "severity", "ranks at fault", "sentence",
                "started (UTC)", "ranks", "steps", "step time (s)", "MFU", "loss",
                "lost GPU hours", "lost records")  # fmt: skip
        rows = [
            (
                line.run.run_id,
                line.run.state,
                line.cause,
                line.severity,
                format_ranges(line.ranks) if line.ranks else "",
                line.verdict,
                format_time(line.run.started_ns),
                line.run.world_size,
                line.run.num_steps,
                line.step_s,
                line.mfu,
                line.loss,
                line.lost_device_h,
                line.num_dropped,
            )
            for line in provider.run_lines()
        ]
        return _csv("runs", head, rows)

    def findings() -> Response:
        run_id = request.args.get("run", "")
        found = _finished(provider, run_id)
        if not isinstance(found, RunReport):
            return found
        head = ("run", "cause", "severity", "ranks", "first step", "last step", "slowdown",
                "recoverable", "confidence", "evidence")  # fmt: skip
        rows = [
            (
                run_id,
                each.cause,
                each.severity,
                format_ranges(each.ranks) if each.ranks else "",
                *(each.steps or (None, None)),
                each.slowdown,
                each.recoverable_ratio,
                each.confidence,
                each.evidence,
            )
            for each in found.findings
        ]
        return _csv(f"{run_id}-findings", head, rows)

    def report() -> Response:
        run_id = request.args.get("run", "")
        found = _finished(provider, run_id)
        if not isinstance(found, RunReport):
            return found
        text = report_page(found, provider.verdict(found))
        return _file(text, f"{run_id}.html", "text/html")

    def step() -> Response:
        run_id, step = request.args.get("run", ""), request.args.get("step", type=int)
        epoch = request.args.get("epoch", type=int)
        if step is None or epoch is None:
            return _refusal("give run, epoch and step", 400)
        view = read_address(TIMELINE, request.query_string.decode())
        window = view.viewport
        try:
            text = provider.step_trace(
                run_id,
                epoch=epoch,
                step=step,
                ranks=view.ranks or _shown_ranks(provider, view),
                window_ns=None if window is None else (window.begin_ns, window.end_ns),
            )
        except AnalysisError as error:
            return _refusal(str(error), 404)
        return _file(text, f"{run_id}-step-{step}.json", "application/json")

    def proof() -> Response:
        run_id, cause = request.args.get("run", ""), request.args.get("cause")
        found = _finished(provider, run_id)
        if not isinstance(found, RunReport):
            return found
        finding = next((each for each in found.findings if each.cause == cause), found.top_finding)
        figure = proof_figure(found, finding)
        if figure is None or cause not in (None, finding.cause):
            return _refusal("this run has no such proof: open its overview", 404)
        title = _text(f"{run_id}: proof of {finding.cause}")
        return Response(static_svg(figure, title=title, alone=True), mimetype="image/svg+xml")

    for path, view in (
        (RUNS_PATH, runs),
        (FINDINGS_PATH, findings),
        (REPORT_PATH, report),
        (TRACE_PATH, step),
        (PROOF_PATH, proof),
        (INCIDENT_PATH, lambda: _incident(provider)),
    ):
        server.add_url_rule(f"/{path}", endpoint=path, view_func=view, methods=["GET"])


def _incident(provider: ReportProvider) -> Response:
    run_id, number = request.args.get("run", ""), request.args.get("incident", type=int)
    if number is None:
        return _refusal("give run and incident", 400)
    try:
        shown = provider.incident(run_id, number)
    except AnalysisError as error:
        return _refusal(str(error), 404)
    if shown is None:
        return _refusal(f"run {run_id!r} has no incident {number}", 404)
    text = json.dumps(asdict(shown.incident), indent=1)
    return _file(text, f"{run_id}-incident-{number}.json", "application/json")


def _shown_ranks(provider: ReportProvider, view: View) -> tuple[int, ...]:
    """Return the ranks in the rows of a view; empty if they are all."""
    window = view.viewport
    if window is None or (window.first_row, window.end_row) == (0, ALL_ROWS):
        return ()
    place: Any = {"epoch": view.epoch or 0, "step": view.step or 0}
    picture = provider.picture(str(view.run), **place, order=view.order, viewport=window)
    if picture is not None:
        return picture.ranks
    timeline = provider.timeline(str(view.run), **place)
    if timeline is None or view.order is RowOrder.EXCESS:
        return ()
    return order_ranks(timeline, view.order)[window.first_row : window.end_row]


def _finished(provider: ReportProvider, run_id: str) -> RunReport | Response:
    try:
        found = provider.report(run_id)
    except AnalysisError as error:
        return _refusal(str(error), 404)
    if isinstance(found, RunReport):
        return found
    return _refusal("this run has no report yet: open its overview, then try again", 409)


def _refusal(text: str, status: int) -> Response:
    return Response(f"{status}: {escape(text)}\n", status=status, mimetype="text/plain")


def _csv(name: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> Response:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\r\n")
    writer.writerow(head)
    for row in rows:
        writer.writerow(["" if cell is None else _cell(cell) for cell in row])
    return _file(text.getvalue(), f"{name}.csv", "text/csv")


def _cell(value: object) -> object:
    """Return a cell that no spreadsheet runs as a formula; numbers stay numbers."""
    if not isinstance(value, str):
        return value
    return f"'{value}" if value.startswith(tuple(FORMULA)) else value


def _file(text: str, name: str, mimetype: str) -> Response:
    answer = Response(text, mimetype=mimetype)
    # Names of runs have none of the letters that a header would need quoted.
    answer.headers["Content-Disposition"] = f'attachment; filename="{name}"'
    return answer


def report_page(report: RunReport, verdict: str) -> str:
    """Return a report as one HTML file without scripts, which needs no server to be read."""
    top = report.top_finding
    parts = " + ".join(f"{format_seconds(part.seconds)} {part.name}" for part in report.step_parts)
    actual = format_seconds(report.step_time_s.actual)
    mfu = UNKNOWN if report.mfu is None else format_percent(report.mfu.mean, digits=1)
    clock = report.quality.clock_error_ns
    facts = [
        format_count(report.world_size, "rank"),
        f"{format_count(len(report.steps), 'step')} analysed",
        f"step time {actual}" + (f" = {parts}" if parts else ""),
        f"MFU {mfu}",
        f"confidence {top.confidence:.2f}",
        format_account(report.quality.account),
        f"clock error {UNKNOWN if clock is None else format_duration(clock)}",
    ]
    findings = [
        (*format_finding(each, report.price(each)), each.evidence) for each in report.findings
    ]
    starved = [
        (
            f"{one.rank}",
            format_percent(one.wait_ratio),
            ", ".join(
                f"{report.name_waited_for(on)} ({format_percent(on.ratio)})"
                for on in one.waits_on[:2]
            ),
        )
        for one in report.longest_waits[:_MAX_ROWS]
    ]
    return "".join(
        [
            _HEAD,
            f"<title>{_text(report.run)}: {_text(top.cause)} - rankscope</title>\n",
            f"<p class=quiet>rankscope, run <code>{_text(report.run)}</code></p>\n",
            f"<h1>{_text(verdict)}</h1>\n",
            "<ul>", *(f"<li>{_text(fact)}</li>" for fact in facts), "</ul>\n",
            *(_proof(report, each) for each in report.findings if each.severity in MATTERS),
            _steps_svg(report),
            _table("Findings", (*FINDING_COLUMNS, "evidence"), findings),
            _table("Who waits for whom", ("rank", "waits", "for"), starved),
            _table("Notices", ("",), [(warning,) for warning in report.quality.warnings]),
            "</html>\n",
        ]
    )  # fmt: skip


def _proof(report: RunReport, finding: Finding) -> str:
    title = f"{finding.cause} {format_ranges(finding.ranks, max_ranges=8)}".removesuffix(" -")
    figure = proof_figure(report, finding)
    picture = "" if figure is None else static_svg(figure, title=_text(f"proof of {title}"))
    advice = advise(finding.cause, run=report.run, ranks=finding.ranks, hosts=finding.hosts)
    parts = [f"<h2>Proof: {_text(title)}</h2>\n<div class=proof>{picture}</div>\n"]
    if advice is not None:
        parts.append("<h2>What to do</h2>\n")
        parts += (f"<p><b>{_text(name)}</b> {_text(text)}</p>\n" for name, text in advice.parts)
        parts += (f"<div><code>{_text(command)}</code></div>\n" for command in advice.commands)
    return "".join(parts)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    cells = "".join(f"<th>{_text(name)}</th>" for name in head)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<h2>{_text(title)}</h2>\n<table>\n<tr>{cells}</tr>\n{body}\n</table>\n"


def _steps_svg(report: RunReport) -> str:
    """Draw the step times as a line in their own units, which the picture stretches."""
    seconds = report.actual_s_by_step
    if len(seconds) <= 1:
        return ""
    steps, longest = sorted(seconds), max(seconds.values())
    # An SVG's y axis points down.
    points = " ".join(f"{place},{longest - seconds[step]}" for place, step in enumerate(steps))
    return (
        f"<h2>Step time of steps {steps[0]:,} to {steps[-1]:,}</h2>\n"
        f'<svg viewBox="0 0 {len(steps) - 1} {longest}" preserveAspectRatio="none" role="img"'
        f' aria-label="step time, at most {format_seconds(longest)}">'
        f'<polyline points="{points}" fill="none" stroke="#1c7ed6" stroke-width="2"'
        ' vector-effect="non-scaling-stroke"/></svg>\n'
        f"<p class=quiet>From 0 to {format_seconds(longest)}.</p>\n"
    )


def _text(text: str) -> str:
    return escape_html(" ".join(escape(word) for word in text.split()))
