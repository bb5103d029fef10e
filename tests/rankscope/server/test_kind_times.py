"""Mean times by kind that the pages read from the rollups, without a span."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.server.provider import StoreProvider
from rankscope.server.reports import Reports
from rankscope.sources.store_source import StoreSource
from rankscope.tracer.span import SpanKind
from tests.support.rankscope.rollup_runs import (
    describe,
    new_number,
    put,
    span_rows,
    untimed_rollups,
)

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store


@pytest.fixture
def run_id() -> str:
    return f"kinds-{new_number()}"


def provider_of(store: Store) -> StoreProvider:
    source = StoreSource(store)
    return StoreProvider(source, Reports(source), store=store)


def test_times_by_kind_are_unknown_before_a_step_is_closed(store: Store, run_id: str) -> None:
    describe(store, run_id)
    put(store, run_id, span_rows(run_id))

    assert provider_of(store).kind_times(run_id) is None


def test_times_by_kind_are_means_over_the_ranks(store: Store, run_id: str) -> None:
    describe(store, run_id)
    put(store, run_id, span_rows(run_id))  # rank 0 computes 40 ms, rank 1 70 ms, 1 ms more a step
    untimed_rollups(store).turn()
    store.rows("ALTER TABLE spans DELETE WHERE run_id = {run_id:String}", {"run_id": run_id})

    times = provider_of(store).kind_times(run_id)

    assert times is not None
    forward, comm = SpanKind.FORWARD, SpanKind.DP_COMM
    assert times.busy_s[forward] == pytest.approx({0: 0.055, 1: 0.056, 2: 0.057})
    assert times.exposed_s == {comm: pytest.approx({0: 0.035, 1: 0.034, 2: 0.033})}
    assert times.wait_s == {comm: pytest.approx(dict.fromkeys(range(3), 0.015))}


def test_times_by_kind_follow_the_rollups(store: Store, run_id: str) -> None:
    describe(store, run_id)
    put(store, run_id, span_rows(run_id, num_steps=1))
    untimed_rollups(store).turn()
    provider = provider_of(store)
    before = provider.kind_times(run_id)
    assert provider.kind_times(run_id) is before
    put(store, run_id, span_rows(run_id, num_steps=2)[4:])
    untimed_rollups(store).turn()

    after = provider.kind_times(run_id)

    assert before is not None
    assert after is not None
    assert after.revision != before.revision
    assert list(after.busy_s[SpanKind.FORWARD]) == [0, 1]


def test_an_unknown_wait_is_left_out(store: Store, run_id: str) -> None:
    describe(store, run_id)
    rows = [row for row in span_rows(run_id) if (row["step"], row["rank"]) != (1, 1)]
    put(store, run_id, rows)  # rank 0's all-reduce of step 1 lacks its other member
    untimed_rollups(store).turn()

    times = provider_of(store).kind_times(run_id)

    assert times is not None
    assert list(times.busy_s[SpanKind.DP_COMM]) == [0, 1, 2]
    assert list(times.wait_s[SpanKind.DP_COMM]) == [0, 2]
