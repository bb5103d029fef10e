"""Days of runs and of upkeep leave a store of one size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.sixty_days import LIVE, simulate_days
from rankscope.collector.read.runs import list_runs
from rankscope.collector.read.spans import read_spans
from rankscope.collector.store.store import open_store
from rankscope.server.upkeep import parse_keep

if TYPE_CHECKING:
    from pathlib import Path

LAST_DAY = 20_000


@pytest.mark.slow
@pytest.mark.nightly
def test_a_store_is_flat_once_the_retention_is_reached(tmp_path: Path) -> None:
    keep = parse_keep(spans="24h", findings="48h", runs="72h")
    with open_store(f"chdb://{tmp_path / 'store'}") as store:
        days = list(simulate_days(store, keep, num_days=5, last_day=LAST_DAY, size="small"))
        runs = {row["run_id"]: row["num_steps"] for row in list_runs(store)}
        left = {
            day: set(read_spans(store, f"short-00{day}-1")["step"].to_pylist()) for day in (2, 4)
        }

    # Spans of two days, runs of three, and of a run with a finding the steps around it for longer.
    num_spans = [day["tables"]["spans"]["num_rows"] for day in days]
    assert num_spans[0] < num_spans[1] == num_spans[2] == num_spans[-1]
    shorts = {f"short-00{day}-{index}" for day in (2, 3, 4) for index in (0, 1)}
    assert runs.keys() == {LIVE, *shorts}
    assert runs[LIVE] == 5 * runs["short-004-0"]
    assert left == {2: set(range(12)), 4: set(range(12))}
    assert days[-1]["tables"]["kept_spans"]["num_rows"] < num_spans[-1]
