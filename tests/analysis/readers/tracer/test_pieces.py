"""Parts of a split backward: gradients of the input and, later, of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.analyze import read_operations
from rankscope.analysis.readers.tracer.pieces import WHOLE, is_deferred_part, number_parts
from rankscope.tracer.span import KIND_CODES, NONE, SpanKind
from rankscope.tracer.topology import Layout
from tests.support.analysis.cluster import MS, Action, Begin, Cluster, Compute, End

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rankscope.analysis.replay.model import Reading

    Script = Callable[[int, int], Iterator[Action]]

FORWARD, BACKWARD = KIND_CODES[SpanKind.FORWARD], KIND_CODES[SpanKind.BACKWARD]


def run(script: Script, layout: Layout | None = None) -> Cluster:
    cluster = Cluster(layout or Layout(), {})
    cluster.run(1, script)
    return cluster


def read(script: Script, layout: Layout | None = None) -> Reading:
    cluster = run(script, layout)
    return read_operations(cluster.run_info(), cluster.span_table(), cluster.step_table())


def spans(kind: SpanKind, microbatch: int, *lengths_ms: int) -> Iterator[Action]:
    for length in lengths_ms:
        yield Begin(kind, microbatch)
        yield Compute(length * MS)
        yield End()


def split(rank: int, _: int) -> Iterator[Action]:
    """Yield two micro-batches in zero-bubble order: input 10 ms (12 on rank 1), weights 4 ms."""
    inputs = 10 + 2 * rank
    for microbatch in range(2):
        yield from spans(SpanKind.FORWARD, microbatch, 6)
    yield from spans(SpanKind.BACKWARD, 0, inputs)
    yield from spans(SpanKind.BACKWARD, 1, inputs)
    yield from spans(SpanKind.BACKWARD, 0, 4)
    yield from spans(SpanKind.BACKWARD, 1, 4)


def test_each_part_of_a_split_backward_has_its_own_ideal() -> None:
    model = read(split, Layout(dp=2)).model

    backward = (model.kind == BACKWARD) & (model.rank == 0)
    assert model.operations.duration_ns[backward].tolist() == [10 * MS, 10 * MS, 4 * MS, 4 * MS]
    # The mean of 10 and 12 ms, and 4 ms: not one mean of all four.
    assert model.ideal_ns[backward].tolist() == [11 * MS, 11 * MS, 4 * MS, 4 * MS]


def test_parts_of_a_micro_batch_are_one_item() -> None:
    items = read(split, Layout(dp=2)).items

    rows = list(
        zip(*(column.tolist() for column in (items.rank, items.kind, items.microbatch)),
            (items.self_ns // MS).tolist(), strict=True)
    )  # fmt: skip
    assert rows == [
        (0, FORWARD, 0, 6), (0, FORWARD, 1, 6), (0, BACKWARD, 0, 14), (0, BACKWARD, 1, 14),
        (1, FORWARD, 0, 6), (1, FORWARD, 1, 6), (1, BACKWARD, 0, 16), (1, BACKWARD, 1, 16),
    ]  # fmt: skip
    assert items.deferred_ratio == 16 / (40 + 44)


def test_the_share_of_deferred_weights_is_that_of_the_split_backwards() -> None:
    def script(_: int, __: int) -> Iterator[Action]:
        for microbatch in range(4):
            yield from spans(SpanKind.FORWARD, microbatch, 6)
        for microbatch in range(3):
            yield from spans(SpanKind.BACKWARD, microbatch, 12)
        yield from spans(SpanKind.BACKWARD, 3, 8)
        yield from spans(SpanKind.BACKWARD, 3, 4)

    # W is 4 of the 12 of a backward, and a backward 12 of 18, also where it is not split.
    assert read(script).items.deferred_ratio == pytest.approx(4 / 18)


def test_whole_backward_next_to_split_ones_is_an_item() -> None:
    def script(_: int, __: int) -> Iterator[Action]:
        yield from spans(SpanKind.BACKWARD, 0, 10)
        yield from spans(SpanKind.BACKWARD, 1, 15)
        yield from spans(SpanKind.BACKWARD, 0, 4)

    reading = read(script)

    assert (reading.items.self_ns // MS).tolist() == [14, 15]
    assert reading.items.microbatch.tolist() == [0, 1]
    model = reading.model
    assert model.ideal_ns[model.kind == BACKWARD].tolist() == [10 * MS, 15 * MS, 4 * MS]


def test_backwards_that_are_not_parts_stay_whole() -> None:
    def script(_: int, __: int) -> Iterator[Action]:
        yield from spans(SpanKind.FORWARD, 0, 1)
        yield from spans(SpanKind.BACKWARD, 0, 1, 1, 1, 1, 1)
        yield from spans(SpanKind.BACKWARD, NONE, 1, 1)

    table = run(script).span_table()

    # Five spans with one number are five micro-batches; two without a number are two.
    assert number_parts(table, np.arange(len(table))).tolist() == [WHOLE] * 8
    assert is_deferred_part(np.array([0, 1, 2, 3, 4, 5])).tolist() == [
        False, False, True, False, True, True,
    ]  # fmt: skip


def test_numbers_that_forwards_share_too_identify_no_parts() -> None:
    def script(_: int, __: int) -> Iterator[Action]:
        for _ in range(2):
            yield from spans(SpanKind.FORWARD, 0, 5)
            yield from spans(SpanKind.BACKWARD, 0, 10)

    assert read(script).items.microbatch.tolist() == [0, 1, 0, 1]
