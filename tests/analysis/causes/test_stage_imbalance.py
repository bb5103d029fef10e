from __future__ import annotations

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.causes.stage_imbalance import find_stages_turned_slow
from rankscope.analysis.statistics.peers import Basis, ComputeProfile
from rankscope.tracer.topology import Layout
from tests.support.analysis.cluster import Source, gpt_cluster

MS = 1e6
NUM_STEPS = 10
JITTER = np.array([0.0, 0.01, -0.01, 0.005, -0.005, 0.01, 0.0, -0.01, 0.005, 0.0])


def profile(
    slow: dict[int, float], first: int, last: int, *, warm_up: float = 1.0
) -> ComputeProfile:
    """Return the compute of two stages of eight ranks: 100 and 120 ms per step, with 1 % jitter.

    Args:
        slow: By rank, the factor of its compute in the steps ``first`` to ``last``.
        first: First slow step.
        last: Last slow step.
        warm_up: Factor of step 0 on all ranks.
    """
    total = np.full((16, NUM_STEPS), 100.0) * MS
    total[8:] *= 1.2
    for rank in range(16):
        total[rank] *= 1 + np.roll(JITTER, rank)
    for rank, factor in slow.items():
        total[rank, first : last + 1] *= factor
    total[:, 0] *= warm_up
    return ComputeProfile(
        ranks=np.arange(16, dtype=np.int32),
        steps=np.arange(NUM_STEPS, dtype=np.int32),
        stage=np.repeat([0, 1], 8).astype(np.int32),
        total_ns=total,
        expected_ns=np.full((16, NUM_STEPS), np.nan),
        basis=(Basis.NOTHING,) * 16,
    )


@pytest.mark.parametrize("num", [4, 5, 6])
def test_at_least_half_of_a_stage_that_became_slow_is_named(num: int) -> None:
    slow = dict.fromkeys(range(8, 8 + num), 1.25)

    (found,) = find_stages_turned_slow(profile(slow, 4, 7))

    assert found.ranks == tuple(range(8, 8 + num))
    assert found.steps == (4, 7)
    assert found.phase.excess_ratio == pytest.approx(0.25, abs=0.02)
    assert np.nanmedian(found.expected_ns) == pytest.approx(120 * MS, rel=0.02)


def test_a_stage_is_named_whole_if_80_percent_of_it_became_slow() -> None:
    (found,) = find_stages_turned_slow(profile(dict.fromkeys(range(8, 15), 1.25), 3, 9))

    assert found.ranks == tuple(range(8, 16))
    assert found.steps == (3, 9)


def test_less_than_half_of_a_stage_is_left_to_the_comparison_with_peers() -> None:
    assert find_stages_turned_slow(profile(dict.fromkeys((8, 9, 10), 1.25), 4, 7)) == ()


def test_slow_from_the_first_step_on_or_together_with_all_stages_is_no_change_of_a_stage() -> None:
    assert find_stages_turned_slow(profile(dict.fromkeys(range(8, 12), 1.25), 0, 9)) == ()
    assert find_stages_turned_slow(profile(dict.fromkeys(range(16), 1.25), 4, 7)) == ()
    assert find_stages_turned_slow(profile({}, 0, 0, warm_up=3.0)) == ()


def test_a_warm_up_step_does_not_hide_a_stage_that_became_slow() -> None:
    (found,) = find_stages_turned_slow(
        profile(dict.fromkeys(range(8, 13), 1.25), 4, 7, warm_up=3.0)
    )

    assert (found.ranks, found.steps[0]) == ((8, 9, 10, 11, 12), 4)


def test_two_fast_steps_before_an_early_onset_are_the_baseline() -> None:
    (found,) = find_stages_turned_slow(profile(dict.fromkeys(range(8, 13), 1.25), 2, 9))

    assert found.steps == (2, 9)


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
