"""Results about a run beside its report: strip, start-up, comparison, a step to save."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.breakdown.kernel_changes import compare_kernels
from rankscope.analysis.readers.formats import split_run_waits
from rankscope.analysis.report.report import Severity
from rankscope.analysis.trace.errors import EmptyRunError
from rankscope.analysis.trace.tables import format_of
from rankscope.collector.read.spans import (
    SpanSelection,
    count_selected_spans,
    read_arrivals,
    read_outline,
    read_selected_spans,
)
from rankscope.collector.read.startup import read_startup_rows
from rankscope.collector.read.steps import read_step_bounds
from rankscope.collector.spool.descriptions import RUNNING
from rankscope.dashboard.records.page_results import (
    PART,
    ComparedNumber,
    RankStartup,
    RunComparison,
    RunStrip,
    Startup,
    StartupPart,
    StartupSpan,
)

from ..comparison import compare_reports
from ..sources.arrow_tables import arrivals_table, span_table
from ..sources.chrome_trace import ChromeTrace
from ..sources.store_source import StoreSource

if TYPE_CHECKING:
    from rankscope.analysis.report.liveness import RankLiveness, StepSilence
    from rankscope.analysis.report.report import Finding, RunReport
    from rankscope.analysis.trace.tables import RunSummary, SpanSource
    from rankscope.collector.store.store import Store

MAX_PARTS = 16
"""Parts of a start-up that are shown, the longest."""

MAX_SLOWEST = 24
"""Ranks whose start-up is shown, the longest."""

MAX_TRACE_SPANS = 200_000
"""Spans of a step that is saved from a page: 60 MB of text, which Perfetto opens in seconds."""

Steps = tuple[int, int]


def read_strip(
    store: Store,
    run: RunSummary,
    report: RunReport | None,
    liveness: RankLiveness | None,
    silence: StepSilence | None,
) -> RunStrip:
    """Return the state of a run in one line."""
    is_live = run.state == RUNNING
    last_step = report.steps[-1] if report is not None and report.steps else None
    bounds = None
    if is_live and last_step is not None:
        bounds = read_step_bounds(store, run.run_id, first=last_step)
    return RunStrip(
        run=run,
        report=report,
        age_ns=None if bounds is None else max(0, time.time_ns() - bounds[1]),
        is_silent=silence is not None,
        num_recent=None if liveness is None or not is_live else liveness.num_recent,
    )


def read_startup(store: Store, run_id: str) -> Startup | None:
    """Return the start-up of the newest epoch; None if no span is outside the steps."""
    found = read_startup_rows(store, run_id, max_parts=MAX_PARTS, max_ranks=MAX_SLOWEST)
    if found is None:
        return None
    epoch, parts, totals, rows, hosts = found
    first_ns = min(row["start_ns"] for row in rows)
    spans: dict[int, list[StartupSpan]] = {}
    for row in rows:
        span = StartupSpan(
            name=row["name"],
            begin_ns=row["start_ns"] - first_ns,
            duration_ns=row["duration_ns"],
        )
        spans.setdefault(row["rank"], []).append(span)
    return Startup(
        epoch=epoch,
        num_ranks=totals[0]["num_ranks"],
        median_ns=totals[0]["median_ns"],
        parts=tuple(StartupPart(**row) for row in parts),
        slowest=tuple(
            RankStartup(
                rank=row["rank"],
                host=hosts.get(row["rank"], ""),
                total_ns=row["total_ns"],
                spans=tuple(spans.get(row["rank"], ())),
            )
            for row in totals
        ),
    )


def write_step_trace(
    store: Store,
    run_id: str,
    *,
    epoch: int,
    step: int,
    ranks: tuple[int, ...],
    window_ns: tuple[int, int] | None = None,
) -> str:
    """Return the spans of a step, and who waited for whom, in the Trace Event Format.

    Args:
        ranks: Only these; empty: all.
        window_ns: Only what touches this time, from the step's first span; None: all.

    Raises:
        EmptyRunError: There are no such spans, or more than `MAX_TRACE_SPANS`.
    """
    outline = read_outline(store, run_id, epoch=epoch, step=step)
    num_by_rank = dict(zip(outline.ranks.tolist(), outline.num_spans.tolist(), strict=True))
    chosen = [rank for rank in num_by_rank if not ranks or rank in ranks]
    num_spans = sum(num_by_rank[rank] for rank in chosen)
    selection = SpanSelection(run_id=run_id, epoch=epoch, step=step, ranks=chosen)
    if window_ns is not None and chosen:
        begin_ns, end_ns = (outline.begin_ns + at_ns for at_ns in window_ns)
        selection = replace(selection, after_ns=begin_ns, before_ns=end_ns)
        num_spans = count_selected_spans(store, selection)
    if not num_spans:
        raise EmptyRunError(f"step {step} of run {run_id!r} has no spans of these ranks and time")
    if num_spans > MAX_TRACE_SPANS:
        raise EmptyRunError(
            f"step {step} has {num_spans:,} spans, more than {MAX_TRACE_SPANS:,}: zoom in,"
            f" choose some ranks, or use rankscope export {run_id} --format perfetto"
            f" --steps {step}:{step}"
        )
    text = io.StringIO()
    trace = ChromeTrace(text.write)
    selected = read_selected_spans(store, selection)
    run = StoreSource(store).run_info(run_id)
    split = None
    if format_of(run).has_groups:
        arrivals = arrivals_table(read_arrivals(store, selection, selected))
        split = split_run_waits(run, span_table(selected), arrivals=arrivals)
    trace.add(selected, split=split)
    trace.end()
    return text.getvalue()


def analyze_steps(source: SpanSource, run_id: str, steps: Steps) -> RunReport:
    """Return the report of a range of steps, both ends included."""
    return analyze_run(source, run_id, first=steps[0], last=steps[1])


def compare_finished(source: SpanSource, first: RunReport, second: RunReport) -> RunComparison:
    """Return two finished reports side by side."""
    compared = compare_reports(source, first, second)
    rows = [
        ComparedNumber(name=row.pop("quantity"), **row) for row in compared.numbers().to_pylist()
    ]
    return RunComparison(
        first=first,
        second=second,
        step_change=compared.step_change,
        settings=tuple(
            (row["setting"], row["first"], row["second"]) for row in compared.settings.to_pylist()
        ),
        numbers=tuple(row for row in rows if not row.name.startswith(PART)),
        parts_s=tuple(
            row for row in rows if row.name.startswith(PART) and (row.first or row.second)
        ),
        appeared=_without(second, first),
        disappeared=_without(first, second),
        remained=tuple(
            each
            for each in second.findings
            if any(_is_same(each, theirs) for theirs in first.findings)
        ),
        kernels=compare_kernels(first.kernels, second.kernels),
    )


def _without(report: RunReport, other: RunReport) -> tuple[Finding, ...]:
    return tuple(
        each
        for each in report.findings
        if each.severity is not Severity.NONE
        and not any(_is_same(each, theirs) for theirs in other.findings)
    )


def _is_same(one: Finding, other: Finding) -> bool:
    """Return whether two findings are of one cause, on a rank in common or both on none.

    A minor one is not the same as one that matters: what fell to nothing is gone.
    """
    minor = Severity.MINOR
    if one.cause != other.cause or (one.severity is minor) != (other.severity is minor):
        return False
    return not (one.ranks or other.ranks) or bool({*one.ranks} & {*other.ranks})
