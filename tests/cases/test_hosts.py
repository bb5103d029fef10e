"""Jobs of several hosts: clocks that nothing measured, and hosts that change places."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.recurrence import Follows, Recurrence
from rankscope.analysis.verdict import verdict_sentence
from rankscope.collector.store.store import open_store
from rankscope.sources.finding_history import FindingHistory
from rankscope.sources.store_source import StoreSource
from rankscope.terminal.report_text import View, report_text
from tests.cases.reports import analyze_job

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("offset_ms", [30, 300, 3_600_000])
def test_the_slow_rank_of_hosts_whose_clocks_differ_is_named(
    tmp_path: Path, offset_ms: int
) -> None:
    # 90 ms of compute, 40 % more on rank 2 (on node-B) in 30 of 40 steps: 27 ms a step.
    report = analyze_job(tmp_path, "h_clock.py", str(offset_ms), "clock", run="clock")

    top = report.top_finding
    assert (top.cause, top.ranks, top.steps) == ("slow-compute", (2,), (10, 39))
    assert top.saved_s == pytest.approx(0.027, rel=0.05)
    assert report.step_time_s.actual == pytest.approx(0.100 + 0.027, rel=0.02)
    assert report.quality.coverage_ratio == 1.0
    assert report.quality.clock_error_ns == 1_000
    aligned = [each for each in report.quality.warnings if "never measured" in each]
    length = {30: "30.0 ms", 300: "300 ms", 3_600_000: "3,600 s"}[offset_ms]
    assert aligned == [
        (
            "clock of node-B was never measured: aligned with node-A by the ends of 40"
            f" communications ({length} ahead, error up to 1.00 us)"
        )
    ]


def test_a_gpu_that_moved_with_its_host_is_one_culprit(tmp_path: Path) -> None:
    # node-B's first GPU takes 45 ms longer for 90 ms; it is rank 2 in epoch 0, rank 0 in epoch 1.
    report = analyze_job(tmp_path, "h_elastic.py", run="h-elastic")

    found = [(one.cause, one.ranks, one.hosts, one.steps) for one in report.findings]
    assert found == [
        ("slow-compute", (0,), ("node-B",), (30, 59)),
        ("slow-compute", (2,), ("node-B",), (0, 29)),
    ]
    assert [one.saved_s for one in report.findings] == [pytest.approx(0.0225, rel=0.03)] * 2
    assert all(one.evidence.startswith("on node-B, rank ") for one in report.findings)
    verdict = verdict_sentence(report)
    assert verdict.startswith("Rank 0 (node-B, dp 0, stage 0) computes slow")
    assert (
        "The same device (node-B, local rank 0) has this finding as rank 2 in steps 0 to 29, too."
    ) in verdict
    with open_store(f"chdb://{tmp_path / 'store'}") as store:
        run = StoreSource(store).run_info("h-elastic")
        later, earlier = FindingHistory(store).follow_report(report, run)
    assert (later, earlier) == (
        Recurrence(
            what=Follows.HOST,
            evidence="host node-B was also named in run h-elastic (epoch 0), at another position:"
            " (dp 2, pp 0, tp 0) there, (dp 0, pp 0, tp 0) here, on the same device (local rank 0)",
        ),
        Recurrence(
            what=Follows.HOST,
            evidence="host node-B was also named in run h-elastic (epoch 1), at another position:"
            " (dp 0, pp 0, tp 0) there, (dp 2, pp 0, tp 0) here, on the same device (local rank 0)",
        ),
    )


def test_a_rank_that_moved_has_no_mean_over_its_hosts(tmp_path: Path) -> None:
    report = analyze_job(tmp_path, "h_elastic.py", run="h-elastic")

    text = report_text(report, verdict="", width=200, view=View(rank=2))

    assert "node-B, local rank 0 in steps 0 to 29; node-A, local rank 0 in steps 30 to 59" in text
    assert text.count("n/a over several hosts: give --steps 30:59") == 3
