from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.drawing.raster import Viewport
from rankscope.analysis.drawing.rows import RowOrder
from rankscope.analysis.drawing.selection import AlikeSpan, SpanPlace, find_rank_stops
from rankscope.analysis.report.report import Proof
from rankscope.analysis.trace.rows import concatenate
from rankscope.dashboard.address import TIMELINE, WHOLE, View
from rankscope.dashboard.app import create_app
from rankscope.dashboard.pages import timeline as timeline_page
from rankscope.tracer.span import KINDS, SpanFlag
from tests.support.dashboard.builders import report
from tests.support.dashboard.page_text import find_part, rendered, words
from tests.support.dashboard.posts import refreshed
from tests.support.dashboard.step_builder import comm, compute, source_of
from tests.support.dashboard.training_builder import training_provider


def test_the_timeline_opens_at_the_last_step_of_the_top_finding() -> None:
    provider = training_provider(report(num_steps=4, onset=2))

    shown = words(rendered(timeline_page.PAGE, provider, View(page=TIMELINE)))

    assert "Step 3 | " in shown
    assert "410 ms, ideal" in shown
    assert "336 spans of 8 ranks, epoch 0" in shown


def test_a_hung_step_is_shown_until_its_last_operation_began() -> None:
    hung = replace(comm(0, 40_000_000, 60_000_000_000), flags=SpanFlag.OPEN)
    provider = source_of(compute(0, 0, 40_000_000), hung, compute(1, 0, 20_000_000))
    view = View(page=TIMELINE, run="r", epoch=0, step=3)

    first, whole = (
        rendered(timeline_page.PAGE, provider, one) for one in (view, replace(view, show=WHOLE))
    )

    ranges = [
        find_part(page, "timeline-graph")["figure"]["layout"]["xaxis"]["range"]
        for page in (first, whole)
    ]
    assert ranges == [[0, pytest.approx(50)], [0, 60_000]]
    note = "No operation began after 40.0 ms, and some that ran then did not end."
    assert f'{note} Shown: 50.0 ms of 60.0 s; "Whole step" shows all.' in words(first)
    assert f"{note} |" in words(whole)


def test_a_step_without_spans_offers_another() -> None:
    view = View(page=TIMELINE, run="demo-42", step=12)

    shown = words(rendered(timeline_page.PAGE, training_provider(), view))

    assert "No data because step 12 of epoch 0 has no spans" in shown
    assert "Show a step of this run that has spans" in shown


def test_a_step_that_the_page_chose_and_has_no_spans_is_not_offered_again() -> None:
    provider = training_provider()
    provider.tables.clear()

    shown = words(rendered(timeline_page.PAGE, provider, View(page=TIMELINE, run="demo-42")))

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

    page = rendered(timeline_page.PAGE, provider, asked)

    layout = find_part(page, "timeline-graph")["figure"]["layout"]
    assert layout["xaxis"]["range"] == [50.0, 200.0]
    assert layout["yaxis"]["ticktext"][0] == "<b>5</b>"  # though rank 0 may be slower
    (frame,) = [shape for shape in layout["shapes"] if shape.get("name") == "proof"]
    assert [frame[end] for end in ("x0", "x1", "y0", "y1")] == [100.0, 150.0, -0.5, 0.5]
    assert "framed: slow-compute of rank 5, 20.0 ms too long" in words(page)
    assert "Step 3" in words(page)


def test_the_proof_of_a_large_job_shows_the_ranks_that_matter_undimmed() -> None:
    # GIVEN a job of 128 ranks of which 8 are traced, rank 5 being dp 0, tp 1 of stage 1
    made = report(num_steps=4, onset=2)
    proof = Proof(epoch=0, step=3, rank=5, begin_ns=100_000_000, end_ns=150_000_000, excess_ns=1)
    found = replace(made.findings[0], proof=proof)
    large = replace(made, findings=(found,), starved=(), world_size=128)
    asked = View(page=TIMELINE, run="demo-42", step=0, ranks=(5,), show=found.cause)

    page = rendered(timeline_page.PAGE, training_provider(large), asked)

    # THEN its partners on tp, then pp follow it, and then the same place of the other replica
    layout = find_part(page, "timeline-graph")["figure"]["layout"]
    assert layout["yaxis"]["ticktext"] == ["<b>5</b>", "4", "1", "7"]
    names = [
        each["text"] for each in layout["annotations"] if each.get("name", "").startswith("fold")
    ]
    assert names == ["▾ <b>at fault</b>", "▾ <b>groups</b>", "▾ <b>alike</b>"]
    assert not [shape for shape in layout["shapes"] if shape.get("name") == "not marked"]
    assert "1 rank at fault, 2 of its groups, 1 alike. 124 others are folded." in words(page)

    # WHEN a group is folded THEN its ranks share a row
    folded = rendered(timeline_page.PAGE, training_provider(large), replace(asked, folded=(1,)))
    layout = find_part(folded, "timeline-graph")["figure"]["layout"]
    assert layout["yaxis"]["ticktext"] == ["<b>5</b>", "2 ranks", "7"]

    # WHEN the whole step is asked for THEN all ranks are there
    whole = replace(asked, step=3, show=WHOLE, order=RowOrder.EXCESS)
    layout = find_part(
        rendered(timeline_page.PAGE, training_provider(large), whole), "timeline-graph"
    )["figure"]["layout"]
    assert len(layout["yaxis"]["ticktext"]) == 8


def test_a_step_stays_while_its_late_spans_are_read() -> None:
    provider = training_provider(report(num_steps=4, onset=2))
    client = create_app(provider).server.test_client()
    shown = refreshed(client, "/timeline?run=demo-42")["page-shown"]["data"]
    assert shown["is_drawn"]
    provider.is_drawing = True
    provider.num_changes += 1

    again = refreshed(client, "/timeline?run=demo-42", shown=shown)
    opened = refreshed(client, "/timeline?run=demo-42")

    assert set(again) == {"page-timer"}
    assert again["page-timer"]["interval"] == opened["page-timer"]["interval"]
    assert not opened["page-shown"]["data"]["is_drawn"]

    # WHEN something is searched for in the step THEN it stays too, and not in another step
    step = f"/timeline?run=demo-42&epoch=0&step={shown['step']}"
    assert set(refreshed(client, f"{step}&find=5", shown=shown)) == {"page-timer"}
    other = refreshed(client, "/timeline?run=demo-42&epoch=0&step=1", shown=shown)
    assert not other["page-shown"]["data"]["is_drawn"]


def test_a_timer_that_fires_before_the_answer_to_an_address_asks_for_that_address() -> None:
    # GIVEN a page whose reader has chosen other rows; Dash drops the first of two answers
    client = create_app(training_provider(report(num_steps=4, onset=2))).server.test_client()
    shown = refreshed(client, "/timeline?run=demo-42&step=3")["page-shown"]["data"]

    # WHEN the timer's post comes THEN it brings these rows, and the next one nothing
    address = "/timeline?run=demo-42&step=3&order=host"
    answer = refreshed(client, address, shown=shown)

    assert "timeline-graph" in answer["page-changes"]["data"]
    shown = answer["page-shown"]["data"]
    assert list(refreshed(client, address, shown=shown)) == ["page-timer"]


def test_a_zoom_brings_the_picture_and_not_the_page_around_it() -> None:
    client = create_app(training_provider(report(num_steps=4, onset=2))).server.test_client()
    step = "/timeline?run=demo-42&step=3"
    shown = refreshed(client, step)["page-shown"]["data"]

    def changed_parts(query: str) -> set[str]:
        return set(refreshed(client, f"{step}&{query}", shown=shown)["page-changes"]["data"])

    picture = {"timeline-graph", "timeline-graph-on-canvas"}
    assert changed_parts("from=1000000&to=2000000&rows=0-3") == picture
    assert picture | {"timeline-controls"} <= changed_parts("order=host")
    assert picture | {"timeline-controls"} <= changed_parts("layers=path")


def test_a_figure_of_another_view_shows_all_of_it_and_of_the_same_view_keeps_the_zoom() -> None:
    provider = training_provider(report(num_steps=4, onset=2))
    view = View(page=TIMELINE, run="demo-42", step=3)

    def zoom_key(view: View) -> str:
        page = rendered(timeline_page.PAGE, provider, view)
        return str(find_part(page, "timeline-graph")["figure"]["layout"]["uirevision"])

    assert zoom_key(view) == zoom_key(replace(view, epoch=0))
    assert zoom_key(view) != zoom_key(replace(view, show=WHOLE))


def test_the_step_of_a_crash_opens_at_its_end_and_marks_where_the_rank_died() -> None:
    # GIVEN a crash of rank 5 in the last step
    made = report(num_steps=4)
    fatal = replace(made.top_finding, cause="crash", ranks=(5,), steps=(3, 3), proof=None)
    provider = training_provider(replace(made, findings=(fatal, *made.findings)))
    view = View(page=TIMELINE, run="demo-42", show="crash")

    page = rendered(timeline_page.PAGE, provider, view)

    # THEN its step is shown, with a line and words at the end of its last span
    timeline = provider.timeline("demo-42", epoch=0, step=3)
    assert timeline is not None
    at_ms = find_rank_stops(timeline, (5,))[5] / 1e6
    layout = find_part(page, "timeline-graph")["figure"]["layout"]
    (line,) = (shape for shape in layout["shapes"] if shape["name"] == "stop")
    assert (line["x0"], line["x1"]) == (at_ms, at_ms)
    (text,) = (one for one in layout["annotations"] if one["x"] == at_ms)
    assert text["text"] == "<b>rank 5 died here</b>"
    # AND the address that it gets has step and rank, and no name of a finding
    search = find_part(page, "timeline-shown")["data"]["search"]
    assert search == "?run=demo-42&epoch=0&step=3&rank=5&order=excess"


def test_the_last_step_that_ended_is_beneath_the_one_in_which_the_job_stopped() -> None:
    # GIVEN a crash of rank 5 in step 3, and the same spans in step 2
    made = report(num_steps=4)
    fatal = replace(made.top_finding, cause="crash", ranks=(5,), steps=(3, 3), proof=None)
    provider = training_provider(replace(made, findings=(fatal, *made.findings)))
    spans = provider.tables["demo-42"]
    provider.tables["demo-42"] = concatenate(replace(spans, step=spans.step - 1), spans)

    page = rendered(timeline_page.PAGE, provider, View(page=TIMELINE, run="demo-42", show="crash"))

    # THEN step 2 is beneath it, with its rows and its time
    assert "Step 2, the last that ended, took" in words(page)
    above, beneath = (
        find_part(page, part)["figure"]["layout"]
        for part in ("timeline-graph", "timeline-ideal-graph")
    )
    assert beneath["xaxis"]["range"] == above["xaxis"]["range"]
    assert beneath["yaxis"]["ticktext"] == above["yaxis"]["ticktext"]


def test_the_address_has_the_selected_span_or_box_or_what_is_searched_for() -> None:
    provider = training_provider(report(num_steps=4))
    view = View(page=TIMELINE, run="demo-42", epoch=0, step=3)
    step = provider.timeline("demo-42", epoch=0, step=3)
    assert step is not None
    row = int(np.flatnonzero((step.spans.rank == 5) & ~step.communication)[3])
    begin_ns = int(step.spans.start_ns[row]) - step.begin_ns
    kind = KINDS[int(step.spans.kind[row])]
    elsewhere = AlikeSpan(step=2, rank=5, begin_ns=7, duration_ns=9)
    provider.alike = (elsewhere,)

    # WHEN a span is in the address THEN it is framed, and its card has alike spans and its JSON
    place = SpanPlace(rank=5, kind=kind, at_ns=begin_ns)
    page = rendered(timeline_page.PAGE, provider, replace(view, span=place))
    (frame,) = [
        one
        for one in find_part(page, "timeline-graph")["figure"]["data"]
        if one.get("name") == "selected"
    ]
    assert frame["x"][0] == pytest.approx(begin_ns / 1e6)
    queries = [
        query
        for trace in find_part(page, "timeline-alike")["figure"]["data"]
        for query in trace["customdata"]
    ]
    assert f"?run=demo-42&epoch=0&step=2&span=5,{kind.value},7" in queries
    copied = json.loads(find_part(page, "timeline-copy")["content"])
    assert (copied["run"], copied["step"], copied["rank"]) == ("demo-42", 3, 5)
    assert copied["begin_ns"] == begin_ns

    # WHEN a rank is searched for THEN its row is framed, and the assets are led to it
    page = rendered(timeline_page.PAGE, provider, replace(view, find="rank 5"))
    shapes = find_part(page, "timeline-graph")["figure"]["layout"]["shapes"]
    assert [one["name"] for one in shapes if one.get("name") == "found"] == ["found"]
    assert "data-line=" in str(page)
    hidden = Viewport(begin_ns=0, end_ns=10**8, first_row=0, end_row=2)
    page = rendered(timeline_page.PAGE, provider, replace(view, find="5", viewport=hidden))
    assert re.search(r"data-search='\?.*from=0&to=100000000&rows=0-", str(page))
    assert "No rank 99: ranks are 0-7" in words(
        rendered(timeline_page.PAGE, provider, replace(view, find="99"))
    )

    # WHEN a box is in the address THEN it is drawn, and compared with the rest
    box = Viewport(begin_ns=10**6, end_ns=10**7, first_row=2, end_row=4)
    page = rendered(timeline_page.PAGE, provider, replace(view, box=box))
    (drawn,) = [
        one
        for one in find_part(page, "timeline-graph")["figure"]["layout"]["shapes"]
        if one.get("name") == "box"
    ]
    assert [drawn[end] for end in ("x0", "x1", "y0", "y1")] == [1.0, 10.0, 1.5, 3.5]
    assert "spans of 2 ranks" in words(page)


def test_an_address_without_a_step_gets_the_one_that_is_shown() -> None:
    provider = training_provider(report(num_steps=4))

    def search_of(view: View) -> str:
        page = rendered(timeline_page.PAGE, provider, view)
        search: str = find_part(page, "timeline-shown")["data"]["search"]
        return search

    view = View(page=TIMELINE, run="demo-42", order=RowOrder.RANK, find="wait")
    assert search_of(view) == "?run=demo-42&epoch=0&step=3&find=wait&order=rank"
    assert search_of(replace(view, step=3)) == ""
