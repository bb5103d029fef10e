"""Micro-batches whose lengths nobody told are as long as their whole column found them."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.analysis.causes.equal_lengths import equalize_inferred_lengths
from rankscope.analysis.replay.model import ComputeItems
from rankscope.tracer.span import KIND_CODES, SpanKind
from rankscope.tracer.topology import Coords

KINDS = [KIND_CODES[SpanKind.FORWARD], KIND_CODES[SpanKind.BACKWARD]]
NUM_STAGES, NUM_COLUMNS, NUM_STEPS, NUM_MICROBATCHES = 4, 3, 4, 4
FACTOR = np.random.default_rng(2).choice(
    [0.5, 1.0, 1.5], (NUM_STEPS, NUM_COLUMNS, NUM_MICROBATCHES)
)
"""Of each micro-batch's length."""


def coords(num_stages: int = NUM_STAGES) -> dict[int, Coords]:
    return {
        stage * NUM_COLUMNS + column: Coords(dp=column, pp=stage)
        for stage in range(num_stages)
        for column in range(NUM_COLUMNS)
    }


def job(*, slow: dict[int, float] | None = None, num_stages: int = NUM_STAGES) -> ComputeItems:
    """Return compute of stages of 10, 20, ... ms, rank by rank as slow as told from step 2 on."""
    rows = [
        (step, rank, kind, microbatch, base * FACTOR[step, place.dp, microbatch])
        for step in range(NUM_STEPS)
        for rank, place in coords(num_stages).items()
        for kind in KINDS
        for microbatch in range(NUM_MICROBATCHES)
        for base in [10e6 * (place.pp + 1) * ((slow or {}).get(rank, 1.0) if step >= 2 else 1.0)]
    ]
    step, rank, kind, microbatch, took = (np.array(column) for column in zip(*rows, strict=True))
    return ComputeItems(
        step=step.astype(np.int32),
        rank=rank.astype(np.int32),
        kind=kind.astype(np.int8),
        chunk=np.zeros(len(step), dtype=np.int32),
        microbatch=microbatch.astype(np.int32),
        self_ns=np.rint(took).astype(np.int64),
    )


def test_what_is_long_on_all_stages_is_a_long_micro_batch() -> None:
    even = equalize_inferred_lengths(job(), coords())

    assert even is not None
    # All micro-batches of a stage take the mean of its lengths.
    for stage in range(NUM_STAGES):
        mine = even.self_ns[np.isin(even.rank, range(stage * 3, stage * 3 + 3))]
        assert mine == pytest.approx(
            np.full(len(mine), 10e6 * (stage + 1) * FACTOR.mean()), rel=0.01
        )


def test_what_is_long_on_one_rank_is_that_rank() -> None:
    even = equalize_inferred_lengths(job(slow={4: 1.3}), coords())

    assert even is not None
    of_rank = even.self_ns[(even.rank == 4) & (even.step >= 2)]
    of_others = even.self_ns[(even.rank == 3) & (even.step >= 2)]
    assert of_rank / of_others == pytest.approx(np.full(len(of_rank), 1.3), rel=0.01)


def test_two_ranks_a_column_cannot_tell_which_of_them_is_slow() -> None:
    assert equalize_inferred_lengths(job(num_stages=2), coords(2)) is None


def test_ranks_whose_compute_goes_its_own_way_are_left_alone() -> None:
    items = job()
    items.self_ns[:] = np.random.default_rng(3).permutation(items.self_ns)

    assert equalize_inferred_lengths(items, coords()) is None
