"""Micro-batches of unequal length, beside other reasons why compute varies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.causes.equal_lengths import equalize_declared_lengths
from rankscope.analysis.causes.sequence_imbalance import describe_sequence_effect
from rankscope.analysis.replay.model import ComputeItems
from rankscope.analysis.trace.context import MicrobatchTable, empty_microbatches
from rankscope.tracer.span import KIND_CODES, SpanKind
from rankscope.trainer.faults.spec import parse_simulated_faults
from rankscope.trainer.simulator.scenario import Scenario, TpDetail
from tests.support.analysis.cluster import MS
from tests.support.analysis.one_group import ALL_REDUCE, findings_of, work
from tests.support.analysis.tables import table_of
from tests.support.rankscope.simulated_source import SimulatedSource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.analysis.cluster import Action

KINDS = (KIND_CODES[SpanKind.FORWARD], KIND_CODES[SpanKind.BACKWARD])


def items(length: np.ndarray[tuple[int, int, int], np.dtype[np.float64]]) -> ComputeItems:
    """Return forwards of 10 ms and backwards of 20 ms, times the length of the micro-batch.

    Args:
        length: Shape (steps, ranks, micro-batches).
    """
    step, rank, microbatch = np.indices(length.shape).reshape(3, -1)
    self_ns = [np.rint(length.ravel() * own) for own in (10e6, 20e6)]
    return table_of(
        ComputeItems,
        step=np.tile(step, 2),
        rank=np.tile(rank, 2),
        kind=np.repeat(KINDS, length.size),
        microbatch=np.tile(microbatch, 2),
        self_ns=np.concatenate(self_ns),
    )


def test_a_warm_up_step_is_no_imbalance_of_sequences() -> None:
    # GIVEN a first step that takes 3 times as long, and micro-batches that differ by 1 %
    rng = np.random.default_rng(0)
    length = 1.0 + 0.01 * rng.standard_normal((8, 4, 4))
    length[0] *= 3.0
    measured = items(length)
    noise = 1.0 + 0.01 * rng.standard_normal(len(measured))
    measured.self_ns[:] = np.rint(measured.self_ns * noise)

    assert describe_sequence_effect(measured, empty_microbatches(), (), is_routed=False) == ""


def test_a_warm_up_step_does_not_hide_unequal_micro_batches() -> None:
    rng = np.random.default_rng(0)
    length = np.exp(0.3 * rng.standard_normal((8, 4, 4)))
    length[0] *= 3.0

    found = describe_sequence_effect(items(length), empty_microbatches(), (), is_routed=False)

    assert found.endswith(", in forward and backward together (correlation 1.00)")


def test_declared_lengths_explain_compute_beside_a_warm_up_step() -> None:
    # GIVEN compute that half follows the squared lengths, and a first step twice as long
    rng = np.random.default_rng(0)
    squares = np.exp(0.4 * rng.standard_normal((8, 4, 4)))
    length = 0.5 + 0.5 * squares
    length[0] *= 2.0
    measured = items(length)
    step, rank, microbatch = np.indices(squares.shape).reshape(3, -1)
    lengths = table_of(
        MicrobatchTable,
        step=step,
        rank=rank,
        microbatch=microbatch,
        sum_squared_lengths=np.rint(squares.ravel() * 4096**2),
    )

    equalized = equalize_declared_lengths(measured, lengths)
    found = describe_sequence_effect(measured, lengths, (), is_routed=False, is_explained=True)

    assert " and follows the sum of squared lengths (correlation 0.9" in found
    # AND declared lengths that do not explain compute are not its cause
    assert describe_sequence_effect(measured, lengths, (), is_routed=False) == ""
    # AND equalized forwards take 10 ms x (0.5 + 0.5 x the mean of the squares), or twice that
    assert equalized is not None
    mean_ns = 10e6 * (0.5 + 0.5 * squares.mean())
    forward = equalized.kind == KINDS[0]
    assert equalized.self_ns[forward & (equalized.step > 0)] == pytest.approx(mean_ns, rel=0.02)
    assert equalized.self_ns[forward & (equalized.step == 0)] == pytest.approx(
        2 * mean_ns, rel=0.02
    )


def test_a_slow_rank_is_named_beside_unequal_lengths() -> None:
    # GIVEN micro-batches that differ by 40 %, and a rank that is slow for some steps
    scenario = Scenario(
        dp=8, pp=2, tp=1, num_steps=10, num_microbatches=16, seed=4, tp_detail=TpDetail.COLLAPSED,
        faults=parse_simulated_faults(
            ["sequence-imbalance:spread=0.4", "slow-compute:rank=5,factor=1.3,steps=4-7"]
        ),
    )  # fmt: skip

    findings = analyze_run(SimulatedSource(scenario), "simulated").findings

    assert {finding.cause for finding in findings} == {"sequence-imbalance", "slow-compute"}
    (slow,) = (finding for finding in findings if finding.cause == "slow-compute")
    assert (slow.ranks, slow.steps) == ((5,), (4, 7))
    assert slow.evidence.endswith("; all times as if micro-batches had equal lengths")


def with_checkpoints(rank: int, step: int) -> Iterator[Action]:
    """Compute for 28.8 ms per step, ranks in turn for 33.6; save for 200 ms in steps 3 and 7."""
    length = 1.12 if rank == step % 4 else 0.96
    for kind, ms in ((SpanKind.FORWARD, 10), (SpanKind.BACKWARD, 20)):
        yield from work(kind, ms * MS * length, microbatch=0)
    yield ALL_REDUCE
    if step % 4 == 3:
        yield from work(SpanKind.CHECKPOINT, 200 * MS)


def test_checkpoints_do_not_hide_the_cost_of_unequal_micro_batches() -> None:
    found = {each.cause: each for each in findings_of(with_checkpoints, num_steps=8)}

    # The mean micro-batch is (1.12 + 3 x 0.96) / 4 = 1: steps of 34.1 ms would take 30.5 ms, which
    # is 12 % of a median step, but 4 % of the mean step of 80.5 ms.
    assert set(found) == {"sequence-imbalance", "checkpoint"}
    assert found["sequence-imbalance"].slowdown == pytest.approx(34.1 / 30.5)


def with_slow_rank(rank: int, step: int) -> Iterator[Action]:
    """Compute for 28.5 ms, ranks in turn for 34.5; rank 3 twice as long from step 9 on."""
    length = 1.15 if rank == step % 4 else 0.95
    factor = 2.0 if rank == 3 and step >= 9 else 1.0
    for kind, ms in ((SpanKind.FORWARD, 10), (SpanKind.BACKWARD, 20)):
        yield from work(kind, ms * MS * length * factor, microbatch=0)
    yield ALL_REDUCE


def test_only_the_slow_steps_of_a_rank_are_left_out_of_the_price() -> None:
    found = {each.cause: each for each in findings_of(with_slow_rank, num_steps=12)}

    # Eleven steps take 35 ms. In the last one the slow rank has the long micro-batch; without its
    # slowness it takes 30.5 ms, because the mean of the other ranks is (9 x 1.15 + 27 x 0.95) / 36.
    # Equalized steps take the mean of 45 items, and 0.5 ms for the reduction.
    equal = 30 * (11 * 1.15 + 34 * 0.95) / 45 + 0.5
    assert set(found) == {"sequence-imbalance", "slow-compute"}
    assert found["slow-compute"].ranks == (3,)
    assert found["sequence-imbalance"].slowdown == pytest.approx(
        (11 * 35 + 30.5) / (9 * equal + 3 * 30.5)
    )
