"""Stages all of whose ranks are longer, and those of which most are."""

from __future__ import annotations

from rankscope.analysis.analyze import analyze_run
from rankscope.tracer.topology import Layout
from tests.support.analysis.cluster import MS, gpt_cluster, source_of

LAYOUT = Layout(dp=5, pp=4)
LAST_STAGE = (15, 16, 17, 18, 19)


def test_a_rank_that_its_slow_stage_spares_is_not_named() -> None:
    # GIVEN the last stage, of which a slow host has four ranks from step 2 on and another the first
    def forward_ns(rank: int, step: int, microbatch: int) -> int:
        return 30 * MS if rank > 15 and step >= 2 else 10 * MS

    source = source_of(gpt_cluster(LAYOUT, num_steps=8, forward_ns=forward_ns))

    (finding,) = analyze_run(source, "run").findings

    assert (finding.cause, finding.ranks, finding.steps) == (
        "slow-compute",
        (16, 17, 18, 19),
        (2, 7),
    )
    # A step of a GPipe of 4 micro-batches: the longest path computes stages 0 to 2 once and the
    # last one 4 times. A slow one: 3 x 20 + 4 x 60 forward and twice that backward, against 140
    # and 280. Sends take half a millisecond: less than 1 % of it.
    healthy, slow = 3 * 140, 3 * (60 + 240)
    expected = (2 * healthy + 6 * slow) / (8 * healthy)
    assert finding.slowdown is not None
    assert abs(finding.slowdown / expected - 1) < 0.02


def test_a_stage_all_of_whose_ranks_are_longer_is_named_whole() -> None:
    # GIVEN a last stage of 1.3 x the work, whose first rank is a device that is 4 % faster
    def forward_ns(rank: int, step: int, microbatch: int) -> int:
        return {15: 125 * MS // 10}.get(rank, 13 * MS) if rank >= 15 else 10 * MS

    source = source_of(gpt_cluster(LAYOUT, num_steps=8, forward_ns=forward_ns))

    (finding,) = analyze_run(source, "run").findings

    assert (finding.cause, finding.ranks) == ("stage-imbalance", LAST_STAGE)


def test_a_rank_slow_now_and_then_is_told_from_the_first_time_to_the_last() -> None:
    # GIVEN a rank that takes 1.5 x as long in steps 1, 8 and 15 of 18
    def forward_ns(rank: int, step: int, microbatch: int) -> int:
        return 15 * MS if rank == 7 and step in (1, 8, 15) else 10 * MS

    source = source_of(gpt_cluster(LAYOUT, num_steps=18, forward_ns=forward_ns))

    (finding,) = analyze_run(source, "run").findings

    assert (finding.cause, finding.ranks, finding.steps) == ("slow-compute", (7,), (1, 15))
    assert "360 ms of its own compute a step against 240 ms" in finding.evidence
    assert "in 3 of the 15 steps 1 to 15" in finding.evidence
    # A GPipe of 4 stages and 4 micro-batches computes 7 in a row, of 60 ms with their backwards.
    # In 3 of 18 steps 4 of the 7 take 90 ms.
    healthy = 7 * 60
    expected = (15 * healthy + 3 * (3 * 60 + 4 * 90)) / (18 * healthy)
    assert finding.slowdown is not None
    assert abs(finding.slowdown / expected - 1) < 0.01
