from __future__ import annotations

from rankscope.analysis.analyze import analyze_run
from rankscope.tracer.span import NONE
from tests.analysis.replay.test_cycles import FORWARD, source_of


def test_a_job_of_which_one_rank_computes_in_one_step_alone_is_analysed() -> None:
    # GIVEN three ranks and three steps, and one forward in all of them
    source = source_of([(0, 0, FORWARD, 1, 1, 0, NONE)], num_ranks=3, num_steps=3, end_ns=100)

    report = analyze_run(source, source.info.run_id)

    assert [finding.cause for finding in report.findings] == ["insufficient-evidence"]
