"""The figure of a proof card, on a page and as a file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from rankscope.analysis.report.proof_card import (
    PointCloud,
    ProofCard,
    ProofFact,
    SampleGroup,
    SampleStrip,
    StepSeries,
)
from rankscope.dashboard.figures.proof_card import (
    MAX_LABEL,
    MAX_LEFT,
    Scale,
    describe_group,
    proof_figure,
)
from rankscope.dashboard.figures.static_svg import static_svg
from tests.support.dashboard.builders import report as make_report

SVG = "{http://www.w3.org/2000/svg}"

CULPRIT = SampleGroup(
    label="rank 3",
    is_culprit=True,
    num=2,
    low=30e6,
    median=30.5e6,
    high=31e6,
    values=(30e6, 31e6),
)
PEERS = replace(CULPRIT, label="2 peers", is_culprit=False, low=2e7, median=2e7, high=2e7)
CARD = ProofCard(
    strips=(
        SampleStrip(quantity='span "<script>"', unit="ns", steps="step 9", groups=(CULPRIT, PEERS)),
    ),
    series=StepSeries(
        quantity="own compute of a step",
        unit="ns",
        steps=(0, 1, 2, 3),
        culprit_label="rank 3",
        usual_label="2 peers",
        culprit=(2e8, None, 3e8, 3e8),
        usual=(2e8, 2e8, 2e8, 2e8),
        culprit_median=3e8,
        usual_median=2e8,
    ),
    onset=2,
)


def figure_of(card: ProofCard) -> Any:  # noqa: ANN401  # plotly's document
    report = make_report()
    finding = replace(report.findings[0], card=card)
    figure = proof_figure(replace(report, findings=(finding,)), finding)
    assert figure is not None
    return figure.to_plotly_json()


def test_each_value_of_a_group_is_a_point_below_its_label() -> None:
    document = figure_of(CARD)

    culprit, peers, first, second = document["data"][:4]
    texts = [note["text"] for note in document["layout"]["annotations"]]
    assert (culprit["x"], peers["x"]) == ([30e6, 31e6], [30e6, 31e6])
    assert "rank 3: 30 to 31 ms, median 30.5 ms (2 values)" in texts
    assert (first["y"], second["y"]) == ([2e8, None, 3e8, 3e8], [2e8] * 4)
    assert "rank 3: 300 ms" in texts
    assert " from step 2" in texts


def test_a_name_from_outside_is_text() -> None:
    document = figure_of(CARD)

    texts = [note["text"] for note in document["layout"]["annotations"]]
    assert 'span "&lt;script&gt;", step 9' in texts


def test_the_step_with_and_without_the_finding_are_bars() -> None:
    report = make_report()
    price = report.price(report.findings[0])
    assert price is not None
    document = figure_of(CARD)

    recorded, fixed = [shape for shape in document["layout"]["shapes"] if shape["type"] == "rect"]

    assert recorded["x1"] == price.step_s
    assert fixed["x1"] == price.step_s - price.seconds


def test_the_bars_of_an_ended_finding_are_the_mean_of_its_own_steps() -> None:
    report = make_report()
    seconds = {step: 0.5 if 10 <= step <= 13 else 0.4 for step in report.steps}
    ended = replace(
        report.findings[0], steps=(10, 13), saved_s=0.4 / 30, shown_saved_s=0.1, card=CARD
    )
    report = replace(report, actual_s_by_step=seconds, findings=(ended,))

    figure = proof_figure(report, ended)

    assert figure is not None
    layout = figure.to_plotly_json()["layout"]
    bars = [shape["x1"] for shape in layout["shapes"] if shape["type"] == "rect"]
    assert bars == pytest.approx([0.5, 0.4])
    texts = [note["text"] for note in layout["annotations"]]
    assert "step as recorded in steps 10 to 13: 500 ms" in texts
    assert "with rank 5 as its peers: 400 ms (20 % less)" in texts


def test_the_file_has_all_that_the_page_has_and_no_script() -> None:
    cloud = PointCloud(
        x_quantity="length",
        x_unit="",
        y_quantity="backward of one micro-batch",
        y_unit="ns",
        num=2,
        x=(1e6, 2e6),
        y=(1e7, 2e7),
    )
    facts = (ProofFact(label="rank 3", text="lr = 1 < 2", is_culprit=True),)
    report = make_report()
    finding = replace(report.findings[0], card=replace(CARD, cloud=cloud, facts=facts))
    figure = proof_figure(replace(report, findings=(finding,)), finding)
    assert figure is not None

    drawn = ElementTree.fromstring(static_svg(figure, title="proof", alone=True))

    texts = ["".join(text.itertext()) for text in drawn.iter(f"{SVG}text")]
    assert {note["text"] for note in figure.to_plotly_json()["layout"]["annotations"]} <= {
        text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") for text in texts
    }
    # Two groups of two values, two points of the cloud, 3 + 4 steps.
    assert len(list(drawn.iter(f"{SVG}circle"))) == 2 + 2 + 2 + 3 + 4
    # A line breaks where its quantity is unknown.
    assert len(list(drawn.iter(f"{SVG}polyline"))) == 3
    assert not list(drawn.iter(f"{SVG}script"))
    places = [float(circle.attrib["cx"]) for circle in drawn.iter(f"{SVG}circle")]
    assert 0 < min(places) < max(places) < 960


def test_facts_alone_are_a_figure_without_axes() -> None:
    facts = (
        ProofFact(label="rank 3", text="after recv 12", is_culprit=True),
        ProofFact(label="ranks 0 to 2", text="inside all_reduce 9", is_culprit=False),
    )
    report = make_report()
    finding = replace(report.findings[0], saved_s=None, card=ProofCard(facts=facts))

    figure = proof_figure(report, finding)

    assert figure is not None
    layout = figure.to_plotly_json()["layout"]
    assert not layout["xaxis"]["visible"]
    assert [note["text"] for note in layout["annotations"]] == [
        "rank 3",
        "after recv 12",
        "ranks 0 to 2",
        "inside all_reduce 9",
    ]


def test_a_finding_without_quantity_and_price_has_no_figure() -> None:
    report = make_report()

    assert proof_figure(report, replace(report.findings[0], saved_s=None, card=None)) is None


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("ns", 30.4e6, "30.4 ms"),
        ("ns", 2.1e9, "2.1 s"),
        ("bytes/s", 5.99e9, "5.99 GB/s"),
        ("Hz", 1.35e9, "1.35 GHz"),
        ("W", 477.0, "477 W"),
        ("", 2.5e7, "25 M"),
        ("ns", 0.0, "0"),
    ],
)
def test_a_value_has_three_digits_and_its_unit(unit: str, value: float, text: str) -> None:
    assert Scale.of(unit, value).with_unit(value) == text


def test_a_single_value_has_no_median() -> None:
    single = replace(CULPRIT, num=1, low=31e6, values=(31e6,))

    assert describe_group(single, "ns") == "rank 3: 31 ms (1 value)"


def test_a_line_ends_before_the_next_column_and_keeps_its_entities_whole() -> None:
    name = "<" * 200
    strip = replace(CARD.strips[0], quantity=name)
    fact = ProofFact(label="rank 3", text=name, is_culprit=True)

    beside = figure_of(replace(CARD, strips=(strip,), facts=(fact,)))
    alone = figure_of(ProofCard(facts=(fact,)))

    for document, most in ((beside, MAX_LEFT), (alone, MAX_LABEL)):
        texts = [note["text"] for note in document["layout"]["annotations"]]
        assert "&lt;" * (most - 1) + "…" in texts


def test_a_price_says_what_is_replaced_by_what() -> None:
    def texts(cause: str) -> str:
        report = make_report()
        finding = replace(report.findings[0], cause=cause, card=CARD)
        figure = proof_figure(replace(report, findings=(finding,)), finding)
        assert figure is not None
        return " | ".join(str(note.text) for note in figure.layout.annotations)

    assert "with rank 5 as its peers: " in texts("slow-compute")
    assert "with alike links' rate: " in texts("slow-link")
    assert "with stage 1 as the others: " in texts("stage-imbalance")
