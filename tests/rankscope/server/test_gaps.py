from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.read.runs import GAP_TIMEOUT_NS, read_run
from rankscope.collector.store.writer import StoreWriter
from rankscope.sources.store_source import StoreSource, build_run_info
from tests.support.collector.cut_builder import span_cut

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store


def store_run(store: Store, run_id: str, *, state: str = "ended") -> None:
    row = {"run_id": run_id, "source_format": "rankscope", "state": state, "world_size": 1}
    store.insert_rows("runs", [row])


def read_warnings(store: Store, run_id: str) -> tuple[str, ...]:
    return StoreSource(store).run_info(run_id).warnings


@pytest.mark.slow
def test_missing_rows_are_a_warning_until_they_arrive(store: Store) -> None:
    # GIVEN cuts in another order, one of them missing
    store_run(store, "held-back")
    writer = StoreWriter(store)
    for first, end in ((30, 40), (0, 10), (20, 30)):
        writer.ingest([span_cut("held-back", first, end, segment=0xAB)])
    writer.ingest([span_cut("held-back", 5, 9, rank=3, segment=0xCD)])
    assert store.rows("SELECT count() AS n FROM spans WHERE run_id = 'held-back'") == [{"n": 34}]

    # THEN the rows are stored, and the missing ones are warnings
    assert read_warnings(store, "held-back") == (
        (
            "rows 10..19 of segment 00000000000000ab of rank 0 (epoch 0)"
            " are missing, but later rows arrived"
        ),
        (
            "rows 0..4 of segment 00000000000000cd of rank 3 (epoch 0)"
            " are missing, but later rows arrived"
        ),
    )

    # WHEN some of them arrive, and then the rest
    writer.ingest([span_cut("held-back", 0, 5, rank=3, segment=0xCD)])
    writer.ingest([span_cut("held-back", 10, 15, segment=0xAB)])
    assert read_warnings(store, "held-back") == (
        (
            "rows 15..19 of segment 00000000000000ab of rank 0 (epoch 0)"
            " are missing, but later rows arrived"
        ),
    )
    writer.ingest([span_cut("held-back", 15, 20, segment=0xAB)])
    assert read_warnings(store, "held-back") == ()


def test_in_a_running_job_missing_rows_are_a_warning_after_a_minute(store: Store) -> None:
    store_run(store, "trains", state="running")
    before_ns = time.time_ns()
    StoreWriter(store).ingest([span_cut("trains", 10, 20)])
    after_ns = time.time_ns()

    def num_warnings(now_ns: int) -> int:
        rows = read_run(store, "trains", unix_ns=lambda: now_ns)
        return len(build_run_info("trains", rows).warnings)

    assert num_warnings(before_ns + GAP_TIMEOUT_NS) == 0
    assert num_warnings(after_ns + GAP_TIMEOUT_NS + 1) == 1


def test_many_gaps_are_counted_and_eight_are_named(store: Store) -> None:
    store_run(store, "holes")
    line = {"run_id": "holes", "segment": 7, "state": "stored", "revision": 2}
    store.insert_rows(
        "ledger",
        [{**line, "first_row": 10 * i, "end_row": 10 * i + 9} for i in range(21)],
    )

    warnings = read_warnings(store, "holes")

    assert [line.split(" of ")[0] for line in warnings[:2]] == [
        "rows 9..9",
        "rows 19..19",
    ]
    assert len(warnings) == 9
    assert warnings[-1] == "12 more ranges of rows are missing"


def test_a_ledger_row_about_duplicates_is_not_a_gap(store: Store) -> None:
    store_run(store, "doubted")
    end = (1 << 32) - 1
    line = {"run_id": "doubted", "segment": 7, "revision": 3, "state": "repeated"}
    store.insert_rows("ledger", [{**line, "first_row": end, "end_row": end}])
    store.insert_rows("ledger", [{**line, "first_row": 0, "end_row": 9}])

    assert read_warnings(store, "doubted") == ()
