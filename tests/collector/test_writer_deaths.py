"""The writer when the collector dies at any statement, or another one writes too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from collector.errors import StoreError
from collector.ledger import Ledger
from collector.read import may_repeat, read_spans
from collector.rollups import open_steps
from collector.writer import CutState, StoreWriter
from tests.collector.cut_builder import span_cut
from tests.collector.stored import shown
from tests.collector.writing import REPEATED, counted, in_engine, names, put, rival

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import pyarrow as pa

    from collector.cut import Cut
    from collector.store import Row, Store


class PowerCutError(StoreError):
    """The process is no more."""


class Interrupted:
    """A store on which something happens just before, or just after, its n-th statement."""

    def __init__(
        self, store: Store, happening: Callable[[], None], *, at: int, is_after: bool = False
    ) -> None:
        self._store = store
        self._happening = happening
        self._left = at
        self._is_after = is_after
        self.path = store.path

    def rows(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        found: list[Row] = self._do(lambda: self._store.rows(sql, parameters))
        return found

    def arrow(self, sql: str, parameters: Mapping[str, Any] | None = None) -> pa.Table:
        found: pa.Table = self._do(lambda: self._store.arrow(sql, parameters))
        return found

    def long_arrow(self, sql: str, parameters: Mapping[str, Any], *, num_rows: int) -> pa.Table:
        found: pa.Table = self._do(
            lambda: self._store.long_arrow(sql, parameters, num_rows=num_rows)
        )
        return found

    def insert_rows(self, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
        self._do(lambda: self._store.insert_rows(table, rows))

    def insert_arrow(self, table: str, rows: pa.Table) -> None:
        self._do(lambda: self._store.insert_arrow(table, rows))

    @property
    def is_through(self) -> bool:
        """Whether there were fewer statements than that."""
        return self._left >= 0

    def _do(self, statement: Callable[[], Any]) -> Any:  # noqa: ANN401 -- whatever it returns
        self._left -= 1
        if self._left == -1 and not self._is_after:
            self._happening()
        found = statement()
        if self._left == -1 and self._is_after:
            self._happening()
        return found


def power_cut() -> None:
    raise PowerCutError("power cut")


def interrupted_writer(store: Any, *, has_rivals: bool) -> StoreWriter:  # noqa: ANN401 -- a fake
    return StoreWriter(store, ledger=Ledger(store, has_rivals=has_rivals))


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("has_rivals", [False, True])
def test_a_power_cut_at_any_statement_loses_and_doubles_nothing(
    store: Store, run_id: str, *, has_rivals: bool, is_after: bool
) -> None:
    dying = None
    for at in range(20):
        name = f"{run_id}-{at}"
        cuts = [span_cut(name, 0, 5), span_cut(name, 5, 8, segment=8)]
        dying = Interrupted(store, power_cut, at=at, is_after=is_after)
        acknowledged = False
        try:
            put(interrupted_writer(dying, has_rivals=has_rivals), *cuts)
            acknowledged = True
        except PowerCutError:
            put(interrupted_writer(store, has_rivals=has_rivals), *cuts)
        assert shown(store, name) == names(0, 8), at
        assert counted(store, name) == 8, at
        assert StoreWriter(store).resume(name).unanswered == ()
        if acknowledged:
            break
    assert dying is not None
    assert dying.is_through
    assert at >= 4  # look, note, insert, note


@pytest.mark.parametrize("is_after", [False, True])
def test_two_collectors_that_store_one_cut_at_once_show_it_once(
    store: Store, run_id: str, *, is_after: bool
) -> None:
    """One does all its work at each statement of the other."""
    for at in range(20):
        name = f"{run_id}-{at}"
        cut = span_cut(name, 0, 5)
        states: list[CutState] = []
        other = rival(store)

        def whole_other(other: StoreWriter = other, cut: Cut = cut) -> None:
            states.extend(put(other, cut))  # noqa: B023 -- called before the next turn

        between = Interrupted(store, whole_other, at=at, is_after=is_after)
        states += put(interrupted_writer(between, has_rivals=True), cut)
        if between.is_through:
            break
        assert shown(store, name) == names(0, 5), at
        assert counted(store, name) == 5, at
        if in_engine(store, name) > 5:
            assert may_repeat(store, name)
    assert at >= 6  # look, note, attempt, look for others, insert, note


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_cut_that_comes_again_while_its_run_is_read_shows_once(
    store: Store, run_id: str, at: int
) -> None:
    """Before the ledger is asked, before the rows are counted, before they are read, and after."""
    cut = span_cut(run_id, 0, 5)
    lost = Interrupted(store, power_cut, at=4)  # the rows are in, and nobody knows
    with pytest.raises(PowerCutError):
        put(interrupted_writer(lost, has_rivals=False), cut)

    def again() -> None:
        assert put(interrupted_writer(store, has_rivals=False), cut) == [REPEATED]

    between = Interrupted(store, again, at=at)
    rows = read_spans(cast("Store", between), run_id)

    assert may_repeat(store, run_id)  # the copies may have been merged meanwhile
    assert sorted(str(name) for name in rows["name"].to_pylist()) == names(0, 5)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_cut_that_comes_again_while_its_steps_are_counted_counts_once(
    store: Store, run_id: str, at: int
) -> None:
    cut = span_cut(run_id, 0, 5)
    lost = Interrupted(store, power_cut, at=4)
    with pytest.raises(PowerCutError):
        put(interrupted_writer(lost, has_rivals=False), cut)

    def again() -> None:
        assert put(interrupted_writer(store, has_rivals=False), cut) == [REPEATED]

    between = Interrupted(store, again, at=at)
    found = open_steps(cast("Store", between), run_id, state="ended")

    assert sum(step.num_spans for step in found) == 5


def test_two_deaths_in_a_row_show_no_row_twice(store: Store, run_id: str) -> None:
    """Both after the rows were in and before the ledger said so."""
    cut = span_cut(run_id, 0, 5)
    for is_second in (False, True):
        dying = Interrupted(store, power_cut, at=4)
        with pytest.raises(PowerCutError):
            put(interrupted_writer(dying, has_rivals=False), cut)
        assert shown(store, run_id) == names(0, 5)
        assert may_repeat(store, run_id) == is_second


def test_the_attempt_of_a_collector_that_died_counts(store: Store, run_id: str) -> None:
    """It may have put rows in after its last line: nobody can tell."""
    cut = span_cut(run_id, 0, 5)
    dying = Interrupted(store, power_cut, at=4, is_after=True)
    with pytest.raises(PowerCutError):
        put(interrupted_writer(dying, has_rivals=True), cut)

    assert put(rival(store), cut) == [REPEATED]
    assert shown(store, run_id) == names(0, 5)


CUTS = st.tuples(st.integers(0, 11), st.integers(1, 8)).map(lambda cut: (cut[0], cut[0] + cut[1]))
DEEDS = st.lists(
    st.tuples(
        st.lists(CUTS, min_size=1, max_size=3), st.integers(0, 9), st.booleans(), st.integers(0, 1)
    ),
    max_size=5,
)
_NUMBERS = iter(range(10**9))


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(deeds=DEEDS)
def test_any_cuts_any_deaths_and_two_collectors_show_each_row_once(
    store: Store, deeds: Sequence[tuple[list[tuple[int, int]], int, bool, int]]
) -> None:
    run_id = f"deeds-{next(_NUMBERS)}"
    acknowledged: set[int] = set()
    attempted: set[int] = set()
    for ranges, at, is_after, who in deeds:
        dying = Interrupted(store, power_cut, at=at, is_after=is_after)
        cuts = [span_cut(run_id, first, end) for first, end in ranges]
        rows = {row for first, end in ranges for row in range(first, end)}
        attempted |= rows
        try:
            put(interrupted_writer(dying, has_rivals=bool(who)), *cuts)
            acknowledged |= rows
        except PowerCutError:
            pass
    seen = [int(name[1:]) for name in shown(store, run_id)]

    assert len(seen) == len(set(seen))
    assert acknowledged <= set(seen) <= attempted
