from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.report.document import to_document
from rankscope.analysis.report.exchange import (
    read_card,
    read_report,
    write_card,
    write_report,
)
from rankscope.analysis.report.report import RunReport, Severity
from rankscope.tracer.topology import Layout
from tests.support.analysis.cluster import MS, gpt_cluster, source_of


@pytest.fixture(scope="module")
def report() -> RunReport:
    """Return a report with findings, a waterfall, starved ranks and unknown values."""
    cluster = gpt_cluster(
        Layout(pp=2, dp=2, tp=2),
        num_steps=8,
        forward_ns=lambda rank, *_: 18 * MS if rank == 5 else 10 * MS,
    )
    return analyze_run(source_of(cluster), "tiny")


def test_a_report_reads_back_equal(report: RunReport) -> None:
    found = read_report(write_report(report))

    assert to_document(found) == to_document(report)
    held = ("excess", "waterfall", "quality", "direct_waits", "links")
    for field in fields(RunReport):
        if field.name not in held:
            assert getattr(found, field.name) == getattr(report, field.name), field.name
    assert np.array_equal(found.excess.excess_ns, report.excess.excess_ns, equal_nan=True)
    assert found.direct_waits is not None
    assert report.direct_waits is not None
    assert np.array_equal(found.direct_waits.waiting_ns, report.direct_waits.waiting_ns)
    assert found.links is not None
    assert report.links is not None
    assert found.links.links == report.links.links
    assert found.findings[0].severity is Severity.CRITICAL
    assert found.waterfall is not None
    assert report.waterfall is not None
    assert found.waterfall.by_step_ns.dtype == report.waterfall.by_step_ns.dtype
    assert (found.waterfall.by_step_ns == report.waterfall.by_step_ns).all()
    assert write_report(found) == write_report(report)


def test_a_proof_card_reads_back_equal_and_that_of_another_version_is_none(
    report: RunReport,
) -> None:
    card = report.findings[0].card
    assert card is not None

    assert read_card(write_card(card)) == card
    assert read_card('{"unknown": 1}') is None
    assert read_card("") is None


def test_numpy_scalars_infinities_and_absent_values_survive(report: RunReport) -> None:
    num_spans: Any = np.int64(2**53 + 1)
    changed = replace(
        report, num_spans=num_spans, m_w=math.nan, m_s=None, slowdown=np.float64("inf")
    )

    found = read_report(write_report(changed))

    assert found.num_spans == 2**53 + 1
    assert found.m_w is not None
    assert math.isnan(found.m_w)
    assert (found.m_s, found.slowdown) == (None, math.inf)


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"run": "tiny"}', '["Popen", {"args": "true"}]', "[" * 100_000],
)
def test_a_text_that_is_no_report_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="not a report"):
        read_report(text)


@pytest.mark.parametrize(
    "changed",
    [
        {"findings": 3},
        {"unknown": 1},
        {"layout": {"dp": 0}},
        {"direct_waits": {"rank": [2, "AAAA"], "on_rank": [0, ""], "waiting_ns": [0, ""]}},
    ],
)
def test_a_report_with_a_field_of_another_form_is_refused(
    report: RunReport, changed: dict[str, object]
) -> None:
    document = json.loads(write_report(report)) | changed

    with pytest.raises(ValueError, match="not a report of this version"):
        read_report(json.dumps(document))
