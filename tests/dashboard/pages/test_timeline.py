from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.analysis.report.report import Proof
from rankscope.dashboard.address import TIMELINE, WHOLE, View
from rankscope.dashboard.app import create_app
from rankscope.dashboard.pages.timeline import timeline_page
from rankscope.tracer.span import SpanFlag
from tests.support.dashboard.builders import report
from tests.support.dashboard.page_text import find_part, words
from tests.support.dashboard.posts import UPDATE_PATH, page_post
from tests.support.dashboard.step_builder import comm, compute, source_of
from tests.support.dashboard.training_builder import training_provider

if TYPE_CHECKING:
    from flask.testing import FlaskClient


def test_the_timeline_opens_at_the_last_step_of_the_top_finding() -> None:
    provider = training_provider(report(num_steps=4, onset=2))

    shown = words(timeline_page(provider, View(page=TIMELINE), base_path="/"))

    assert "Step 3 | 410 ms, ideal" in shown
    assert "336 spans of 8 ranks, epoch 0" in shown


def test_a_hung_step_is_shown_until_its_last_operation_began() -> None:
    hung = replace(comm(0, 40_000_000, 60_000_000_000), flags=SpanFlag.OPEN)
    provider = source_of(compute(0, 0, 40_000_000), hung, compute(1, 0, 20_000_000))
    view = View(page=TIMELINE, run="r", epoch=0, step=3)

    first, whole = (
        timeline_page(provider, one, base_path="/") for one in (view, replace(view, show=WHOLE))
    )

    ranges = [
        find_part(page, "timeline-graph")["figure"]["layout"]["xaxis"]["range"]
        for page in (first, whole)
    ]
    assert ranges == [[0, pytest.approx(50)], [0, 60_000]]
    note = "No operation began after 40.0 ms, and some that ran then did not end."
    assert f'{note} "Whole step" shows all 60.0 s of it.' in words(first)
    assert f"{note} |" in words(whole)


def test_a_step_without_spans_offers_another() -> None:
    view = View(page=TIMELINE, run="demo-42", step=12)

    shown = words(timeline_page(training_provider(), view, base_path="/"))

    assert "No data because step 12 of epoch 0 has no spans" in shown
    assert "Show a step of this run that has spans" in shown


def test_a_step_that_the_page_chose_and_has_no_spans_is_not_offered_again() -> None:
    provider = training_provider()
    provider.tables.clear()

    shown = words(timeline_page(provider, View(page=TIMELINE, run="demo-42"), base_path="/"))

    assert "No data because the step to show has no spans" in shown
    assert "Show a step" not in shown


def test_the_proof_of_a_finding_fills_the_step_with_its_ranks_marked() -> None:
    made = report(num_steps=4, onset=2)
    proof = Proof(
        epoch=0, step=3, rank=5, begin_ns=100_000_000, end_ns=150_000_000, excess_ns=20_000_000
    )
    found = replace(made.findings[0], proof=proof)
    provider = training_provider(replace(made, findings=(found, *made.findings[1:])))
    asked = View(page=TIMELINE, run="demo-42", step=0, ranks=(5,), show=found.cause)

    page = timeline_page(provider, asked, base_path="/")

    layout = find_part(page, "timeline-graph")["figure"]["layout"]
    assert layout["xaxis"]["range"] == [50.0, 200.0]
    assert layout["yaxis"]["ticktext"][0] == "<b>5</b>"  # though rank 0 may be slower
    (frame,) = [shape for shape in layout["shapes"] if shape.get("name") == "proof"]
    assert [frame[end] for end in ("x0", "x1", "y0", "y1")] == [100.0, 150.0, -0.5, 0.5]
    assert "framed: slow-compute of rank 5, 20.0 ms too long" in words(page)
    assert "Step 3" in words(page)


def refresh(client: FlaskClient, address: str, *, shown: object, changed: str) -> dict[str, Any]:
    """Return what the page gets that shows a step, has asked for an address, and sees a change."""
    values = {
        "timeline-asked.data": address,
        "timeline-timer.n_intervals": 1,
        "fallback-timer.n_intervals": 0,
        "timeline-shown.data": shown,
        "url.search": address,
    }
    body = page_post(client, values) | {"changedPropIds": [changed]}
    response: dict[str, Any] = client.post(UPDATE_PATH, json=body).get_json()["response"]
    return response


def test_a_timer_that_fires_before_the_answer_to_an_address_asks_for_that_address() -> None:
    # GIVEN a page of step 2 whose reader has gone to step 3; Dash drops the first of two answers
    provider = training_provider(report(num_steps=4, onset=2))
    client = create_app(provider).server.test_client()
    page = timeline_page(provider, View(page=TIMELINE, step=2), base_path="/")
    address, timer = "?run=demo-42&step=3", "timeline-timer.n_intervals"
    shown = find_part(page, "timeline-shown")["data"]

    # WHEN the timer's post comes THEN it brings step 3, and the next one nothing
    answer = refresh(client, address, shown=shown, changed=timer)

    assert answer["timeline-title"] == {"children": "Step 3"}
    shown = answer["timeline-shown"]["data"]
    assert list(refresh(client, address, shown=shown, changed=timer)) == ["timeline-timer"]


def test_a_zoom_brings_neither_the_title_nor_the_controls_again() -> None:
    provider = training_provider(report(num_steps=4, onset=2))
    client = create_app(provider).server.test_client()
    page = timeline_page(provider, View(page=TIMELINE, run="demo-42", step=3), base_path="/")
    around = {"timeline-title", "timeline-stepper", "timeline-controls"}
    shown = find_part(page, "timeline-shown")["data"]

    def ask(address: str) -> set[str]:
        return set(refresh(client, address, shown=shown, changed="timeline-asked.data"))

    zoomed = "?run=demo-42&step=3&from=1000000&to=2000000&rows=0-3"
    assert "timeline-graph-on-canvas" in ask(zoomed)
    assert not around & ask(zoomed)
    for other in ("step=2", "step=3&order=rank", "step=3&rank=1", "step=3&layers=path"):
        assert around <= ask(f"?run=demo-42&{other}")
