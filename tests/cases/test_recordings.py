"""Recordings of a job on a GPU, with the step times that the job itself printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.report.report import Severity
from rankscope.analysis.verdict import verdict_sentence
from tests.cases.reports import analyze_recording

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def test_a_job_of_one_rank_is_healthy_and_its_start_up_is_in_no_number(tmp_path: Path) -> None:
    report = analyze_recording(tmp_path, "single1")

    assert [each.cause for each in report.findings] == ["healthy"]
    assert "peers to compare" not in verdict_sentence(report)
    # The job printed a median of 20.6 ms, without the input that it makes between its steps.
    assert report.step_time_s.actual == pytest.approx(0.021, rel=0.03)
    assert list(report.startup_s_by_step) == [0]
    assert report.startup_s_by_step[0] == pytest.approx(0.54, rel=0.01)


def test_two_ranks_that_share_their_gpu_are_healthy(tmp_path: Path) -> None:
    report = analyze_recording(tmp_path, "fsdp-ok")

    assert report.findings[0].cause == "healthy"
    assert {each.severity for each in report.findings} <= {Severity.NONE, Severity.MINOR}
    assert report.step_time_s.actual == pytest.approx(0.292, rel=0.03)
    assert list(report.startup_s_by_step) == [0]


def test_a_slow_rank_is_named_from_the_step_on_in_which_it_became_slow(tmp_path: Path) -> None:
    report = analyze_recording(tmp_path, "ddp-slow")

    top = report.findings[0]
    assert (top.cause, top.ranks) == ("slow-compute", (1,))
    assert top.steps is not None
    assert top.steps[0] == 15
    assert verdict_sentence(report).startswith("Rank 1 (dp 1, stage 0) computes slowly in steps 15")
