"""The writer if the collector dies at any statement, or another collector writes too."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope.collector.arrow_columns import to_numpy
from rankscope.collector.read.rollups import read_open_steps
from rankscope.collector.read.spans import read_spans
from rankscope.collector.store.deduplicated_reads import read_stored_spans
from rankscope.collector.store.writer import StoreWriter
from tests.support.collector.cut_builder import span_cut
from tests.support.collector.interrupted_store import (
    Interrupted,
    PowerCutError,
    interrupted_writer,
    power_cut,
)
from tests.support.collector.stored import shown
from tests.support.collector.writing import (
    REPEATED,
    STORED,
    counted,
    in_engine,
    names,
    other_collector,
    put,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.collector.spool.cut import Cut
    from rankscope.collector.store.ledger import CutState
    from rankscope.collector.store.store import Store


@pytest.mark.slow
@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_power_cut_at_any_statement_loses_and_repeats_no_row(
    store: Store, run_id: str, *, is_shared: bool, is_after: bool
) -> None:
    dying = None
    for at in range(20):
        name = f"{run_id}-{at}"
        cuts = [span_cut(name, 0, 5), span_cut(name, 5, 8, segment=8)]
        dying = Interrupted(store, power_cut, at=at, is_after=is_after)
        acknowledged = False
        try:
            put(interrupted_writer(dying, is_shared=is_shared), *cuts)
            acknowledged = True
        except PowerCutError:
            put(interrupted_writer(store, is_shared=is_shared), *cuts)
        assert shown(store, name) == names(0, 8), at
        assert counted(store, name) == 8, at
        assert StoreWriter(store).resume(name).unanswered == ()
        if acknowledged:
            break
    assert dying is not None
    assert dying.is_complete
    assert at >= 4  # read ledger, write sent, insert, write stored


@pytest.mark.slow
@pytest.mark.parametrize("is_after", [False, True])
def test_a_cut_stored_by_two_collectors_at_once_shows_once(
    store: Store, run_id: str, *, is_after: bool
) -> None:
    """One collector stores the cut while the other one is at each of its statements."""
    for at in range(20):
        name = f"{run_id}-{at}"
        cut = span_cut(name, 0, 5)
        states: list[CutState] = []
        other = other_collector(store)

        def whole_other(other: StoreWriter = other, cut: Cut = cut) -> None:
            states.extend(put(other, cut))  # noqa: B023 -- called in the same iteration

        between = Interrupted(store, whole_other, at=at, is_after=is_after)
        states += put(interrupted_writer(between, is_shared=True), cut)
        if between.is_complete:
            break
        assert shown(store, name) == names(0, 5), at
        assert counted(store, name) == 5, at
        if in_engine(store, name) > 5:
            assert read_stored_spans(store, name).has_repeated
    assert at >= 6  # read ledger, write sent, write attempt, read attempts, insert, write stored


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_cut_repeated_during_a_read_shows_once(store: Store, run_id: str, at: int) -> None:
    """Before the ledger is read, before the rows are counted, before they are read, and after."""
    cut = span_cut(run_id, 0, 5)
    lost = Interrupted(
        store, power_cut, at=4
    )  # the rows are stored, and the ledger does not say so
    with pytest.raises(PowerCutError):
        put(interrupted_writer(lost, is_shared=False), cut)

    def again() -> None:
        assert put(interrupted_writer(store, is_shared=False), cut) == [REPEATED]

    between = Interrupted(store, again, at=at)
    rows = read_spans(cast("Store", between), run_id)

    assert read_stored_spans(store, run_id).has_repeated  # the copies may have been merged by now
    assert sorted(str(name) for name in rows["name"].to_pylist()) == names(0, 5)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_cut_repeated_while_steps_are_counted_counts_once(
    store: Store, run_id: str, at: int
) -> None:
    cut = span_cut(run_id, 0, 5)
    lost = Interrupted(store, power_cut, at=4)
    with pytest.raises(PowerCutError):
        put(interrupted_writer(lost, is_shared=False), cut)

    def again() -> None:
        assert put(interrupted_writer(store, is_shared=False), cut) == [REPEATED]

    between = Interrupted(store, again, at=at)
    found = read_open_steps(cast("Store", between), run_id, state="ended")

    assert sum(step.num_spans for step in found) == 5


def test_the_attempt_of_a_crashed_collector_counts(store: Store, run_id: str) -> None:
    """It may have stored rows after its last statement."""
    cut = span_cut(run_id, 0, 5)
    dying = Interrupted(store, power_cut, at=4, is_after=True)
    with pytest.raises(PowerCutError):
        put(interrupted_writer(dying, is_shared=True), cut)

    assert put(other_collector(store), cut) == [REPEATED]
    assert shown(store, run_id) == names(0, 5)


CUTS = st.tuples(st.integers(0, 11), st.integers(1, 8)).map(lambda cut: (cut[0], cut[0] + cut[1]))
WRITES = st.lists(
    st.tuples(
        st.lists(CUTS, min_size=1, max_size=3), st.integers(0, 9), st.booleans(), st.integers(0, 1)
    ),
    max_size=5,
)
_NUMBERS = iter(range(10**9))


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(writes=WRITES)
def test_each_row_shows_once_for_any_cuts_crashes_and_two_collectors(
    store: Store, writes: Sequence[tuple[list[tuple[int, int]], int, bool, int]]
) -> None:
    run_id = f"writes-{next(_NUMBERS)}"
    acknowledged: set[int] = set()
    attempted: set[int] = set()
    for ranges, at, is_after, is_shared in writes:
        dying = Interrupted(store, power_cut, at=at, is_after=is_after)
        cuts = [span_cut(run_id, first, end) for first, end in ranges]
        rows = {row for first, end in ranges for row in range(first, end)}
        attempted |= rows
        try:
            put(interrupted_writer(dying, is_shared=bool(is_shared)), *cuts)
            acknowledged |= rows
        except PowerCutError:
            pass
    seen = [int(name[1:]) for name in shown(store, run_id)]

    assert len(seen) == len(set(seen))
    assert acknowledged <= set(seen) <= attempted


def test_repeated_rows_with_other_times_keep_their_first_times(store: Store, run_id: str) -> None:
    # GIVEN a collector that died after it stored the rows and before the ledger said so
    cut = span_cut(run_id, 0, 4)
    lost = Interrupted(store, power_cut, at=4)
    with pytest.raises(PowerCutError):
        put(interrupted_writer(lost, is_shared=False), cut)
    assert in_engine(store, run_id) == 4

    # WHEN a sender with another clock sends them again, and one more row
    later_ns = 1_700_000_000_000_500_000 + np.arange(5, dtype=np.int64) * 10
    whole = span_cut(run_id, 0, 5, start_ns=later_ns)
    writer = interrupted_writer(store, is_shared=False)
    assert put(writer, span_cut(run_id, 0, 4, start_ns=later_ns[:4])) == [REPEATED]
    assert put(writer, whole) == [STORED]

    # THEN each shows once, with its first time
    assert shown(store, run_id) == names(0, 5)
    start_ns = to_numpy(read_spans(store, run_id)["start_ns"])
    first_ns = 1_700_000_000_000_000_000
    expected = [first_ns, first_ns + 10, first_ns + 20, first_ns + 30, int(later_ns[4])]
    assert sorted(start_ns.tolist()) == expected
