from __future__ import annotations

from typing import TYPE_CHECKING

from collector.read import may_repeat, read_spans
from tests.collector.cut_builder import SEGMENT, span_cut
from tests.collector.service.serving import serving

if TYPE_CHECKING:
    from collector.store import Store


def shown(store: Store, run_id: str) -> list[str]:
    return sorted(str(name) for name in read_spans(store, run_id)["name"].to_pylist())


def test_cuts_that_are_acknowledged_can_be_read(store: Store, run_id: str) -> None:
    with serving(store) as collector:
        answer = collector.ship(span_cut(run_id, 0, 3), span_cut(run_id, 3, 5))

    assert answer.status_code == 200
    assert answer.json() == {
        "schema": 1,
        "cuts": [
            {"segment": SEGMENT, "first_row": 0, "state": "stored"},
            {"segment": SEGMENT, "first_row": 3, "state": "stored"},
        ],
    }
    assert shown(store, run_id) == ["s0", "s1", "s2", "s3", "s4"]
    assert not may_repeat(store, run_id)
