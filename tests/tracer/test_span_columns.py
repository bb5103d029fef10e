"""The table of a span's columns agrees with the arrays of the analysis."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from rankscope.analysis.trace.rows import make_span_table
from rankscope.analysis.trace.tables import SpanTable
from rankscope.tracer.span import NONE, SPAN_COLUMNS


def test_the_analysis_has_a_field_for_each_column() -> None:
    expected = {"epoch", "rank", *(each.name for each in SPAN_COLUMNS if each.in_analysis)}
    assert {each.name for each in fields(SpanTable)} - {"names", "tracks"} == expected


def test_columns_that_a_source_does_not_have_hold_the_missing_value() -> None:
    two = np.zeros(2, dtype=np.int64)
    coded = {name: two.astype(np.int32) for name in ("kind", "name", "track")}
    required = dict.fromkeys(("epoch", "rank", "step", "start_ns", "duration_ns"), two)
    spans = make_span_table(names=("a",), tracks=("b",), **required, **coded)

    assert spans.num_bytes.tolist() == [NONE, NONE]
    assert spans.num_bytes.dtype == np.int64
    assert spans.group_id.tolist() == [0, 0]
    del required["duration_ns"]
    with pytest.raises(KeyError, match="duration_ns"):
        make_span_table(names=("a",), tracks=("b",), **required, **coded)
