"""Files that pages offer: no cell of a table runs as a formula, and a report needs no script."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace

import pytest

from rankscope.analysis.report.report import Severity
from rankscope.dashboard.app import create_app
from rankscope.dashboard.exports import report_page
from rankscope.dashboard.theme import graph_config
from tests.support.dashboard.builders import FakeProvider, report
from tests.support.dashboard.training_builder import training_provider

FORMULAS = ('=HYPERLINK("http://evil")', "+1", "-2+3", "@SUM(A1)", "\tx")


@pytest.mark.parametrize("text", FORMULAS)
def test_no_cell_of_a_table_begins_as_a_formula(text: str) -> None:
    found = report(name=text)
    provider = FakeProvider(reports={"demo-42": found}, sentence=text)
    client = create_app(provider).server.test_client()

    for path in ("/export/findings.csv?run=demo-42", "/export/runs.csv"):
        answer = client.get(path)
        (_, row, *_) = csv.reader(io.StringIO(answer.get_data(as_text=True), newline=""))
        assert f"'{text}" in row
        assert not [cell for cell in row if cell.startswith(("=", "+", "@", "\t", "-2"))]
        assert answer.headers["Content-Disposition"].startswith("attachment; filename=")


def test_a_report_to_send_is_one_file_without_scripts_and_with_escaped_text() -> None:
    found = report(name='<script>alert("x")</script> 5 % & more', warnings=("<img src=x>",))
    client = create_app(FakeProvider(reports={"demo-42": found})).server.test_client()

    text = client.get("/export/report.html?run=demo-42").get_data(as_text=True)

    assert "&lt;script&gt;" in text
    assert not re.search(r"<script|<img|src=[\"']|href=|https?://", text)
    assert "default-src 'none'" in text
    assert "Rank 5 computes 1.80x slower" in text
    assert "<polyline" in text
    assert "<polyline" not in report_page(replace(found, actual_s_by_step={3: 1.0}), "One step.")


def test_the_report_to_send_has_the_proof_and_what_to_do() -> None:
    found = report()
    finding = replace(found.findings[0], hosts=("n<1>",), severity=Severity.CRITICAL)

    text = report_page(replace(found, findings=(finding,)), "x")

    assert "with rank 5 as its peers" in text
    assert "<h2>What to do</h2>" in text
    assert "ssh &#x27;n&lt;1&gt;&#x27; nvidia-smi" in text


def test_the_picture_of_a_finding_is_a_file() -> None:
    provider = FakeProvider(reports={"demo-42": report()})
    client = create_app(provider).server.test_client()

    answer = client.get("/export/proof.svg?run=demo-42&cause=slow-compute")

    assert (answer.status_code, answer.mimetype) == (200, "image/svg+xml")
    assert answer.get_data(as_text=True).startswith("<svg xmlns")
    assert client.get("/export/proof.svg?run=demo-42&cause=gc-pause").status_code == 404
    assert client.get("/export/proof.svg?run=none").status_code == 404


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/export/report.html?run=none", 404),
        ("/export/findings.csv?run=empty", 409),
        ("/export/step.json?run=empty", 400),
        ("/export/step.json?run=none&epoch=0&step=1", 404),
        ("/export/step.json?run=empty&epoch=0&step=1&rank=2-3", 200),
    ],
)
def test_what_cannot_be_saved_is_refused_with_a_reason(path: str, status: int) -> None:
    client = create_app(FakeProvider(reports={"empty": None})).server.test_client()

    answer = client.get(path)

    assert answer.status_code == status
    assert status == 200 or answer.get_data(as_text=True).startswith(f"{status}: ")


def test_a_step_for_perfetto_has_the_shown_ranks_and_time() -> None:
    client = create_app(training_provider()).server.test_client()

    shown = "run=demo-42&epoch=0&step=3&order=dp&from=5&to=900&rows=0-1"
    answer = client.get(f"/export/step.json?{shown}")

    # By DP, the first rows are ranks 0 and 1.
    assert answer.get_json() == {"traceEvents": [0, 3, 0, 1, 5, 900]}


def test_a_figure_is_exported_as_an_image_only() -> None:
    config = graph_config(selects=False)

    assert config["toImageButtonOptions"]["format"] == "png"
    assert not {"sendData", "editable", "edits"} & {name for name, on in config.items() if on}
