from __future__ import annotations

import pytest

from tests.support.analysis.exit_builders import event


@pytest.mark.parametrize("entries", [None, 7, "open", {"name": "all_reduce"}])
def test_what_is_no_list_of_open_spans_is_none(entries: object) -> None:
    assert event(1, "lost", open=entries).open_spans == []


def test_what_is_no_span_is_left_out_of_those_that_were_open() -> None:
    inside = {"name": "all_reduce", "seq": 3}

    assert event(1, "stalled", open=[None, inside, 7]).open_spans == [inside]
    assert event(1, "stalled").open_spans == []
