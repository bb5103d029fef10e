from __future__ import annotations

from rankscope.dashboard.address import TIMELINE, View
from rankscope.dashboard.pages.timeline import timeline_page
from tests.support.dashboard.builders import report
from tests.support.dashboard.page_text import words
from tests.support.dashboard.training_builder import training_provider


def test_the_timeline_opens_at_the_last_step_of_the_top_finding() -> None:
    provider = training_provider(report(num_steps=4, onset=2))

    shown = words(timeline_page(provider, View(page=TIMELINE), base_path="/"))

    assert "Step 3 | 410 ms, ideal" in shown
    assert "336 spans of 8 ranks, epoch 0" in shown


def test_a_step_without_spans_offers_another() -> None:
    view = View(page=TIMELINE, run="demo-42", step=12)

    shown = words(timeline_page(training_provider(), view, base_path="/"))

    assert "No data because step 12 of epoch 0 has no spans" in shown
    assert "Show a step of this run that has spans" in shown
