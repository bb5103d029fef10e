"""Ranks that do more work than others: more micro-batches, or larger ones.

Users train on unequal devices with unequal batches, give one rank more micro-batches than others,
or make batches and sequences larger as the training goes on. None of that is a slow device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.trace.context import MicrobatchTable, RunContext
from rankscope.tracer.span import SpanKind
from rankscope.tracer.topology import Layout
from tests.support.analysis.cluster import MS, Source, source_of
from tests.support.analysis.one_group import ALL_REDUCE, trained, work
from tests.support.analysis.tables import table_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rankscope.analysis.report.report import RunReport
    from tests.support.analysis.cluster import Action

NUM_STEPS = 20
ONSET = 10


def analyze(
    number: Callable[[int, int], int],
    length: Callable[[int, int], float] = lambda rank, step: 1.0,
    tokens: Callable[[int, int], int] | None = None,
    *,
    num_ranks: int = 4,
    num_steps: int = NUM_STEPS,
    unit: str = "num_tokens",
) -> RunReport:
    """Analyse a job whose micro-batches take 30 ms; each step reduces for 0.5 ms.

    Args:
        number: How many micro-batches a rank has in a step.
        length: Factor of their time.
        tokens: Declared in each of them; None: unknown.
        unit: What is declared: tokens, or the elements of images.
    """

    def script(rank: int, step: int) -> Iterator[Action]:
        rng = np.random.default_rng((rank, step))
        for microbatch in range(number(rank, step)):
            factor = length(rank, step) * (1 + 0.005 * rng.standard_normal())
            yield from work(SpanKind.FORWARD, 10 * MS * factor, microbatch=microbatch)
            yield from work(SpanKind.BACKWARD, 20 * MS * factor, microbatch=microbatch)
        yield ALL_REDUCE

    source = source_of(trained(script, num_steps=num_steps, layout=Layout(dp=num_ranks)))
    if tokens is not None:
        rows = [
            (step, rank, microbatch, tokens(rank, step), 32 * tokens(rank, step))
            for step in range(num_steps)
            for rank in range(num_ranks)
            for microbatch in range(number(rank, step))
        ]
        names = ("step", "rank", "microbatch", unit, "sum_squared_lengths")
        columns = dict(zip(names, np.array(rows).T, strict=True))
        if unit == "num_elements":
            del columns["sum_squared_lengths"]
        lengths = table_of(MicrobatchTable, **columns)
        source = Source(
            source.info,
            source.span_table,
            source.step_table,
            RunContext(microbatches=lengths),
        )
    return analyze_run(source, "run")


def four(rank: int, step: int) -> int:
    return 4


@pytest.mark.parametrize(
    ("num_ranks", "onset", "tokens"),
    [(2, 0, None), (3, 0, 128), (3, ONSET, None), (4, 0, None), (5, ONSET, 128)],
)
def test_a_rank_with_more_micro_batches_is_not_slow(
    num_ranks: int, onset: int, tokens: int | None
) -> None:
    report = analyze(
        lambda rank, step: 8 if rank == 1 and step >= onset else 4,
        tokens=None if tokens is None else lambda rank, step: tokens,
        num_ranks=num_ranks,
    )

    (found,) = report.findings
    assert (found.cause, found.ranks) == ("sequence-imbalance", ())
    assert "micro-batches of a step: 8 on rank 1, 4 on the others" in found.evidence
    # 8 micro-batches of 30 ms on one rank and 4 on all others are 4 + 4 / num_ranks each.
    saved_s = 0.030 * (8 - 4 - 4 / num_ranks) * (NUM_STEPS - onset) / NUM_STEPS
    assert found.saved_s == pytest.approx(saved_s, rel=0.05)


def test_a_slow_rank_with_more_micro_batches_is_slow() -> None:
    report = analyze(
        lambda rank, step: 6 if rank == 1 and step >= ONSET else 4,
        lambda rank, step: 1.4 if rank == 1 and step >= ONSET else 1.0,
    )

    top = report.findings[0]
    assert (top.cause, top.ranks, top.steps) == ("slow-compute", (1,), (ONSET, NUM_STEPS - 1))
    assert "(+40 %" in top.evidence


@pytest.mark.parametrize("fast", [(0,), (0, 1, 2)])
def test_more_micro_batches_on_faster_devices_are_no_problem(fast: tuple[int, ...]) -> None:
    report = analyze(
        lambda rank, step: 8 if rank in fast else 4,
        lambda rank, step: 0.5 if rank in fast else 1.0,
    )

    assert [found.cause for found in report.findings] == ["healthy"]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_more_micro_batches_on_all_ranks_make_none_slow(num_ranks: int) -> None:
    report = analyze(lambda rank, step: 2 if step < ONSET else 4, num_ranks=num_ranks)

    assert [found.cause for found in report.findings] == ["healthy"]


UNITS = pytest.mark.parametrize("unit", ["num_tokens", "num_elements"])


@UNITS
@pytest.mark.parametrize(("num_ranks", "onset"), [(2, 0), (3, 8), (4, 0)])
def test_a_rank_with_a_larger_batch_is_not_slow(num_ranks: int, onset: int, unit: str) -> None:
    def is_large(rank: int, step: int) -> bool:
        return rank == 1 and step >= onset

    report = analyze(
        four,
        lambda rank, step: 1.9 if is_large(rank, step) else 1.0,
        lambda rank, step: 256 if is_large(rank, step) else 128,
        num_ranks=num_ranks,
        unit=unit,
    )

    (found,) = report.findings
    assert (found.cause, found.ranks) == ("sequence-imbalance", ())
    noun = unit.removeprefix("num_")
    assert f"{noun} of a step: 1,024 on rank 1, 512 on the others" in found.evidence


@UNITS
def test_a_larger_batch_does_not_hide_a_device_that_is_slower_than_it_explains(unit: str) -> None:
    report = analyze(
        four,
        lambda rank, step: 2.0 * 1.4 if rank == 1 else 1.0,
        lambda rank, step: 256 if rank == 1 else 128,
        unit=unit,
    )

    assert ("slow-compute", (1,)) in [(found.cause, found.ranks) for found in report.findings]


@UNITS
def test_sizes_that_are_padding_explain_nothing(unit: str) -> None:
    # GIVEN batches of one shape, of which other shares are padding
    report = analyze(
        four,
        lambda rank, step: 1.5 if rank == 1 else 1.0,
        lambda rank, step: 64 + 16 * (7 * rank + 5 * step & 3) + 64 * (rank == 1),
        unit=unit,
    )

    assert [(found.cause, found.ranks) for found in report.findings] == [("slow-compute", (1,))]


def test_images_of_other_sizes_in_each_batch_are_work_and_a_slow_device_shows_beside_them() -> None:
    # GIVEN batches of one of four sizes, of which a quarter of the time does not depend
    def size(rank: int, step: int) -> int:
        return (1, 2, 3, 6)[int(np.random.default_rng((9, rank, step)).integers(4))]

    def length(rank: int, step: int) -> float:
        return 0.25 + 0.75 * size(rank, step) / 3

    alike = analyze(four, length, lambda rank, step: 10**6 * size(rank, step), unit="num_elements")
    slow = analyze(
        four,
        lambda rank, step: length(rank, step) * (1.5 if rank == 2 else 1.0),
        lambda rank, step: 10**6 * size(rank, step),
        unit="num_elements",
    )

    (found,) = alike.findings
    assert (found.cause, found.ranks) == ("sequence-imbalance", ())
    assert "follows the number of elements of the input" in found.evidence
    assert {(found.cause, found.ranks) for found in slow.findings} == {
        ("sequence-imbalance", ()),
        ("slow-compute", (2,)),
    }


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_sequences_that_become_longer_make_no_rank_slow(num_ranks: int) -> None:
    report = analyze(
        lambda rank, step: 1,
        lambda rank, step: 1.0 if step < ONSET else 1.8,
        lambda rank, step: 128 if step < ONSET else 256,
        num_ranks=num_ranks,
    )

    assert [found.cause for found in report.findings] == ["healthy"]


def test_a_lone_rank_that_becomes_slow_with_equal_sequences_is_slow() -> None:
    report = analyze(
        lambda rank, step: 1,
        lambda rank, step: 1.0 if step < ONSET else 1.8,
        lambda rank, step: 128,
        num_ranks=1,
    )

    top = report.top_finding
    assert (top.cause, top.ranks, top.steps) == ("slow-compute", (0,), (ONSET, NUM_STEPS - 1))
