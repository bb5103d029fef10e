"""Gauges of the live runs for Prometheus, of a bounded number of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.analysis.goodput import GoodputPart
from rankscope.analysis.report.report import Severity
from rankscope.collector.http.metrics import Reading
from rankscope.collector.spool.descriptions import RUNNING
from rankscope.tracer.span import NS_PER_S

from ..sources.goodput import read_goodput
from .shared_results import SharedResults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rankscope.analysis.goodput import Goodput
    from rankscope.analysis.report.report import RunReport
    from rankscope.collector.store.store import Store

    from .alert_watch import AlertWatch
    from .reports import Reports

SECONDS_PER_HOUR = 3600
MAX_RUNS = 20
"""Live runs with gauges, the first by name: Prometheus keeps a series for each value of a label."""


GOODPUT_AGE_NS = 30 * NS_PER_S
"""Age of a goodput: reading one visits all steps of the run."""


def read_live_runs(
    reports: Reports, watch: AlertWatch, store: Store
) -> Callable[[], Iterable[Reading]]:
    """Return the gauges of the live runs, as of their last diagnoses. Unknown ones are left out."""
    goodputs: SharedResults[str, Goodput | None] = SharedResults(max_results=MAX_RUNS)

    def goodput_of(run: str) -> Goodput | None:
        return goodputs.get(
            run,
            lambda: read_goodput(store, run, reports.peek(run), state=RUNNING),
            max_age_ns=GOODPUT_AGE_NS,
        )

    def read() -> Iterable[Reading]:
        signals = dict(sorted(watch.signals.items())[:MAX_RUNS])
        found = {run: reports.peek(run) for run in signals}
        known = {run: report for run, report in found.items() if report is not None}
        for name, text, value in GAUGES:
            values = {run: value(report) for run, report in known.items()}
            yield Reading(
                name=name,
                text=text,
                label="run",
                values={run: number for run, number in values.items() if number is not None},
            )
        spent = {run: goodput for run in known if (goodput := goodput_of(run)) is not None}
        yield Reading(
            name="run_goodput_ratio",
            text="Share of the GPU time of the live run that trained steps that were kept.",
            label="run",
            values={run: goodput.ratio for run, goodput in spent.items()},
        )
        yield Reading(
            name="run_gpu_seconds",
            text="GPU-seconds of the live run, by the part of its goodput.",
            label=("run", "part"),
            values={
                (run, str(part)): goodput.hours(part) * SECONDS_PER_HOUR
                for run, goodput in spent.items()
                for part in GoodputPart
            },
        )
        yield Reading(
            name="run_open_findings",
            text="Findings of the last diagnosis, by severity.",
            label=("run", "severity"),
            values={
                (run, str(severity)): float(
                    sum(finding.severity is severity for finding in report.findings)
                )
                for run, report in known.items()
                for severity in (Severity.CRITICAL, Severity.WARNING)
            },
        )
        yield Reading(
            name="run_silent_ranks",
            text="Ranks of the live run without a heartbeat while others go on.",
            label="run",
            values={
                run: 0.0 if each.liveness is None else float(each.liveness.num_silent)
                for run, each in signals.items()
            },
        )
        active = [alert for alert in watch.alerting.alerts if alert.resolved_ns is None]
        yield Reading(
            name="run_active_alerts",
            text="Alerts of the live run that are not resolved.",
            label="run",
            values={run: float(sum(each.run_id == run for each in active)) for run in signals},
        )

    return read


def _newest_mfu(report: RunReport) -> float | None:
    return None if report.mfu is None else next(reversed(report.mfu.by_step.values()), None)


def _memory_ratio(report: RunReport) -> float | None:
    """Return how full the fullest device is, without the allocator's cache."""
    stage = None if report.memory is None else report.memory.fullest
    return None if stage is None else stage.full_ratio


def _newest_step_s(report: RunReport) -> float | None:
    return next(reversed(report.actual_s_by_step.values()), None)


GAUGES: tuple[tuple[str, str, Callable[[RunReport], float | None]], ...] = (
    ("run_mfu_ratio", "MFU of the newest diagnosed step.", _newest_mfu),
    ("run_step_duration_seconds", "Time of the newest diagnosed step.", _newest_step_s),
    ("run_step", "Newest diagnosed step.", lambda report: max(report.steps, default=None)),
    ("run_slowdown_ratio", "S: replayed over ideal step time.", lambda report: report.slowdown),
    (
        "run_memory_ratio",
        "Peak of tensors over what the allocator of the fullest device can have.",
        _memory_ratio,
    ),
    (
        "run_lost_records_total",
        "Records of the run that were dropped.",
        lambda report: float(report.quality.account.num_dropped),
    ),
)
