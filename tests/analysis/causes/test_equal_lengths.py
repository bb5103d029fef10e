"""Compute as it would be with micro-batches of equal length."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.arrays.grouping import NO_GROUP
from rankscope.analysis.causes.equal_lengths import (
    correlation,
    equalize_declared_lengths,
    equalize_durations,
    equalize_experts,
    equalize_inferred_lengths,
)
from rankscope.analysis.replay.model import ComputeItems
from rankscope.analysis.trace.context import MicrobatchTable
from rankscope.tracer.span import KIND_CODES, SpanKind
from rankscope.tracer.topology import Coords
from tests.analysis.breakdown.test_starved import model_of
from tests.support.analysis.tables import table_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

FORWARD, BACKWARD = KIND_CODES[SpanKind.FORWARD], KIND_CODES[SpanKind.BACKWARD]

NUM_RANKS, NUM_MICROBATCHES = 4, 32


def declared(squares: NDArray[np.int64], *, num_ranks: int = NUM_RANKS) -> MicrobatchTable:
    """Return the lengths of one step, rank after rank."""
    rank, microbatch = np.divmod(np.arange(squares.size), squares.size // num_ranks)
    return table_of(MicrobatchTable, rank=rank, microbatch=microbatch, sum_squared_lengths=squares)


LENGTHS = declared(np.random.default_rng(6).integers(10**6, 10**7, NUM_RANKS * NUM_MICROBATCHES))


def one_step(*, share: float = 0.5, slow: float = 1.0) -> ComputeItems:
    """Return the compute of one step with these lengths.

    Args:
        share: Share of the compute that goes with the sum of squared lengths.
        slow: Factor of the last rank's compute.
    """
    squares = LENGTHS.sum_squared_lengths.reshape(NUM_RANKS, NUM_MICROBATCHES)
    factor = 1 - share + share * squares / squares.mean()
    forward = 1e6 * factor * np.array([1.0] * (NUM_RANKS - 1) + [slow])[:, None]
    rank, kind, microbatch = np.meshgrid(
        np.arange(NUM_RANKS), (FORWARD, BACKWARD), np.arange(NUM_MICROBATCHES), indexing="ij"
    )
    return table_of(
        ComputeItems,
        rank=rank.ravel(),
        kind=kind.ravel(),
        microbatch=microbatch.ravel(),
        self_ns=np.rint(np.stack((forward, 2 * forward), axis=1).ravel()),
    )


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_declared_lengths_are_taken_out_and_a_slow_rank_stays_slow(share: float) -> None:
    equal = equalize_declared_lengths(one_step(share=share, slow=1.3), LENGTHS)

    assert equal is not None
    forward = equal.self_ns[equal.kind == FORWARD].reshape(NUM_RANKS, -1)
    assert forward.mean(axis=1) / forward[0].mean() == pytest.approx([1, 1, 1, 1.3], rel=1e-3)
    assert (np.ptp(forward, axis=1) / forward.mean(axis=1) < 1e-3).all()


ONE_UNKNOWN = declared(np.where(np.arange(128) == 3, -1, LENGTHS.sum_squared_lengths))
ALL_EQUAL = declared(np.full(NUM_RANKS * NUM_MICROBATCHES, 10**6))
SHUFFLED = declared(np.random.default_rng(7).permutation(LENGTHS.sum_squared_lengths))


@pytest.mark.parametrize("lengths", [ONE_UNKNOWN, ALL_EQUAL, SHUFFLED])
def test_lengths_that_do_not_explain_compute_leave_it_as_it_is(lengths: MicrobatchTable) -> None:
    assert equalize_declared_lengths(one_step(), lengths) is None


def test_equal_values_have_no_correlation() -> None:
    # GIVEN values whose standard deviation is not 0, because their mean is rounded
    equal, other = np.full(50, 0.1), np.random.default_rng(0).random(50)
    assert equal.std() > 0

    assert correlation(equal, other) is None


def test_ranks_with_few_micro_batches_are_equalized_too() -> None:
    # GIVEN 16 ranks with 5 micro-batches each, whose medians differ much, and compute of exactly
    # 1 + 9 s, s being the sum of squares over its mean
    squares = np.exp(np.random.default_rng(3).normal(0, 0.6, (16, 5))) * 10**6
    table = declared(np.rint(squares.ravel()).astype(np.int64), num_ranks=16)
    items = table_of(
        ComputeItems,
        rank=table.rank,
        kind=FORWARD,
        microbatch=table.microbatch,
        self_ns=np.rint(1e6 * (1 + 9 * squares.ravel() / squares.mean())),
    )

    equal = equalize_declared_lengths(items, table)

    # THEN all take as long as one of the mean length, 10 ms
    assert equal is not None
    assert equal.self_ns == pytest.approx(1e7, rel=0.01)


NUM_STAGES, NUM_COLUMNS, NUM_STEPS = 4, 3, 4
FACTOR = np.random.default_rng(2).choice([0.5, 1.0, 1.5], (NUM_STEPS, NUM_COLUMNS, 4))
"""Length of each (step, column, micro-batch)."""


def coords(num_stages: int = NUM_STAGES) -> dict[int, Coords]:
    return {
        stage * NUM_COLUMNS + column: Coords(dp=column, pp=stage)
        for stage in range(num_stages)
        for column in range(NUM_COLUMNS)
    }


def pipeline(*, slow: dict[int, float] | None = None, num_stages: int = NUM_STAGES) -> ComputeItems:
    """Return the compute of stages that take 10, 20, ... ms.

    Args:
        slow: By rank, the factor of its compute from step 2 on.
        num_stages: Stages of three ranks.
    """
    rows = [
        (step, rank, kind, microbatch, base * FACTOR[step, place.dp, microbatch])
        for step in range(NUM_STEPS)
        for rank, place in coords(num_stages).items()
        for kind in (FORWARD, BACKWARD)
        for microbatch in range(4)
        for base in [10e6 * (place.pp + 1) * ((slow or {}).get(rank, 1.0) if step >= 2 else 1.0)]
    ]
    step, rank, kind, microbatch, took = zip(*rows, strict=True)
    return table_of(
        ComputeItems, step=step, rank=rank, kind=kind, microbatch=microbatch, self_ns=np.rint(took)
    )


def test_what_is_long_on_all_stages_is_a_long_micro_batch() -> None:
    equal = equalize_inferred_lengths(pipeline(), coords())

    # THEN all micro-batches of a stage take the mean of its lengths
    assert equal is not None
    for stage in range(NUM_STAGES):
        mine = equal.self_ns[np.isin(equal.rank, range(stage * 3, stage * 3 + 3))]
        assert mine == pytest.approx(
            np.full(len(mine), 10e6 * (stage + 1) * FACTOR.mean()), rel=0.01
        )


def test_what_is_long_on_one_rank_is_that_rank() -> None:
    equal = equalize_inferred_lengths(pipeline(slow={4: 1.3}), coords())

    assert equal is not None
    of_rank = equal.self_ns[(equal.rank == 4) & (equal.step >= 2)]
    of_others = equal.self_ns[(equal.rank == 3) & (equal.step >= 2)]
    assert of_rank / of_others == pytest.approx(np.full(len(of_rank), 1.3), rel=0.01)


def test_lengths_cannot_be_inferred_from_columns_of_two_ranks() -> None:
    assert equalize_inferred_lengths(pipeline(num_stages=2), coords(2)) is None


def test_ranks_that_do_not_follow_their_column_are_left_as_they_are() -> None:
    items = pipeline()
    items.self_ns[:] = np.random.default_rng(3).permutation(items.self_ns)

    assert equalize_inferred_lengths(items, coords()) is None


def equalized(by_rank: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Equalize one piece per rank and step, all of one stage. Shape (ranks, steps)."""
    num_ranks, num_steps = len(by_rank), len(by_rank[0])
    rank, step = np.meshgrid(np.arange(num_ranks), np.arange(num_steps), indexing="ij")
    found = equalize_durations(
        np.array(by_rank, dtype=np.float64).reshape(-1),
        rank=rank.reshape(-1).astype(np.int32),
        step=step.reshape(-1).astype(np.int32),
        label=np.zeros(rank.size, dtype=np.int64),
    )
    return found.reshape(num_ranks, num_steps)


def test_ranks_that_differ_by_chance_take_the_mean_of_all() -> None:
    # GIVEN 90 ms in 6 pieces. The ratios to the mean, 2/3 and 4/3, vary so much within a rank that
    # its mean over 3 steps has a variance of 0.15, while the variance between ranks is 0.11
    found = equalized([[10.0, 10.0, 20.0], [20.0, 20.0, 10.0]])

    assert found == pytest.approx(np.full((2, 3), 15.0))


def test_equal_lengths_have_as_many_tokens_as_before() -> None:
    lengths = np.random.default_rng(1).lognormal(0.0, 0.4, (8, 40))

    assert equalized(lengths.tolist()).sum() == pytest.approx(lengths.sum(), rel=0.01)


def test_a_step_that_is_long_as_a_whole_stays_long() -> None:
    found = equalized([[30.0, 10.0, 10.0, 20.0, 10.0], [30.0, 20.0, 10.0, 10.0, 10.0]])

    # THEN step 0 stays 3 times as long. The other steps hold 100 ms in 8 pieces, and step 0, over
    # 3, holds 20 ms in 2: 12 ms each
    assert found[0] == pytest.approx([36.0, 12.0, 12.0, 12.0, 12.0])


def test_a_span_is_equalized_as_a_whole_however_it_is_cut() -> None:
    # GIVEN ranks that in turn take 40 ms in one piece, and 20 ms in two pieces of 5 and 15 ms
    found = equalize_durations(
        np.array([40.0, 5.0, 15.0, 5.0, 15.0, 40.0]),
        rank=np.array([0, 1, 1, 0, 0, 1], dtype=np.int32),
        step=np.array([0, 0, 0, 1, 1, 1], dtype=np.int32),
        label=np.zeros(6, dtype=np.int64),
        span=np.array([0, 1, 1, 2, 2, 3]),
    )

    # THEN each span takes the mean, 30 ms, shared among its pieces as before
    assert found == pytest.approx([30.0, 7.5, 22.5, 7.5, 22.5, 30.0])


EXPERTS = np.array([False, True] * 3)


def equalized_experts(experts_ns: tuple[int, int, int]) -> tuple[list[bool], list[float]]:
    """Equalize the experts of three micro-batches that take 10, 20 and 30 ns outside experts.

    Returns:
        The operations that are equalized, and what the experts would take.
    """
    ops, now = [], 0
    for pair in zip((10, 20, 30), experts_ns, strict=True):
        for took in pair:
            ops.append((0, now, now + took, NO_GROUP))
            now += took
    outside = np.array([20.0, 0.0] * 3)
    model = replace(model_of(ops, []), span=np.array([0, 0, 1, 1, 2, 2]))
    part, found = equalize_experts(model, EXPERTS, ~EXPERTS, outside)
    return part.tolist(), found[EXPERTS].tolist()


def test_experts_are_shortened_by_the_factor_of_the_rest_of_their_span() -> None:
    part, found = equalized_experts((22, 40, 63))

    assert part == [True] * 6
    assert found == pytest.approx([22 * 20 / 10, 40, 63 * 20 / 30])


def test_experts_that_do_not_follow_the_lengths_are_left_as_they_are() -> None:
    part, found = equalized_experts((60, 40, 20))

    assert part == (~EXPERTS).tolist()
    assert found == [0.0] * 3
