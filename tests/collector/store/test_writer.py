from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.read.steps import read_steps
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.deduplicated_reads import read_stored_spans
from rankscope.collector.store.ledger import Ledger, Range, missing_ranges
from rankscope.collector.store.writer import StoreWriter
from tests.support.collector.cut_builder import SEGMENT, span_cut
from tests.support.collector.spool_builder import SpoolBuilder
from tests.support.collector.stored import shown
from tests.support.collector.writing import (
    CONFLICT,
    DUPLICATE,
    STORED,
    counted,
    in_engine,
    names,
    put,
)

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.store.store import Store


@pytest.mark.slow
def test_a_cut_sent_a_thousand_times_is_stored_once(store: Store, run_id: str) -> None:
    writer, cut = StoreWriter(store), span_cut(run_id, 0, 10)

    assert put(writer, cut) == [STORED]
    assert put(writer, *[cut] * 999) == [DUPLICATE] * 999

    assert in_engine(store, run_id) == 10
    assert shown(store, run_id) == names(0, 10)
    assert not read_stored_spans(store, run_id).has_repeated


def test_a_duplicate_is_found_after_a_hundred_other_cuts(store: Store, run_id: str) -> None:
    """The ledger remembers every cut; the engine would remember only recent inserts."""
    writer, cut = StoreWriter(store), span_cut(run_id, 0, 2)
    put(writer, cut)
    for at in range(1, 11):
        put(writer, *[span_cut(run_id, 20 * at + 2 * n, 20 * at + 2 * n + 2) for n in range(10)])

    assert put(writer, cut) == [DUPLICATE]
    assert in_engine(store, run_id) == 202


def test_a_cut_given_twice_in_one_insert_is_stored_once(store: Store, run_id: str) -> None:
    cut = span_cut(run_id, 0, 10)

    assert put(StoreWriter(store), cut, cut) == [STORED, DUPLICATE]
    assert in_engine(store, run_id) == 10


def test_only_the_missing_rows_of_a_cut_are_stored(store: Store, run_id: str) -> None:
    writer = StoreWriter(store)
    put(writer, span_cut(run_id, 10, 20), span_cut(run_id, 30, 40))

    states = put(writer, span_cut(run_id, 5, 35)) + put(writer, span_cut(run_id, 12, 33))

    assert states == [STORED, DUPLICATE]
    assert in_engine(store, run_id) == 35
    assert shown(store, run_id) == names(5, 40)
    assert counted(store, run_id) == 35
    assert not read_stored_spans(store, run_id).has_repeated


def test_cuts_out_of_order_are_stored_and_resume_stops_at_the_first_gap(
    store: Store, run_id: str
) -> None:
    writer = StoreWriter(store)
    assert put(writer, span_cut(run_id, 20, 30), span_cut(run_id, 0, 10)) == [STORED, STORED]
    assert shown(store, run_id) == sorted(names(0, 10) + names(20, 30))

    with_gap = writer.resume(run_id)
    put(writer, span_cut(run_id, 10, 20))

    assert with_gap.end_rows == {SEGMENT: 10}
    assert writer.resume(run_id).end_rows == {SEGMENT: 30}


def test_missing_rows_before_the_first_cut_are_a_gap(store: Store, run_id: str) -> None:
    writer = StoreWriter(store)
    put(writer, span_cut(run_id, 5, 9))

    assert writer.resume(run_id).end_rows == {SEGMENT: 0}


def test_equal_segment_numbers_of_two_runs_are_not_mixed_up(store: Store, run_id: str) -> None:
    other = f"{run_id}-b"
    writer = StoreWriter(store)

    states = put(writer, span_cut(run_id, 0, 4), span_cut(other, 0, 6))
    again = put(
        StoreWriter(store, ledger=Ledger(store)), span_cut(other, 0, 6), span_cut(run_id, 0, 4)
    )

    assert states + again == [STORED, STORED, DUPLICATE, DUPLICATE]
    assert (shown(store, run_id), shown(store, other)) == (names(0, 4), names(0, 6))


@pytest.mark.parametrize(
    ("stored", "missing"),
    [
        ([], [(10, 20)]),
        ([(0, 30)], []),
        ([(0, 12)], [(12, 20)]),
        ([(18, 30)], [(10, 18)]),
        ([(12, 14), (14, 16), (13, 15)], [(10, 12), (16, 20)]),
        ([(20, 25), (5, 10)], [(10, 20)]),
    ],
)
def test_missing_ranges(stored: list[tuple[int, int]], missing: list[tuple[int, int]]) -> None:
    assert missing_ranges(10, 20, [Range(first, end) for first, end in stored]) == missing


def test_a_stored_part_of_a_cut_is_a_duplicate_and_no_conflict(store: Store, run_id: str) -> None:
    # GIVEN rows 10 to 14, stored as the missing part of a cut that began before them
    writer = StoreWriter(store)
    put(writer, span_cut(run_id, 0, 10), span_cut(run_id, 6, 15))

    # WHEN they are sent as a cut of their own, and once more after a restart
    restarted = StoreWriter(store, ledger=Ledger(store))
    part = span_cut(run_id, 10, 15)

    # THEN they are duplicates, and other bytes for a whole cut are still a conflict
    assert put(writer, part) + put(restarted, part) == [DUPLICATE, DUPLICATE]
    assert put(restarted, span_cut(run_id, 0, 10, content="x")) == [CONFLICT]
    assert shown(store, run_id) == names(0, 15)


@pytest.mark.slow
def test_an_unknown_loss_is_null_in_the_store_and_nan_in_the_analysis(
    store: Store, run_id: str, tmp_path: Path
) -> None:
    # GIVEN a spool, which has NaN for an unknown loss
    spool = SpoolBuilder(tmp_path, run_id=run_id)
    spool.step(0, start_ns=10, duration_ns=20)
    spool.step(1, start_ns=30, duration_ns=25, loss=2.5)
    spool.end()

    SpoolTail(tmp_path, StoreWriter(store)).poll()

    (found,) = store.rows(
        "SELECT avg(loss) AS mean, count(loss) AS known, sum(duration_ns) AS total_ns FROM steps"
        " WHERE run_id = {run_id:String}",
        {"run_id": run_id},
    )
    assert found == {"mean": 2.5, "known": 1, "total_ns": 45}
    assert str(read_steps(store, run_id)["loss"].to_pylist()) == "[nan, 2.5]"
