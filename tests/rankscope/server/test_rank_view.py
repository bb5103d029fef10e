"""Rows of one rank, and values of all ranks, read from a store."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.report.report import RankStepExcess
from rankscope.dashboard.records.rank_details import RankQuantity
from rankscope.server.provider import StoreProvider
from rankscope.server.reports import Reports
from rankscope.sources.store_source import StoreSource
from rankscope.tracer.span import SpanKind
from tests.support.dashboard.analysed import SLOW_RANK, analysed_report
from tests.support.rankscope.rollup_runs import (
    describe,
    new_number,
    put,
    span_rows,
    untimed_rollups,
)

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store


def test_a_rank_of_a_store_has_times_samples_and_events(store: Store) -> None:
    run_id = f"rank-{new_number()}"
    describe(store, run_id)
    place = {"run_id": run_id, "host": f"host-of-{run_id}", "local_rank": 1}
    store.insert_rows("ranks", [place | {"rank": rank, "process": f"{rank}"} for rank in (0, 1)])
    put(store, run_id, span_rows(run_id))  # rank 0 computes 40 ms, rank 1 70 ms, 1 ms more a step
    untimed_rollups(store).turn()
    source = StoreSource(store)
    provider = StoreProvider(source, Reports(source), store=store)
    report = replace(analyze_run(source, run_id), run=run_id)
    bounds = store.rows(
        "SELECT begin_ns, end_ns FROM closed_steps FINAL WHERE run_id = {run_id:String}"
        " AND step = 1",
        {"run_id": run_id},
    )[0]
    middle_ns = (bounds["begin_ns"] + bounds["end_ns"]) // 2
    sample = {"run_id": run_id, "host": place["host"], "device": 1, "name": "gpu-clock-hz"}
    store.insert_rows(
        "samples",
        [
            sample | {"at_ns": bounds["begin_ns"], "value": 1.7e9},
            sample | {"at_ns": middle_ns, "value": 1.3e9},
        ],
    )
    exception = {"traceback": "Traceback\n  line"}
    event = {"epoch": 0, "rank": 1, "at_ns": 5, "kind": "exit", "text": "KeyError"}
    event |= {"run_id": run_id, "process": "p", "line": 1}
    store.insert_rows("events", [event | {"data": json.dumps({"exception": exception})}])

    found = provider.rank_details(report, 1)

    assert found is not None
    assert found.steps == (0, 1, 2)
    forward = next(one for one in found.kinds if one.kind is SpanKind.FORWARD)
    assert forward.own_s == pytest.approx([0.07, 0.071, 0.072])
    assert forward.peers_s == pytest.approx([0.04, 0.041, 0.042])
    assert [(one.kind, one.detail) for one in found.events] == [("exit", "Traceback\n  line")]
    assert provider.rank_details(report, 99) is None
    (clock,) = found.samples
    assert clock.at_step[0] == pytest.approx(1.0)
    assert 1.0 < clock.at_step[1] < 2.0

    wait = provider.rank_values(report, RankQuantity.WAIT, steps=(1, 2))
    assert wait is not None
    assert wait.steps == (1, 2)
    # rank 0 waits the 30 ms by which rank 1 is later
    assert wait.seconds == pytest.approx({0: 0.03, 1: 0.0})
    assert provider.rank_values(report, RankQuantity.WAIT, steps=(50, 60)) is None


def test_no_process_of_a_silent_run_is_running(store: Store) -> None:
    # GIVEN a run whose last record came in 1970, and has no end
    run_id = f"silent-{new_number()}"
    describe(store, run_id, state="running")
    store.insert_rows("ranks", [{"run_id": run_id, "rank": 1, "exit_state": "running"}])
    cut = {"run_id": run_id, "rank": 1, "segment": new_number(), "state": "stored", "at_ns": 7}
    store.insert_rows("ledger", [cut])
    source = StoreSource(store)
    provider = StoreProvider(source, Reports(source), store=store)
    report = replace(analysed_report(), run=run_id)

    # THEN it runs while it is not silent
    found = provider.rank_details(report, 1)
    assert found is not None
    assert found.exit_state == "running"
    assert found.reported is not None
    assert found.reported[0] == 7

    # AND is lost with its run
    store.command(
        "ALTER TABLE runs UPDATE created_ns = 1 WHERE run_id = {run_id:String}"
        " SETTINGS mutations_sync = 1",
        {"run_id": run_id},
    )
    found = StoreProvider(source, Reports(source), store=store).rank_details(report, 1)
    assert found is not None
    assert found.exit_state == "lost"


def test_events_of_one_kind_do_not_hide_others(store: Store) -> None:
    run_id = f"events-{new_number()}"
    describe(store, run_id)
    store.insert_rows("ranks", [{"run_id": run_id, "rank": 1}])
    event = {"run_id": run_id, "rank": 1, "process": "p", "data": "", "text": ""}
    pace = [event | {"at_ns": 10 + n, "line": n, "kind": "pace"} for n in range(40)]
    store.insert_rows("events", [*pace, event | {"at_ns": 5, "line": 99, "kind": "stalled"}])
    source = StoreSource(store)

    found = StoreProvider(source, Reports(source), store=store).rank_details(
        replace(analysed_report(), run=run_id), 1
    )

    assert found is not None
    events = [(one.kind, one.at_ns, one.num_alike) for one in found.events]
    assert events == [("pace", 49, 40), ("pace", 48, 40), ("pace", 47, 40), ("stalled", 5, 1)]


def test_compute_of_all_ranks_is_that_of_the_diagnosis(store: Store) -> None:
    # Forward spans of its TP partner are as long, because they include what it waits.
    source = StoreSource(store)
    provider = StoreProvider(source, Reports(source), store=store)

    found = provider.rank_values(analysed_report(), RankQuantity.COMPUTE, steps=(2, 90))

    assert found is not None
    assert found.steps == (2, 7)
    longest, second = sorted(found.seconds, key=lambda rank: -found.seconds[rank])[:2]
    assert longest == SLOW_RANK
    assert found.seconds[longest] > 10 * abs(found.seconds[second])


def test_the_evidence_of_all_ranks_is_that_of_the_diagnosis(store: Store) -> None:
    source = StoreSource(store)
    provider = StoreProvider(source, Reports(source), store=store)
    gaps = RankStepExcess(
        ranks=(0, 1, 2),
        steps=(5, 6),
        excess_ns=np.array([[2e9, 4e9], [-1e9, np.nan], [np.nan, np.nan]]),
        quantity="gaps of the host",
    )
    transfers = replace(gaps, links=((0, 4), (4, 8), (8, 9)))

    def seconds(evidence: RankStepExcess | None) -> dict[int, float] | None:
        report = replace(analysed_report(), evidence=evidence)
        found = provider.rank_values(report, RankQuantity.EVIDENCE, steps=None)
        return None if found is None else dict(found.seconds)

    assert seconds(gaps) == {0: 3.0, 1: -1.0}
    # Each member of a link has the time of its slowest one.
    assert seconds(transfers) == {0: 3.0, 4: 3.0, 8: -1.0}
    assert seconds(None) is None
