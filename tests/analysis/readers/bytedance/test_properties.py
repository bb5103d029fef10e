"""Findings of a trace in the ByteDance format do not depend on how it was written."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.sources.bytedance_file import read_trace_file
from tests.support.analysis.bytedance_files import source_of, write_meta, write_trace
from tests.support.analysis.bytedance_jobs import MS, Job, from_each_steps_start

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rankscope.analysis.report.report import RunReport
    from tests.support.analysis.bytedance_jobs import Row

STEPS = (3, 5, 8, 9, 14, 40)
COMMON = Job(dp=4, pp=2, tp=4, microbatches=(6,) * 6, steps=STEPS, seed=5, jitter=0.02)
JOBS = {
    "healthy": COMMON,
    "worker": replace(COMMON, worker_factor={(1, 1): 1.4}, batched=False),
    "later": replace(COMMON, worker_factor={(2, 0): 1.5}, faults_from=3, vpp=2, overlapped=True),
    "stage": replace(COMMON, stage_factor={1: 1.4}, vpp=2),
    "link": replace(COMMON, pp=4, link_factor={(3, 1): 30}, records_no_ops=True),
    "in calls": replace(
        COMMON, pp=4, vpp=2, microbatches=(8,) * 6, worker_factor={(0, 2): 2}, forward_ns=300 * MS
    ),
    "stalls": replace(COMMON, stall_chance=0.03, stall_ns=150 * MS),
}
EXPECTED: dict[str, list[tuple[str, set[int]]]] = {
    "healthy": [("healthy", set())],
    "worker": [("slow-compute", {20})],
    "later": [("slow-compute", {8})],
    "stage": [("stage-imbalance", {16, 20, 24, 28})],
    "link": [("slow-link", {28, 44})],
    "in calls": [("slow-compute", {32})],
}


QUICK = {"healthy", "worker", "link"}


@pytest.fixture(
    params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.nightly) for name in JOBS]
)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def report_on(
    job: Job, rows: Sequence[Row], folder: Path, *, seconds: float = 1e-9, form: int | None = None
) -> RunReport:
    rng = None if form is None else random.Random(form)
    trace = write_trace(folder / "trace.parquet", rows, rng=rng, seconds=seconds)
    run, columns = read_trace_file(trace, write_meta(folder / "meta.yaml", job))
    return analyze_run(source_of(run, columns), run.run_id)


def causes(report: RunReport) -> list[tuple[str, set[int]]]:
    return [(finding.cause, set(finding.ranks)) for finding in report.findings]


def slowdowns(report: RunReport) -> list[float | None]:
    workers = report.exact_slowdown_by_worker
    return [report.slowdown, report.m_w, report.m_s, *(workers[key] for key in sorted(workers))]


@pytest.mark.slow
def test_row_order_column_types_and_row_groups_do_not_matter(name: str, tmp_path: Path) -> None:
    job = JOBS[name]
    rows = from_each_steps_start(job.rows())
    report = report_on(job, rows, tmp_path)
    expected = EXPECTED.get(name)
    assert expected is None or causes(report) == expected

    mixed = random.Random(1).sample(rows, len(rows))
    again = report_on(job, mixed, tmp_path, form=2)

    assert causes(again) == causes(report)
    # The times of the other file may have 64 bits.
    assert slowdowns(again) == pytest.approx(slowdowns(report), rel=1e-4, abs=1e-3)
    same = report_on(job, mixed, tmp_path)
    assert slowdowns(same) == pytest.approx(slowdowns(report), rel=1e-9)


@pytest.mark.slow
def test_numbers_of_the_ranks_do_not_matter(name: str, tmp_path: Path) -> None:
    job = JOBS[name]
    rows = from_each_steps_start(job.rows())
    report = report_on(job, rows, tmp_path)
    ranks = sorted({row["rank"] for row in rows})
    renamed = dict(zip(ranks, random.Random(2).sample(ranks, len(ranks)), strict=True))

    again = report_on(job, [{**row, "rank": renamed[row["rank"]]} for row in rows], tmp_path)

    assert causes(again) == [
        (cause, {renamed[rank] for rank in named}) for cause, named in causes(report)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.5, 3])
def test_speed_of_the_whole_job_does_not_matter(name: str, factor: float, tmp_path: Path) -> None:
    job = JOBS[name]
    rows = from_each_steps_start(job.rows())
    report = report_on(job, rows, tmp_path)

    again = report_on(job, rows, tmp_path, seconds=factor * 1e-9)

    assert causes(again) == causes(report)
    assert slowdowns(again) == pytest.approx(slowdowns(report), rel=1e-4, abs=1e-3)


@pytest.mark.slow
def test_clock_errors_within_their_bound_do_not_matter(name: str, tmp_path: Path) -> None:
    job = JOBS[name]
    report = report_on(job, from_each_steps_start(job.rows()), tmp_path)
    rng = random.Random(3)
    workers = [(dp, stage) for dp in range(job.dp) for stage in range(job.pp)]
    shifted = replace(job, clock_ns={worker: rng.randint(-MS, MS) for worker in workers})

    again = report_on(job, from_each_steps_start(shifted.rows()), tmp_path)

    assert causes(again) == causes(report)
