"""Two writers of one process that store the same rows at once: its own tail, and an agent."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from rankscope.collector.arrow_columns import to_numpy
from rankscope.collector.read.spans import read_spans
from rankscope.collector.store.ledger import Ledger
from rankscope.collector.store.writer import StoreWriter
from tests.support.collector.cut_builder import span_cut
from tests.support.collector.interrupted_store import Interrupted, PowerCutError, power_cut
from tests.support.collector.stored import shown
from tests.support.collector.writing import DUPLICATE, STORED, counted, names, put

if TYPE_CHECKING:
    from rankscope.collector.store.ledger import CutState
    from rankscope.collector.store.store import Store

BLOCKED_S = 0.2
TIMEOUT_S = 60.0
FIRST_NS = 1_700_000_000_000_000_000


@pytest.mark.slow
@pytest.mark.parametrize("is_shared", [False, True])
def test_rows_of_two_writers_with_different_clocks_show_once(
    store: Store, run_id: str, *, is_shared: bool
) -> None:
    # GIVEN a writer that is about to insert its rows
    ledger = Ledger(store, is_shared=is_shared)
    states: list[CutState] = []
    later_ns = FIRST_NS + 2_000_000 + np.arange(6, dtype=np.int64) * 10
    other = threading.Thread(
        target=lambda: states.extend(
            put(StoreWriter(store, ledger=ledger), span_cut(run_id, 0, 6, start_ns=later_ns))
        )
    )

    def start_other() -> None:
        other.start()
        other.join(BLOCKED_S)

    # WHEN another writer of this process, with another clock, stores them and one more row
    between = cast("Store", Interrupted(store, start_other, at=0))
    states_first = put(StoreWriter(between, ledger=ledger), span_cut(run_id, 0, 5))
    other.join(TIMEOUT_S)

    # THEN it waits for the first writer, and stores only the missing row
    assert (states_first, states) == ([STORED], [STORED])
    assert counted(store, run_id) == 6
    assert shown(store, run_id) == names(0, 6)
    spans = read_spans(store, run_id)
    expected = [FIRST_NS + 10 * row for row in range(5)] + [int(later_ns[5])]
    assert sorted(to_numpy(spans["start_ns"]).tolist()) == expected


def test_a_failed_writer_does_not_block_others(store: Store, run_id: str) -> None:
    # GIVEN a writer whose store fails
    ledger = Ledger(store)
    dying = cast("Store", Interrupted(store, power_cut, at=0))
    with pytest.raises(PowerCutError):
        put(StoreWriter(dying, ledger=ledger), span_cut(run_id, 0, 5))

    # WHEN another writer stores the rows, twice
    again = [put(StoreWriter(store, ledger=ledger), span_cut(run_id, 0, 5)) for _ in range(2)]

    # THEN they are stored once
    assert again[1] == [DUPLICATE]
    assert shown(store, run_id) == names(0, 5)
