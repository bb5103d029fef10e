"""Steps that are long as a whole, told from micro-batches of unequal length."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.analysis.causes.equal_lengths import equalize_declared_lengths
from rankscope.analysis.causes.sequence_imbalance import measure_sequence_effect
from rankscope.analysis.replay.model import ComputeItems
from rankscope.analysis.statistics.baseline import common_step_ratio
from rankscope.analysis.trace.context import MicrobatchTable, empty_microbatches
from rankscope.tracer.span import KIND_CODES, SpanKind

KINDS = (KIND_CODES[SpanKind.FORWARD], KIND_CODES[SpanKind.BACKWARD])


def items(length: np.ndarray[tuple[int, int, int], np.dtype[np.float64]]) -> ComputeItems:
    """Return forwards of 10 ms and backwards of 20 ms, times (step, rank, micro-batch) lengths."""
    step, rank, microbatch = np.indices(length.shape).reshape(3, -1)
    self_ns = [np.rint(length.ravel() * own) for own in (10e6, 20e6)]
    num = length.size
    return ComputeItems(
        step=np.tile(step, 2).astype(np.int32),
        rank=np.tile(rank, 2).astype(np.int32),
        kind=np.repeat(KINDS, num).astype(np.int8),
        chunk=np.zeros(2 * num, dtype=np.int32),
        microbatch=np.tile(microbatch, 2).astype(np.int32),
        self_ns=np.concatenate(self_ns).astype(np.int64),
    )


def test_a_step_is_long_as_a_whole_where_nearly_all_of_it_is() -> None:
    ratio = np.array([3.0, 3.2, 2.9, 0.9, 1.1, 1.3])
    step = np.array([0, 0, 0, 1, 1, 1], dtype=np.int32)

    # THEN the first step is 3 times as long as usual, the second as long as usual
    assert common_step_ratio(ratio, step).tolist() == [3.0, 3.0, 3.0, 1.0, 1.0, 1.0]


def test_a_first_step_that_warms_up_is_no_imbalance_of_sequences() -> None:
    # GIVEN 8 steps of 4 ranks and 4 micro-batches, the first 3 times as long, the others alike
    rng = np.random.default_rng(0)
    length = 1.0 + 0.01 * rng.standard_normal((8, 4, 4))
    length[0] *= 3.0
    measured = items(length)
    noise = 1.0 + 0.01 * rng.standard_normal(len(measured))
    measured.self_ns[:] = np.rint(measured.self_ns * noise)

    assert measure_sequence_effect(measured, empty_microbatches(), (), is_routed=False) is None


def test_micro_batches_that_differ_within_a_step_are_seen_beside_a_warm_up() -> None:
    rng = np.random.default_rng(0)
    length = np.exp(0.3 * rng.standard_normal((8, 4, 4)))
    length[0] *= 3.0

    found = measure_sequence_effect(items(length), empty_microbatches(), (), is_routed=False)

    assert found is not None
    assert found.correlation > 0.99


def test_known_lengths_explain_compute_beside_a_warm_up() -> None:
    # GIVEN compute of which half goes with the squares, and a first step twice as long
    rng = np.random.default_rng(0)
    squares = np.exp(0.4 * rng.standard_normal((8, 4, 4)))
    length = 0.5 + 0.5 * squares
    length[0] *= 2.0
    measured = items(length)
    step, rank, microbatch = np.indices(squares.shape).reshape(3, -1).astype(np.int32)
    told = MicrobatchTable(
        epoch=np.zeros(squares.size, dtype=np.int32),
        step=step,
        rank=rank,
        microbatch=microbatch,
        num_tokens=np.full(squares.size, 4096),
        sum_squared_lengths=np.rint(squares.ravel() * 4096**2).astype(np.int64),
    )

    found = measure_sequence_effect(measured, told, (), is_routed=False)
    equalized = equalize_declared_lengths(measured, told)

    assert found is not None
    assert found.by_lengths
    # THEN what is left are the ranks' own medians: each is of 32 random lengths.
    assert found.correlation > 0.95
    # THEN forwards of mean length last 10 ms x (0.5 + 0.5 x the mean of the squares), twice that
    # in the first step
    assert equalized is not None
    fixed_ns = 10e6 * (0.5 + 0.5 * squares.mean())
    forward = equalized.kind == KINDS[0]
    assert equalized.self_ns[forward & (equalized.step > 0)] == pytest.approx(fixed_ns, rel=0.02)
    assert equalized.self_ns[forward & (equalized.step == 0)] == pytest.approx(
        2 * fixed_ns, rel=0.02
    )
