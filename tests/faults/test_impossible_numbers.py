"""Records with arbitrary numbers (fault D3): stored or rejected, and sums stay finite."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope.collector.read.rollups import read_open_steps
from rankscope.collector.read.runs import read_run
from rankscope.collector.read.spans import read_spans
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.writer import StoreWriter
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from pathlib import Path

    from rankscope.collector.store.store import Store

LEAST, MOST = -(2**63), 2**63 - 1
MONTH_NS = 30 * 86_400 * 10**9
INT64 = st.integers(LEAST, MOST) | st.sampled_from([LEAST, -1, 0, 1, MOST])
SPANS = st.tuples(INT64, INT64)
STEPS = st.tuples(st.floats(), INT64)
_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def spools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spools")


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(spans=st.lists(SPANS, max_size=6), steps=st.lists(STEPS, max_size=3))
def test_any_record_is_stored_or_rejected_and_sums_stay_finite(
    store: Store, spools: Path, spans: list[tuple[int, int]], steps: list[tuple[float, int]]
) -> None:
    # GIVEN a process that recorded a valid span, and others with any times, losses and counts
    run_id = f"numbers-{next(_NUMBERS)}"
    builder = SpoolBuilder(spools / run_id, run_id=run_id)
    builder.span("good", start_ns=100, duration_ns=7)
    for start_ns, end_ns in spans:
        builder.span("any", start_ns=start_ns, duration_ns=end_ns - start_ns)
    for step, (loss, num_tokens) in enumerate(steps):
        builder.step(step, start_ns=100, duration_ns=50, loss=loss, num_tokens=num_tokens)
    builder.end()

    # WHEN it is stored
    progress = SpoolTail(spools / run_id, StoreWriter(store)).poll()

    # THEN each row is accounted for, and impossible ones are reported
    num_rows = 1 + len(spans) + len(steps)
    assert progress.num_spans + progress.num_steps + progress.num_bad == num_rows
    described = read_run(store, run_id)
    assert sum(bad["num_rows"] for bad in described.bad) == progress.num_bad
    assert all(bad["reason"] for bad in described.bad)
    # AND results of queries are possible
    kept = read_spans(store, run_id).to_pylist()
    assert "good" in {span["name"] for span in kept}
    assert all(0 <= span["duration_ns"] <= MONTH_NS and span["start_ns"] >= 0 for span in kept)
    (sums,) = totals(store, run_id)
    assert all(math.isfinite(float(number)) for number in sums.values())
    assert sum(step.num_spans for step in read_open_steps(store, run_id, state="ended")) == len(
        kept
    )


def totals(store: Store, run_id: str) -> list[dict[str, Any]]:
    """Return sums over a run's spans."""
    return store.rows(
        "SELECT sum(duration_ns) AS whole, avg(duration_ns) AS mean, max(start_ns) AS last"
        " FROM spans WHERE run_id = {r:String}",
        {"r": run_id},
    )
