from __future__ import annotations

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.tracer.topology import Layout
from tests.support.analysis.cluster import Source, gpt_cluster

MS = 1e6


@pytest.mark.parametrize("slow_rank", [0, 2])
@pytest.mark.parametrize("head_factor", [1.0, 1.15, 1.3])
def test_a_slow_rank_of_a_pipeline_of_two_by_two_is_no_stage(
    slow_rank: int, head_factor: float
) -> None:
    # GIVEN stage 1 with more work, and one rank of two that is slow in all steps
    noise = np.random.default_rng(7)

    def forward_ns(rank: int, step: int, microbatch: int) -> int:
        factor = (head_factor if rank >= 2 else 1.0) * (2.0 if rank == slow_rank else 1.0)
        return int(5 * MS * factor * (1 + 0.01 * noise.standard_normal()))

    cluster = gpt_cluster(Layout(pp=2, dp=2), num_steps=12, forward_ns=forward_ns)
    source = Source(cluster.run_info(), cluster.span_table(), cluster.step_table())

    first, *others = analyze_run(source, "run").findings

    # THEN the rank is what is worth fixing, and the stage only what its other rank shows
    assert (first.cause, first.ranks) == ("slow-compute", (slow_rank,))
    assert first.recoverable_ratio is not None
    assert first.recoverable_ratio > 0.7
    assert all(
        each.cause == "stage-imbalance" and each.slowdown == pytest.approx(head_factor, abs=0.1)
        for each in others
    )


@pytest.mark.parametrize(("last_step", "is_stage"), [(6, False), (11, True)])
def test_unequal_work_of_stages_lasts(last_step: int, is_stage: bool) -> None:  # noqa: FBT001
    """On a busy host all ranks of a stage may be late in the same step."""
    noise = np.random.default_rng(7)

    def forward_ns(rank: int, step: int, microbatch: int) -> int:
        factor = 1.6 if rank >= 6 and 6 <= step <= last_step else 1.0
        return int(5 * MS * factor * (1 + 0.01 * noise.standard_normal()))

    cluster = gpt_cluster(Layout(pp=4, dp=2), num_steps=12, forward_ns=forward_ns)
    source = Source(cluster.run_info(), cluster.span_table(), cluster.step_table())

    causes = [finding.cause for finding in analyze_run(source, "run").findings]

    assert ("stage-imbalance" in causes) == is_stage
