"""Ranks are held against each other as if their micro-batches were of equal length."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.causes.equal_lengths import equalize_declared_lengths
from rankscope.analysis.replay.model import ComputeItems
from rankscope.analysis.trace.context import MicrobatchTable
from rankscope.sources.simulated_source import SimulatedSource
from rankscope.tracer.span import KIND_CODES, SpanKind
from rankscope.trainer.simulator.fault import parse_simulated_faults
from rankscope.trainer.simulator.scenario import Scenario, TpDetail

KINDS = [KIND_CODES[SpanKind.FORWARD], KIND_CODES[SpanKind.BACKWARD]]
NUM_RANKS, NUM_MICROBATCHES = 4, 32


def job(*, share: float = 0.5, slow: float = 1.0, noise: float = 0.0) -> ComputeItems:
    """Return compute of ranks of which the last is slow; ``share`` of it goes with lengths."""
    rng = np.random.default_rng(5)
    squares = lengths().sum_squared_lengths.reshape(NUM_RANKS, NUM_MICROBATCHES)
    factor = 1 - share + share * squares / squares.mean()
    one = 1e6 * factor * np.array([1.0] * (NUM_RANKS - 1) + [slow])[:, None]
    both = np.stack((one, 2 * one), axis=1) * rng.normal(1.0, noise, (NUM_RANKS, 2, 1))
    rank, kind, microbatch = np.meshgrid(
        np.arange(NUM_RANKS), KINDS, np.arange(NUM_MICROBATCHES), indexing="ij"
    )
    return ComputeItems(
        step=np.zeros(rank.size, dtype=np.int32),
        rank=rank.ravel().astype(np.int32),
        kind=kind.ravel().astype(np.int8),
        chunk=np.zeros(rank.size, dtype=np.int32),
        microbatch=microbatch.ravel().astype(np.int32),
        self_ns=np.rint(both.ravel()).astype(np.int64),
    )


def lengths() -> MicrobatchTable:
    rng = np.random.default_rng(6)
    rank, microbatch = np.meshgrid(np.arange(NUM_RANKS), np.arange(NUM_MICROBATCHES), indexing="ij")
    return MicrobatchTable(
        epoch=np.zeros(rank.size, dtype=np.int32),
        step=np.zeros(rank.size, dtype=np.int32),
        rank=rank.ravel().astype(np.int32),
        microbatch=microbatch.ravel().astype(np.int32),
        num_tokens=np.full(rank.size, 4096),
        sum_squared_lengths=rng.integers(10**6, 10**7, rank.size),
    )


def by_rank(items: ComputeItems) -> list[float]:
    """Return each rank's forward, over that of rank 0; and how far its items differ."""
    forward = items.self_ns[items.kind == KINDS[0]].reshape(NUM_RANKS, -1)
    return [float(mean) for mean in forward.mean(axis=1) / forward[0].mean()]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_what_lengths_explain_is_taken_out_and_a_slow_rank_stays_slow(share: float) -> None:
    equalized = equalize_declared_lengths(job(share=share, slow=1.3), lengths())

    assert equalized is not None
    assert by_rank(equalized) == pytest.approx([1.0, 1.0, 1.0, 1.3], rel=1e-3)
    forward = equalized.self_ns[equalized.kind == KINDS[0]].reshape(NUM_RANKS, -1)
    assert (np.ptp(forward, axis=1) / forward.mean(axis=1) < 1e-3).all()


def test_compute_that_does_not_go_with_lengths_is_left_alone() -> None:
    items = job()
    shuffled = replace(items, self_ns=np.random.default_rng(7).permutation(items.self_ns))

    assert equalize_declared_lengths(shuffled, lengths()) is None


def test_one_length_that_nobody_told_leaves_all_alone() -> None:
    told = lengths()
    told.sum_squared_lengths[3] = -1

    assert equalize_declared_lengths(job(), told) is None


def test_equal_lengths_explain_nothing() -> None:
    told = replace(lengths(), sum_squared_lengths=np.full(NUM_RANKS * NUM_MICROBATCHES, 10**6))

    assert equalize_declared_lengths(job(), told) is None


def test_a_slow_rank_is_named_beside_unequal_lengths() -> None:
    # GIVEN micro-batches that differ by 40 %, and a rank that is slow for some steps
    scenario = Scenario(
        dp=8, pp=2, tp=1, num_steps=10, num_microbatches=16, seed=4, tp_detail=TpDetail.COLLAPSED,
        faults=parse_simulated_faults(
            ["sequence-imbalance:spread=0.4", "slow-compute:rank=5,factor=1.3,steps=4-7"]
        ),
    )  # fmt: skip

    # WHEN the run is analysed
    findings = analyze_run(SimulatedSource(scenario), "simulated").findings

    # THEN both are told, and the evidence says what it holds against what
    assert {finding.cause for finding in findings} == {"sequence-imbalance", "slow-compute"}
    (slow,) = (finding for finding in findings if finding.cause == "slow-compute")
    assert (slow.ranks, slow.steps) == ((5,), (4, 7))
    assert "as with micro-batches of equal length" in slow.evidence


def test_ranks_that_had_few_micro_batches_are_evened_too() -> None:
    # GIVEN 16 ranks with 5 micro-batches each, so that the middle one's length differs much from
    # rank to rank, and compute of exactly 1 + 9 s, s being the sum of squares over the mean
    squares = np.exp(np.random.default_rng(3).normal(0, 0.6, (16, 5))) * 10**6
    rank, microbatch = np.meshgrid(np.arange(16), np.arange(5), indexing="ij")
    table = MicrobatchTable(
        epoch=np.zeros(rank.size, dtype=np.int32),
        step=np.zeros(rank.size, dtype=np.int32),
        rank=rank.ravel().astype(np.int32),
        microbatch=microbatch.ravel().astype(np.int32),
        num_tokens=np.full(rank.size, 4096),
        sum_squared_lengths=np.rint(squares.ravel()).astype(np.int64),
    )
    items = ComputeItems(
        step=table.step,
        rank=table.rank,
        kind=np.full(rank.size, KINDS[0], dtype=np.int8),
        chunk=np.zeros(rank.size, dtype=np.int32),
        microbatch=table.microbatch,
        self_ns=np.rint(1e6 * (1 + 9 * squares.ravel() / squares.mean())).astype(np.int64),
    )

    equalized = equalize_declared_lengths(items, table)

    # THEN all are as long as one of the mean length, 10 ms
    assert equalized is not None
    assert equalized.self_ns == pytest.approx(1e7, rel=0.01)
