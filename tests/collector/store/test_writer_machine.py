"""State machine of an agent that records, cuts and sends rows while collectors die."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rankscope.collector.store.writer import StoreWriter
from tests.support.collector.cut_builder import span_cut
from tests.support.collector.interrupted_store import (
    Interrupted,
    PowerCutError,
    interrupted_writer,
    power_cut,
)
from tests.support.collector.stored import shown
from tests.support.collector.writing import counted, names, other_collector, put

if TYPE_CHECKING:
    from rankscope.collector.spool.cut import Cut
    from rankscope.collector.store.store import Store

MAX_CUTS = 3
LAST_STATEMENT = 9
"""No commit of `MAX_CUTS` cuts has more statements, so some collectors die after the commit."""

_NUMBERS = count()


class Path(RuleBasedStateMachine):
    """One rank's segment, an agent that keeps its cuts, and collectors that die at any statement.

    The agent never cuts rows twice: after any failure it sends the same cut again.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._run_id = f"machine-{next(_NUMBERS)}"
        self._num_recorded = 0
        self._cuts: list[Cut] = []
        self._num_acknowledged = 0
        self._num_sent = 0

    @property
    def _num_cut(self) -> int:
        return self._cuts[-1].key.end_row if self._cuts else 0

    @rule(num_rows=st.integers(1, 8))
    def record(self, num_rows: int) -> None:
        self._num_recorded += num_rows

    @precondition(lambda self: self._num_recorded > self._num_cut)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        end = data.draw(st.integers(self._num_cut + 1, self._num_recorded))
        self._cuts.append(span_cut(self._run_id, self._num_cut, end))

    @precondition(lambda self: len(self._cuts) > self._num_acknowledged)
    @rule(
        num=st.integers(1, MAX_CUTS),
        at=st.integers(0, LAST_STATEMENT),
        is_after=st.booleans(),
        is_shared=st.booleans(),
    )
    def send(self, num: int, at: int, *, is_after: bool, is_shared: bool) -> None:
        """Send the oldest cuts to a collector that dies before or after its ``at``-th statement."""
        first = self._num_acknowledged
        batch = self._cuts[first : first + num]
        self._num_sent = max(self._num_sent, first + len(batch))
        dying = Interrupted(self._store, power_cut, at=at, is_after=is_after)
        try:
            put(interrupted_writer(dying, is_shared=is_shared), *batch)
        except PowerCutError:
            return
        self._num_acknowledged = first + len(batch)

    @precondition(lambda self: self._num_sent > 0)
    @rule(data=st.data())
    def another_collector_gets_a_late_copy(self, data: st.DataObject) -> None:
        """A proxy delayed a request; its agent may have been acknowledged by another collector."""
        number = data.draw(st.integers(0, self._num_sent - 1))
        put(other_collector(self._store), self._cuts[number])

    @precondition(lambda self: self._num_sent > 0)
    @rule()
    def a_new_agent_asks_what_is_stored(self) -> None:
        found = StoreWriter(self._store).resume(self._run_id)
        stored = max(found.end_rows.values(), default=0)
        ends = {cut.key.end_row for cut in self._cuts}
        assert stored in {0, *ends}
        assert stored >= self._acknowledged_rows
        assert {key.end_row for key in found.unanswered} <= ends

    @property
    def _acknowledged_rows(self) -> int:
        return self._cuts[self._num_acknowledged - 1].key.end_row if self._num_acknowledged else 0

    @invariant()
    def rows_that_show_were_sent_and_show_once(self) -> None:
        seen = [int(name[1:]) for name in shown(self._store, self._run_id)]
        sent = self._cuts[self._num_sent - 1].key.end_row if self._num_sent else 0
        assert len(seen) == len(set(seen))
        assert set(range(self._acknowledged_rows)) <= set(seen) <= set(range(sent))

    def teardown(self) -> None:
        """In the end a collector survives: every cut row is stored and counted, once."""
        put(StoreWriter(self._store), *self._cuts[self._num_acknowledged :])
        assert shown(self._store, self._run_id) == names(0, self._num_cut)
        assert counted(self._store, self._run_id) == self._num_cut


@pytest.mark.slow
@pytest.mark.parametrize("num_examples", [8, pytest.param(40, marks=pytest.mark.nightly)])
def test_each_row_is_stored_once_whatever_process_dies(store: Store, num_examples: int) -> None:
    class Here(Path):
        def __init__(self) -> None:
            super().__init__(store)

    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=15,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
