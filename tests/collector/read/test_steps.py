"""Begin and end of the steps of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.read.steps import read_step_times

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.slow


def test_time_that_two_steps_share_is_time_of_the_earlier_one(store: Store, run_id: str) -> None:
    # GIVEN two stages that overlap, a step after a missing one, one that ends too early, a restart
    rows = [
        (0, 0, 0, 0, 80), (0, 0, 1, 10, 100),
        (0, 1, 0, 80, 180), (0, 1, 1, 100, 200),
        (0, 3, 0, 190, 300),
        (0, 4, 0, 280, 290),
        (1, 4, 0, 250, 400),
    ]  # fmt: skip
    columns = ("epoch", "step", "rank", "start_ns", "end_ns")
    store.insert_rows(
        "steps", [{"run_id": run_id, **dict(zip(columns, row, strict=True))} for row in rows]
    )

    found = read_step_times(store, run_id, most=10)

    assert [
        tuple(row[name] for name in ("epoch", "step", "first_ns", "last_ns")) for row in found
    ] == [
        (0, 0, 0, 100),
        (0, 1, 100, 200),
        (0, 3, 190, 300),
        (0, 4, 280, 290),
        (1, 4, 250, 400),
    ]
    assert [row["step"] for row in read_step_times(store, run_id, most=2)] == [4, 4]
