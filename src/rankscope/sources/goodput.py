"""Goodput of a stored run: its stored times, and what its diagnosis says of them."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from rankscope.analysis.goodput import Diagnosis, EpochRecord, GoodputStep, measure_goodput
from rankscope.analysis.report.tracked_findings import NO_PROBLEM, FindingTracker
from rankscope.collector.read.findings import read_findings
from rankscope.collector.read.goodput import read_run_times
from rankscope.collector.spool.descriptions import RUNNING

from .stored_findings import to_tracked

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankscope.analysis.goodput import Goodput
    from rankscope.analysis.report.report import Finding, RunReport
    from rankscope.collector.identity import Row
    from rankscope.collector.read.goodput import RunTimes
    from rankscope.collector.store.store import Store

EVALUATION, CHECKPOINT = "evaluation", "checkpoint"


def read_goodput(
    store: Store, run_id: str, report: RunReport | None, *, state: str
) -> Goodput | None:
    """Return what the time of a run was spent on; None if nothing is known of it.

    Args:
        report: Its diagnosis; None: no time is attributed to findings.
        state: Its state; the time of a running job goes on until now.
    """
    times = read_run_times(store, run_id)
    return measure_goodput(
        list_epochs(times),
        Diagnosis() if report is None else _diagnosis(store, report),
        until_ns=time.time_ns() if state == RUNNING else None,
        total_steps=_find_total(times, "total_steps"),
        total_tokens=_find_total(times, "total_tokens"),
    )


def _find_total(times: RunTimes, name: str) -> int | None:
    """Return a total that the newest epoch with one declared; None if none did."""
    declared: list[int] = [row[name] for row in times.epochs if row[name] > 0]
    return declared[-1] if declared else None


def list_epochs(times: RunTimes) -> tuple[EpochRecord, ...]:
    """Return the epochs of a run from its stored times."""
    steps, ends, saves = map(_by_epoch, (times.steps, times.ends, times.saves))
    tokens = {
        (row["epoch"], row["step"]): row["num_tokens"] for row in times.tokens if row["fewest"] >= 0
    }
    records = []
    for row in times.epochs:
        number = row["epoch"]
        record = _epoch_record(row, steps[number], ends[number], saves[number])
        counted = (
            replace(step, num_tokens=tokens.get((number, step.step))) for step in record.steps
        )
        records.append(replace(record, steps=tuple(counted), is_counted=number in times.counted))
    return tuple(records)


def _by_epoch(rows: Iterable[Row]) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["epoch"]].append(row)
    return found


def _epoch_record(epoch: Row, steps: list[Row], ends: list[Row], saves: list[Row]) -> EpochRecord:
    started = [ns for ns in (epoch["first_ns"], epoch["process_ns"]) if ns and ns > 0]
    is_over = epoch["num_known"] and not epoch["num_running"]
    failed_ns = epoch["failed_ns"] or None
    saving_ns = {row["step"]: row["saving_ns"] for row in saves}
    num_ranks = max((row["num_ranks"] for row in steps), default=0)
    found = [
        GoodputStep(
            step=row["step"],
            begin_ns=row["begin_ns"],
            end_ns=row["last_end_ns"] if row["first_end_ns"] > 0 else 0,
            saving_ns=saving_ns.get(row["step"], 0),
        )
        for row in steps
    ]
    if found and failed_ns and steps[-1]["num_ranks"] < num_ranks:
        found[-1] = replace(found[-1], end_ns=0)  # some ranks died in it
    for row in ends:
        if not found or row["step"] > found[-1].step:
            found.append(GoodputStep(step=row["step"], begin_ns=row["begin_ns"], end_ns=0))
        elif is_over and found[-1].begin_ns < row["last_end_ns"] < found[-1].end_ns:
            # Nothing begins after the last step, so its record lasts until the process exits.
            found[-1] = replace(found[-1], end_ns=row["last_end_ns"])
    ended_ns = max((step.end_ns for step in found), default=0)
    return EpochRecord(
        epoch=epoch["epoch"],
        num_ranks=epoch["world_size"] or epoch["num_known"] or 1,
        started_ns=min(started, default=None),
        failed_ns=failed_ns,
        ended_ns=epoch["last_exit_ns"] or None if is_over else None,
        last_begin_ns=ends[-1]["last_begin_ns"] if ends else None,
        steps=tuple(found),
        final_saving_ns=sum(
            row["saving_ns"] for row in saves if row["step"] < 0 and row["begin_ns"] >= ended_ns
        ),
    )


def _diagnosis(store: Store, report: RunReport) -> Diagnosis:
    """Return what a report, and the findings stored before its steps, say of the time of steps."""
    tracked = [to_tracked(stored) for stored in read_findings(store, report.run)]
    in_report = set(FindingTracker(report.run, tracked).match(report).values())
    earlier = [each.finding for each in tracked if each.number not in in_report]
    lost_s: dict[str, float] = defaultdict(float)
    for finding in (*report.findings, *earlier):
        if finding.cause not in NO_PROBLEM and finding.cause != CHECKPOINT:
            lost_s[finding.cause] += _lost_s(finding)
    return Diagnosis(
        evaluation_s=lost_s.pop(EVALUATION, 0.0),
        lost_s={cause: seconds for cause, seconds in lost_s.items() if seconds > 0},
        startup_excess_s=_startup_excess_s(report),
        flops_by_step={} if report.mfu is None else report.mfu.flops_by_step,
    )


def _lost_s(finding: Finding) -> float:
    """Return the price of a finding over all steps from the first to the last that shows it."""
    saved_s = finding.shown_saved_s
    if saved_s is None or finding.steps is None:
        return 0.0
    return saved_s * (finding.steps[1] - finding.steps[0] + 1)


def _startup_excess_s(report: RunReport) -> dict[int, float]:
    """Return what each step of a start-up took longer than the median of the other steps."""
    startup_s = report.startup_s_by_step
    usual = [
        seconds
        for step, seconds in report.actual_s_by_step.items()
        if step not in report.warmup_steps
    ]
    if not usual:
        return {}
    return {step: max(seconds - median(usual), 0.0) for step, seconds in startup_s.items()}
