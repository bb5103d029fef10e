from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.read.runs import END_OF_TIME, SELECT_GAPS, list_runs, read_run
from rankscope.collector.retention.ledger_merges import LedgerMerges
from rankscope.collector.retention.span_days import DAY_NS
from rankscope.collector.store.ledger import Ledger
from rankscope.collector.store.resume import read_resume, resume_page
from rankscope.collector.store.writer import StoreWriter
from tests.support.collector.cut_builder import span_cut
from tests.support.collector.interrupted_store import Interrupted, PowerCutError, power_cut
from tests.support.collector.writing import DUPLICATE, STORED, put

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.slow

DAY = 20_000


def lines(store: Store, run_id: str) -> list[tuple[int, int, str, int]]:
    rows = store.rows(
        "SELECT first_row, end_row, state, num_spans FROM ledger FINAL WHERE run_id = {r:String}"
        " ORDER BY segment, first_row",
        {"r": run_id},
    )
    return [(row["first_row"], row["end_row"], row["state"], row["num_spans"]) for row in rows]


def fill(store: Store, run_id: str) -> None:
    """Store the cuts of a day: three in a row, a gap, one more, and one that was only sent."""
    line = {"run_id": run_id, "segment": 1, "state": "stored", "revision": 2, "at_ns": DAY * DAY_NS}
    store.insert_rows(
        "ledger",
        [
            {**line, "first_row": first, "end_row": end, "num_spans": end - first, "sha256": "a"}
            for first, end in ((0, 10), (10, 25), (25, 30), (40, 50))
        ],
    )
    sent = {**line, "first_row": 50, "end_row": 60, "state": "sent", "revision": 1}
    store.insert_rows("ledger", [sent])
    store.insert_rows("runs", [{"run_id": run_id, "state": "ended", "source_format": "rankscope"}])


MERGED = [(0, 30, "stored", 30), (40, 50, "stored", 10), (50, 60, "sent", 0)]


@pytest.mark.parametrize("num_statements", [None, *range(8)])
def test_the_cuts_of_a_past_day_become_one_line_for_each_run_of_rows(
    store: Store, run_id: str, num_statements: int | None
) -> None:
    # GIVEN a day of cuts, and what readers say of it
    fill(store, run_id)
    bound = {"run_id": run_id, "before_ns": END_OF_TIME}
    before = (
        read_run(store, run_id).account, read_resume(store, run_id).end_rows,
        store.rows(SELECT_GAPS, bound), resume_page(store, run_id, after=0, ranks=()),
    )  # fmt: skip
    (listed,) = [row for row in list_runs(store) if row["run_id"] == run_id]

    # WHEN it is merged, the first time perhaps only in part
    at_ns = (DAY + 2) * DAY_NS
    if num_statements is not None:
        dying = Interrupted(store, power_cut, at=num_statements)
        with suppress(PowerCutError):
            LedgerMerges(dying, unix_ns=lambda: at_ns).turn()  # type: ignore[arg-type]
        assert sum(num for *_, num in lines(store, run_id)) == 40  # each row counts once
    LedgerMerges(store, unix_ns=lambda: at_ns).turn()

    # THEN nothing that readers say has changed
    assert lines(store, run_id) == MERGED
    assert before == (
        read_run(store, run_id).account, read_resume(store, run_id).end_rows,
        store.rows(SELECT_GAPS, bound), resume_page(store, run_id, after=0, ranks=()),
    )  # fmt: skip
    assert listed == next(row for row in list_runs(store) if row["run_id"] == run_id)
    days = "SELECT DISTINCT day FROM ledger WHERE run_id = {r:String}"
    assert store.rows(days, {"r": run_id}) == [{"day": -1}]


def test_a_day_that_is_not_over_for_a_day_stays(store: Store, run_id: str) -> None:
    fill(store, run_id)

    LedgerMerges(store, unix_ns=lambda: (DAY + 2) * DAY_NS - 1).turn()

    assert len(lines(store, run_id)) == 5


def test_a_cut_that_is_sent_again_after_its_day_was_merged_is_a_duplicate(
    store: Store, run_id: str
) -> None:
    cuts = [span_cut(run_id, first, first + 5) for first in (0, 5)]
    writer = StoreWriter(store, unix_ns=lambda: DAY * DAY_NS)
    assert put(writer, *cuts) == [STORED, STORED]

    LedgerMerges(store, unix_ns=lambda: (DAY + 5) * DAY_NS).turn()

    again = StoreWriter(store, ledger=Ledger(store))
    assert put(again, cuts[1]) == [DUPLICATE]
    more = span_cut(run_id, 8, 12)
    assert put(again, more) == [STORED]
    assert lines(store, run_id)[0][:2] == (0, 10)
    assert lines(store, run_id)[1][:2] == (10, 12)
