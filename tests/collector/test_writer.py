from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from collector.cut_batch import CutBatch
from collector.errors import StoreError
from collector.ledger import Ledger, Range, missing
from collector.name_cap import MAX_NAMES, OTHER_NAME, NameCap
from collector.read import may_repeat, read_run, read_spans
from collector.rollups import open_steps
from collector.writer import CutState, StoreWriter
from tests.collector.cut_builder import SEGMENT, span_cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import pyarrow as pa

    from collector.cut import Cut, CutKey
    from collector.store import Row, Store

STORED, REPEATED = CutState.STORED, CutState.REPEATED
DUPLICATE, CONFLICT = CutState.DUPLICATE, CutState.CONFLICT


def put(writer: StoreWriter, *cuts: Cut) -> list[CutState]:
    return [state for (state,) in writer.store([CutBatch.of(cut) for cut in cuts])]


def shown(store: Store, run_id: str) -> list[str]:
    return sorted(str(name) for name in read_spans(store, run_id)["name"].to_pylist())


def names(first: int, end: int) -> list[str]:
    return sorted(f"s{row}" for row in range(first, end))


def in_engine(store: Store, run_id: str) -> int:
    bound = {"r": run_id}
    copies = "SELECT count() AS n FROM spans WHERE run_id = {r:String} SETTINGS final = 0"
    return int(store.rows(copies, bound)[0]["n"])


def counted(store: Store, run_id: str) -> int:
    return sum(int(row["num_spans"]) for row in read_run_account(store, run_id))


def read_run_account(store: Store, run_id: str) -> list[Row]:
    store.insert_rows("runs", [{"run_id": run_id, "epoch": 0, "state": "running", "revision": 1}])
    return read_run(store, run_id).account


def rival(store: Store) -> StoreWriter:
    """A collector of another process on the same store."""
    return StoreWriter(store, ledger=Ledger(store, has_rivals=True))


def test_a_cut_that_comes_a_thousand_times_is_stored_once(store: Store, run_id: str) -> None:
    writer, cut = StoreWriter(store), span_cut(run_id, 0, 10)

    assert put(writer, cut) == [STORED]
    assert put(writer, *[cut] * 999) == [DUPLICATE] * 999

    assert in_engine(store, run_id) == 10
    assert shown(store, run_id) == names(0, 10)
    assert not may_repeat(store, run_id)


def test_a_cut_is_known_after_a_restart(store: Store, run_id: str) -> None:
    cut = span_cut(run_id, 0, 10)
    put(StoreWriter(store, ledger=Ledger(store)), cut)

    assert put(StoreWriter(store, ledger=Ledger(store)), cut) == [DUPLICATE]


def test_a_cut_is_known_after_a_hundred_others(store: Store, run_id: str) -> None:
    """No window of the engine's is what tells duplicates: the ledger forgets none."""
    writer, cut = StoreWriter(store), span_cut(run_id, 0, 2)
    put(writer, cut)
    for at in range(1, 11):
        put(writer, *[span_cut(run_id, 20 * at + 2 * n, 20 * at + 2 * n + 2) for n in range(10)])

    assert put(writer, cut) == [DUPLICATE]
    assert in_engine(store, run_id) == 202


def test_a_cut_given_twice_in_one_insert_goes_in_once(store: Store, run_id: str) -> None:
    cut = span_cut(run_id, 0, 10)

    assert put(StoreWriter(store), cut, cut) == [STORED, DUPLICATE]
    assert in_engine(store, run_id) == 10


def test_other_bytes_under_the_same_key_are_refused_and_told(store: Store, run_id: str) -> None:
    heard: list[CutKey] = []
    writer = StoreWriter(store, on_conflict=heard.append)
    first, other = (
        span_cut(run_id, 0, 3),
        span_cut(run_id, 0, 3, names=["x", "y", "z"], content="x"),
    )

    states = put(writer, first) + put(writer, other, span_cut(run_id, 3, 5))

    assert states == [STORED, CONFLICT, STORED]
    assert heard == [other.key]
    assert shown(store, run_id) == names(0, 5)


def test_a_range_that_is_held_in_part_brings_what_is_missing(store: Store, run_id: str) -> None:
    writer = StoreWriter(store)
    put(writer, span_cut(run_id, 10, 20), span_cut(run_id, 30, 40))

    states = put(writer, span_cut(run_id, 5, 35)) + put(writer, span_cut(run_id, 12, 33))

    assert states == [STORED, DUPLICATE]
    assert in_engine(store, run_id) == 35
    assert shown(store, run_id) == names(5, 40)
    assert counted(store, run_id) == 35
    assert not may_repeat(store, run_id)


def test_a_longer_cut_from_the_same_row_keeps_the_account_of_the_first(
    store: Store, run_id: str
) -> None:
    writer = StoreWriter(store)
    put(writer, span_cut(run_id, 0, 10))
    put(writer, span_cut(run_id, 0, 15))

    assert counted(store, run_id) == 15
    assert in_engine(store, run_id) == 15


def test_cuts_that_come_out_of_order_are_stored_as_they_come_and_a_gap_is_named(
    store: Store, run_id: str
) -> None:
    writer = StoreWriter(store)
    assert put(writer, span_cut(run_id, 20, 30), span_cut(run_id, 0, 10)) == [STORED, STORED]
    assert shown(store, run_id) == sorted(names(0, 10) + names(20, 30))

    with_gap = writer.resume(run_id)
    put(writer, span_cut(run_id, 10, 20))

    assert with_gap.end_rows == {SEGMENT: 10}
    assert writer.resume(run_id).end_rows == {SEGMENT: 30}


def test_a_row_before_the_first_cut_is_a_gap_too(store: Store, run_id: str) -> None:
    writer = StoreWriter(store)
    put(writer, span_cut(run_id, 5, 9))

    assert writer.resume(run_id).end_rows == {SEGMENT: 0}


def test_two_runs_that_number_a_segment_alike_do_not_mix(store: Store, run_id: str) -> None:
    other = f"{run_id}-b"
    writer = StoreWriter(store)

    states = put(writer, span_cut(run_id, 0, 4), span_cut(other, 0, 6))
    again = put(
        StoreWriter(store, ledger=Ledger(store)), span_cut(other, 0, 6), span_cut(run_id, 0, 4)
    )

    assert states + again == [STORED, STORED, DUPLICATE, DUPLICATE]
    assert (shown(store, run_id), shown(store, other)) == (names(0, 4), names(0, 6))


@pytest.mark.parametrize(
    ("settled", "gaps"),
    [
        ([], [(10, 20)]),
        ([(0, 30)], []),
        ([(0, 12)], [(12, 20)]),
        ([(18, 30)], [(10, 18)]),
        ([(12, 14), (14, 16), (13, 15)], [(10, 12), (16, 20)]),
        ([(20, 25), (5, 10)], [(10, 20)]),
    ],
)
def test_what_is_missing_of_a_range(
    settled: list[tuple[int, int]], gaps: list[tuple[int, int]]
) -> None:
    assert missing(10, 20, [Range(first, end) for first, end in settled]) == gaps


# --- whatever dies, and whoever else writes


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


# --- names


def test_names_beyond_the_cap_become_one_and_are_counted(store: Store, run_id: str) -> None:
    first = span_cut(run_id, 0, MAX_NAMES)
    more = span_cut(run_id, MAX_NAMES, MAX_NAMES + 3, names=["s0", "new", "newer"])
    cap = NameCap(store)

    kept = cap.capped(first.rows.spans)
    capped = cap.capped(more.rows.spans)

    assert kept is first.rows.spans
    assert capped["name"].to_pylist() == ["s0", OTHER_NAME, OTHER_NAME]
    assert cap.num_other == {run_id: 2}
    assert capped["row"].to_pylist() == more.rows.spans["row"].to_pylist()


def test_the_cap_of_one_run_is_not_the_cap_of_another(store: Store, run_id: str) -> None:
    cap = NameCap(store)
    cap.capped(span_cut(run_id, 0, MAX_NAMES + 1).rows.spans)

    other = span_cut(f"{run_id}-b", 0, 2, names=["new", "newer"])

    assert cap.capped(other.rows.spans)["name"].to_pylist() == ["new", "newer"]


def test_the_cap_holds_over_a_restart(store: Store, run_id: str) -> None:
    put(StoreWriter(store), span_cut(run_id, 0, MAX_NAMES))
    after = NameCap(store)

    capped = after.capped(span_cut(run_id, 0, 2, names=["s1", "new"]).rows.spans)

    assert capped["name"].to_pylist() == ["s1", OTHER_NAME]


def test_a_run_that_names_every_span_anew_stays_countable(store: Store, run_id: str) -> None:
    writer = StoreWriter(store)
    for first in range(0, 12_000, 4_000):
        put(writer, span_cut(run_id, first, first + 4_000))

    bound = {"r": run_id}
    found = store.rows(
        "SELECT uniqExact(name) AS names, countIf(name = '__other__') AS other, count() AS n"
        " FROM spans WHERE run_id = {r:String}",
        bound,
    )
    assert found == [{"names": MAX_NAMES + 1, "other": 2_000, "n": 12_000}]
    assert np.isfinite(counted(store, run_id))
