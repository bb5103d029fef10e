"""Ranks that run out of the memory of their devices."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.causes import near_oom
from rankscope.analysis.causes.detector import Record
from rankscope.analysis.proof.cards import with_cards
from rankscope.analysis.trace.context import RunContext
from rankscope.analysis.trace.tables import RankMemory, StepTable
from tests.support.analysis.exit_builders import run_of
from tests.support.analysis.tables import table_of
from tests.support.dashboard.builders import span_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankscope.analysis.report.report import Finding

GIB, MIB = 1 << 30, 1 << 20
NUM_RANKS, NUM_STEPS = 4, 40
DEVICE = RankMemory(device_bytes=80 * GIB, other_bytes=2 * GIB)
"""78 GiB that the allocator can have."""

FULL_CACHE = 78 * GIB - MIB


def record_of(
    peak: Callable[[int, int], int],
    retries: Callable[[int, int], int] = lambda rank, step: 0,
    *,
    memory: RankMemory = DEVICE,
    num_steps: int = NUM_STEPS,
    num_earlier_steps: int = 0,
) -> Record:
    """Return a run whose allocators have a full cache, as those of most healthy jobs do.

    Args:
        peak: Bytes of tensors, by rank and step.
        retries: How often the allocator freed its cache so far, by rank and step.
        memory: Of each rank.
        num_steps: Steps of the record.
        num_earlier_steps: Steps before these.
    """
    run = run_of(NUM_RANKS)
    (epoch,) = run.epochs
    ranks = tuple(replace(info, memory=memory) for info in epoch.ranks)
    cells = [(rank, step) for step in range(num_steps) for rank in range(NUM_RANKS)]
    rank, step = np.array(cells).T
    steps = table_of(
        StepTable,
        rank=rank,
        step=step + num_earlier_steps,
        peak_memory_bytes=[peak(*cell) for cell in cells],
        peak_reserved_bytes=FULL_CACHE,
        num_alloc_retries=[retries(*cell) for cell in cells],
    )
    return Record(
        run=replace(run, epochs=(replace(epoch, ranks=ranks),)),
        spans=span_table([]),
        steps=steps,
        context=RunContext(),
        num_earlier_steps=num_earlier_steps,
    )


def steady(rank: int, step: int) -> int:
    """Return a peak of 97 % of what the allocator can have."""
    return int(0.97 * 78 * GIB)


def only(record: Record) -> Finding:
    (finding,) = near_oom.detect(record)
    return finding


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(record_of(steady), id="a full cache and a high peak"),
        pytest.param(record_of(steady, lambda rank, step: 9), id="retries of the start-up"),
        # Other sizes, as after an evaluation.
        pytest.param(record_of(steady, lambda rank, step: 9 * (step >= 20)), id="retries once"),
        pytest.param(record_of(steady, lambda rank, step: -1), id="retries that are unknown"),
        pytest.param(
            record_of(lambda rank, step: step * GIB, memory=RankMemory()),
            id="growth towards an unknown size",
        ),
        pytest.param(record_of(lambda rank, step: 60 * GIB + 512 * step), id="a list of losses"),
        pytest.param(record_of(lambda rank, step: -1), id="no peaks"),
        pytest.param(
            record_of(lambda rank, step: (60 + step % 10) * GIB), id="a peak that the job resets"
        ),
    ],
)
def test_a_healthy_allocator_is_no_finding(record: Record) -> None:
    assert near_oom.detect(record) == ()


def test_an_allocator_that_frees_its_cache_again_and_again_is_named() -> None:
    # GIVEN retries of rank 1 in each of the steps 11 to 14
    finding = only(record_of(steady, lambda rank, step: min(max(step - 10, 0), 4) * (rank == 1)))

    assert (finding.cause, finding.ranks, finding.steps) == ("near-oom", (1,), (11, 14))
    assert finding.confidence == 1.0
    assert finding.evidence == (
        "the peak of rank 1 is 75.7 GiB (78.0 GiB with the allocator's cache) of 78.0 GiB that the"
        " allocator can have, beside 2.00 GiB outside of it; its allocator found no memory 4 times"
        " in these steps, freed its cache and tried again"
    )


def test_retries_show_it_without_the_size_of_the_device() -> None:
    unknown = record_of(steady, lambda rank, step: step, memory=RankMemory())

    finding = only(unknown)

    assert finding.ranks == (0, 1, 2, 3)
    assert "can have" not in finding.evidence


@pytest.mark.parametrize(("room", "is_named"), [(20 * MIB - 1, True), (20 * MIB, False)])
def test_tensors_that_leave_no_segment_are_named_from_the_step_that_took_it(
    room: int,
    is_named: bool,  # noqa: FBT001
) -> None:
    record = record_of(lambda rank, step: 78 * GIB - (room if step >= 30 and rank == 3 else GIB))

    findings = near_oom.detect(record)

    assert [(each.ranks, each.steps) for each in findings] == [((3,), (30, 39))] * is_named


def test_a_peak_that_grows_is_named_before_it_is_full() -> None:
    # GIVEN 60 GiB and a quarter of a GiB more with each of 40 steps: 69.75 GiB of 78
    finding = only(record_of(lambda rank, step: 60 * GIB + step * GIB // 4 * (rank == 2)))

    assert (finding.ranks, finding.steps) == ((2,), (20, 39))
    assert finding.confidence == pytest.approx(1.0)
    assert finding.evidence.endswith(
        "the peak grows by 256 MiB per step, so that the memory is full in 33 steps"
    )


def test_growth_is_extrapolated_as_far_as_steps_were_seen() -> None:
    # GIVEN 18 GiB of room and 0.1 GiB a step: 176 steps
    def grows(rank: int, step: int) -> int:
        return 60 * GIB + step * GIB // 10

    assert near_oom.detect(record_of(grows)) == ()
    (finding,) = near_oom.detect(record_of(grows, num_earlier_steps=200))
    assert finding.ranks == (0, 1, 2, 3)


@given(seed=st.integers(0, 2**32 - 1), spread=st.integers(1, 17 * GIB))
def test_peaks_that_vary_by_chance_are_no_finding(seed: int, spread: int) -> None:
    # GIVEN steps of any lengths: a peak of 60 GiB and up to `spread` more
    drawn = np.random.default_rng(seed).integers(0, spread, (NUM_RANKS, NUM_STEPS))
    so_far = np.maximum.accumulate(drawn, axis=1)

    assert near_oom.detect(record_of(lambda rank, step: 60 * GIB + int(so_far[rank, step]))) == ()


def test_the_proof_has_the_peak_by_step_beside_that_of_others() -> None:
    record = record_of(lambda rank, step: 60 * GIB + step * GIB // 4 * (rank == 2))

    (finding,) = with_cards(near_oom.detect(record), record, None)

    assert finding.card is not None
    series = finding.card.series
    assert series is not None
    assert (series.unit, series.steps) == ("bytes", tuple(range(NUM_STEPS)))
    assert series.culprit[-1] == 60 * GIB + 39 * GIB // 4
    assert set(series.usual) == {60 * GIB}
    assert finding.card.onset == 20
