from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.read import spans as spans_module
from rankscope.collector.read.spans import read_spans, read_spans_final

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.parametrize("store", ["embedded"], indirect=True)


def insert_runs(store: Store, run_id: str) -> None:
    """Insert spans of two epochs, with a large step, and of another run."""
    store.insert_rows(
        "spans",
        [
            {
                "run_id": name, "epoch": epoch, "step": step, "rank": rank, "start_ns": start,
                "kind": "forward", "segment": rank, "row": 100 * (10 * epoch + step) + start,
            }
            for name in (run_id, f"other than {run_id}")
            for epoch, step, num_ranks in ((0, 1, 2), (0, 2, 9), (0, 3, 1), (1, 3, 2), (1, 7, 2))
            for rank in range(num_ranks)
            for start in range(2)
        ],
    )  # fmt: skip


@pytest.mark.parametrize("most", [1, 3, 4, 7, 20, 1000])
def test_spans_are_the_same_in_any_number_of_statements(
    store: Store, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    run_id = f"in statements of {most}"
    insert_runs(store, run_id)
    whole = read_spans(store, run_id).to_pylist()
    bounds: list[Mapping[str, Any]] = []
    stream = store.stream_arrow

    def observed(sql: str, *parameters: Mapping[str, Any], num_rows: int) -> pa.Table:
        bounds.extend(parameters)
        return stream(sql, *parameters, num_rows=num_rows)

    monkeypatch.setattr(spans_module, "MAX_STATEMENT_SPANS", most)
    monkeypatch.setattr(store, "stream_arrow", observed)

    found = read_spans(store, run_id)

    assert found.to_pylist() == whole
    assert len(whole) == 32
    assert found["start_ns"].num_chunks == 1
    # A rank's spans of one step stay together, so the smallest part has two.
    assert len(bounds) == {1: 16, 3: 16, 4: 9, 7: 7, 20: 3, 1000: 1}[most]


def test_the_steps_of_large_runs_are_selected(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert_runs(store, "selected")
    monkeypatch.setattr(spans_module, "MAX_STATEMENT_SPANS", 4)

    found = read_spans(store, "selected", first=2, last=3).to_pylist()

    assert {(row["epoch"], row["step"]) for row in found} == {(0, 2), (0, 3), (1, 3)}
    assert len(found) == 24
    assert read_spans_final(store, "selected", first=2, last=3).to_pylist() == found
