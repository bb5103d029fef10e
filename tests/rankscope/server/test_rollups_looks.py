"""Which of a run's steps are looked at, while it goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.read.rollups import SELECT_OPEN, SELECT_OPEN_FINAL
from rankscope.collector.store.store import Store, open_store
from rankscope.server.rollups import Rolling
from tests.support.rankscope.rolling_rig import describe, from_scratch, put, rolled, span_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

RUN = "job"
S = 1_000_000_000


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with open_store(f"chdb://{tmp_path_factory.mktemp('store')}") as opened:
        yield opened


class AskedStore:
    """A store that remembers from which step on it was asked for open ones."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.firsts: list[int] = []
        self.arrow, self.insert_arrow = store.arrow, store.insert_arrow
        self.insert_rows = store.insert_rows

    def rows(self, sql: str, parameters: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        if sql in (SELECT_OPEN, SELECT_OPEN_FINAL) and parameters is not None:
            self.firsts.append(parameters["first"])
        return self._store.rows(sql, parameters)


def num_spans(store: Store, step: int) -> int:
    return sum(row["num_spans"] for row in rolled(store, RUN) if row["step"] == step)


def test_a_run_that_goes_on_is_looked_at_whole_once_a_minute(store: Store) -> None:
    # GIVEN a run of which five steps come at a time, the very first lacks a row
    describe(store, RUN, state="running")
    late, *others = span_rows(RUN, num_steps=20)
    now_ns = [0]
    asked = AskedStore(store)
    rolling = Rolling(asked, monotonic_ns=lambda: now_ns[0])  # type: ignore[arg-type]
    for at_s, first in ((0, 0), (20, 5), (40, 10), (50, 15)):
        now_ns[0] = at_s * S
        put(store, RUN, [row for row in others if first <= row["step"] < first + 5])
        assert rolling.turn()

    # THEN the look at 50 s began with what was open at 20 s, the newest two steps of then
    assert asked.firsts == [0, 0, 0, 3]

    # WHEN the row comes, THEN it is seen once a minute has gone since all was looked at
    put(store, RUN, [late])
    rolling.turn()
    assert num_spans(store, 0) == 3
    now_ns[0] = 100 * S
    rolling.turn()
    assert asked.firsts[-1] == 0
    assert num_spans(store, 0) == 4

    # THEN nothing that came is missing when the run ends
    describe(store, RUN)
    assert rolling.turn()
    assert rolled(store, RUN) == from_scratch(store, RUN)


def test_a_run_in_which_nothing_happens_is_left_alone_after_a_whole_look(store: Store) -> None:
    describe(store, RUN, state="running")
    rows = span_rows(RUN, num_steps=6)
    now_ns = [0]
    asked = AskedStore(store)
    rolling = Rolling(asked, monotonic_ns=lambda: now_ns[0])  # type: ignore[arg-type]
    put(store, RUN, rows)
    for at_s in (0, 1, 500):
        now_ns[0] = at_s * S
        assert rolling.turn()

    assert asked.firsts == [0]


def test_steps_before_a_restart_are_not_looked_at_again_either(store: Store) -> None:
    # GIVEN a run whose steps begin anew in a second epoch
    describe(store, RUN, state="running")
    rows = span_rows(RUN, num_steps=6)
    again = [{**row, "epoch": 1} for row in rows]
    now_ns = [0]
    asked = AskedStore(store)
    rolling = Rolling(asked, monotonic_ns=lambda: now_ns[0])  # type: ignore[arg-type]
    halves = (rows, again[:8], again[8:16], again[16:])
    for at_s, part in zip((0, 20, 40, 50), halves, strict=True):
        now_ns[0] = at_s * S
        put(store, RUN, part)
        assert rolling.turn()

    # THEN what was rolled up is all but the newest two steps of the second epoch
    closed = {(row["epoch"], row["step"]) for row in rolled(store, RUN)}
    assert closed == {(0, step) for step in range(6)} | {(1, step) for step in range(4)}
    assert asked.firsts == [0, 0, 0, 4]
