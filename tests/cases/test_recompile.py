"""Recompilation while the job runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.verdict import verdict_sentence
from tests.cases.reports import analyze_job, analyze_live

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow


def test_a_rank_that_compiles_again_is_named(tmp_path: Path) -> None:
    report = analyze_job(tmp_path, "h_recompile.py", "8", run="h-recompile-w8")

    (top,) = report.findings
    assert (top.cause, top.ranks, top.steps) == ("recompile", (1,), (15, 39))
    assert top.evidence.startswith("rank 1 loses 8.00 s recompiling")
    assert "in every 2nd step (steps 15 to 39)" in top.evidence
    # 13 of 40 steps compile for 8 s
    assert top.saved_s == pytest.approx(2.6, rel=0.01)
    assert "Rank 1 (dp 1, stage 0) recompiles" in verdict_sentence(report)


@pytest.mark.nightly
def test_compile_ids_of_a_live_job_are_evidence(tmp_path: Path) -> None:
    report = analyze_live(tmp_path, "live.py", "recompile", num_ranks=2)

    top = report.findings[0]
    assert (top.cause, top.ranks) == ("recompile", (1,))
    assert "compile ids 0/1" in top.evidence
    assert "in every 4th step (steps 12 to 28)" in top.evidence
