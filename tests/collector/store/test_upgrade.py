"""Upgrade of a store whose spans and ledger have no partitions yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.read.runs import list_runs
from rankscope.collector.read.spans import read_spans
from rankscope.collector.retention.span_days import DAY_NS
from rankscope.collector.store import store as store_module
from rankscope.collector.store.migrations import known_migrations
from rankscope.collector.store.store import migrate, open_store

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.slow

TODAY = 20_000
DAYS = "0029_days.sql"


def fill(store: Store) -> None:
    """Store a run of two days, whose first steps have expired, and an imported one of 1970."""
    own = {"run_id": "own", "state": "running", "source_format": "rankscope", "world_size": 2}
    old = {"run_id": "imported", "state": "ended", "source_format": "kineto", "world_size": 1}
    store.insert_rows("runs", [own, old])
    spans = [
        {
            "run_id": "own",
            "step": step,
            "row": step,
            "start_ns": TODAY * DAY_NS + step * DAY_NS // 4,
        }
        for step in (1, 2, 5, 6, 7)
    ]
    imported = [{"run_id": "imported", "step": step, "row": step} for step in range(3)]
    store.insert_rows("spans", [*spans, *imported])
    store.insert_rows("steps", [{"run_id": "own", "step": step} for step in range(8)])
    expired = {"run_id": "own", "last_step": 4, "kept_first": [1], "kept_last": [2]}
    store.insert_rows("expired", [expired])
    line = {"end_row": 8, "num_spans": 8, "num_steps": 8, "state": "stored", "revision": 2}
    for run_id, day in (("own", TODAY), ("own", TODAY + 1), ("imported", TODAY + 1)):
        segment = {"run_id": run_id, "segment": day, "at_ns": day * DAY_NS}
        store.insert_rows("ledger", [{**segment, **line}])
        store.insert_rows("ledger", [{**segment, **line, "state": "sent", "revision": 1}])


def counts(store: Store) -> list[int]:
    tables = ("spans", "ledger")
    select = "SELECT count() AS n FROM {table:Identifier} FINAL"
    return [int(store.rows(select, {"table": table})[0]["n"]) for table in tables]


def test_an_upgrade_that_is_killed_again_and_again_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a store as it was before the partitions
    known = known_migrations()
    (days,) = [migration for migration in known if migration.name == DAYS]
    monkeypatch.setattr(store_module, "known_migrations", lambda: known[: days.version - 1])
    with open_store(f"chdb://{tmp_path / 'store'}") as store:
        fill(store)
        before = counts(store)
        assert before == [8, 3]

        # WHEN the upgrade is killed after more and more of its statements
        statements = days.statements()
        for num in range(1, len(statements) + 1, 2):
            for statement in statements[:num]:
                store.command(statement)
            assert counts(store) == before, statements[num - 1]
        monkeypatch.undo()
        lines: list[str] = []
        migrate(store, say=lines.append)

        # THEN nothing is lost, and nothing counts twice
        assert lines == [f"upgrading the store: {left.name}" for left in known[days.version - 1 :]]
        assert counts(store) == before
        shown = {row["run_id"]: (row["num_spans"], row["num_steps"]) for row in list_runs(store)}
        assert shown == {"own": (16, 8), "imported": (8, 0)}
        assert read_spans(store, "own")["step"].to_pylist() == [1, 2, 5, 6, 7]
        rows = store.rows("SELECT DISTINCT run_id, day FROM spans ORDER BY run_id, day")
        assert [(row["run_id"], row["day"] - TODAY) for row in rows] == [
            ("imported", 1), ("own", 0), ("own", 1),
        ]  # fmt: skip
