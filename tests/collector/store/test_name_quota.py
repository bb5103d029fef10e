from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.collector.store.name_quota import MAX_NAMES, OTHER_NAME, NameQuota
from rankscope.collector.store.writer import StoreWriter
from tests.support.collector.cut_builder import span_cut
from tests.support.collector.writing import counted, put

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store


def test_names_beyond_the_quota_are_replaced(store: Store, run_id: str) -> None:
    first = span_cut(run_id, 0, MAX_NAMES)
    more = span_cut(run_id, MAX_NAMES, MAX_NAMES + 3, names=["s0", "new", "newer"])
    quota = NameQuota(store)

    kept = quota.limit(first.rows.spans)
    limited = quota.limit(more.rows.spans)

    assert kept is first.rows.spans
    assert limited["name"].to_pylist() == ["s0", OTHER_NAME, OTHER_NAME]
    assert limited["row"].to_pylist() == more.rows.spans["row"].to_pylist()


def test_each_run_has_its_own_quota(store: Store, run_id: str) -> None:
    quota = NameQuota(store)
    quota.limit(span_cut(run_id, 0, MAX_NAMES + 1).rows.spans)

    other = span_cut(f"{run_id}-b", 0, 2, names=["new", "newer"])

    assert quota.limit(other.rows.spans)["name"].to_pylist() == ["new", "newer"]


def test_the_quota_holds_after_a_restart(store: Store, run_id: str) -> None:
    put(StoreWriter(store), span_cut(run_id, 0, MAX_NAMES))
    after = NameQuota(store)

    limited = after.limit(span_cut(run_id, 0, 2, names=["s1", "new"]).rows.spans)

    assert limited["name"].to_pylist() == ["s1", OTHER_NAME]


def test_spans_with_replaced_names_are_all_counted(store: Store, run_id: str) -> None:
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
