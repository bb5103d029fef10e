"""Prices of findings, compared with the same job without the fault."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.price.findings import noise_of_steps
from rankscope.analysis.report.report import Severity
from rankscope.tracer.span import SpanKind
from rankscope.tracer.topology import Layout
from rankscope.trainer.faults.spec import parse_simulated_faults
from rankscope.trainer.simulator.scenario import Noise, Scenario, TpDetail
from tests.support.analysis.cluster import MS, Compute
from tests.support.analysis.one_group import ALL_REDUCE, findings_of, work
from tests.support.rankscope.simulated_source import SimulatedSource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankscope.analysis.report.report import Finding
    from tests.support.analysis.cluster import Action

CLUSTER = Scenario(dp=4, pp=4, tp=2, num_steps=8, num_microbatches=8, ranks_per_host=4, seed=3)


def simulated_findings(scenario: Scenario) -> tuple[Finding, ...]:
    return analyze_run(SimulatedSource(scenario), "simulated").findings


def true_slowdown(scenario: Scenario) -> float:
    return _mean_step(scenario) / _mean_step(replace(scenario, faults=()))


def _mean_step(scenario: Scenario) -> float:
    steps = SimulatedSource(scenario).steps("simulated")
    last = int(steps.step.max())
    whole = steps.end_ns[steps.step == last].max() - steps.start_ns[steps.step == 0].min()
    return float(whole) / (last + 1)


@pytest.mark.parametrize(
    "detail", [pytest.param(TpDetail.COLLAPSED, marks=pytest.mark.slow), TpDetail.COARSE]
)
@pytest.mark.parametrize(
    "spec",
    [
        "slow-compute:rank=9,factor=1.8",
        "stage-imbalance:stage=1,factor=1.5",
        "host-stall:rank=5,ms=15",
        "data-stall:rank=2,ms=120,spans=yes",
        "data-stall:rank=2,ms=120,spans=no",
        "slow-link:rank=0,factor=3",
    ],
)
def test_the_slowdown_is_the_ratio_of_the_run_to_the_run_without_the_fault(
    spec: str, detail: TpDetail
) -> None:
    scenario = replace(CLUSTER, tp_detail=detail, faults=parse_simulated_faults([spec]))

    (finding,) = simulated_findings(scenario)

    assert finding.cause == spec.split(":", maxsplit=1)[0]
    assert finding.slowdown == pytest.approx(true_slowdown(scenario), rel=0.05)
    assert finding.recoverable_ratio is not None
    assert 0.5 < finding.recoverable_ratio <= 1.0


def test_a_slow_rank_does_not_pay_for_the_work_of_its_stage() -> None:
    stage, slow = parse_simulated_faults(
        ["stage-imbalance:stage=3,factor=1.4", "slow-compute:rank=25,factor=1.8"]
    )
    scenario = replace(CLUSTER, tp_detail=TpDetail.COLLAPSED, faults=(stage, slow))

    findings = simulated_findings(scenario)

    (found,) = (each for each in findings if each.cause == "slow-compute")
    assert {each.cause for each in findings} == {"slow-compute", "stage-imbalance"}
    without = _mean_step(replace(scenario, faults=(stage,)))
    assert found.slowdown == pytest.approx(_mean_step(scenario) / without, rel=0.02)


def test_two_equally_slow_ranks_are_one_finding_that_recovers_what_both_cost() -> None:
    both = parse_simulated_faults(
        ["slow-compute:rank=8,factor=1.6", "slow-compute:rank=10,factor=1.6"]
    )
    scenario = replace(CLUSTER, tp=1, faults=both)

    (found,) = simulated_findings(scenario)

    # Fixing one of them saves nothing: the other one holds the job up as long.
    assert (found.cause, found.ranks) == ("slow-compute", (8, 10))
    assert found.slowdown == pytest.approx(true_slowdown(scenario), rel=0.05)
    assert found.recoverable_ratio is not None
    assert found.recoverable_ratio > 0.8


def test_steps_whose_tokens_vary_do_not_vary_by_chance() -> None:
    tokens = np.array([4_000, 9_000, 5_000, 7_000, 3_000, 8_000, 6_000, 5_000])
    times_ns = 10_000.0 * tokens + 1e5 * np.array([1, -1, 0, 1, -1, 0, 1, -1])

    # GIVEN 10 us for each token and 0.1 ms of chance in a step of 59 ms
    assert noise_of_steps(times_ns, tokens) < 5e5
    # WHEN the tokens of one step are unknown THEN they explain none
    unknown = np.where(tokens == 9_000, 0, tokens)
    assert noise_of_steps(times_ns, unknown) > 5e6
    # WHEN equal steps have unequal tokens THEN these explain nothing either
    assert noise_of_steps(np.full(8, 5e7), tokens) == 0.0


def test_a_slow_rank_matters_although_the_tokens_of_the_steps_vary() -> None:
    scenario = Scenario(
        dp=4,
        pp=1,
        num_steps=12,
        num_microbatches=8,
        noise=Noise(token_spread=0.4),
        faults=parse_simulated_faults(["slow-compute:rank=2,factor=1.15,steps=6-11"]),
        seed=1,
    )

    (found,) = simulated_findings(scenario)

    assert (found.cause, found.ranks, found.severity) == ("slow-compute", (2,), Severity.CRITICAL)


def late_host(rank: int, step: int) -> Iterator[Action]:
    """Compute 31 ms per step; rank 2 is 8 ms late from step 2 on; evaluate in steps 3 and 7."""
    yield from work(SpanKind.FORWARD, 10 * MS, microbatch=0)
    if rank == 2 and step >= 2:
        yield Compute(8 * MS)
    yield from work(SpanKind.BACKWARD, 20 * MS, microbatch=0)
    yield ALL_REDUCE
    if step in (3, 7):
        yield Compute(300 * MS)
    yield from work(SpanKind.OPTIMIZER, MS)


def test_a_late_host_does_not_pay_for_evaluations_of_all_ranks() -> None:
    late, evaluation = findings_of(late_host, num_steps=10)

    # Ten steps of 31.5 ms take 315 ms. The host adds 8 x 8 ms, the evaluations 2 x 300 ms.
    assert (late.cause, late.ranks, late.steps) == ("host-stall", (2,), (2, 9))
    assert late.slowdown == pytest.approx((315 + 64) / 315)
    assert (evaluation.cause, evaluation.ranks) == ("common-pause", (0, 1, 2, 3))
    assert evaluation.slowdown == pytest.approx((315 + 600) / 315)


def pausing_ranks(rank: int, step: int) -> Iterator[Action]:
    """Compute 31 ms per step; in steps 2 to 5 one rank after the other pauses for 100 ms."""
    yield from work(SpanKind.FORWARD, 10 * MS, microbatch=0)
    if step == rank + 2:
        yield Compute(100 * MS)
    yield from work(SpanKind.BACKWARD, 20 * MS, microbatch=0)
    yield ALL_REDUCE
    yield from work(SpanKind.OPTIMIZER, MS)


def test_fixed_pauses_take_no_time_even_if_there_are_no_other_gaps() -> None:
    (pauses,) = findings_of(pausing_ranks, num_steps=10)

    assert (pauses.cause, pauses.ranks, pauses.steps) == ("gc-pause", (0, 1, 2, 3), (2, 5))
    assert pauses.slowdown == pytest.approx((315 + 400) / 315)
    assert pauses.recoverable_ratio == pytest.approx(1.0, abs=0.01)


def starved_and_slow_at_the_end(rank: int, step: int) -> Iterator[Action]:
    """Compute 31 ms per step; all wait 4 ms for input from step 4 on, and rank 1 updates 25 ms
    longer than the others, so that it begins each step late.
    """
    if step >= 4:
        yield Compute(4 * MS)
    yield from work(SpanKind.FORWARD, 10 * MS, microbatch=0)
    yield from work(SpanKind.BACKWARD, 20 * MS, microbatch=0)
    yield ALL_REDUCE
    yield from work(SpanKind.OPTIMIZER, (26 if rank == 1 else 1) * MS)


def test_input_that_all_ranks_miss_does_not_cost_what_makes_one_begin_late() -> None:
    found = {each.cause: each for each in findings_of(starved_and_slow_at_the_end, num_steps=12)}

    assert found["slow-compute"].ranks == (1,)
    assert found["slow-compute"].saved_s == pytest.approx(0.025)
    assert found["data-stall"].ranks == (0, 1, 2, 3)
    assert found["data-stall"].shown_saved_s == pytest.approx(0.004)


PAUSED = {(3, 1): 100, (5, 5): 100}
"""By (step, rank): pause before the backward, in ms."""


def slow_worker(rank: int, step: int) -> Iterator[Action]:
    """Compute 30 ms per step; ranks 4 and 5, one worker, take 45 ms from step 2 on.

    The partner of a rank that pauses waits for it inside its backward.
    """
    factor = 1.5 if rank in (4, 5) and step >= 2 else 1.0
    yield from work(SpanKind.FORWARD, 10 * MS * factor, microbatch=0)
    own, partner = (PAUSED.get((step, number), 0) * MS for number in (rank, rank ^ 1))
    if own:
        yield Compute(own)
    yield from work(SpanKind.BACKWARD, partner + 20 * MS * factor, microbatch=0)
    yield ALL_REDUCE


def test_a_slow_worker_does_not_pay_for_the_pauses_of_its_partners() -> None:
    findings = findings_of(slow_worker, num_steps=8, layout=Layout(dp=4, tp=2))
    found = {each.cause: each for each in findings}

    # Eight steps of 30.5 ms take 244 ms. The worker adds 6 x 15 ms, the pauses 2 x 100 ms.
    slow = found["slow-compute"]
    assert (slow.ranks, slow.steps) == ((4, 5), (2, 7))
    assert slow.slowdown == pytest.approx((244 + 90) / 244)
    assert found["gc-pause"].ranks == (1, 5)
    assert found["gc-pause"].slowdown == pytest.approx((244 + 200) / 244)


def slow_rank_that_saves(rank: int, step: int) -> Iterator[Action]:
    """Compute 30 ms per step, rank 2 from step 2 on 45 ms; save for 500 ms in steps 4 and 9."""
    factor = 1.5 if rank == 2 and step >= 2 else 1.0
    for kind, length in ((SpanKind.FORWARD, 10 * MS), (SpanKind.BACKWARD, 20 * MS)):
        yield from work(kind, length * factor, microbatch=0)
    yield ALL_REDUCE
    if step in (4, 9):
        yield from work(SpanKind.CHECKPOINT, 500 * MS)


def test_a_slow_rank_does_not_pay_for_the_checkpoints_that_it_writes() -> None:
    slow, checkpoint = findings_of(slow_rank_that_saves, num_steps=10)

    # Ten steps of 30.5 ms take 305 ms. The rank adds 8 x 15 ms, the checkpoints 2 x 500 ms.
    assert (slow.cause, slow.ranks) == ("slow-compute", (2,))
    assert slow.slowdown == pytest.approx((305 + 120) / 305)
    assert slow.recoverable_ratio == pytest.approx(120 / 1120)
    assert (checkpoint.cause, checkpoint.ranks) == ("checkpoint", (0, 1, 2, 3))
    assert checkpoint.slowdown == pytest.approx((305 + 1000) / 305)
    assert checkpoint.recoverable_ratio is None
    assert checkpoint.evidence.endswith("; it costs 100 ms per step")


def slow_first_stage(rank: int, step: int) -> Iterator[Action]:
    """Compute 5 micro-batches of 10 ms, the last stage of 15 ms, the first from step 3 on of 11 ms.

    In the first 3 steps the first micro-batch takes 60 ms longer, because everything warms up.
    """
    factor = 1.5 if rank == 1 else 1.1 if step >= 3 else 1.0
    for microbatch in range(5):
        is_warm_up = step < 3 and microbatch == 0
        yield from work(SpanKind.FORWARD, 10 * MS * factor, microbatch=microbatch)
        if is_warm_up:
            yield from work(SpanKind.FORWARD, 60 * MS, microbatch=microbatch)
    yield ALL_REDUCE


def test_a_rank_that_is_slow_in_all_steps_but_the_start_up_has_no_baseline() -> None:
    found = findings_of(slow_first_stage, num_steps=16, layout=Layout(pp=2))

    # Its only other steps warm up, and a stage alone has no peers.
    assert "slow-compute" not in {each.cause for each in found}
